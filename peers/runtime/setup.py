"""The values from which a peer's node is made: identity, run, layers and device.

`NodeSetup` is immutable. When the peer changes its layers (scheduler/placement/move.py), a new setup replaces the old
one in `PresentSetup`, which all parts of a node share, so that no part uses an outdated setup.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core.config import Config
from decentral.core.credit import SeenWork
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import RetainedStates
from decentral.core.units import Amount
from decentral.peers.membership.records import Profile
from decentral.peers.membership.swarm_size import UNKNOWN, SwarmStart
from decentral.scheduler.placement.move import MemoryBudget


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The values from which a node makes its state machines; `prepare.prepare` or a simulator fills them in."""

    config: Config
    run: RunId
    own: Signer
    fragments: Sequence[Fragment]
    state_layouts: Sequence[Layout]  # one for each held fragment: the arrays of the state that newcomers fetch
    layers: int
    profile: Profile
    addresses: tuple[str, ...]
    contacts: tuple[PeerId, ...] = ()  # peers that answered our greeting at the start
    restored_step: int | None = None  # learning-rate step of our checkpoint; None if we start without a checkpoint
    stop_after: Amount | None = None
    routes: StageConfig | None = None  # None if this peer exchanges no micro-batches with other peers
    memory_budget: MemoryBudget | None = None  # None if this peer always keeps its layers
    retained: RetainedStates = ()  # states kept on disk for layers that this peer no longer holds
    secret: int = 0  # seeds the choice of answers to audit; peers that knew it could cheat unseen
    versions: Mapping[int, bytes] = field(default_factory=dict)  # fragment index -> version in the checkpoint
    private: PrivateSwarm | None = None
    start: SwarmStart = UNKNOWN
    seen: tuple[SeenWork, ...] = ()  # other peers' work, from the last record that an earlier process of ours published
    trained_tokens: int = 0  # tokens on which earlier processes of ours have trained, from the same record

    @property
    def whole(self) -> bool:
        """Return whether this peer holds the whole model; such a peer trains alone, and never changes its layers."""
        return (self.fragments[0].first, self.fragments[-1].last) == (0, self.layers)

    @property
    def held(self) -> range:
        """Return the indices of the fragments that this peer holds."""
        return range(self.fragments[0].index, self.fragments[-1].index + 1)

    @property
    def cuts(self) -> Sequence[Fragment]:
        """Return the fragments of the whole model; without routes every peer holds all of them."""
        return self.routes.cuts if self.routes else self.fragments

    def holding(self, held: range) -> "NodeSetup":
        """Return a copy of this setup in which the peer holds the fragments `held`.

        Raises:
            AssertionError: If the setup has no memory budget or no routes.
        """
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
    """A peer's present setup, which can be replaced; all parts of a node share this object."""

    now: NodeSetup

    def set_span(self, held: range) -> NodeSetup:
        """Replace the present setup by one in which the peer holds the fragments `held`, and return the new setup."""
        self.now = self.now.holding(held)
        return self.now

    def measured(self, tokens_per_s: float) -> None:
        """Set this device's tokens/s in the present setup; called after the first measurement in training."""
        self.now = replace(self.now, profile=replace(self.now.profile, tokens_per_s=tokens_per_s))
