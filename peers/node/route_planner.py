"""Where routes should run: keeps the flow that they follow up to date, and shows them the swarm.

Routes (comm/routes/router.py) carry micro-batches; this is what they go by: routing weights from the flow
(peers/planning/routing_weights.py), how fast others usually are, and who holds which layer (RouteView in
comm/routes/forwarding.py). The flow is solved anew when the speeds in the roster
have changed enough, and looked at every FLOWS_S at most: a large swarm's less often, as one peer changes little of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.comm.rounds.contributions import ContributionRecord
from decentral.comm.rounds.round import Rounds
from decentral.comm.routes.ledger import GradientLedger
from decentral.comm.routes.router import Router
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_choice import holder_of
from decentral.peers.planning import routing_weights

FLOWS_S = 2.0  # how often to look whether the flow through the swarm has changed
MOST_SPANS = 4096  # that are remembered


@dataclass(slots=True)
class RoutePlanner:
    setup: Callable[[], NodeSetup]  # as it is now, with the terms of routes
    roster: Roster
    routes: Router = field(init=False)
    rounds: Rounds | None = None  # of a synchronous run: routes stay among the members
    routed: bool = field(init=False)
    _look_at: Seconds = 0.0
    _seen: tuple[int, str] = (0, "")  # changes of the roster, our own speed
    _known: dict[routing_weights.Span, float] = field(default_factory=dict)  # speeds of the flow that we go by
    _whole: dict[tuple[int, int], range] = field(default_factory=dict)  # the fragments in layers [first, last)

    def __post_init__(self) -> None:
        setup = self.setup()
        assert setup.routes is not None
        stage = setup.routes
        own = GradientLedger(stage.micro_batches_per_step, stage.slots)
        self.routes = Router(stage, self, ContributionRecord() if stage.synchronous else own)
        # Whether our micro-batches go along routes: those of a peer with the whole model do so in rounds only.
        self.routed = not setup.whole or setup.config.synchronous

    # What routes ask of the swarm: RouteView

    def successors(self, layer: int) -> Sequence[PeerId]:
        if self.rounds:
            return self.rounds.successors(layer)
        return self.roster.holders.near(layer)

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        return self.roster.holders.place(peer)

    # The flow

    @property
    def wake_at(self) -> Seconds | None:
        return self._look_at if self.routes.active and self.routed else None

    def due(self, now: Seconds) -> bool:
        """Whether it is time to look, of a peer that trains."""
        return self.routed and now >= self._look_at

    def look(self, now: Seconds) -> None:
        """Now and then: whether the roster or its speeds have changed."""
        holders = self.roster.holders
        self._look_at = (
            now
            + FLOWS_S
            + routing_weights.FLOW_PAUSE_S
            * max(0, self.routes.forwarding.weights.size - routing_weights.SOLVED_AT_ONCE)
        )
        self.routes.load.usual_speed = sum(holders.speeds.values()) / holders.count if holders.count else 0.0
        self.solve()

    def solve(self, anew: bool = False) -> None:
        """Where routes should run, if enough has changed since; `anew`: whatever has."""
        cuts, held = self.routes.stage.cuts, self.setup().held
        own = held.start, held.stop
        seen = self.roster.holders.changes, f"{self.routes.load.speed:.1e}"
        if seen == self._seen and not anew:
            return
        self._seen, speeds = seen, self._speeds(own)
        if not anew and not routing_weights.changed(self._known, speeds):
            return
        self._known = speeds
        self.routes.forwarding.weights = routing_weights.solve(cuts, speeds, own)

    def _speeds(self, own: routing_weights.Span) -> dict[routing_weights.Span, float]:
        """How fast all are that hold the same fragments, ourselves included; tokens/s of the whole model."""
        setup = self.setup()
        found = {own: self.routes.load.speed or setup.profile.tokens_per_s}
        for (first, last), speed in self.roster.holders.speeds.items():
            by_itself = (first, last) == (0, setup.layers) and not self.rounds
            span = self.whole_fragments(first, last)
            if span and not by_itself:
                found[span[0], span[-1] + 1] = found.get((span[0], span[-1] + 1), 0.0) + speed
        return routing_weights.rounded(found)

    def whole_fragments(self, first: int, last: int) -> range:
        """Those that lie within layers [first, last)."""
        found = self._whole.get((first, last))
        if found is None:
            held = holder_of(self.setup().cuts, first, last, 0.0)
            if len(self._whole) > MOST_SPANS:
                self._whole.clear()
            found = self._whole[first, last] = range(held.begin, held.end)
        return found


__all__ = ["RoutePlanner"]
