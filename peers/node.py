"""A peer without its network, clock and tensors: composes the machines and routes events between them.

    JOINING --Started--> TRAINING --leave--> LEFT

One event in, a list of effects out. peers/host.py carries the effects out over libp2p; a simulator does it in
virtual time. Nothing here raises for what another peer sends: it is refused, counted, and the journal shows it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from random import Random

from decentral.comm.codec import Envelope
from decentral.comm.exchange import Exchange
from decentral.comm.identity import Signer
from decentral.comm.leg import Terms as RouteTerms
from decentral.comm.messages import (
    MAX_PROBE_BYTES,
    Carry,
    Carrying,
    Collect,
    Commit,
    Done,
    Follow,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Probe,
    Probed,
    Pull,
    PullState,
    Push,
    Refused,
    Settle,
    Stay,
    Swap,
    Unsettled,
    Welcome,
)
from decentral.comm.meter import Meter
from decentral.comm.push import PushExchange
from decentral.comm.rounds import Rounds
from decentral.comm.route import Routes
from decentral.comm.snapshots import Terms
from decentral.comm.swap import SwapExchange
from decentral.comm.transport import Answered, Asked, AskFailed, Found, Reply
from decentral.core import rng
from decentral.core.config import Config
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import (
    Absorbed,
    Backed,
    Evaluated,
    Forwarded,
    Fragment,
    HopFailed,
    JobFailed,
    Kept,
    KeptExported,
    Layout,
    Merged,
    Move,
    Moved,
    RoundClosed,
    Saved,
    Sealed,
    Started,
    StateExported,
    StateImported,
    Stepped,
    WindowClosed,
)
from decentral.core.machine import Effect, Log, Woke, earliest, log
from decentral.core.units import Amount, Seconds
from decentral.peers import flows
from decentral.peers.cover import Cover, Member
from decentral.peers.holders import Holders
from decentral.peers.join import Donor, Join
from decentral.peers.join import State as JoinState
from decentral.peers.move import Drained, Hold, Moves, Room
from decentral.peers.move import State as MoveState
from decentral.peers.placement import holder_of
from decentral.peers.plans import Plans
from decentral.peers.plans import key_of as plan_key
from decentral.peers.probe import Prober, zeros
from decentral.peers.progress import Progress, Stop
from decentral.peers.records import PeerRecord, Profile
from decentral.peers.roster import Roster
from decentral.peers.weigh import Weighed

WIRE_BYTES = {"bf16": 2.0, "int8": 1.0, "fp32": 4.0}  # a number between two layers
OF_NONE = -1
NEVER = -1  # a step
PROBE_AFTER_S = 2.0
FLOWS_S = 2.0  # how often to look whether the flow through the swarm has changed
TRAFFIC_S = 10.0  # a `traffic` line, with the totals, for about this much time
MOST_SPANS = 4096  # that are remembered
WEIGHT_FLOOR = 0.1  # a slow link's share of pulls, against the fastest one's
COUNTED = frozenset((Log, Reply))
BLOB_BYTES_PER_PARAMETER = 8  # no algorithm's snapshot is larger

QUESTIONS: dict[str, tuple[type[Message], ...]] = {
    "pull": (Pull,),
    "allreduce": (Pull,),
    "symmetric": (Swap, Commit),
    "push_sum": (Push,),
    "synchronous": (),
}

Gossip = Exchange | SwapExchange | PushExchange


class Phase(Enum):
    JOINING = auto()
    TRAINING = auto()
    LEFT = auto()


@dataclass(frozen=True, slots=True)
class Setup:
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
    routes: RouteTerms | None = None  # None: takes part in no routes
    room: Room | None = None  # None: never changes its layers
    kept: Kept = ()  # that the disk keeps of layers that were given up
    versions: Mapping[int, bytes] = field(default_factory=dict)  # of our checkpoint's fragments, in a synchronous run

    @property
    def whole(self) -> bool:
        """Whether this peer holds the whole model, and so trains by itself."""
        return (self.fragments[0].first, self.fragments[-1].last) == (0, self.layers)


@dataclass(slots=True)
class Node:
    setup: Setup
    phase: Phase = Phase.JOINING
    meter: Meter = field(default_factory=Meter)
    exchanges: Counter[str] = field(default_factory=Counter)  # by outcome
    sent_bytes: int = 0
    received_bytes: int = 0
    roster: Roster = field(init=False)
    join: Join = field(init=False)
    donor: Donor = field(init=False)
    prober: Prober = field(init=False)
    progress: Progress = field(init=False)
    gossip: dict[int, Gossip] = field(default_factory=dict)  # by fragment
    routes: Routes | None = field(init=False)
    moves: Moves | None = None
    cover: Cover | None = None
    rounds: Rounds | None = None  # of a synchronous run
    plans: Plans | None = None
    _gossip_at: Seconds | None = None  # the first exchange's wish; None: to be looked at
    _rng: Random = field(init=False)
    _traffic_at: Seconds = 0.0
    _flows_at: Seconds = 0.0
    _seen: tuple[int, str] = (0, "")  # changes of the roster, our own speed
    _whole: dict[tuple[int, int], range] = field(default_factory=dict)  # the fragments in layers [first, last)
    _known_speeds: dict[flows.Span, float] = field(default_factory=dict)  # of the flow that we go by
    _advertised: float = 0.0  # tokens/s in our last record
    _unanswered: dict[int, int] = field(default_factory=dict)  # of which fragment a question is, or OF_NONE

    def __post_init__(self) -> None:
        setup, run = self.setup, self.setup.config
        restored = setup.restored_step is not None
        self._rng = rng.stream(run.seed, "node", setup.own.peer)
        chance = rng.stream(run.seed, "roster", setup.own.peer)
        holders = Holders(setup.own.peer, setup.layers if setup.routes else 0)  # without routes nobody asks
        self.roster = Roster(setup.run, setup.own, run.swarm, self._compose, chance, holders)
        step = setup.restored_step or 0
        self.join = self._newcomer(step, restored)
        self.donor = Donor(setup.run, setup.fragments, setup.kept, exact=run.synchronous)
        self.prober = Prober(self.meter, self._rng, None)
        self.progress = Progress(run.train, run.swarm, setup.stop_after, lr_step=step, evaluates=setup.whole)
        self.routes = Routes(setup.routes, self) if setup.routes else None
        if run.synchronous:
            assert self.routes, "all of a synchronous run take part in its routes"
            self.rounds = Rounds(self.routes, self, step, versions=dict(setup.versions))
        elif setup.routes and setup.room and not setup.whole:
            held = range(setup.fragments[0].index, setup.fragments[-1].index + 1)
            chance = rng.stream(run.seed, "moves", setup.own.peer)
            self.moves = Moves(setup.run, setup.own.peer, setup.room, self, chance, run.routes.holders, held)
            self.cover = Cover(setup.own.peer, setup.room.needs, rng.stream(run.seed, "cover", setup.own.peer))
            self.plans = Plans(
                setup.run,
                setup.own,
                setup.room.needs,
                WIRE_BYTES[run.routes.wire] * run.model.d_model,
                run.routes.holders,
                run.seed,
                rng.stream(run.seed, "plans", setup.own.peer),
            )

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
            self._donates,
            self._newest_kept,
            exact=setup.config.synchronous,
        )

    def begin(self, now: Seconds) -> list[Effect]:
        self.join.begin(now)
        return self.handle(Woke(), now)

    @property
    def wake_at(self) -> Seconds | None:
        if self.phase is Phase.LEFT:
            return None
        if self._gossip_at is None:
            self._gossip_at = earliest(one.wake_at for one in self.gossip.values()) or math.inf
        routes = self.routes
        times = (
            self.roster.wake_at,
            self.join.wake_at,
            self.prober.wake_at,
            self.progress.wake_at,
            self._gossip_at,
            self.moves.wake_at if self.moves else None,
            routes.wake_at if routes else None,
            self._flows_at if routes and routes.active and self._routed else None,
            self.rounds.wake_at if self.rounds else None,
        )
        first = earliest(times)
        return None if first == math.inf else first

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        if self.phase is Phase.LEFT:
            return self._left(event, now)
        if isinstance(event, Asked):
            self._unanswered[event.request] = OF_NONE
            if event.sender not in self.roster.live:
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
        self.phase = Phase.LEFT
        held = [Reply(request, Envelope(Refused("leaving"))) for request in sorted(self._unanswered)]
        return [*held, *self.progress.flush(now), self._traffic(), *self.roster.leave(now)]

    def move(self, goal: range, why: str, now: Seconds) -> list[Effect]:
        """Sets out to hold these fragments instead; see peers/move.py for what may keep us from it."""
        effects = self.moves.begin(goal, why, now) if self.moves and self.phase is Phase.TRAINING else []
        return self._follow(effects, now)

    def blob_bound(self, message: Message) -> int:
        """How large a blob may come with a question; everything else carries none."""
        match message:
            case Probe():
                return MAX_PROBE_BYTES
            case Swap(offered) | Push(offered):
                held = {fragment.index: fragment.parameters for fragment in self.setup.fragments}
                known = offered.fragment in held
                return held[offered.fragment] * BLOB_BYTES_PER_PARAMETER + 1024 if known else 0
            case Carry() if self.setup.routes:
                return self.setup.routes.size(message)
        return 0

    # Routing

    def _route(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self._woke(event, now)
            case Asked():
                self.received_bytes += len(event.envelope.blob)
                return self._asked(event, now)
            case Answered() | AskFailed():
                return self._heard_back(event, now)
            case Found():
                return self._found(event, now)
            case WindowClosed(fragment=index) | Merged(fragment=index) | Absorbed(fragment=index):
                return self._gossips(index, event, now) if index in self.gossip else []
            case Moved(accepted=True, kept=kept):
                self.donor.kept = kept
                return self.moves.handle(event, now) if self.moves else []
            case Moved() if self.moves:
                return self.moves.handle(event, now)
            case Weighed():
                return self.plans.handle(event, now) if self.plans else []
            case StateExported() | KeptExported():
                version = self.rounds.versions.get(event.fragment, bytes(16)) if self.rounds else bytes(16)
                return self.donor.exported(event, self._state_step, now, version)
            case StateImported():
                return self.join.handle(event, now, self._donors())
            case Started(step):
                return self._started(step, now)
            case Stepped():
                routed = self.routes.handle(event, now) if self.routes else []
                routed += self.rounds.handle(event, now) if self.rounds else []
                return self.progress.handle(event, now) + routed
            case Evaluated() | Saved() | JobFailed():
                return self.progress.handle(event, now)
            case Forwarded() | Backed() | HopFailed() | Sealed() if self.routes:
                return self.routes.handle(event, now)
            case RoundClosed() if self.rounds:
                return self.rounds.handle(event, now)
        return []

    def _keep_round(self, rounds: Rounds, now: Seconds) -> list[Effect]:
        """Whatever happened, the round may go on now; or we have fallen out of it, and fetch the state anew."""
        effects = rounds.handle(Woke(), now)
        if rounds.behind and self.phase is Phase.TRAINING:
            effects += [log("behind", round=rounds.number, reason=rounds.behind), *rounds.stop()]
            self.phase, self.join = Phase.JOINING, self._newcomer(0, restored=False)
            self.join.begin(now)
            self.roster.renew_soon(now)
            effects += self.join.roster_known(now, self._donors())
        return effects

    def _woke(self, event: Woke, now: Seconds) -> list[Effect]:
        effects = self.roster.handle(event, now)
        if _due(self.join, now):
            effects += self.join.handle(event, now, self._donors())
        if _due(self.prober, now):
            effects += self.prober.handle(event, now, self._live())
        effects += self.progress.handle(event, now)
        if self._gossip_at is None or now >= self._gossip_at:
            for index, exchange in self.gossip.items():
                if _due(exchange, now):
                    effects += self._gossips(index, event, now)
        if self.routes:
            effects += self._look_at_flows(now)
            if _due(self.routes, now):
                effects += self.routes.handle(event, now)
        if self.moves and _due(self.moves, now):
            effects += self.moves.handle(event, now)
        self.donor.forget_old(now)
        if now >= self._traffic_at:
            self._traffic_at = now + TRAFFIC_S
            effects.append(self._traffic())
        return effects

    def _asked(self, event: Asked, now: Seconds) -> list[Effect]:
        match event.envelope.message:
            case Hello(run):
                wanted = run in ("", self.setup.run)
                answer = Welcome(self.setup.run, self.setup.config.canonical())
                return [self._reply(event, answer if wanted else self._other_run(run))]
            case Ping(nonce):
                return [self._reply(event, Pong(nonce))]
            case Probe(download_bytes):
                probed = Probed(len(event.envelope.blob))
                return [Reply(event.request, Envelope(probed, zeros(download_bytes)))]
            case Stay(run=run, fragment=index) if run == self.setup.run and self.phase is Phase.TRAINING:
                if self.moves:
                    return self.moves.handle(event, now)
                return [self._reply(event, Done() if self._holds(index) else Refused("fragment"))]
            case PullState(run=run) as pull if run == self.setup.run:
                fallen_out = self.rounds is not None and self.rounds.behind != ""
                if self.phase is Phase.JOINING and (self.setup.restored_step is None or fallen_out):
                    return [self._reply(event, Refused("not-ready"))]
                if self.rounds:
                    self.rounds.pin(event.sender, now)
                return self.donor.asked(event.request, event.sender, pull, self._state_step, now)
            case Pull(run=run, fragment=index) | Commit(run=run, fragment=index):
                return self._gossip(event, run, index, now)
            case Swap(offered) | Push(offered):
                return self._gossip(event, offered.run, offered.fragment, now)
            case Carry(run=run) | Offer(run=run) | Carrying(run=run) | Settle(run=run) | Unsettled(run=run) if (
                run == self.setup.run and self.routes
            ):
                return self.routes.handle(event, now)
            case Follow(run=run) | Collect(run=run) if run == self.setup.run and self.rounds:
                return self.rounds.handle(event, now)
            case (
                PullState(run=run)
                | Carry(run=run)
                | Offer(run=run)
                | Carrying(run=run)
                | Settle(run=run)
                | Unsettled(run=run)
                | Follow(run=run)
                | Collect(run=run)
            ) if run != self.setup.run:
                return [self._reply(event, self._other_run(run))]
        return [self._reply(event, Refused("unexpected"))]

    def _gossip(self, event: Asked, run: str, index: int, now: Seconds) -> list[Effect]:
        if run != self.setup.run:
            return [self._reply(event, self._other_run(run))]
        if index not in self.gossip and not self.rounds:
            return [self._reply(event, Refused("not-ready" if self._holds(index) else "fragment"))]
        algorithm = self.setup.config.gossip.algorithm
        if not isinstance(event.envelope.message, QUESTIONS[algorithm]):
            return [self._reply(event, Refused("algorithm", f"this run gossips by {algorithm}"))]
        self._unanswered[event.request] = index
        return self._gossips(index, event, now)

    def _gossips(self, index: int, event: object, now: Seconds) -> list[Effect]:
        self._gossip_at = None
        return self.gossip[index].handle(event, now)

    def _heard_back(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        late = isinstance(event, AskFailed) and event.tag[0] == "route" and event.reason == "deadline"
        effects = [] if late else self.roster.handle(event, now)  # all behind it may be late: it need not be dead
        if isinstance(event, Answered):
            self.sent_bytes += event.sent_bytes
            self.received_bytes += event.received_bytes
            if event.tag[0] in ("route", "settle", "round"):
                pass  # its seconds are the work of all behind it, not the link's
            elif event.tag[0] != "exchange" or self.setup.config.gossip.algorithm != "allreduce":
                self.meter.saw(event.peer, event.seconds, event.sent_bytes, event.received_bytes)
        match event.tag:
            case ("join", *_):
                effects += self.join.handle(event, now, self._donors())
            case ("probe", *_):
                effects += self.prober.handle(event, now, self._live())
            case ("exchange", int() as index, *_) if index in self.gossip:
                effects += self._gossips(index, event, now)
            case ("offer" | "route" | "carrying" | "settle" | "doubt", *_) if self.routes:
                effects += self.routes.handle(event, now)
            case ("move" | "stay", *_) if self.moves:
                effects += self.moves.handle(event, now)
            case ("round" | "follow" | "elsewhere", *_) if self.rounds:
                effects += self.rounds.handle(event, now)
        return effects

    def _found(self, event: Found, now: Seconds) -> list[Effect]:
        if self.plans and event.key == plan_key(self.setup.run):
            return self.plans.handle(event, now)
        effects = self.roster.handle(event, now)
        if self.join.state is not JoinState.DONE:
            return effects + self.join.roster_known(now, self._donors())
        if self.rounds:
            return effects  # the round is the clock
        return effects + self.progress.follow(entry.record.lr_step for entry in self.roster.live.values())

    def _started(self, step: int, now: Seconds) -> list[Effect]:
        self.phase = Phase.TRAINING
        if self.progress.joined_at is None:
            self.progress.begin(now, step, fetched=bool(self.join.used))
        self.prober.wake_at = now + PROBE_AFTER_S
        if not self.rounds:
            self.gossip = {fragment.index: self._exchange(fragment, now) for fragment in self.setup.fragments}
            self._gossip_at = None
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
        return lines + self._look_at_flows(now) + self.routes.handle(Woke(), now)

    def _exchange(self, fragment: Fragment, now: Seconds) -> Gossip:
        """Windows of the fragments are staggered, so that one at a time is on the wire."""
        gossip = self.setup.config.gossip
        synchronous = gossip.algorithm == "allreduce"
        phase = (fragment.index + 1) / self._fragments_in_all()
        if not synchronous and gossip.algorithm != "pull":
            phase = self._rng.random()  # peers that ask each other at the same time only get in each other's way
        terms = Terms(self.setup.run, self.setup.own.peer, fragment.index, phase, gossip.max_age_s)
        close_at = terms.next_close(now, self.period_s(0))
        if gossip.algorithm == "symmetric":
            return SwapExchange(terms, self, close_at)
        if gossip.algorithm == "push_sum":
            return PushExchange(terms, self, close_at)
        rounds = [entry.record.round for entry in self.roster.live.values()]
        seq = max(rounds, default=0)
        if synchronous:
            return Exchange(terms, self, close_at, synchronous=True, seq=seq)
        return Exchange(terms, self, close_at, light=("delta",), whole_every=gossip.consensus_every)

    # What exchanges ask of the swarm: comm/snapshots.View

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """Whom to exchange with: drawn by the bandwidth of the links, none of them never."""
        gossip = self.setup.config.gossip
        holders = self.holders(fragment)
        if gossip.algorithm == "allreduce":
            return holders
        count = gossip.partners if gossip.algorithm == "pull" else 1
        return self._draw(holders, min(count, len(holders)))

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return self.meter.deadline_s(peer, size)

    def period_s(self, size: int) -> Seconds:
        """Whole windows, as many as all fragments take at our share of the link (Streaming DiLoCo's P)."""
        gossip = self.setup.config.gossip
        early = self.progress.lr_step < gossip.start_steps
        window_s = min(gossip.window_s, gossip.start_window_s) if early else gossip.window_s
        rates = [rate for rate in (self.meter.typical_down(), self.meter.typical_up()) if rate]
        if not rates or not size:
            return window_s
        parameters = sum(fragment.parameters for fragment in self.setup.fragments)
        largest = max(fragment.parameters for fragment in self.setup.fragments)
        round_bytes = size / largest * parameters * gossip.partners
        windows = -(-round_bytes // (gossip.link_share * min(rates) * window_s))
        return window_s * max(1.0, windows)

    def _draw(self, peers: Sequence[PeerId], count: int) -> list[PeerId]:
        """`count` different peers, with probabilities by bandwidth (an unmeasured link counts as the fastest)."""
        known = {peer: self.meter.bandwidth(peer) for peer in peers}
        top = max((rate for rate in known.values() if rate), default=1.0)
        weights = {peer: max(WEIGHT_FLOOR, (rate or top) / top) for peer, rate in known.items()}
        drawn: list[PeerId] = []
        while len(drawn) < count:
            left = [peer for peer in peers if peer not in drawn]
            drawn += self._rng.choices(left, [weights[peer] for peer in left])
        return drawn

    # What moves ask of the swarm, and do to us: peers/move.py

    def holders(self, fragment: int) -> list[PeerId]:
        """Who else holds it, and trains."""
        cut = self._cut(fragment)
        return sorted(
            peer
            for peer, entry in self.roster.live.items()
            if entry.record.phase == "training" and entry.record.first <= cut.first and cut.last <= entry.record.last
        )

    def keepers(self, fragment: int) -> list[PeerId]:
        """Who else keeps the newest state of it that anybody keeps, if that is newer than what we keep."""
        step, peers = self._newest_kept(fragment)
        return peers if step > dict(self.donor.kept).get(fragment, NEVER) else []

    def keeps(self, fragment: int) -> bool:
        """Whether we keep a state of it ourselves."""
        return fragment in dict(self.donor.kept)

    def _newest_kept(self, fragment: int) -> tuple[int, list[PeerId]]:
        """Of what others keep: the learning-rate step, or NEVER, and who keeps it."""
        found = {peer: dict(entry.record.kept).get(fragment, NEVER) for peer, entry in sorted(self.roster.live.items())}
        newest = max(found.values(), default=NEVER)
        return newest, [peer for peer, step in found.items() if step == newest > NEVER]

    def _look_at_spans(self, now: Seconds) -> list[Effect]:
        """Whether we should hold other layers: lost ones, if it is our turn, or those of the plan that we adopted."""
        if self.moves is None or self.cover is None or self.plans is None:
            return []
        members, coming = self._members()
        effects = self.plans.look(members, now)
        if self.moves.why == "plan":
            effects += self.moves.follow(self.plans.wanted(self.moves.held), now)
        if self.moves.state is not MoveState.SETTLED or now < self.moves.rest_until:
            return effects
        lost = self.cover.look(members, coming, now, self._is_kept)
        if lost is not None:
            return effects + self.moves.begin(lost[0], "lost", now, alone=lost[1])
        goal = self.plans.goal(self.moves.held, now)
        return effects if goal is None else effects + self.moves.begin(goal, "plan", now)

    def _is_kept(self, fragment: int) -> bool:
        return self.keeps(fragment) or bool(self.keepers(fragment))

    def _members(self) -> tuple[dict[PeerId, Member], list[range]]:
        """Who trains, ourselves included; the spans of those who are joining."""
        setup = self.setup
        spans = {peer: self._span(entry.record) for peer, entry in self.roster.live.items()}
        members = {
            peer: _member(spans[peer], entry.record.profile)
            for peer, entry in self.roster.live.items()
            if entry.record.phase == "training"
        }
        own = range(setup.fragments[0].index, setup.fragments[-1].index + 1)
        members[setup.own.peer] = _member(own, self._profile())
        return members, [span for peer, span in spans.items() if peer not in members]

    def _span(self, record: PeerRecord) -> range:
        """The whole fragments that it holds."""
        return self._whole_fragments(record.first, record.last)

    def _whole_fragments(self, first: int, last: int) -> range:
        found = self._whole.get((first, last))
        if found is None:
            cuts = self.setup.routes.cuts if self.setup.routes else self.setup.fragments
            held = holder_of(cuts, first, last, 0.0)
            if len(self._whole) > MOST_SPANS:
                self._whole.clear()
            found = self._whole[first, last] = range(held.begin, held.end)
        return found

    def _follow(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """What a move wants of the other machines."""
        if self.moves is None or self.routes is None:
            return effects
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case Hold(fragments):
                    done += self._hold(fragments, now)
                case Move():
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
        """Whoever waits for something of these fragments is told that it does not come."""
        self.donor.fragments = [fragment for fragment in self.setup.fragments if fragment.index not in lost]
        for index in lost:
            self.gossip.pop(index, None)
            self._gossip_at = None
        asked = [request for request, index in self._unanswered.items() if index in lost]
        return [Reply(request, Envelope(Refused("fragment"))) for request in asked]

    def _hold(self, held: range, now: Seconds) -> list[Effect]:
        """These fragments are ours from now on."""
        room, terms = self.setup.room, self.setup.routes
        assert room is not None
        assert terms is not None
        assert self.routes is not None
        fragments = room.needs.fragments[held.start : held.stop]
        moved = list(fragments) != list(self.setup.fragments)
        capacity = room.needs.capacity(held.start, held.stop, room.memory_bytes)
        terms = replace(terms, first=fragments[0].first, last=fragments[-1].last, capacity=capacity)
        layouts = room.layouts[held.start : held.stop]
        self.setup = replace(self.setup, fragments=fragments, state_layouts=layouts, routes=terms)
        self.donor.fragments = fragments
        self.routes.hold(terms)
        for fragment in fragments:
            if fragment.index not in self.gossip:
                self.gossip[fragment.index] = self._exchange(fragment, now)
                self._gossip_at = None
        if moved:
            self.roster.renew_soon(now)
            self.progress.save_soon(now)
        self._solve_flows(anew=True)
        return self.routes.handle(Woke(), now)

    def _cut(self, index: int) -> Fragment:
        cuts = self.setup.routes.cuts if self.setup.routes else self.setup.fragments
        return next(cut for cut in cuts if cut.index == index)

    def _fragments_in_all(self) -> int:
        return len(self.setup.routes.cuts if self.setup.routes else self.setup.fragments)

    def _holds(self, index: int) -> bool:
        return any(fragment.index == index for fragment in self.setup.fragments)

    # What routes ask of the swarm: comm/onward.View

    def successors(self, layer: int) -> Sequence[PeerId]:
        if self.rounds:
            return self.rounds.successors(layer)
        return self.roster.holders.near(layer)

    def place(self, peer: PeerId) -> tuple[int, int, float]:
        return self.roster.holders.place(peer)

    def _look_at_flows(self, now: Seconds) -> list[Effect]:
        """Now and then, if the roster or its speeds have changed; and others are told when our own speed has."""
        assert self.routes is not None
        if not self._routed or self.phase is not Phase.TRAINING or now < self._flows_at:
            return []
        holders = self.roster.holders
        self._flows_at = now + FLOWS_S + flows.PAUSE_S * max(0, self.routes.onward.prior.size - flows.AT_ONCE)
        if self.routes.workload.speed and not 0.8 < self._advertised / self.routes.workload.speed < 1.25:
            self.roster.renew_soon(now)
        self.routes.workload.usual_speed = sum(holders.speeds.values()) / holders.count if holders.count else 0.0
        self._solve_flows()
        return self._look_at_spans(now)

    def _solve_flows(self, anew: bool = False) -> None:
        """Where routes should run, if enough has changed since; `anew`: whatever has."""
        assert self.routes is not None
        cuts, ours = self.routes.terms.cuts, self.setup.fragments
        own = ours[0].index, ours[-1].index + 1
        seen = self.roster.holders.changes, f"{self.routes.workload.speed:.1e}"
        if seen == self._seen and not anew:
            return
        self._seen, speeds = seen, self._speeds(own)
        if not anew and not flows.changed(self._known_speeds, speeds):
            return
        self._known_speeds = speeds
        self.routes.onward.prior = flows.solve(cuts, speeds, own)

    def _speeds(self, own: flows.Span) -> dict[flows.Span, float]:
        """How fast all are that hold the same fragments, ourselves included."""
        assert self.routes is not None
        found = {own: self.routes.workload.speed or self.setup.profile.tokens_per_s}
        for (first, last), speed in self.roster.holders.speeds.items():
            by_itself = (first, last) == (0, self.setup.layers) and not self.rounds
            span = self._whole_fragments(first, last)
            if span and not by_itself:
                found[span[0], span[-1] + 1] = found.get((span[0], span[-1] + 1), 0.0) + speed
        return flows.rounded(found)

    # What rounds ask of the swarm: comm/rounds.View

    def acquaintances(self) -> Sequence[PeerId]:
        return sorted({*self.roster.live, *self.setup.contacts})

    def trainers(self) -> Sequence[PeerId]:
        return sorted(peer for peer, entry in self.roster.live.items() if entry.record.phase == "training")

    # Helpers

    @property
    def _state_step(self) -> int:
        """Of which step our weights are, for newcomers."""
        return self.rounds.number if self.rounds and self.rounds.now_in else self.progress.lr_step

    @property
    def _routed(self) -> bool:
        """Whether our micro-batches go along routes: those of a peer with the whole model do so in rounds only."""
        return not self.setup.whole or self.rounds is not None

    def _donates(self, peer: PeerId, fragment: Fragment) -> bool:
        """By its record. Where all hold everything, whoever answers may be asked, and says if it is not ready."""
        entry = self.roster.live.get(peer)
        if entry is None:
            return self.setup.whole
        covers = entry.record.first <= fragment.first and fragment.last <= entry.record.last
        return covers and (self.setup.whole or entry.record.phase == "training")

    def _donors(self) -> list[PeerId]:
        """Whom a newcomer may ask: those who train, or whoever is there while nobody says so."""
        training = [peer for peer, entry in self.roster.live.items() if entry.record.phase == "training"]
        return sorted(training) or self._live()

    def _live(self) -> list[PeerId]:
        return sorted(self.roster.live)

    def _compose(self, now: Seconds, leaving: bool) -> PeerRecord:
        setup, progress, profile = self.setup, self.progress, self._profile()
        self._advertised = profile.tokens_per_s
        rounds = max(
            (one.seq for one in self.gossip.values() if isinstance(one, Exchange) and one.synchronous), default=0
        )
        return PeerRecord(
            run=setup.run,
            time=now,
            addresses=setup.addresses,
            profile=profile,
            first=setup.fragments[0].first,
            last=setup.fragments[-1].last,
            step=progress.step,
            lr_step=progress.lr_step,
            tokens=progress.tokens,
            round=rounds,
            phase="leaving" if leaving else "training" if self.phase is Phase.TRAINING else "joining",
            kept=self.donor.kept,
        )

    def _profile(self) -> Profile:
        """As measured by now."""
        return replace(
            self.setup.profile,
            down=self.meter.typical_down() or 0.0,
            up=self.meter.typical_up() or 0.0,
            latency_s=min((link.latency_s for link in self.meter.links.values() if link.latency_s), default=0.0),
            tokens_per_s=self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float:
        """As measured in training: by a peer that trains alone from its progress, else from its part in routes."""
        measured = (
            self.progress.tokens_per_s if self.setup.whole else self.routes.workload.speed if self.routes else 0.0
        )
        return measured or self.setup.profile.tokens_per_s

    def _traffic(self) -> Log:
        return log("traffic", sent_bytes=self.sent_bytes, received_bytes=self.received_bytes)

    def _other_run(self, run: str) -> Refused:
        return Refused("run", f"this peer is in {self.setup.run}, not in {run}"[:200])

    def _reply(self, event: Asked, message: Message) -> Reply:
        return Reply(event.request, Envelope(message))

    def _left(self, event: object, now: Seconds) -> list[Effect]:
        """What still comes in while the last checkpoint is written."""
        if isinstance(event, Asked):
            return [self._reply(event, Refused("leaving"))]
        return self.progress.handle(event, now) if isinstance(event, Saved) else []

    def _count(self, effect: Effect) -> None:
        if isinstance(effect, Log) and effect.event == "exchange":
            self.exchanges[effect.fields["outcome"]] += 1
        elif isinstance(effect, Reply):
            self._unanswered.pop(effect.request, None)
            self.sent_bytes += len(effect.envelope.blob)


def _member(held: range, profile: Profile) -> Member:
    return Member(held, profile.memory_bytes, profile.tokens_per_s, min(profile.down, profile.up))


def _due(machine: Join | Prober | Gossip | Routes | Moves, now: Seconds) -> bool:
    wake_at = machine.wake_at
    return wake_at is not None and now >= wake_at


__all__ = ["Node", "Phase", "Setup", "Stop"]
