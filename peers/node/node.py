"""A peer without its network, clock and tensors: composes the machines and routes events between them.

    JOINING --Started--> TRAINING --leave--> LEFT

One event in, a list of effects out. peers/hosts/host.py carries the effects out over libp2p; a simulator does it in
virtual time. Nothing here raises for what another peer sends: it is refused, counted, and the journal shows it.

What several machines need is beside them: whom of the swarm to ask (selection.py), where routes should run
(routing.py), which layers to hold (spans.py), what we say of ourselves (advert.py), what we answer others (answers.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

from decentral.comm.gossip.tags import ExchangeTag
from decentral.comm.rounds.round import Rounds
from decentral.comm.rounds.tags import RoundTag
from decentral.comm.routes.router import Router
from decentral.comm.routes.tags import RouteTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Found, Reply
from decentral.core import rng
from decentral.core.jobs import (
    Absorbed,
    BackwardDone,
    ChangeSpan,
    Evaluated,
    ExecutionFailed,
    ForwardDone,
    JobFailed,
    Merged,
    RetainedExported,
    RoundClosed,
    Saved,
    Sealed,
    SpanChanged,
    Started,
    StateExported,
    StateImported,
    Stepped,
    WindowClosed,
)
from decentral.core.machine import Effect, Log, Woke, earliest, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.join import Donor, Join, JoinTag
from decentral.peers.joining.join import JoinPhase as JoinState
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.prober import Prober, ProbeTag
from decentral.peers.membership.records import PeerRecord
from decentral.peers.membership.roster import Roster
from decentral.peers.node.answers import Answers
from decentral.peers.node.fragment_exchanges import FragmentExchanges
from decentral.peers.node.own_record import OwnRecord
from decentral.peers.node.peer_selection import PeerSelection
from decentral.peers.node.progress import TrainingProgress
from decentral.peers.node.route_planner import RoutePlanner
from decentral.peers.node.setup import NodeSetup
from decentral.peers.node.span_manager import SpanManager
from decentral.peers.placement.span_move import Drained, HoldSpan, LeaseTag, MoveTag, SpanMove
from decentral.peers.placement.span_move import MovePhase as MoveState
from decentral.peers.planning.plan_evaluation import PlansEvaluated
from decentral.peers.planning.swarm_plans import key_of as plan_key

PROBE_AFTER_S = 2.0
TRAFFIC_S = 10.0  # a `traffic` line, with the totals, for about this much time
COUNTED = frozenset((Log, Reply))


class NodePhase(Enum):
    JOINING = auto()
    TRAINING = auto()
    LEFT = auto()


@dataclass(slots=True)
class Node:
    setup: NodeSetup  # as it is now: a move replaces it, so nobody else keeps it
    phase: NodePhase = NodePhase.JOINING
    meter: Meter = field(default_factory=Meter)
    exchanges: Counter[str] = field(default_factory=Counter)  # by outcome
    sent_bytes: int = 0
    received_bytes: int = 0
    roster: Roster = field(init=False)
    progress: TrainingProgress = field(init=False)
    selection: PeerSelection = field(init=False)
    join: Join = field(init=False)
    donor: Donor = field(init=False)
    prober: Prober = field(init=False)
    gossip: FragmentExchanges = field(init=False)
    routing: RoutePlanner | None = None
    routes: Router | None = None  # of the routing
    rounds: Rounds | None = None  # of a synchronous run
    advert: OwnRecord = field(init=False)
    spans: SpanManager | None = None
    moves: SpanMove | None = None  # of the spans
    answers: Answers = field(init=False)
    _rng: Random = field(init=False)
    _traffic_at: Seconds = 0.0

    def __post_init__(self) -> None:
        def current() -> NodeSetup:
            return self.setup

        setup, run = self.setup, self.setup.config
        restored = setup.restored_step is not None
        self._rng = rng.stream(run.seed, "node", setup.own.peer)
        chance = rng.stream(run.seed, "roster", setup.own.peer)
        holders = Holders(setup.own.peer, setup.layers if setup.routes else 0)  # without routes nobody asks
        self.roster = Roster(setup.run, setup.own, run.swarm, self._compose, chance, holders)
        step = setup.restored_step or 0
        self.progress = TrainingProgress(run.train, run.swarm, setup.stop_after, lr_step=step, evaluates=setup.whole)
        self.selection = PeerSelection(current, self.roster, self.meter, self.progress, self._rng)
        self.join = self._newcomer(step, restored)
        self.donor = Donor(setup.run, setup.fragments, setup.kept, exact=run.synchronous)
        self.prober = Prober(self.meter, self._rng, None)
        self.gossip = FragmentExchanges(current, self.selection, self._rng)
        if setup.routes:
            self.routing = RoutePlanner(current, self.roster)
            self.routes = self.routing.routes
        self.advert = OwnRecord(current, self.meter, self.progress, self.donor, self.gossip, self.routes)
        if run.synchronous:
            assert self.routing, "all of a synchronous run take part in its routes"
            self.rounds = Rounds(self.routing.routes, self.selection, step, versions=dict(setup.versions))
            self.routing.rounds = self.rounds
        elif self.routing and setup.room and not setup.whole:
            self.spans = SpanManager(current, self.selection, self.routing, self.advert, self.donor)
            self.moves = self.spans.moves
        self.answers = Answers(current, self.progress, self.donor, self.gossip, self.routes, self.rounds, self.moves)

    def _newcomer(self, step: int, restored: bool) -> Join:
        setup = self.setup
        return Join(
            setup.run,
            setup.fragments,
            setup.state_layouts,
            setup.contacts,
            step,
            restored,
            self._rng,
            self.selection.donates,
            self.selection.newest_kept,
            exact=setup.config.synchronous,
        )

    def begin(self, now: Seconds) -> list[Effect]:
        self.join.begin(now)
        return self.handle(Woke(), now)

    @property
    def wake_at(self) -> Seconds | None:
        if self.phase is NodePhase.LEFT:
            return None
        times = (
            self.roster.wake_at,
            self.join.wake_at,
            self.prober.wake_at,
            self.progress.wake_at,
            self.gossip.wake_at,
            self.moves.wake_at if self.moves else None,
            self.routes.wake_at if self.routes else None,
            self.routing.wake_at if self.routing else None,
            self.spans.wake_at if self.spans and self.phase is NodePhase.TRAINING else None,
            self.rounds.wake_at if self.rounds else None,
        )
        return earliest(times)

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        if self.phase is NodePhase.LEFT:
            return self._left(event, now)
        if isinstance(event, Asked) and event.sender not in self.roster.live:
            self.roster.look_soon(now)
        effects = self._follow(self._route(event, now), now)
        if self.rounds:
            effects += self._keep_round(self.rounds, now)
        for effect in effects:
            if type(effect) in COUNTED:
                self._count(effect)
        return effects

    def leave(self, reason: str, now: Seconds) -> list[Effect]:
        """The last effects: others need not wait for our record to expire."""
        self.phase = NodePhase.LEFT
        return [*self.answers.leave(), *self.progress.flush(now), self._traffic(), *self.roster.leave(now)]

    def move(self, goal: range, why: str, now: Seconds) -> list[Effect]:
        """Sets out to hold these fragments instead; see peers/placement/span_move.py for what may keep us from it."""
        effects = self.moves.begin(goal, why, now) if self.moves and self.phase is NodePhase.TRAINING else []
        return self._follow(effects, now)

    # Routing

    def _route(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self._woke(event, now)
            case Asked():
                self.received_bytes += len(event.envelope.blob)
                return self.answers.asked(event, self.phase is NodePhase.TRAINING, now)
            case Answered() | AskFailed():
                return self._heard_back(event, now)
            case Found():
                return self._found(event, now)
            case WindowClosed(fragment=index) | Merged(fragment=index) | Absorbed(fragment=index):
                return self.gossip.tell(index, event, now) if index in self.gossip.running else []
            case SpanChanged(accepted=True, kept=kept):
                self.donor.kept = kept
                return self.moves.handle(event, now) if self.moves else []
            case SpanChanged() if self.moves:
                return self.moves.handle(event, now)
            case PlansEvaluated():
                return self.spans.plans.handle(event, now) if self.spans else []
            case StateExported() | RetainedExported():
                return self.answers.exported(event, now)
            case StateImported():
                return self.join.handle(event, now, self.selection.donors())
            case Started(step):
                return self._started(step, now)
            case Stepped():
                routed = self.routes.handle(event, now) if self.routes else []
                routed += self.rounds.handle(event, now) if self.rounds else []
                return self.progress.handle(event, now) + routed
            case Evaluated() | Saved() | JobFailed():
                return self.progress.handle(event, now)
            case ForwardDone() | BackwardDone() | ExecutionFailed() | Sealed() if self.routes:
                return self.routes.handle(event, now)
            case RoundClosed() if self.rounds:
                return self.rounds.handle(event, now)
        return []

    def _keep_round(self, rounds: Rounds, now: Seconds) -> list[Effect]:
        """Whatever happened, the round may go on now; or we have fallen out of it, and fetch the state anew."""
        effects = rounds.handle(Woke(), now)
        if rounds.behind and self.phase is NodePhase.TRAINING:
            effects += [log("behind", round=rounds.number, reason=rounds.behind), *rounds.stop()]
            self.phase, self.join = NodePhase.JOINING, self._newcomer(0, restored=False)
            self.join.begin(now)
            self.roster.renew_soon(now)
            effects += self.join.roster_known(now, self.selection.donors())
        return effects

    def _woke(self, event: Woke, now: Seconds) -> list[Effect]:
        effects = self.roster.handle(event, now)
        if _due(self.join, now):
            effects += self.join.handle(event, now, self.selection.donors())
        if _due(self.prober, now):
            effects += self.prober.handle(event, now, self.selection.live())
        effects += self.progress.handle(event, now)
        effects += self.gossip.woke(event, now)
        if self.routes:
            effects += self._look_around(now)
            if _due(self.routes, now):
                effects += self.routes.handle(event, now)
        if self.moves and _due(self.moves, now):
            effects += self.moves.handle(event, now)
        self.donor.forget_old(now)
        if now >= self._traffic_at:
            self._traffic_at = now + TRAFFIC_S
            effects.append(self._traffic())
        return effects

    def _heard_back(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        effects = [] if self._is_only_late(event) else self.roster.handle(event, now)
        if isinstance(event, Answered):
            self.sent_bytes += event.sent_bytes
            self.received_bytes += event.received_bytes
            if event.tag.measures_link:
                self.meter.saw(event.peer, event.seconds, event.sent_bytes, event.received_bytes)
        match event.tag:
            case JoinTag():
                effects += self.join.handle(event, now, self.selection.donors())
            case ProbeTag():
                effects += self.prober.handle(event, now, self.selection.live())
            case ExchangeTag(fragment=index) if index in self.gossip.running:
                effects += self.gossip.tell(index, event, now)
            case RouteTag() if self.routes:
                effects += self.routes.handle(event, now)
            case MoveTag() | LeaseTag() if self.moves:
                effects += self.moves.handle(event, now)
            case RoundTag() if self.rounds:
                effects += self.rounds.handle(event, now)
        return effects

    def _is_only_late(self, event: Answered | AskFailed) -> bool:
        """Whether it says nothing of the peer's being there: an answer that waits for its device, or all behind it."""
        return event.tag.waits_for_work and isinstance(event, AskFailed) and event.reason == Reason.DEADLINE

    def _found(self, event: Found, now: Seconds) -> list[Effect]:
        if self.spans and event.key == plan_key(self.setup.run):
            return self.spans.plans.handle(event, now)
        effects = self.roster.handle(event, now)
        if self.join.state is not JoinState.DONE:
            return effects + self.join.roster_known(now, self.selection.donors())
        if self.rounds:
            return effects  # the round is the clock
        return effects + self.progress.follow(entry.record.lr_step for entry in self.roster.live.values())

    def _started(self, step: int, now: Seconds) -> list[Effect]:
        self.phase = NodePhase.TRAINING
        if self.progress.joined_at is None:
            self.progress.begin(now, step, fetched=bool(self.join.used))
        self.prober.wake_at = now + PROBE_AFTER_S
        if not self.rounds:
            self.gossip.begin(now)
        self.roster.renew_soon(now)
        seconds = round(now - self.join.began, 3)
        lines: list[Effect] = [
            log("joined", peers=len(self.roster.live), donors=sorted(self.join.used), seconds=seconds)
        ]
        if self.routes is None:
            return lines
        if self.rounds:
            self.rounds.begin(step, self.join.taken())
        self.routes.active = self.rounds is None
        return lines + self._look_around(now) + self.routes.handle(Woke(), now)

    def _look_around(self, now: Seconds) -> list[Effect]:
        """Now and then: where routes should run, and which layers we should hold. Others hear of our new speed."""
        assert self.routing is not None
        if self.phase is not NodePhase.TRAINING:
            return []
        if self.routing.due(now):
            if self.advert.outdated:
                self.roster.renew_soon(now)
            self.routing.look(now)
        return self.spans.look(now) if self.spans and now >= self.spans.wake_at else []

    # What moves do to us: peers/placement/span_move.py

    def _follow(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """What a move wants of the other machines."""
        if self.moves is None or self.routes is None:
            return effects
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case HoldSpan(fragments):
                    done += self._hold(fragments, now)
                case ChangeSpan():
                    done += [*self._part_with(self.moves.lost), effect]
                case _:
                    done.append(effect)
        if self.moves.drains and not self.routes.draining:
            self.routes.drain()
            done += self.routes.handle(Woke(), now)
        if self.moves.state is MoveState.DRAINING and self.routes.idle:
            done += self._follow(self.moves.handle(Drained(), now), now)
        return done

    def _part_with(self, lost: Sequence[int]) -> list[Effect]:
        self.donor.fragments = [fragment for fragment in self.setup.fragments if fragment.index not in lost]
        self.gossip.drop(lost)
        return self.answers.part_with(lost)

    def _hold(self, held: range, now: Seconds) -> list[Effect]:
        """These fragments are ours from now on."""
        assert self.routing is not None
        before, self.setup = self.setup, self.setup.holding(held)
        stage, fragments = self.setup.routes, self.setup.fragments
        assert stage is not None
        self.donor.fragments = fragments
        self.routing.routes.hold(stage)
        self.gossip.add(fragments, now)
        if list(fragments) != list(before.fragments):
            self.roster.renew_soon(now)
            self.progress.save_soon(now)
        self.routing.solve(anew=True)
        return self.routing.routes.handle(Woke(), now)

    # Helpers

    def _compose(self, now: Seconds, leaving: bool) -> PeerRecord:
        training = self.phase is NodePhase.TRAINING
        return self.advert.compose("leaving" if leaving else "training" if training else "joining", now)

    def _traffic(self) -> Log:
        return log("traffic", sent_bytes=self.sent_bytes, received_bytes=self.received_bytes)

    def _left(self, event: object, now: Seconds) -> list[Effect]:
        """What still comes in while the last checkpoint is written."""
        if isinstance(event, Asked):
            return [Reply(event.request, Envelope(Refused(Reason.LEAVING)))]
        return self.progress.handle(event, now) if isinstance(event, Saved) else []

    def _count(self, effect: Effect) -> None:
        if isinstance(effect, Log) and effect.event == "exchange":
            self.exchanges[effect.fields["outcome"]] += 1
        elif isinstance(effect, Reply):
            self.answers.waiting.pop(effect.request, None)
            self.sent_bytes += len(effect.envelope.blob)


def _due(machine: Join | Prober | Router | SpanMove, now: Seconds) -> bool:
    wake_at = machine.wake_at
    return wake_at is not None and now >= wake_at


__all__ = ["Node", "NodePhase"]
