"""A peer without its network, clock and tensors: `Node` has the peer's state machines, and passes events to them.

    JOINING --Started--> TRAINING --leave--> LEAVING

`Node.handle` takes one event and returns a list of effects. In a real peer, peers/runtime/host.py carries the effects
out over libp2p; a simulator carries them out in virtual time. Nothing that another peer sends makes `handle` raise: bad
input is refused and counted, and the journal shows the count.

A table (handlers.py) maps each event to the function of a state machine that handles it. Other files of this folder
serve several state machines: they choose which peers to ask (peer_selection.py), weight routes (route_planner.py),
decide which layers this peer holds (span_manager.py), compose this peer's record (own_record.py), and answer other
peers' questions (answers.py).
"""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from random import Random
from typing import get_args

from decentral.comm.gossip.exchange import ExchangeTag
from decentral.comm.gossip.gossip_cost import CoresUsed
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.tags import RouteTag
from decentral.comm.rounds.collection import RoundTag
from decentral.comm.rounds.round import Rounds
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import LeaseRequest, RecordsQuery, Refused
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Effect, Event, Found, Reply
from decentral.core import jobs, rng
from decentral.core.ids import PeerId
from decentral.core.journal.events import AuditLine, BehindLine, JoinedLine, PeerLeftLine
from decentral.core.machine import Log, Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.joining.join import Join, JoinPhase, JoinTag
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.link_probes import Prober, ProbeTag
from decentral.peers.membership.record_gossip import RecordGossip, RecordsTag
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.membership.roster import Roster
from decentral.peers.membership.swarm_size import SwarmSize
from decentral.peers.runtime.answers import ROUND_QUESTIONS, ROUTE_QUESTIONS, Answers
from decentral.peers.runtime.divergence import Divergence
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from decentral.peers.runtime.handlers import Handlers, PeerEffect, PeerEvent
from decentral.peers.runtime.own_record import OwnRecord
from decentral.peers.runtime.peer_selection import PeerSelection
from decentral.peers.runtime.progress import StepClock, TrainingProgress
from decentral.peers.runtime.route_planner import RoutePlanner
from decentral.peers.runtime.setup import NodeSetup, PresentSetup
from decentral.peers.runtime.span_manager import SpanManager
from decentral.peers.runtime.traffic import TrafficCounter
from decentral.peers.runtime.witness import Witness
from decentral.scheduler.placement.cold_copies import CopyTag
from decentral.scheduler.placement.evaluate import PlansEvaluated
from decentral.scheduler.placement.move import LeaseTag, MoveTag
from decentral.scheduler.throughput.link_limits import TokenLinks

STOPPED_S = 5.0  # if no event comes for more than this while one is due (`wake_at`), the process was suspended
ROUTE_OUTCOMES = (jobs.ForwardDone, jobs.BackwardDone, jobs.ExecutionFailed, jobs.Compared, jobs.Undone)
FragmentJobDone = jobs.WindowClosed | jobs.SectionsEncoded | jobs.Merged


