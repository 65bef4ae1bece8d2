"""Admission: which executions this peer accepts from other peers, and how many micro-batches of its own it begins.

An execution is a micro-batch's forward and backward pass through one peer.
Start with `Admission.requested`, which accepts or refuses another peer's execution, and `OwnMicroBatches.begin`.
`MicroBatchWindow` decides how many of our own micro-batches are in flight.

Memory is counted in micro-batches through all layers of this peer (`StageConfig.memory_share`). An execution in state
HELD waits only for the origin peer's decision; its activations are freed, and it takes no memory. If the previous peer
of a route is replaced, the new peer requests the same execution. This peer then computes the execution only once, and
sends the same gradient to both peers (the `askers` of the execution).
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
from decentral.core.jobs import MOST_UNDER_WAY, Draw, Forward, Undo
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_HELD = 4  # at most MOST_HELD * `capacity` executions are at this peer, including those that await a decision
KEPT_PART = 8  # at most 1 / KEPT_PART of the memory is reserved for executions that enter at later layers
ROUNDING = 1e-6
SHARE = 0.9  # we give up after this fraction of the sender's waiting time, so that it can still try another peer
MOST_ASKERS = 8  # at most this many peers may request one execution; more than MAX_TRIES (comm/pipeline/forwarding.py)
GRACE_S = 1.0  # gradients are held this long after the origin peer's time limit, since its decision may be on its way

# Constants of `MicroBatchWindow`, the congestion window

FULL = (1.0, 2.0)  # queued micro-batches per device: the window grows below the first value, shrinks above the second
LEAN = (0.125, 0.5)  # used instead of FULL if a step waits for all micro-batches in flight: a queue enlarges that step
LARGE_STEP = 4  # FULL is used all the same for steps of at least this many micro-batches: a queue hardly enlarges them
RECENT_ON_ROUTE = 32  # we remember the last RECENT_ON_ROUTE durations of each route
FADES = 0.002  # each new duration raises the stored shortest duration by this part of their difference
SLOWER = 2.0  # a route has become slower once all its recent durations exceed this many times its shortest duration
MOST_ROUTES = 64  # we store durations of at most this many routes; then the least recently used one is forgotten
AT_RANDOM = 3.0  # while most routes are new, executions arrive unevenly, so queues may be this many times as long
MANY_ROUTES = 8  # if we know more routes than this, a new route's first estimate is the shortest duration on any route
LEAST_BUDGET_S = 9.0  # a micro-batch's time limit is at least this, enough to notice a silent peer and try another one
MOST_DOUBLED = 6  # a micro-batch's time limit is doubled at most this many times


@dataclass(slots=True)
class RouteBase:
    """The base of a route: an estimate of the seconds that a micro-batch takes along it without waiting anywhere.

    `least` is the shortest duration seen, and rises slowly. If the last RECENT_ON_ROUTE durations all exceed SLOWER
    times `least`, the route has become slower, and the shortest of these durations becomes `least`.
    """

    least: Seconds
    recent: deque[Seconds] = field(default_factory=lambda: deque(maxlen=RECENT_ON_ROUTE))

    def saw(self, seconds: Seconds) -> None:
        """Update `least` with the seconds that one more micro-batch took along the route, waiting included."""
        self.recent.append(seconds)
        self.least = min(seconds, self.least + FADES * (seconds - self.least))
        if len(self.recent) == RECENT_ON_ROUTE and min(self.recent) > SLOWER * self.least:
            self.least = min(self.recent)


@dataclass(slots=True)
class MicroBatchWindow:
    """The congestion window: how many of its own micro-batches an origin peer may have in flight.

    Source: TCP Vegas (Brakmo & Peterson 1994). If a micro-batch takes `seconds` on its route, and `base` without
    waiting, then size * (1 - base / seconds) micro-batches wait in queues. The window keeps this number, per device of
    the route, between the two values of `waiting`, so that the slowest device stays busy. Each route has its own base,
    since a route through a slow device takes long even without queues.
    """

    waiting: tuple[float, float] = FULL
    size: int = 2
    starting: bool = True  # True during slow start: each completed micro-batch enlarges the window until a queue forms
    bases: dict[tuple[PeerId, ...], RouteBase] = field(default_factory=dict)  # by route: the peers after this one
    typical_s: Seconds | None = None  # running average of a micro-batch's duration; None until one is completed
    late: int = 0  # how often micro-batches have run out of time since the last one was completed, up to MOST_DOUBLED
    _doubled_at: Seconds = -math.inf  # when `late` grew last
    _waiting: float = 0.0  # running average of the fraction of its duration that a micro-batch waits in queues
    _new: float = 0.0  # running average of the fraction of our micro-batches that take a route without known durations
    _fastest_s: Seconds = math.inf  # shortest duration on any route; each longer duration raises it slightly (FADES)
    _since: int = 0  # micro-batches completed since `size` was last reviewed

    def done(self, seconds: Seconds, route: tuple[PeerId, ...], max_size: int) -> None:
        """Record a completed micro-batch of ours, and grow or shrink the window by how long micro-batches have waited.

        Args:
            seconds: The micro-batch's duration, from its beginning to the end of its backward pass at this peer.
            route: The peers after this one on the micro-batch's route.
            max_size: The largest window that memory allows, in micro-batches.
        """
        self.late = 0
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

    def budget_s(self, guess_s: Seconds = 0.0) -> Seconds:
        """Return the seconds after which a micro-batch is given up; see the function `budget_s`."""
        return budget_s(self.typical_s, guess_s, self.late)

    def ran_out(self, started_at: Seconds, now: Seconds) -> None:
        """Record that a micro-batch which began at `started_at` ran out of time: later ones get twice as long.

        Micro-batches that began with the same limit count once.
        """
        if started_at >= self._doubled_at:
            self.late, self._doubled_at = min(MOST_DOUBLED, self.late + 1), now

    def _base_s(self, seconds: Seconds, route: tuple[PeerId, ...]) -> Seconds:
        """Record a micro-batch's duration on a route, and return the seconds that it would take without waiting.

        With more than MANY_ROUTES known routes, a new route's base is the shortest duration on any route. With its own
        duration as the base, the first micro-batch on each route would seem not to have waited.
        """
        fading = FADES * (seconds - self._fastest_s) if self._fastest_s < math.inf else 0.0
        self._fastest_s = min(seconds, self._fastest_s + fading)
        known = self.bases.get(route)
        self._new += NEWEST_WEIGHT * ((known is None) - self._new)
        base = known or RouteBase(seconds)
        base.saw(seconds)
        keep_latest(self.bases, route, base, MOST_ROUTES)
        return self._fastest_s if known is None and len(self.bases) > MANY_ROUTES else base.least


def budget_s(typical_s: Seconds | None, guess_s: Seconds = 0.0, late: int = 0) -> Seconds:
    """Return the seconds after which an origin peer gives up one of its micro-batches, retries included.

    Args:
        typical_s: Usual duration of our micro-batches; None until the first one has completed.
        guess_s: Expected duration without waiting, used while `typical_s` is None; 0 if unknown.
        late: How often in a row micro-batches ran out of time; each time doubles the result.

    Returns:
        At most MAX_ROUTE_S; MAX_ROUTE_S if neither duration is known.
    """
    if typical_s is None and guess_s <= 0:
        return MAX_ROUTE_S
    expected_s, least_s = (guess_s, UNKNOWN_S) if typical_s is None else (typical_s, LEAST_BUDGET_S)
    return min(MAX_ROUTE_S, 2.0**late * max(least_s, 2 * ROUTE_SLACK * expected_s))


@dataclass(slots=True)
class Admission:
    """Decides which executions this peer accepts, by its layers, its free memory and its round of training."""

    table: ExecutionTable
    forwarding: Forwarding
    window: MicroBatchWindow
    active: bool = False
    draining: bool = False  # True while this peer refuses new executions, and only finishes present ones
    round: int = 0  # current round of synchronous training (comm/rounds/round.py); 0 if asynchronous

    @property
    def stage(self) -> StageConfig:
        """Return the layers and limits of this peer."""
        return self.forwarding.load.stage

    def start(self) -> None:
        """Accept executions from now on: this peer trains."""
        self.active = True

    def drain(self, drains: bool) -> None:
        """Stop accepting and beginning executions if `drains` is true; otherwise accept and begin them again."""
        self.draining = drains

    def requested(self, event: Asked, request: ForwardRequest, now: Seconds) -> list[Effect]:
        """Handle a ForwardRequest: begin the execution, refuse it, or add the sender to a known execution.

        All peers that requested an execution get the answer as soon as it is computed. A request from the origin peer
        itself replaces an execution of the same id that another peer sent here.
        """
        id = ExecutionId(request.origin, request.number, request.first)
        known = self.table.by_id.get(id)
        if known is not None and (event.sender != request.origin or event.sender in known.askers):
            return self._asked_again(known, event, request, now)
        # Another peer sent this execution here, and now the origin peer sends it directly: drop the earlier copy.
        given_up = self.table.give_up(known, Reason.MOVED) if known is not None else []
        refusal = self.refusal(request, len(event.envelope.blob))
        if refusal is None and self.table.holds.rests(PeerId(request.origin), now):
            refusal = Reason.BUSY
        if refusal:
            return [*given_up, Reply(event.request, Envelope(Refused(refusal)))]
        last, token = self.forwarding.end(request.first), next(self.table.tokens)
        blob, thin = event.envelope.blob, self.forwarding.view.is_thin()
        job = Forward(token, id.first, last, request.sequences, request.layout, blob, thin)
        execution = ForwardedExecution(
            token=token,
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
            undo=Undo(job) if self.stage.undoes else None,
        )
        self.table.add(execution)
        given_up += [] if self.stage.synchronous else self.table.give_up_held(execution)
        self.push(job, request.round)
        return given_up

    def _asked_again(
        self, known: ForwardedExecution, event: Asked, request: ForwardRequest, now: Seconds
    ) -> list[Effect]:
        """Add the sender to an execution that is already here, and answer at once if the answer is known.

        All peers that request it get the same answer. The origin peer's time to commit does not change. If a peer
        repeats its request, the earlier request is refused. A sender that cannot be the previous peer of the route is
        refused.
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
        """Return whether the sender may be the previous peer on the execution's route.

        True if the sender has already requested the execution, or if its record says that it serves the layer before
        `first`.
        """
        if sender in known.askers:
            return True
        first, last, _ = self.forwarding.view.span_and_speed(sender)
        return first < known.id.first <= last

    def refusal(self, request: ForwardRequest, blob_bytes: int) -> Reason | None:
        """Return why this peer refuses an execution; None if it accepts the execution.

        Args:
            request: The execution that another peer asks for.
            blob_bytes: Size of the activations that came with the request.
        """
        stage = self.stage
        if not self.active:
            return Reason.NOT_READY
        if ExecutionId(request.origin, request.number, request.first) in self.table.counted:
            return Reason.COUNTED  # a late request: the execution was already computed and committed here
        if stage.size(request) == 0 or request.origin == stage.peer:
            return Reason.SPAN
        if not stage.fits(request, blob_bytes):
            return Reason.SHAPE
        if request.patience_s < MIN_PATIENCE_S or request.round < self.round:
            return Reason.LATE
        if request.round > self.round + stage.synchronous:  # requests for synchronous rounds may come one round early
            return Reason.NOT_READY
        return None if self.has_memory(request.first) and not self.draining else Reason.BUSY

    def answer(self, event: Asked) -> Load | Done | Refused | None:
        """Return the answer to an Offer or a ForwardStatusQuery; None for other messages.

        Both messages change no state and are far more frequent than executions, so the router answers them first.
        """
        match event.envelope.message:
            case Offer() as offer:
                return self._load(offer)
            case ForwardStatusQuery(execution=id):
                execution = self.table.by_id.get(id)
                return Done() if execution is not None and event.sender in execution.askers else Refused(Reason.GONE)
        return None

    def _load(self, offer: Offer) -> Load | Refused:
        """Return the answer to an Offer: the seconds that one more execution would wait and take here, or a refusal."""
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
        """Return whether one more of our own micro-batches may begin.

        It must fit in the window and in memory, the job queue must not be full, and no step must be due.

        Args:
            own: How many of our own micro-batches are in flight.
        """
        return not self.table.jobs.full and self.has_memory(0) and own < self.window.size and not self.table.step_waits

    def has_memory(self, first: int) -> bool:
        """Return whether there is memory for an execution that enters at layer `first`.

        For each later layer at which executions may enter, the memory of one execution is reserved (buffer classes:
        Merlin and Schweitzer, 1980). Without this, peers that hold the same layers could fill each other's memory with
        executions that wait for one another: a deadlock.
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
        # Reserve memory for our own micro-batches, since no other peer can begin them.
        wanted = min(self.window.size * usual, capacity - kept) - own
        others = in_use - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING

    def push(self, job: Forward, round: int) -> None:
        """Queue a forward pass for the training thread, or keep it until `round` begins if that is a later round."""
        if round > self.round:
            self.table.jobs.early[job.token] = job
        else:
            self.table.jobs.push(job)

    def begin_round(self, round: int, active: bool) -> list[Effect]:
        """Enter a round: queue the forward passes that came early for this round, or refuse them if not `active`."""
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
        """Remove all executions of this round and, if `everything`, executions that came early for the next round."""
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
    """Begins this peer's own micro-batches, and gives them up when no other peer can take them."""

    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    quota: int | None = None  # how many micro-batches may still begin; None: as many as the window allows
    look_at: Seconds | None = None  # when to look again for a peer that holds the next layers; None: no need to look

    def begin(self, now: Seconds) -> list[Effect]:
        """Return the jobs that begin new micro-batches, as many as quota, window and training thread allow."""
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
            self.table.jobs.running.add(execution.token)  # this job needs no queue: `may_begin` found the thread free
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
            until=now + self.admission.window.budget_s(),
            drawn=now,
            round=self.admission.round,
        )
        self.table.add(execution)
        return execution

    @property
    def under_way(self) -> list[OwnExecution]:
        """Return our own micro-batches in flight."""
        own = (one for one in self.table.by_token.values() if isinstance(one, OwnExecution))
        return [execution for execution in own if execution.state is not GONE]

    def give_up_all(self) -> list[Effect]:
        """Give up our micro-batches in flight and begin no more, because no peer is left that could take them."""
        self.quota = 0
        return [effect for execution in self.under_way for effect in self.table.give_up(execution, Reason.GONE)]
