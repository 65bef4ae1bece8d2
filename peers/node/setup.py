"""Who a peer is and what it trains: all that its machines are told at their start.

A Setup is a value. A move to other layers (peers/placement/span_move.py) puts another one in its place, and the node alone keeps it:
the node's parts ask for it whenever they need it (`setup()`), so none of them can go by an old one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.routes.stage import StageConfig
from decentral.comm.wire.identity import Signer
from decentral.core.config import Config
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Fragment, Layout, RetainedStates
from decentral.core.units import Amount
from decentral.peers.membership.records import Profile
from decentral.peers.placement.span_move import MemoryBudget


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """Who this peer is and what it trains."""

    config: Config
    run: RunId
    own: Signer
    fragments: Sequence[Fragment]  # that this peer holds: its span
    state_layouts: Sequence[Layout]  # what newcomers get of each
    layers: int  # of the whole model
    profile: Profile
    addresses: tuple[str, ...]
    contacts: tuple[PeerId, ...] = ()  # peers that are known to be there
    restored_step: int | None = None  # of our checkpoint
    stop_after: Amount | None = None
    routes: StageConfig | None = None  # None: takes part in no routes
    room: MemoryBudget | None = None  # None: never changes its layers
    kept: RetainedStates = ()  # that the disk keeps of layers that were given up
    versions: Mapping[int, bytes] = field(default_factory=dict)  # of our checkpoint's fragments, in a synchronous run

    @property
    def whole(self) -> bool:
        """Whether this peer holds the whole model, and so trains by itself. No move changes that (Room.fits)."""
        return (self.fragments[0].first, self.fragments[-1].last) == (0, self.layers)

    @property
    def held(self) -> range:
        """The numbers of the fragments that this peer holds."""
        return range(self.fragments[0].index, self.fragments[-1].index + 1)

    @property
    def cuts(self) -> Sequence[Fragment]:
        """The fragments of the whole model: without routes everybody holds all of them."""
        return self.routes.cuts if self.routes else self.fragments

    def cut(self, index: int) -> Fragment:
        return next(cut for cut in self.cuts if cut.index == index)

    def holds(self, index: int) -> bool:
        return any(fragment.index == index for fragment in self.fragments)

    def holding(self, held: range) -> "NodeSetup":
        """The same peer after a move to these fragments."""
        room, stage = self.room, self.routes
        assert room is not None
        assert stage is not None
        fragments = room.needs.fragments[held.start : held.stop]
        capacity = room.needs.capacity(held.start, held.stop, room.memory_bytes)
        stage = replace(stage, first=fragments[0].first, last=fragments[-1].last, capacity=capacity)
        layouts = room.layouts[held.start : held.stop]
        return replace(self, fragments=fragments, state_layouts=layouts, routes=stage)


__all__ = ["NodeSetup"]
