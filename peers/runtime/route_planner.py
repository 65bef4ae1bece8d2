"""Where routes should run: keeps the flow that they follow up to date, and shows them the swarm.

Routes (comm/pipeline/router.py) carry micro-batches. They go by the routing weights that follow from a flow through the
swarm (scheduler/throughput/routing.py), by the usual speed of the others, and by who holds which layer
(comm/pipeline/forwarding.py, RouteView). The flow is solved again when the speeds in the roster have changed enough.
That is checked every FLOW_CHECK_S, and less often in a large swarm, where one peer changes little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from decentral.comm.pipeline.ledger import GradientLedger
from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.comm.pipeline.router import Router
from decentral.comm.rounds.contributions import ContributionRecord
from decentral.comm.rounds.round import Rounds
from decentral.comm.rounds.search import RoundView
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.transport import Effect
from decentral.core.fragments import Fragment, share
from decentral.core.ids import PeerId
from decentral.core.journal.events import HeldLine, UnheldLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.setup import PresentSetup
from decentral.scheduler.placement.span_choice import holder_of
from decentral.scheduler.throughput import routing

FLOW_CHECK_S = 2.0  # between two checks whether the speeds in the swarm have changed
UNHELD_S = 10.0  # without a peer that trains a layer: its holder is not only late
THIN_SHARE = 0.2  # of the uplink: what gossip leaves of it (gossip.link_share)
BF16_BYTES = 2
MAX_SPANS_KEPT = 4096  # spans of layers whose fragments are remembered


@dataclass(slots=True)
class RoutePlanner:
    setup: PresentSetup
    roster: Roster
    meter: Meter
    round_view: RoundView
    chance: Random  # a secret one: it draws which answers are audited
    routes: Router = field(init=False)
    rounds: Rounds | None = None  # in a synchronous run, where routes stay among the round's members
    weights: RoutingWeights = field(default_factory=RoutingWeights)  # those of the present flow
    usual_speed: float = 0.0  # as in RouteView
    routed: bool = field(init=False)  # whether our own micro-batches go along routes
    unheld: str = ""  # what the user reads when no peer has held some layer for UNHELD_S; "": all are held
    _unheld_since: dict[int, Seconds] = field(default_factory=dict)  # by fragment
    _check_at: Seconds = 0.0
    _look_at: Seconds = 0.0  # when to look for peers that are gone
    _changes: int = 0  # of the roster, at the last look for peers that are gone
    _seen: tuple[int, str] = (0, "")  # the count of the roster's changes and our own speed at the last check
    _solved: dict[routing.Span, float] = field(default_factory=dict)  # the speeds behind the present flow
    _fragments: dict[tuple[int, int], range] = field(default_factory=dict)  # the fragments within layers [first, last)

    def __post_init__(self) -> None:
        setup, stage = self.setup.now, self.setup.now.routes
        assert stage is not None
        own = GradientLedger(stage.micro_batches_per_step, stage.slots)
        self.routes = Router(stage, self, ContributionRecord() if stage.synchronous else own, self.chance)
        if stage.synchronous:
            restored, versions = setup.restored_step or 0, dict(setup.versions)
            self.rounds = Rounds(self.routes, self.round_view, restored, versions=versions)
        # A peer with the whole model computes its micro-batches alone, except in synchronous rounds.
        self.routed = not setup.whole or setup.config.synchronous

    # RouteView: what routes ask about the swarm

    def successors(self, layer: int) -> Sequence[PeerId]:
        return self.rounds.successors(layer) if self.rounds else self.roster.holders.near(layer)

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        return self.roster.holders.span_and_speed(peer)

    def is_thin(self) -> bool:
        """Whether bf16 would take more of our uplink than THIN_SHARE while our device is busy: hidden values go on from
        all stages but the last, their gradients back from all but the first."""
        setup, up, speed = self.setup.now, self.meter.best_up(), self.routes.load.speed
        first, last = setup.fragments[0].first, setup.fragments[-1].last
        goes_on = self.routes.forwarding.usual_end(first) < setup.layers
        numbers = setup.config.model.d_model * ((first > 0) + goes_on)  # for each token
        through_us = speed / share(setup.cuts, first, last)
        return up is not None and BF16_BYTES * numbers * through_us > THIN_SHARE * up

    # The flow

    @property
    def wake_at(self) -> Seconds | None:
        return min(self._check_at, self._look_at) if self.routes.active and self.routed else None

    def is_due(self, now: Seconds) -> bool:
        """Whether a peer that trains should check the flow now."""
        return self.routed and now >= self._check_at

    def refresh(self, now: Seconds) -> list[Effect]:
        """Takes over the speeds in the roster, and solves the flow again if they have changed enough. The journal says
        when no micro-batch can get through, because some layer has no holder, and when all have one again."""
        holders = self.roster.holders
        beyond = max(0, self.weights.size - routing.SOLVED_AT_ONCE)
        self._check_at = now + FLOW_CHECK_S + routing.FLOW_PAUSE_S * beyond
        self.usual_speed = sum(holders.speeds.values()) / holders.count if holders.count else 0.0
        self.solve()
        before, worst = self.unheld, self._look_for_unheld(now)
        self.unheld = self._without_holder(worst) if worst else ""
        if self.unheld == before:
            return []
        line = UnheldLine(reason=self.unheld, first=worst.first, last=worst.last) if worst else HeldLine()
        return [Log(line)]

    def look_for_lost(self, now: Seconds) -> list[Effect]:
        """What was under way at peers that have left the roster goes to others. Where records are spread over several
        keys a peer also leaves it because we do not read its key any more, and says so itself if it is gone."""
        if not self.routed or now < self._look_at:
            return []
        self._look_at = now + FLOW_CHECK_S
        if self.rounds is not None or self.roster.changes == self._changes or self.roster.size.level > 0:
            return []
        self._changes = self.roster.changes
        return self.routes.look_for_lost(self.roster.live.__contains__, now)

    def _look_for_unheld(self, now: Seconds) -> Fragment | None:
        """Return the layers that no peer that trains has held for UNHELD_S; of several, those that take most memory."""
        setup, near = self.setup.now, self.roster.holders.near
        missing = [cut for cut in setup.cuts if cut.index not in setup.held and not near(cut.first)]
        self._unheld_since = {cut.index: self._unheld_since.get(cut.index, now) for cut in missing}
        lasting = [cut for cut in missing if now >= self._unheld_since[cut.index] + UNHELD_S]
        return max(lasting, key=self._bytes_of, default=None)

    def _bytes_of(self, cut: Fragment) -> int:
        """Return the memory that these layers take; 0 if it is not known."""
        budget = self.setup.now.memory_budget
        return budget.needs.span_bytes(cut.index, cut.index + 1) if budget else 0

    def _without_holder(self, cut: Fragment) -> str:
        """Return what to say of layers without a holder."""
        least = f" with --memory {self._bytes_of(cut)} or more" if self.setup.now.memory_budget else ""
        what = f"no peer that trains holds layers {cut.first} to {cut.last - 1}"
        remedy = f"start a peer{least}, or begin a run with a smaller train.micro_batch"
        return f"{what}, so no micro-batch gets through the model: {remedy}"

    def solve(self, always: bool = False) -> None:
        """Solves the flow if enough has changed since the last time; `always`: in any case."""
        held = self.setup.now.held
        own = held.start, held.stop
        seen = self.roster.holders.changes, f"{self.routes.load.speed:.1e}"
        if seen == self._seen and not always:
            return
        self._seen, speeds, cuts = seen, self._speeds(own), self.routes.stage.cuts
        whole_alone = self.rounds is None
        useful = routing.useful_speeds(cuts, speeds) if whole_alone else speeds
        if always or routing.changed(self._solved, useful):
            self._solved = useful
            self.weights = routing.solve(cuts, speeds, own, whole_alone)

    def _speeds(self, own: routing.Span) -> dict[routing.Span, float]:
        """Tokens/s of the whole model, summed over all peers with the same fragments, ourselves included.

        With exact gradients those with the whole model are left out: spans wait for each other there, so each peer more
        that could answer is worth more than its own work, and they have their turns by the times that were measured.
        """
        found = {own: self.routes.load.speed or self.setup.now.profile.tokens_per_s}
        for (first, last), speed in self.roster.holders.speeds.items():
            left_out = (first, last) == (0, self.setup.now.layers) and not (self.rounds or self.routes.stage.overlap)
            if (span := self.whole_fragments(first, last)) and not left_out:
                found[span[0], span[-1] + 1] = found.get((span[0], span[-1] + 1), 0.0) + speed
        return routing.rounded(found)

    def whole_fragments(self, first: int, last: int) -> range:
        """The numbers of the fragments that lie within layers [first, last)."""
        found = self._fragments.get((first, last))
        if found is None:
            held = holder_of(self.setup.now.cuts, first, last, 0.0)
            if len(self._fragments) > MAX_SPANS_KEPT:
                self._fragments.clear()
            found = self._fragments[first, last] = range(held.begin, held.end)
        return found
