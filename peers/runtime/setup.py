"""Who a peer is and what it trains: all that its machines are told at their start.

A NodeSetup is a value. A move to other layers (scheduler/placement/move.py) puts another one in its place. Only
PresentSetup keeps it, which all parts of a node share: none of them can go by an old one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core.config import Config
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import RetainedStates
from decentral.core.units import Amount
from decentral.peers.membership.records import Profile
from decentral.peers.membership.swarm_size import UNKNOWN, SwarmStart
from decentral.scheduler.placement.move import MemoryBudget


@dataclass(frozen=True, slots=True)
class NodeSetup:
    config: Config
    run: RunId
    own: Signer
    fragments: Sequence[Fragment]  # the span of this peer
    state_layouts: Sequence[Layout]  # sections of each held fragment's state, as newcomers get it
    layers: int  # number of layers of the whole model
    profile: Profile
    addresses: tuple[str, ...]
    contacts: tuple[PeerId, ...] = ()  # peers that have answered already
    restored_step: int | None = None  # the learning-rate step of our checkpoint; None: there is none
    stop_after: Amount | None = None
    routes: StageConfig | None = None  # None: this peer takes part in no routes
    memory_budget: MemoryBudget | None = None  # None: this peer never changes its layers
    retained: RetainedStates = ()  # states on our disk of layers that were given up
    secret: int = 0  # nobody else knows it: which answers of others are audited follows from it
    versions: Mapping[int, bytes] = field(default_factory=dict)  # the checkpoint's, by fragment, if synchronous
    private: PrivateSwarm | None = None  # None: the swarm is public
    start: SwarmStart = UNKNOWN

    @property
    def whole(self) -> bool:
        """Whether this peer holds the whole model, so that it can train by itself. No move changes that."""
        return (self.fragments[0].first, self.fragments[-1].last) == (0, self.layers)

    @property
    def held(self) -> range:
        """The numbers of the fragments that this peer holds."""
        return range(self.fragments[0].index, self.fragments[-1].index + 1)

    @property
    def cuts(self) -> Sequence[Fragment]:
        """The fragments of the whole model. Without routes every peer holds all of them."""
        return self.routes.cuts if self.routes else self.fragments

    def holding(self, held: range) -> "NodeSetup":
        """The setup of the same peer after a move to these fragments."""
        budget, stage = self.memory_budget, self.routes
        assert budget is not None
        assert stage is not None
        fragments = budget.needs.fragments[held.start : held.stop]
        capacity = budget.needs.capacity(held.start, held.stop, budget.memory_bytes)
        stage = replace(stage, first=fragments[0].first, last=fragments[-1].last, capacity=capacity)
        layouts = budget.layouts[held.start : held.stop]
        return replace(self, fragments=fragments, state_layouts=layouts, routes=stage)


@dataclass(slots=True)
class PresentSetup:
    """A peer's setup, as it is now."""

    now: NodeSetup

    def hold(self, held: range) -> NodeSetup:
        """Return the setup after a move to these fragments, which is the present one from now on."""
        self.now = self.now.holding(held)
        return self.now

    def measured(self, tokens_per_s: float) -> None:
        """Note this device's speed, which was not known at the start."""
        self.now = replace(self.now, profile=replace(self.now.profile, tokens_per_s=tokens_per_s))
