"""Which executions begin here: those of other peers, and why they are refused, our own, and those of a new round.

Memory is counted in what an execution's activations take, as parts of an execution through the whole span
(StageConfig.memory_share). An execution that is held has given its activations back: only its answer is kept. How many
of our own are under way, `MicroBatchWindow` says. A peer that is asked a second time for an execution, because the peer
in between is gone, computes it once and sends the same gradient again.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from decentral.comm.pipeline.execution import FORWARD, GONE, HELD, ForwardedExecution, OwnExecution
from decentral.comm.pipeline.execution_table import ExecutionTable
from decentral.comm.pipeline.forwarding import MIN_PATIENCE_S, SUCCESSOR_RETRY_S, Forwarding
from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT, ROUTE_SLACK, UNKNOWN_S
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    MAX_ROUTE_S,
    Done,
    ExecutionId,
    ForwardRequest,
    ForwardStatusQuery,
    Load,
    Offer,
    Refused,
)
from decentral.comm.wire.transport import Asked, Effect, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import MOST_UNDER_WAY, Draw, Forward
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_HELD = 4  # times the micro-batches that the memory takes: executions, with those whose backward pass is done
KEPT_PART = 8  # one part in so many of the memory is kept for executions that enter at later layers
ROUNDING = 1e-6  # of sums of parts of the memory
SHARE = 0.9  # part of the asker's patience after which we give up: the asker then still has time for another peer
MOST_ASKERS = 8  # of one execution: as many as an origin peer or a hop tries, and some
GRACE_S = 1.0  # for a CommitDecision that is on its way when its origin peer's time is over

# The window of our own micro-batches

FULL = (1.0, 2.0)  # wanted queue per device on a route: (least, most) of our micro-batches; no device idles
LEAN = (0.125, 0.5)  # the same where each step waits for all under way: a longer queue makes its batch too large
LARGE_STEP = 4  # micro-batches in a step; where there are as many, a few that wait make it no larger
RECENT_ON_ROUTE = 32  # micro-batches along one route
FADES = 0.002  # part of the distance to the newest value by which a least value rises, for each micro-batch
SLOWER = 2.0
MOST_ROUTES = 64  # routes whose bases are known; the longest unused is forgotten
AT_RANDOM = 3.0  # times as many wait where hardly a route comes twice: executions arrive at irregular times
MANY_ROUTES = 8  # from so many on a new route is measured by the fastest of all
LEAST_BUDGET_S = 9.0  # enough to find out that a peer is silent, and to ask another one


@dataclass(slots=True)
class RouteBase:
    """Seconds of a micro-batch along one route if nothing waits: the least that was seen, which rises slowly.

    If all recent ones took twice as long, the route itself has become slower.
    """

    least: Seconds
    recent: deque[Seconds] = field(default_factory=lambda: deque(maxlen=RECENT_ON_ROUTE))

    def saw(self, seconds: Seconds) -> None:
        self.recent.append(seconds)
        self.least = min(seconds, self.least + FADES * (seconds - self.least))
        if len(self.recent) == RECENT_ON_ROUTE and min(self.recent) > SLOWER * self.least:
            self.least = min(self.recent)


@dataclass(slots=True)
class MicroBatchWindow:
    """How many micro-batches an origin peer has under way (TCP Vegas, Brakmo & Peterson 1994).

    As many as keep the slowest device of the routes busy, and a little more: of W under way, W (1 - base / seconds)
    wait in some queue; that number is kept within bounds. Every route has a base of its own: one through a slow device
    is long without anything waiting.
    """

    waiting: tuple[float, float] = FULL
    size: int = 2  # at the start as many as the devices of a route, if they are like ours
    starting: bool = True  # until something waits, the size grows by one for each that comes back
    bases: dict[tuple[PeerId, ...], RouteBase] = field(default_factory=dict)  # by route
    typical_s: Seconds | None = None  # of a micro-batch, running average
    _waiting: float = 0.0  # part of its time that a micro-batch waits somewhere, running average
    _new: float = 0.0  # part of the routes that were not known, running average
    _fastest_s: Seconds = math.inf  # of any route; rises as a base does
    _since: int = 0  # completions since the size was last changed

    def done(self, seconds: Seconds, route: tuple[PeerId, ...], max_size: int) -> None:
        """A micro-batch took so long along this route, from its beginning to its end. `max_size`: by memory."""
        waited = 1 - self._base_s(seconds, route) / max(1e-9, seconds)
        self._waiting += NEWEST_WEIGHT * (waited - self._waiting)
        known = self.typical_s
        self.typical_s = seconds if known is None else (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * seconds
        self._since += 1
        by_chance = AT_RANDOM if self._new > 0.5 and len(self.bases) > MANY_ROUTES else 1.0
        least, most = (by_chance * (len(route) + 1) * many for many in self.waiting)
        self.starting = self.starting and self.size * max(waited, self._waiting) < least
        if self._since < self.size and not self.starting:
            return
        self._since = 0
        if self.size * self._waiting < least:
            self.size += 1
        elif self.size * self._waiting > most:
            self.size = max(2, self.size - 1)
        self.size = min(self.size, max_size)

    def _base_s(self, seconds: Seconds, route: tuple[PeerId, ...]) -> Seconds:
        """The seconds that it would have taken if nothing had waited.

        Where routes are many, a new one is measured by the fastest of all: else the first micro-batch of each would
        look as if it had never waited.
        """
        fading = FADES * (seconds - self._fastest_s) if self._fastest_s < math.inf else 0.0
        self._fastest_s = min(seconds, self._fastest_s + fading)
        known = self.bases.get(route)
        self._new += NEWEST_WEIGHT * ((known is None) - self._new)
        base = known or RouteBase(seconds)
        base.saw(seconds)
        keep_latest(self.bases, route, base, MOST_ROUTES)
        return self._fastest_s if known is None and len(self.bases) > MANY_ROUTES else base.least


def budget_s(typical_s: Seconds | None, guess_s: Seconds = 0.0) -> Seconds:
    """How long an origin peer tries to get one micro-batch through, retries included.

    `guess_s`: what it would take if nothing waited, for as long as none has come back; 0: unknown.
    """
    if typical_s is None:
        return min(MAX_ROUTE_S, max(UNKNOWN_S, 2 * ROUTE_SLACK * guess_s)) if guess_s > 0 else MAX_ROUTE_S
    return min(MAX_ROUTE_S, max(LEAST_BUDGET_S, 2 * ROUTE_SLACK * typical_s))


@dataclass(slots=True)
class Admission:
    table: ExecutionTable
    forwarding: Forwarding
    window: MicroBatchWindow
    active: bool = False  # this peer trains
    draining: bool = False  # no new executions: those that are here are brought to their end
    round: int = 0  # of synchronous training (comm/rounds/round.py)

    @property
    def stage(self) -> StageConfig:
        return self.forwarding.load.stage

    def start(self) -> None:
        """This peer trains from now on."""
        self.active = True

    def drain(self, drains: bool) -> None:
        """Take no executions any more, or take them again."""
        self.draining = drains

    # What another peer asks for

    def requested(self, event: Asked, request: ForwardRequest, now: Seconds) -> list[Effect]:
        """Takes an execution, refuses it, or, if it is here already, answers whoever asks for it now."""
        id = ExecutionId(request.origin, request.number, request.first)
        known = self.table.by_id.get(id)
        if known is not None and (event.sender != request.origin or event.sender in known.askers):
            return self._asked_again(known, event, request, now)
        # The origin itself asks: what is here came by another peer in its name. Drop it.
        given_up = self.table.give_up(known, Reason.MOVED) if known is not None else []
        refusal = self.refusal(request, len(event.envelope.blob))
        if refusal is None and self.table.holds.rests(PeerId(request.origin), now):
            refusal = Reason.BUSY
        if refusal:
            return [*given_up, Reply(event.request, Envelope(Refused(refusal)))]
        last = self.forwarding.end(request.first)
        execution = ForwardedExecution(
            token=next(self.table.tokens),
            id=id,
            last=last,
            memory_share=self.stage.memory_share(request.first, last),
            started_at=now,
            until=now + request.hold_s + GRACE_S,
            drawn=request.drawn,
            round=request.round,
            sequences=request.sequences,
            askers={event.sender: event.request},
            answer_by=now + SHARE * request.patience_s,
        )
        self.table.add(execution)
        given_up += [] if self.stage.synchronous else self.table.give_up_held(execution)
        blob, thin = event.envelope.blob, self.forwarding.view.is_thin()
        job = Forward(execution.token, id.first, last, request.sequences, request.layout, blob, thin)
        self.push(job, request.round)
        return given_up

    def _asked_again(
        self, known: ForwardedExecution, event: Asked, request: ForwardRequest, now: Seconds
    ) -> list[Effect]:
        """A peer asks for an execution that is here: again, or because another one that asked before is gone.

        Naming an execution takes nothing from whoever has asked for it: all askers get the answer, and how long the
        origin peer may commit it stays as it was. Only a peer that can be before this one on a route may ask.
        """
        if not self._may_be_before(event.sender, known):
            return [Reply(event.request, Envelope(Refused(Reason.SPAN)))]
        earlier = known.askers.get(event.sender)
        if len(known.askers) >= MOST_ASKERS and event.sender not in known.askers:
            return [Reply(event.request, Envelope(Refused(Reason.BUSY)))]
        effects: list[Effect] = [] if earlier is None else [Reply(earlier, Envelope(Refused(Reason.MOVED)))]
        known.asked_by(event.sender, event.request, now + SHARE * request.patience_s)
        return effects + known.replies()

    def _may_be_before(self, sender: PeerId, known: ForwardedExecution) -> bool:
        """Whether the peer has asked before, or holds the layer before, by its record."""
        if sender in known.askers:
            return True
        first, last, _ = self.forwarding.view.span_and_speed(sender)
        return first < known.id.first <= last

    def refusal(self, request: ForwardRequest, blob_bytes: int) -> Reason | None:
        """Why this execution is not taken; None: it is."""
        stage = self.stage
        if not self.active:
            return Reason.NOT_READY
        if ExecutionId(request.origin, request.number, request.first) in self.table.counted:
            return Reason.COUNTED  # an old question that was delayed: a later one has been answered long ago
        if stage.size(request) == 0 or request.origin == stage.peer:
            return Reason.SPAN
        if not stage.fits(request, blob_bytes):
            return Reason.SHAPE
        if request.patience_s < MIN_PATIENCE_S or request.round < self.round:
            return Reason.LATE
        if request.round > self.round + stage.synchronous:  # without rounds there is no next one to wait for
            return Reason.NOT_READY
        return None if self.has_memory(request.first) and not self.draining else Reason.BUSY

    def answer(self, event: Asked) -> Load | Done | Refused | None:
        """The answer to a question that changes nothing: there are many more of them than of executions."""
        match event.envelope.message:
            case Offer() as offer:
                return self._load(offer)
            case ForwardStatusQuery(execution=id):
                execution = self.table.by_id.get(id)
                return Done() if execution is not None and event.sender in execution.askers else Refused(Reason.GONE)
        return None

    def _load(self, offer: Offer) -> Load | Refused:
        """How soon this peer would be through with one more execution."""
        if not self.active or self.draining:
            return Refused(Reason.NOT_READY)
        if not self.stage.begins(offer.first):
            return Refused(Reason.SPAN)
        if not self.has_memory(offer.first):
            return Refused(Reason.BUSY)
        last = self.forwarding.usual_end(offer.first)
        load = self.forwarding.load
        wait_s = load.wait_s(self.table.by_token.values())
        return Load(self.stage.run, wait_s, load.execution_s(offer.first, last), last)

    def may_begin(self, own: int) -> bool:
        """Whether a micro-batch of our own may begin while so many are under way: the training thread has time for it,
        and no gradients wait for a step."""
        return not self.table.jobs.full and self.has_memory(0) and own < self.window.size and not self.table.step_waits

    def has_memory(self, first: int) -> bool:
        """Whether there is memory for an execution that enters at this layer.

        The memory of one execution is kept for each later layer at which executions may enter (buffer classes: Merlin
        and Schweitzer, 1980). Else peers that hold the same layers could fill each other with executions that wait for
        one another.
        """
        capacity, count, in_use, own_count, own = self.stage.capacity, 0, 0.0, 0, 0.0
        for execution in self.table.by_token.values():
            if execution.state is not HELD:
                count, in_use = count + 1, in_use + execution.memory_share
                if execution.own:
                    own_count, own = own_count + 1, own + execution.memory_share
        more = self.stage.memory_share(first, self.stage.last)
        full = count >= MOST_UNDER_WAY or len(self.table.by_token) >= MOST_HELD * capacity
        if full or in_use + more > capacity + ROUNDING:
            return False
        kept = min(self.stage.later_entries(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.stage.first > 0:
            return in_use + more <= most
        if first == 0:
            return own + more <= most
        usual = own / own_count if own_count else 1.0
        # Reserve memory for our own window: only we can begin our micro-batches.
        wanted = min(self.window.size * usual, capacity - kept) - own
        others = in_use - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING

    # Forward passes, which wait for their round in synchronous training

    def push(self, job: Forward, round: int) -> None:
        """The job waits for the training thread, or, if it belongs to the next round, for that."""
        if round > self.round:
            self.table.jobs.early[job.token] = job
        else:
            self.table.jobs.push(job)

    def begin_round(self, round: int, active: bool) -> list[Effect]:
        """The weights are those of this round now. Micro-batches that came early belong to it."""
        self.round, self.active = round, active
        effects: list[Effect] = []
        early, self.table.jobs.early = self.table.jobs.early, {}
        for job in early.values():
            execution = self.table.by_token.get(job.token)
            if execution is not None and execution.state is FORWARD and active:
                self.table.jobs.push(job)
            elif execution is not None:
                effects += self.table.give_up(execution, Reason.NOT_READY)
        return effects

    def end_round(self, everything: bool) -> list[Effect]:
        """What is under way is given up. `everything`: also what came early."""
        effects: list[Effect] = []
        for execution in list(self.table.by_token.values()):
            if execution.state is GONE or (execution.round > self.round and not everything):
                continue
            if execution.state is HELD:
                self.table.end_held(execution, "the round is over")
            else:
                effects += self.table.give_up(execution, Reason.LATE)
        return effects


@dataclass(slots=True)
class OwnMicroBatches:
    """How many micro-batches of our own are under way, and when the next one begins."""

    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    quota: int | None = None  # micro-batches that may still begin; None: as many as the window allows
    look_at: Seconds | None = None  # when to see whether a peer holds the next layers

    def begin(self, now: Seconds) -> list[Effect]:
        """Begins as many micro-batches as the window allows, while the training thread has nothing better to do."""
        jobs: list[Effect] = []
        self.look_at = None
        stage = self.admission.stage
        alone = stage.last == stage.layers and not stage.synchronous
        elsewhere = stage.first > 0 or not stage.originates
        if not self.admission.active or self.admission.draining or elsewhere or alone:
            return jobs
        own = sum(execution.own for execution in self.table.by_token.values())
        while self.quota != 0 and self.admission.may_begin(own):
            last = self.forwarding.end(0)
            if last < stage.layers and not self.forwarding.view.successors(last):
                self.look_at = now + SUCCESSOR_RETRY_S
                break
            execution = self._new(last, now)
            self.table.jobs.running.add(execution.token)  # at once: nothing else waits for the training thread
            jobs.append(Draw(execution.token, last, self.forwarding.view.is_thin()))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _new(self, last: int, now: Seconds) -> OwnExecution:
        execution = OwnExecution(
            token=next(self.table.tokens),
            id=ExecutionId(self.admission.stage.peer, 0, 0),
            last=last,
            memory_share=self.admission.stage.memory_share(0, last),
            started_at=now,
            until=now + budget_s(self.admission.window.typical_s),
            drawn=now,
            round=self.admission.round,
        )
        self.table.add(execution)
        return execution

    @property
    def under_way(self) -> list[OwnExecution]:
        own = (one for one in self.table.by_token.values() if isinstance(one, OwnExecution))
        return [execution for execution in own if execution.state is not GONE]

    def give_up_all(self) -> list[Effect]:
        """Gives up those under way, and begins none any more: no peers are left that could take them on."""
        self.quota = 0
        return [effect for execution in self.under_way for effect in self.table.give_up(execution, Reason.GONE)]
