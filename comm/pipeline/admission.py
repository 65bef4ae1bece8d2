"""Admission: which executions this peer accepts from other peers, and how many micro-batches of its own it begins.

An execution is a micro-batch's forward and backward pass through one peer.
Start with `Admission.requested`, which accepts or refuses another peer's execution, and `OwnMicroBatches.begin`.
`InFlightLimit` (in_flight.py) decides how many of our own micro-batches are in flight.

Memory is counted in micro-batches through all layers of this peer (`StageConfig.memory_share`). An execution in state
IN_DOUBT waits only for the origin peer's decision; its activations are freed, and it takes no memory. If the previous
peer of a route is replaced, the new peer requests the same execution. This peer then computes the execution only once,
and sends the same gradient to both peers (the `askers` of the execution).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decentral.comm.pipeline.execution import (
    AWAY,
    FORWARD,
    GONE,
    IN_DOUBT,
    ForwardedExecution,
    OwnExecution,
    Paused,
    StageExecution,
)
from decentral.comm.pipeline.execution_table import ExecutionTable
from decentral.comm.pipeline.forwarding import MIN_PATIENCE_S, SUCCESSOR_RETRY_S, Forwarding
from decentral.comm.pipeline.in_flight import InFlightLimit
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
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
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_HELD = 4  # at most MOST_HELD * `capacity` executions are at this peer, including those that await a decision
KEPT_PART = 8  # at most 1 / KEPT_PART of the memory is reserved for executions that enter at later layers
ROUNDING = 1e-6
OWN_TIMES = 2.0  # our micro-batches stay longer than others', so this many times our part of them may be in flight
SHARE = 0.9  # we give up after this fraction of the sender's waiting time, so that it can still try another peer
MOST_ASKERS = 8  # at most this many peers may request one execution; more than MAX_TRIES (comm/pipeline/forwarding.py)
GRACE_S = 1.0  # gradients are held this long after the origin peer's time limit, since its decision may be on its way


def _waits(execution: StageExecution, waiting: Collection[int]) -> bool:
    """Return whether an execution waits for its forward pass (its id is in `waiting`) or for a next peer."""
    hop = execution.next_hop
    paused = execution.state is AWAY and hop is not None and isinstance(hop.place, Paused)
    return paused or (execution.state is FORWARD and execution.local_id in waiting)


@dataclass(slots=True)
class Admission:
    """Decides which executions this peer accepts, by its layers, its free memory and its round of training."""

    table: ExecutionTable
    forwarding: Forwarding
    in_flight: InFlightLimit
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
        order = request.drawn, request.origin, request.number
        younger = None if refusal else self._younger(request.first, order)
        if younger is None or self.table.decision_limits.rests(PeerId(request.origin), now):
            return [*given_up, Reply(event.request, Envelope(Refused(refusal or Reason.BUSY)))]
        given_up += [effect for one in younger for effect in self.table.give_up(one, Reason.BUSY)]
        last, local_id = self.forwarding.choose_end(request.first), next(self.table.local_ids)
        blob, thin = event.envelope.blob, self.forwarding.view.is_thin()
        job = Forward(local_id, id.first, last, request.sequences, request.layout, blob, thin)
        execution = ForwardedExecution(
            local_id=local_id,
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
        given_up += [] if self.stage.synchronous else self.table.give_up_in_doubt(execution)
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
        """Return the reason to refuse an execution, memory aside; None if there is no reason.

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
        return Reason.BUSY if self.draining else None

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
        if self._younger(offer.first, (offer.drawn, "", 0)) is None:
            return Refused(Reason.BUSY)
        last = self.forwarding.usual_end(offer.first)
        load = self.forwarding.load
        wait_s = load.wait_s(self.table.by_local_id.values())
        return Load(self.stage.run, wait_s, load.execution_s(offer.first, last), last)

    def may_begin(self, own: int) -> bool:
        """Return whether one more of our own micro-batches may begin.

        The limit and memory must have room for it, the job queue must not be full, and no step must be due.

        Args:
            own: How many of our own micro-batches are in flight.
        """
        return (
            not self.table.jobs.full and self.has_memory(0) and own < self.in_flight.size and not self.table.step_waits
        )

    def _younger(self, first: int, order: tuple[Seconds, str, int]) -> list[ForwardedExecution] | None:
        """Return the executions to give up, so that there is memory for one that enters at layer `first`.

        None if too little memory would be free. Only executions of other peers' younger micro-batches are given up,
        the youngest first: those whose forward pass has not begun here, or that no next peer has taken. The peers
        before send them again later. So the oldest micro-batch finds memory wherever it comes, and a circle of full
        peers that wait for one another dissolves (wound-wait: Rosenkrantz, Stearns, Lewis 1978). An origin peer with
        half of the memory takes none from other origin peers, since it may lie about the age.

        Args:
            first: Layer at which the execution enters.
            order: The age of its micro-batch (`StageExecution.order`).
        """
        given_up: list[ForwardedExecution] = []
        if self.has_memory(first):
            return given_up
        waiting = self.table.jobs.waiting
        origin = order[1]
        displaces = sum(one.id.origin == origin for one in self.table.by_id.values()) < self.stage.capacity / 2
        younger = [
            one
            for one in self.table.by_id.values()
            if one.order > order and _waits(one, waiting) and (displaces or one.id.origin == origin)
        ]
        for one in sorted(younger, key=lambda one: one.order, reverse=True):
            given_up.append(one)
            if self.has_memory(first, given_up):
                return given_up
        return None

    def has_memory(self, first: int, given_up: Sequence[StageExecution] = ()) -> bool:
        """Return whether there is memory for an execution that enters at layer `first`, not counting `given_up`.

        For each later layer at which executions may enter, the memory of one execution is reserved (buffer classes:
        Merlin and Schweitzer, 1980). Without this, peers that hold the same layers could fill each other's memory with
        executions that wait for one another: a deadlock.
        """
        capacity, count, in_use, own_count, own = self.stage.capacity, 0, 0.0, 0, 0.0
        for execution in self.table.by_local_id.values():
            if execution.state is not IN_DOUBT and execution not in given_up:
                count, in_use = count + 1, in_use + execution.memory_share
                if execution.own:
                    own_count, own = own_count + 1, own + execution.memory_share
        more = self.stage.memory_share(first, self.stage.last)
        full = count >= MOST_UNDER_WAY or len(self.table.by_local_id) - len(given_up) >= MOST_HELD * capacity
        if full or in_use + more > capacity + ROUNDING:
            return False
        kept = min(self.stage.later_entries(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.stage.first > 0:
            return in_use + more <= most
        if first == 0:
            return own + more <= most
        usual = own / own_count if own_count else 1.0
        # Reserve memory for our part of the micro-batches that are begun, since no other peer can begin them.
        part = min(1.0, OWN_TIMES * self.forwarding.begun_part)
        wanted = part * min(self.in_flight.size * usual, capacity - kept) - own
        others = in_use - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING

    def push(self, job: Forward, round: int) -> None:
        """Queue a forward pass for the training thread, or keep it until `round` begins if that is a later round."""
        if round > self.round:
            self.table.jobs.early[job.local_id] = job
        else:
            self.table.jobs.push(job)

    def begin_round(self, round: int, active: bool) -> list[Effect]:
        """Enter a round: queue the forward passes that came early for this round, or refuse them if not `active`."""
        self.round, self.active = round, active
        effects: list[Effect] = []
        early, self.table.jobs.early = self.table.jobs.early, {}
        for job in early.values():
            execution = self.table.by_local_id.get(job.local_id)
            if execution is not None and execution.state is FORWARD and active:
                self.table.jobs.push(job)
            elif execution is not None:
                effects += self.table.give_up(execution, Reason.NOT_READY)
        return effects

    def end_round(self, everything: bool) -> list[Effect]:
        """Remove all executions of this round and, if `everything`, executions that came early for the next round."""
        effects: list[Effect] = []
        for execution in list(self.table.by_local_id.values()):
            if execution.state is GONE or (execution.round > self.round and not everything):
                continue
            if execution.state is IN_DOUBT:
                self.table.end_in_doubt(execution, "the round is over")
            else:
                effects += self.table.give_up(execution, Reason.LATE)
        return effects


@dataclass(slots=True)
class OwnMicroBatches:
    """Begins this peer's own micro-batches, and gives them up when no other peer can take them."""

    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    quota: int | None = None  # how many micro-batches may still begin; None: as many as the limit allows
    look_at: Seconds | None = None  # when to look again for a peer that holds the next layers; None: no need to look

    def begin(self, now: Seconds) -> list[Effect]:
        """Return the jobs that begin new micro-batches, as many as quota, limit and training thread allow."""
        jobs: list[Effect] = []
        self.look_at = None
        stage = self.admission.stage
        reaches_the_end = stage.last == stage.layers and not stage.synchronous
        elsewhere = stage.first > 0 or not stage.originates
        if not self.admission.active or self.admission.draining or elsewhere or reaches_the_end:
            return jobs
        own = sum(execution.own for execution in self.table.by_local_id.values())
        others = len(self.table.by_local_id) - own
        while self.quota != 0 and self.admission.may_begin(own) and self._is_our_turn(own, others):
            last = self.forwarding.choose_end(0)
            if last < stage.layers and not self.forwarding.view.successors(last):
                self.look_at = now + SUCCESSOR_RETRY_S
                break
            execution = self._new(last, now)
            self.table.jobs.running.add(
                execution.local_id
            )  # no queue: `may_begin` found fewer than JOBS_AT_ONCE jobs there
            jobs.append(Draw(execution.local_id, last, self.forwarding.view.is_thin()))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _is_our_turn(self, own: int, others: int) -> bool:
        """Return whether this peer may begin one more of its own micro-batches beside those of others.

        By the routing weights, a share of its executions begins here (`begun_part`); up to OWN_TIMES as many may be in
        flight. More would fill the device, which may be the only one that computes its later layers for others.

        Args:
            own: How many of our own micro-batches are in flight.
            others: How many executions of others are at this peer. Without any, we may always begin.
        """
        part = self.forwarding.begun_part
        return not others or own * (1 - part) < OWN_TIMES * part * others

    def _new(self, last: int, now: Seconds) -> OwnExecution:
        execution = OwnExecution(
            local_id=next(self.table.local_ids),
            id=ExecutionId(self.admission.stage.peer, 0, 0),
            last=last,
            memory_share=self.admission.stage.memory_share(0, last),
            started_at=now,
            until=now + self.admission.in_flight.budget_s(),
            drawn=now,
            round=self.admission.round,
        )
        self.table.add(execution)
        return execution

    @property
    def under_way(self) -> list[OwnExecution]:
        """Return our own micro-batches in flight."""
        own = (one for one in self.table.by_local_id.values() if isinstance(one, OwnExecution))
        return [execution for execution in own if execution.state is not GONE]

    def give_up_all(self) -> list[Effect]:
        """Give up our micro-batches in flight and begin no more, because no peer is left that could take them."""
        self.quota = 0
        return [effect for execution in self.under_way for effect in self.table.give_up(execution, Reason.GONE)]