@dataclass(slots=True)
class Node:
    """All state machines of one peer; a host or simulator calls `begin`, `handle` and `leave`."""

    first_setup: InitVar[NodeSetup]
    phase: PeerPhase = PeerPhase.JOINING
    _handled_at: Seconds = 0.0  # when `handle` got its last event
    meter: Meter = field(default_factory=Meter)
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    handlers: Handlers = field(default_factory=Handlers)
    present: PresentSetup = field(init=False)
    roster: Roster = field(init=False)
    record_gossip: RecordGossip = field(init=False)
    progress: TrainingProgress = field(init=False)
    clock: StepClock = field(init=False)
    selection: PeerSelection = field(init=False)
    prober: Prober = field(init=False)
    join: Join = field(init=False)
    donor: Donor = field(init=False)
    gossip: FragmentExchanges = field(init=False)
    witness: Witness = field(init=False)
    own_record: OwnRecord = field(init=False)
    answers: Answers = field(init=False)
    route_planner: RoutePlanner | None = None  # None if this peer exchanges no micro-batches with other peers
    rounds: Rounds | None = None
    span_manager: SpanManager | None = None  # None if this peer always keeps its layers

    def __post_init__(self, first_setup: NodeSetup) -> None:
        """Make the state machines that this peer needs, and register their handlers."""
        self.present = PresentSetup(first_setup)
        setup, run = self.setup, self.setup.config
        chance = rng.stream(run.seed, "node", setup.own.peer)
        self.handlers.register(self._woke, Woke)
        self.handlers.register(self._asked, Asked)
        self.handlers.register(self._answered, Answered, AskFailed)
        self.handlers.register(self._found, Found)
        self._make_membership(chance)
        self.join = self._new_join(setup.restored_step or 0, setup.restored_step is not None, chance)
        self.donor = Donor(setup.run, setup.fragments, setup.retained, self.meter, run.synchronous)
        self.handlers.register(self._to_join, JoinTag, jobs.StateImported)
        self.handlers.register(self._started, jobs.Started)
        self.gossip = FragmentExchanges(self.present, self.selection)
        self.handlers.register(self._cores_used, CoresUsed)
        self.handlers.register(self._to_exchange, ExchangeTag, *get_args(FragmentJobDone))
        assert setup.routes or not run.synchronous, "all peers of a synchronous run take part in its routes"
        if setup.routes:
            self._make_routes()
        self.witness = Witness(self.present, self.roster, self.selection, self.routes)
        self.own_record = OwnRecord(
            setup=self.present,
            meter=self.meter,
            selection=self.selection,
            progress=self.progress,
            donor=self.donor,
            gossip=self.gossip,
            traffic=self.traffic,
            routes=self.routes,
            witness=self.witness,
        )
        progress, rounds = self.progress, self.rounds
        self.answers = Answers(self.present, self, self.handlers, progress, self.donor, self.gossip, rounds)
        self.handlers.register(self.answers.exported, jobs.StateExported, jobs.RetainedExported)
        if self.route_planner and setup.memory_budget and not setup.whole and not run.synchronous:
            self._make_spans(self.route_planner)
        else:
            self.handlers.register(self.answers.lease, LeaseRequest)

    def _make_membership(self, chance: Random) -> None:
        setup, run = self.setup, self.setup.config
        cuts = setup.routes.cuts if setup.routes else ()  # only routes need the index of holders
        holders = Holders(setup.own.peer, cuts, TokenLinks.of(run))
        roster_chance = rng.stream(run.seed, "roster", setup.own.peer)
        size = SwarmSize(setup.run, setup.own.peer, roster_chance, setup.start, lambda: self.gossip.period_s)
        self.roster = Roster(setup.run, setup.own, run.swarm, self, size, holders)
        gossip_chance = rng.stream(run.seed, "records", setup.own.peer)
        self.record_gossip = RecordGossip(setup.run, self.roster, setup.contacts, gossip_chance)
        self.handlers.register(self._gossiped, RecordsTag, RecordsQuery)
        step, judge = setup.restored_step or 0, Divergence(math.log(run.model.vocabulary))
        self.progress = TrainingProgress(
            run.train, run.swarm, setup.stop_after, lr_step=step, evaluates=setup.whole, divergence=judge
        )
        self.clock = StepClock(self.progress)
        self.selection = PeerSelection(self.present, self.roster, self.meter, self.progress, chance)
        self.prober = Prober(self.meter, chance)
        self.handlers.register(self._pass_step_on, jobs.Stepped, jobs.Sealed)
        self.handlers.register(self.progress.handle, jobs.Evaluated, jobs.Saved, jobs.SaveFailed, jobs.JobFailed)
        self.handlers.register(lambda event, now: self.prober.handle(event, now, self.selection.live()), ProbeTag)
        if setup.private:
            watch = self.roster.watch_revocations(setup.private, rng.stream(run.seed, "revocations", setup.own.peer))
            self.handlers.register(watch.handle, watch.key)

    def _make_routes(self) -> None:
        setup = self.setup
        self.route_planner = RoutePlanner(self.present, self.roster, self.meter, self.selection, Random(setup.secret))
        routes, self.rounds = self.route_planner.routes, self.route_planner.rounds
        self.handlers.register(routes.handle, RouteTag, *ROUTE_QUESTIONS)
        self.handlers.register(routes.handle, *ROUTE_OUTCOMES)
        if self.rounds:
            self.handlers.register(self.rounds.handle, RoundTag, jobs.RoundClosed, *ROUND_QUESTIONS)

    def _make_spans(self, route_planner: RoutePlanner) -> None:
        own_record, donor, gossip, answers = self.own_record, self.donor, self.gossip, self.answers
        spans = SpanManager(self.present, self.selection, route_planner, own_record, donor, gossip, answers)
        self.span_manager = spans
        self.handlers.register(spans.moved, MoveTag, LeaseTag)
        self.handlers.register(spans.asked, LeaseRequest)
        self.handlers.register(spans.changed, jobs.SpanChanged)
        self.handlers.register(spans.copied, CopyTag, jobs.RetainedChanged)
        self.handlers.register(spans.swarm_plans.handle, PlansEvaluated, spans.swarm_plans.key)
        self.record_gossip.pass_on(spans.swarm_plans)

    def _new_join(self, step: int, restored: bool, chance: Random) -> Join:
        setup, selection = self.setup, self.selection
        return Join(
            run=setup.run,
            fragments=setup.fragments,
            layouts=setup.state_layouts,
            contacts=tuple(sorted({*setup.contacts, *selection.live()})),
            own_step=step,
            restored=restored,
            chance=chance,
            view=selection,
            synchronous=setup.config.synchronous,
            has_weights=restored or self.progress.joined_at is not None,
        )

    @property
    def setup(self) -> NodeSetup:
        """Return the present setup, which changes when the peer changes its layers."""
        return self.present.now

    @property
    def routes(self) -> Router | None:
        """Return the router; None if this peer neither sends nor accepts micro-batches along routes."""
        return self.route_planner.routes if self.route_planner else None

    @property
    def wake_at(self) -> Seconds | None:
        """Return when the node needs the next timer event (Woke); None if it has left, or needs none."""
        if self.phase is PeerPhase.LEAVING:
            return None
        times = [self.roster.wake_at, self.join.wake_at, self.prober.wake_at, self.progress.wake_at]
        times += [self.gossip.wake_at, self.record_gossip.wake_at]
        if self.route_planner:
            times += [self.route_planner.routes.wake_at, self.route_planner.wake_at]
        if self.span_manager:
            times.append(self.span_manager.span_move.wake_at)
            times.append(self.span_manager.wake_at if self.phase is PeerPhase.TRAINING else None)
        if self.rounds:
            times.append(self.rounds.wake_at)
        return earliest(times)

    def begin(self, now: Seconds) -> list[PeerEffect]:
        """Begin to join the swarm, and return the first effects; call it once, before `handle`."""
        self.join.begin(now)
        return self.handle(Woke(), now)

    def handle(self, event: PeerEvent, now: Seconds) -> list[PeerEffect]:
        """Take one event, and return the effects in the order in which the host must carry them out."""
        if self.phase is PeerPhase.LEAVING:  # handle only the outcome of the last checkpoint, and refuse questions
            if isinstance(event, Asked):
                return [Reply(event.request, Envelope(Refused(Reason.LEAVING)))]
            if isinstance(event, jobs.Saved | jobs.SaveFailed | jobs.JobFailed):
                return [*self.progress.handle(event, now)]
            return []
        if now - self._handled_at > STOPPED_S and self.routes and self.is_training():
            late_s = now - max(self._handled_at, self.wake_at or now)
            if late_s > STOPPED_S:
                self.routes.was_stopped(late_s)
        self._handled_at = now
        effects = [*self.handlers.handle(event, event, now)]
        if self.span_manager:
            effects += self.span_manager.settle(now)
        if self.rounds:
            effects += self._advance_round(self.rounds, now)
        gone: list[PeerId] = []
        for effect in effects:
            match effect:
                case Reply(request, envelope):
                    self.traffic.replied(len(envelope.blob))
                    self.answers.replied(request)
                case Log(AuditLine() as line):
                    self.witness.audited(line)
                case Log(PeerLeftLine(peer=peer)):
                    gone.append(peer)
                    self.meter.left(peer)
                    self.witness.left(peer)
        return [*effects, *self.witness.signed(gone)] if gone else effects

    def leave(self, reason: str, now: Seconds) -> list[PeerEffect]:
        """Leave the swarm, and return the last effects: refusals of open questions, and a record in phase `leaving`.

        Afterwards `handle` only refuses questions, and records the outcome of the last checkpoint.
        """
        self.phase = PeerPhase.LEAVING
        last = [*self.answers.leave(), *self.progress.flush(now), self.traffic.line(), *self.roster.leave(now)]
        return [*last, *self.witness.last_lines()]

    def _woke(self, event: Woke, now: Seconds) -> list[PeerEffect]:
        effects: list[PeerEffect] = [*self.roster.handle(event, now)]
        effects += self.record_gossip.handle(event, now)
        if _is_due(self.join.wake_at, now):
            effects += self._to_join(event, now)
        if _is_due(self.prober.wake_at, now):
            effects += self.prober.handle(event, now, self.selection.live(), self.gossip.period_s)
        effects += self.progress.handle(event, now)
        effects += self.gossip.woke(event, now)
        if self.route_planner:
            effects += self._review_routes_and_span(self.route_planner, now)
            if _is_due(self.route_planner.routes.wake_at, now):
                effects += self.route_planner.routes.handle(event, now)
        if self.span_manager and _is_due(self.span_manager.span_move.wake_at, now):
            effects += self.span_manager.moved(event, now)
        effects += self.donor.forget_old(now)
        totals = self.traffic.lines(now)
        if totals:
            self.meter.sample_sent(now)
        effects += self.witness.lines(now)
        return [*effects, *totals, *([self.own_record.status(now)] if totals and self.is_training() else [])]

    def _asked(self, event: Asked, now: Seconds) -> Sequence[PeerEffect]:
        if event.sender not in self.roster.live:
            self.roster.refresh_soon(event.sender, now)
        self.traffic.received(event)
        return self.answers.asked(event, now)

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[PeerEffect]:
        # If the answer waits for a busy device or our uplink, a missed deadline does not show that the peer is gone.
        late = event.tag.may_be_late and isinstance(event, AskFailed) and event.reason == Reason.DEADLINE
        effects = [] if late else self.roster.handle(event, now)
        if isinstance(event, Answered):
            self.traffic.received(event)
            self.witness.answered(event)
            if event.tag.measures_link:
                self.meter.saw(event.peer, event.seconds, event.first_byte_s, event.sent_bytes, event.received_bytes)
        elif event.reason == Reason.DEADLINE and event.tag.measures_link and not late:
            self.meter.missed(event.peer)
        return [*effects, *self.handlers.handle(event.tag, event, now)]

    def _found(self, event: Found, now: Seconds) -> Sequence[PeerEffect]:
        if handler := self.handlers.find(event.key):
            return handler(event, now)
        return self._read(self.roster.handle(event, now), now)  # every other DHT key holds records of peers

    def _gossiped(self, event: Asked | Answered | AskFailed, now: Seconds) -> list[PeerEffect]:
        return self._read(self.record_gossip.handle(event, now), now)

    def _read(self, effects: Sequence[PeerEffect], now: Seconds) -> list[PeerEffect]:
        """Tell the donor, the join and the step clock that records were read; return `effects` and their effects."""
        effects = [*effects, *self.donor.recognise(self.answers.knows)]
        if self.join.phase is not JoinPhase.DONE:
            return effects + self.join.roster_known(now, self.selection.donors())
        if self.rounds:
            return effects  # synchronous rounds set the learning-rate step, so other peers' steps must not raise it
        return effects + self.clock.follow([entry.record.lr_step for entry in self.roster.live.values()])

    def _started(self, event: jobs.Started, now: Seconds) -> list[PeerEffect]:
        self.phase = PeerPhase.TRAINING
        if self.progress.joined_at is None:
            self.progress.begin(now, event.step, fetched=bool(self.join.fetch.used))
        self.prober.begin(now)
        if not self.rounds:
            self.gossip.begin(now)
        self.roster.renew_soon(now)
        donors, seconds = tuple(sorted(self.join.fetch.used)), round(now - self.join.began_at, 3)
        line = JoinedLine(peers=len(self.roster.live), donors=donors, seconds=seconds)
        lines: list[PeerEffect] = [Log(line), self.own_record.status(now)]
        if self.route_planner is None:
            return lines
        if self.rounds:
            self.rounds.begin(event.step, self.join.taken())
        else:
            self.route_planner.routes.start()
        reviewed = self._review_routes_and_span(self.route_planner, now)
        return [*lines, *reviewed, *self.route_planner.routes.handle(Woke(), now)]

    def _pass_step_on(self, event: jobs.Stepped | jobs.Sealed, now: Seconds) -> list[PeerEffect]:
        routed = self.routes.handle(event, now) if self.routes else []
        routed += self.rounds.handle(event, now) if self.rounds else []
        effects: list[PeerEffect] = [*self.progress.handle(event, now), *routed]
        if not self.setup.profile.tokens_per_s and (speed := self.progress.tokens_per_s):
            self.present.measured(speed)
            self.roster.renew_soon(now)
        return effects

    def _cores_used(self, event: CoresUsed, now: Seconds) -> list[PeerEffect]:
        joined_at, routes = self.progress.joined_at, self.routes
        fetched = joined_at is None or joined_at > now - event.seconds  # whether joining took up a part of the interval
        routed = routes is not None and (not self.setup.whole or bool(routes.executions))
        alone = not (self.donor.exports or fetched or routed)
        self.selection.lengths.cost.measured(event, alone, self.traffic.gossip())
        self.gossip.replan(now)
        if self.own_record.windows_outdated:
            self.roster.renew_soon(now)
        return []

    def _to_join(self, event: Event, now: Seconds) -> list[Effect]:
        effects = self.join.handle(event, now, self.selection.donors())
        self.progress.waits_for_weights(bool(self.join.waits), now)
        return effects

    def _to_exchange(self, event: Answered | AskFailed | FragmentJobDone, now: Seconds) -> list[Effect]:
        tag = event.tag if isinstance(event, Answered | AskFailed) else event
        assert isinstance(tag, ExchangeTag | FragmentJobDone)
        if isinstance(event, FragmentJobDone):
            self.selection.lengths.cost.did(event.cost_s, closed=isinstance(event, jobs.WindowClosed))
        exchange = self.gossip.running.get(tag.fragment)
        if exchange and isinstance(event, jobs.Merged):
            self.witness.merged(event, exchange.lasted_s, exchange.pulled)
        return self.gossip.tell(tag.fragment, event, now) if exchange else []

    def _advance_round(self, rounds: Rounds, now: Seconds) -> list[PeerEffect]:
        """Advance the synchronous round; if this peer has fallen behind, stop its rounds and fetch the state again.

        To find peers with newer weights, this peer looks up all records at once.
        """
        effects: list[PeerEffect] = [*rounds.handle(Woke(), now)]
        if rounds.behind and self.phase is PeerPhase.TRAINING:
            effects += [Log(BehindLine(round=rounds.number, reason=rounds.behind)), *rounds.stop()]
            self.phase, self.join = PeerPhase.JOINING, self._new_join(0, False, self.join.chance)
            self.join.begin(now)
            self.roster.renew_soon(now)
            effects += self.roster.look_up(now)
        return effects

    def _review_routes_and_span(self, route_planner: RoutePlanner, now: Seconds) -> list[PeerEffect]:
        """Resend micro-batches that were at lost peers; when due, review published speed, routing weights and layers.

        Return [] if this peer does not train.
        """
        if self.phase is not PeerPhase.TRAINING:
            return []
        effects: list[PeerEffect] = [*route_planner.look_for_lost(now)]
        if route_planner.is_due(now):
            if self.own_record.speed_outdated:
                self.roster.renew_soon(now)
            effects += route_planner.refresh(now)
        if self.span_manager and now >= self.span_manager.wake_at:
            effects += self.span_manager.review(now)
        return effects

    def is_training(self) -> bool:
        """Return whether this peer trains; False while it joins and after it has left."""
        return self.phase is PeerPhase.TRAINING

    def compose_record(self, now: Seconds, leaving: bool) -> PeerRecord:
        """Return our own record as of `now`, in phase "leaving" if `leaving` is True, else in the node's phase."""
        return self.own_record.compose(PeerPhase.LEAVING if leaving else self.phase, now)


def _is_due(wake_at: Seconds | None, now: Seconds) -> bool:
    return wake_at is not None and now >= wake_at
