"""Compute routing weights, and tell the router which peers hold which layers. See `RoutePlanner`.

A route (comm/pipeline/router.py) takes a micro-batch through several peers, which hold different layers. The router
chooses the next peer by routing weights, which come from a maximum flow through the swarm
(scheduler/throughput/routing.py). It sees the holders of each layer and their speeds through `RouteView`
(comm/pipeline/stage.py), which RoutePlanner implements. The flow is solved again if the speeds in the roster have
changed enough. This is checked every FLOW_CHECK_S, but less often in a large swarm, where one peer hardly changes the
flow.
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
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import HeldLine, UnheldLine
from decentral.core.layer_work import Shape, mean_shape, shape_of
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.setup import PresentSetup
from decentral.scheduler.placement.span_choice import holder_of
from decentral.scheduler.throughput import routing

FLOW_CHECK_S = 2.0
UNHELD_S = 10.0  # the user is told of a layer that no training peer has held for this long
THIN_SHARE = 0.2  # an uplink is too slow for bf16 activations if they need more than this share of it
BF16_BYTES = 2
MAX_SPANS_KEPT = 4096  # `whole_fragments` caches at most about this many spans, since other peers choose the spans


@dataclass(slots=True)
class RoutePlanner:
    """The owner of the router and of synchronous rounds; it implements RouteView, the router's view of the swarm."""

    setup: PresentSetup
    roster: Roster
    meter: Meter
    round_view: RoundView
    chance: Random  # has a secret seed: peers that could predict which answers are audited could cheat
    routes: Router = field(init=False)
    rounds: Rounds | None = None  # None in an asynchronous run
    weights: RoutingWeights = field(default_factory=RoutingWeights)
    usual_speed: float = 0.0
    routed: bool = field(init=False)  # whether our own micro-batches visit other peers; False if we compute them alone
    unheld: str = ""  # message to the user naming layers without a holder, or ""
    _unheld_since: dict[int, Seconds] = field(default_factory=dict)  # fragment index -> time when its last holder left
    _check_at: Seconds = 0.0
    _look_at: Seconds = 0.0  # time of the next search for micro-batches that were sent to peers which have since left
    _changes: int = 0
    _seen: tuple[int, str, str] = (
        0,
        "",
        "",
    )  # inputs of the last `solve`; if they have not changed, `solve` does nothing
    _solved: dict[routing.Span, float] = field(default_factory=dict)
    _crossed: dict[routing.Span, float] = field(default_factory=dict)
    _fragments: dict[tuple[int, int], range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the router, and in a synchronous run the state machine of the rounds."""
        setup, stage = self.setup.now, self.setup.now.routes
        assert stage is not None
        own = GradientLedger(stage.micro_batches_per_step, stage.slots)
        self.routes = Router(stage, self, ContributionRecord() if stage.synchronous else own, self.chance)
        if stage.synchronous:
            restored, versions = setup.restored_step or 0, dict(setup.versions)
            self.rounds = Rounds(self.routes, self.round_view, restored, versions=versions)
        # A peer with the whole model computes its micro-batches alone, except in synchronous rounds.
        self.routed = not setup.whole or setup.config.synchronous

    # The next methods implement RouteView, the interface through which the router sees the swarm.

    def successors(self, layer: int) -> Sequence[PeerId]:
        """Return the peers to which a micro-batch whose next layer is `layer` may be sent."""
        return self.rounds.successors(layer) if self.rounds else self.roster.holders.near(layer)

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """Return (first, last, tokens/s) of a peer that holds layers [first, last); (0, 0, 0.0) if it holds none."""
        return self.roster.holders.span_and_speed(peer)

    def there_and_back_s(self, peer: PeerId | None, sent: int, received: int) -> Seconds:
        """Return the seconds in which `sent` bytes reach a peer and `received` bytes come back (`Meter`)."""
        return self.meter.there_and_back_s(peer, sent, received)

    def is_thin(self) -> bool:
        """Return whether routes in bf16 would take more than THIN_SHARE of our uplink at our device's full speed.

        Only a peer without the last layers sends hidden values; only a peer without the first layers sends gradients.
        """
        setup, up, speed = self.setup.now, self.meter.typical_up(), self.routes.load.speed
        first, last = setup.fragments[0].first, setup.fragments[-1].last
        goes_on = self.routes.forwarding.usual_end(first) < setup.layers
        numbers = setup.config.model.d_written * ((first > 0) + goes_on)  # hidden state goes forward, gradient backward
        through_us = speed / self.routes.load.share(first, last)
        return up is not None and BF16_BYTES * numbers * through_us > THIN_SHARE * up

    @property
    def wake_at(self) -> Seconds | None:
        """Return when to check the flow or `look_for_lost` next; None if our own micro-batches take no routes."""
        return min(self._check_at, self._look_at) if self.routes.active and self.routed else None

    def is_due(self, now: Seconds) -> bool:
        """Return whether it is time to call `refresh`, which checks the flow."""
        return self.routed and now >= self._check_at

    def refresh(self, now: Seconds) -> list[Effect]:
        """Solve the flow again if speeds in the roster have changed enough, and update `self.unheld`.

        Returns:
            A journal line if `self.unheld` has changed: layers have lost their holders, or have holders again; else [].
        """
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
        """Return effects that resend our micro-batches, if they were at peers that have left the roster.

        Return [] in a synchronous run. Return [] in a large swarm too: we read only some shards of the records there,
        so a peer may leave our roster although it is still running.
        """
        if not self.routed or now < self._look_at:
            return []
        self._look_at = now + FLOW_CHECK_S
        if self.rounds is not None or self.roster.changes == self._changes or self.roster.size.level > 0:
            return []
        self._changes = self.roster.changes
        return self.routes.look_for_lost(self.roster.live.__contains__, now)

    def _look_for_unheld(self, now: Seconds) -> Fragment | None:
        """Return the largest fragment that no training peer has held for UNHELD_S; None if there is none."""
        setup, near = self.setup.now, self.roster.holders.near
        missing = [cut for cut in setup.cuts if cut.index not in setup.held and not near(cut.first)]
        self._unheld_since = {cut.index: self._unheld_since.get(cut.index, now) for cut in missing}
        lasting = [cut for cut in missing if now >= self._unheld_since[cut.index] + UNHELD_S]
        return max(lasting, key=self._bytes_of, default=None)

    def _bytes_of(self, cut: Fragment) -> int:
        """Return how many bytes of memory a peer needs to hold a fragment; 0 if this is not known."""
        budget = self.setup.now.memory_budget
        return budget.needs.span_bytes(cut.index, cut.index + 1) if budget else 0

    def _without_holder(self, cut: Fragment) -> str:
        """Return a line that tells the user that no training peer holds this fragment, and which peer to start."""
        least = f" with --memory {self._bytes_of(cut)} or more" if self.setup.now.memory_budget else ""
        what = f"no peer that trains holds layers {cut.first} to {cut.last - 1}"
        remedy = f"start a peer{least}, or begin a run with a smaller train.micro_batch"
        return f"{what}, so no micro-batch gets through the model: {remedy}"

    def solve(self, always: bool = False) -> None:
        """Solve the flow for new routing weights, if `always` or if speeds have changed enough since the last time."""
        held = self.setup.now.held
        own = held.start, held.stop
        seen = self.roster.holders.changes, f"{self.routes.load.speed:.1e}", f"{self.meter.typical_up() or 0.0:.1e}"
        if seen == self._seen and not always:
            return
        (speeds, shapes, crossings), cuts = self._speeds(own), self.routes.stage.cuts
        self._seen, whole_alone = seen, self.rounds is None
        useful = routing.useful_speeds(cuts, speeds, shapes) if whole_alone else speeds
        if always or routing.changed(self._solved, useful) or routing.changed(self._crossed, crossings):
            self._solved, self._crossed = useful, crossings
            self.weights = routing.solve(cuts, speeds, own, whole_alone, shapes, crossings)

    def _speeds(
        self, own: routing.Span
    ) -> tuple[dict[routing.Span, float], dict[routing.Span, Shape], dict[routing.Span, float]]:
        """Return the tokens/s of all peers, ourselves included, summed by the span of fragments that they hold.

        The second result is the mean shape (core/layer_work.py) of the peers of each span, weighted by speed; the third
        is how many tokens/s their links let enter or leave them (`TokenLinks.crossings_per_s`).

        The speed of a peer is its tokens/s through the whole model. In an asynchronous run without `routes.overlap`,
        other peers with the whole model are left out, because the router sends them work by measured times instead.
        """
        stage, holders = self.routes.stage, self.roster.holders
        ours, span = self.routes.load.speed or self.setup.now.profile.tokens_per_s, (stage.first, stage.last)
        crossings = {own: holders.links.crossings_per_s(stage.cuts, span, self.meter.typical_up() or 0.0)}
        ours = holders.links.supply(stage.cuts, span, crossings[own], ours, stage.costs)
        found = {own: [(ours, shape_of(stage.cuts, stage.costs))]}
        for (first, last), speed in holders.speeds.items():
            left_out = (first, last) == (0, self.setup.now.layers) and not (self.rounds or stage.overlap)
            if (whole := self.whole_fragments(first, last)) and not left_out:
                held = whole[0], whole[-1] + 1
                found.setdefault(held, []).append((speed, holders.shape((first, last))))
                crossings[held] = crossings.get(held, 0.0) + holders.crossings[first, last]
        speeds = routing.rounded({span: sum(speed for speed, _ in alike) for span, alike in found.items()})
        return speeds, {span: mean_shape(alike) for span, alike in found.items()}, crossings

    def whole_fragments(self, first: int, last: int) -> range:
        """Return the indices of the fragments that lie within layers [first, last)."""
        found = self._fragments.get((first, last))
        if found is None:
            held = holder_of(self.setup.now.cuts, first, last, 0.0)
            if len(self._fragments) > MAX_SPANS_KEPT:
                self._fragments.clear()
            found = self._fragments[first, last] = range(held.begin, held.end)
        return found
