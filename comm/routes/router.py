"""Micro-batches through peers that hold a part of the model each: activations on, gradients back the same way.

    ours      FORWARD --Forwarded--> AWAY --gradient--> BACKWARD --Backed--> counted; its route is settled
    others'   FORWARD --Forwarded--> AWAY --gradient--> BACKWARD --Backed--> HELD --Settle--> counted
    last hop  FORWARD ------------------------------------------> Backed --> HELD --Settle--> counted

A question (ForwardRequest) takes the activations to the next peer, and its answer brings the gradient back when all behind it is
done. So whoever asked still has what it sent: when the next peer is gone, late, or answers nonsense, another one gets
the same. Peers in front learn nothing of it but the time. A peer that is asked a second time for an execution that it has
carried already, because the peer in between is gone, sends the same gradient again.

Exactly once: gradients are held (comm/routes/ledger.py) until the origin peer, to whom the route's hops come back with the
gradient, has settled them. It settles one route per micro-batch, so each layer counts it once, or not at all.

This file is an execution's life. Who is next is comm/routes/forwarding.py; what the executions take of memory and time, comm/routes/load.py; what
the compute thread gets first, comm/routes/job_queue.py (our own new micro-batches come last); what others are told, comm/routes/decisions.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.rounds.contributions import ContributionRecord
from decentral.comm.routes.decisions import DecisionOutboxes
from decentral.comm.routes.forwarding import LEAST_S, SUCCESSOR_RETRY_S, Forwarding, RouteView, Way
from decentral.comm.routes.in_doubt import CommitLog, InDoubtExecutions
from decentral.comm.routes.job_queue import JobQueue
from decentral.comm.routes.ledger import CommitState, GradientEntry, GradientLedger, reaches_the_end
from decentral.comm.routes.load import StageLoad
from decentral.comm.routes.pacing import FULL, LARGE_STEP, LEAN, MicroBatchWindow, budget_s
from decentral.comm.routes.stage import ExecutionState, StageConfig, StageExecution
from decentral.comm.routes.tags import (
    CommitDecisionTag,
    CommitQueryTag,
    ExecutionTag,
    ForwardStatusTag,
    ForwardTag,
    OfferTag,
)
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    MAX_HOPS,
    BackwardResponse,
    CommitDecision,
    CommitQuery,
    Done,
    ExecutionId,
    ForwardRequest,
    ForwardStatusQuery,
    Hop,
    Load,
    Offer,
    Refused,
)
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import (
    Backward,
    BackwardDone,
    Draw,
    ExecutionFailed,
    Forget,
    Forward,
    ForwardDone,
    Sealed,
    Stepped,
)
from decentral.core.machine import Effect, Woke, earliest, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

BUSY = (
    Reason.BUSY,
    Reason.NOT_READY,
    Reason.MOVED,
    Reason.SPAN,
    Reason.OVERSIZE,
)  # nobody's fault: a record may be older than a span
SHARE = 0.9  # of the asker's patience, after which we give up: it then still has time for another peer
GRACE_S = 1.0  # for a CommitDecision that is on its way when its origin peer's time is over
COMPUTING_STATES = (ExecutionState.FORWARD, ExecutionState.AWAY, ExecutionState.BACKWARD)
COUNTED_KEPT = 4096  # executions of others that are known to have been counted


@dataclass(slots=True)
class Router:
    stage: StageConfig
    view: RouteView
    active: bool = False  # from Started on
    draining: bool = False  # no new executions: those that are here are brought to their end
    executions: dict[int, StageExecution] = field(default_factory=dict)
    window: MicroBatchWindow = field(init=False)
    work: JobQueue = field(default_factory=JobQueue)
    workload: StageLoad = field(init=False)
    outboxes: DecisionOutboxes = field(init=False)
    onward: Forwarding = field(init=False)
    ledger: GradientLedger | ContributionRecord = field(init=False)
    quota: int | None = None  # micro-batches that we may still begin; None: as many as the window has room for
    completed: int = 0
    doubts: InDoubtExecutions = field(init=False)
    _settled: CommitLog = field(default_factory=CommitLog)
    round: int = 0
    _by_id: dict[ExecutionId, int] = field(default_factory=dict)
    _counted: dict[ExecutionId, None] = field(default_factory=dict)  # the latest of others
    _last_token: int = 0
    _look_at: Seconds | None = None
    _wake: Seconds | None = None  # the earliest wish of all; infinite: none; None: to be looked for
    _early: list[Forward] = field(default_factory=list)  # of the next round

    def __post_init__(self) -> None:
        stage = self.stage
        full = stage.overlap or stage.synchronous or stage.at_least >= LARGE_STEP
        stages = -(-stage.layers // (stage.last - stage.first))
        self.window = MicroBatchWindow(stage.most, FULL if full else LEAN, max(2, min(stages, stage.capacity)))
        self.ledger = ContributionRecord() if stage.synchronous else GradientLedger(stage.at_least, stage.slots)
        self.doubts, self.outboxes = InDoubtExecutions(stage.run), DecisionOutboxes(stage.run)
        self.workload = StageLoad(stage)
        self.onward = Forwarding(stage, self.view, self.workload, self.outboxes)

    @property
    def wake_at(self) -> Seconds | None:
        """Looked for once after each event: it takes a look at every execution."""
        if not self.active:
            return None
        if self._wake is None:
            at = earliest(
                (self._look_at, self.doubts.wake_at, *(execution.wake_at() for execution in self.executions.values()))
            )
            self._wake = math.inf if at is None else at
        return None if self._wake == math.inf else self._wake

    @property
    def idle(self) -> bool:
        """Whether no execution is here, and no gradient waits for a step."""
        return not self.executions and not self.ledger.entries and not self.ledger.sealing

    def drain(self) -> None:
        """Takes no more executions; gradients need not wait for more of them before a step."""
        self.draining, self.ledger.at_least = True, 1

    def hold(self, stage: StageConfig) -> None:
        """This peer's place from now on; executions are taken again."""
        self.stage, self.draining, self.ledger.at_least = stage, False, stage.at_least
        self.window.most = stage.most
        self.workload.hold(stage)
        self.onward.hold(stage)

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        if isinstance(event, Asked):
            said = self._said(event)
            if said is not None:
                return [Reply(event.request, Envelope(said))]
        elif isinstance(event, Answered | AskFailed) and isinstance(event.tag, OfferTag) and self._heard(event):
            return []
        self._wake = None
        self.ledger.quiet = self._quiet()
        effects = self._react(event, now)
        effects += self.ledger.look(self._quiet())
        effects += self.work.dispatch(self._is_older() if self._draining() else None)
        return effects + self._begin_more(now) + self.outboxes.tell()

    def _react(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self._overdue(now) + list(self.doubts.ask(now))
            case Asked(envelope=Envelope(ForwardRequest() as carry)):
                return self._asked(event, carry, now)
            case Asked(request, sender, Envelope(CommitDecision() as told)):
                return [*self._told(sender, told), Reply(request, Envelope(Done()))]
            case Asked(request, sender, Envelope(CommitQuery(executions=executions))):
                return [Reply(request, Envelope(self._what_became(sender, executions)))]
            case Answered(tag=CommitQueryTag(), peer=peer, envelope=Envelope(CommitDecision() as told)):
                return self._told(peer, self._only(told, self.doubts.answered(peer)))
            case Answered(tag=CommitQueryTag(), peer=peer):
                self.doubts.answered(peer)
            case AskFailed(tag=CommitQueryTag(), peer=peer):
                self.doubts.answered(peer)
                return self._told(peer, CommitDecision(self.stage.run, (), tuple(self.doubts.of(peer))))
            case Answered(tag=OfferTag(token=token)) | AskFailed(tag=OfferTag(token=token)):
                heard = self.executions[token]
                return self._on(heard, self.onward.offered(heard, now))
            case Answered(tag=ExecutionTag()) | AskFailed(tag=ExecutionTag()):
                execution = self._awaited(event)
                return self._from_next(execution, event, now) if execution else []
            case Answered(tag=CommitDecisionTag(), peer=peer) | AskFailed(tag=CommitDecisionTag(), peer=peer):
                self.outboxes.told(peer)
            case ForwardDone() | BackwardDone() | ExecutionFailed():
                self.work.done(event.token)
                return self._computed(event, now)
            case Sealed(tokens, slot):
                return self.ledger.sealed(tokens, slot)
            case Stepped(seconds=seconds, executions=executions):
                self.workload.stepped(seconds)
                return self.ledger.stepped(executions) if executions else []
        return []

    # Others' micro-batches

    def _said(self, event: Asked) -> Load | Done | Refused | None:
        """What is answered to questions that change nothing: there are many more of them than of executions."""
        match event.envelope.message:
            case Offer() as offer:
                return self._load(offer)
            case ForwardStatusQuery(execution=name):
                execution = self.executions.get(self._by_id.get(name, -1))
                return Done() if execution is not None and execution.asker == event.sender else Refused(Reason.GONE)
        return None

    def _asked(self, event: Asked, carry: ForwardRequest, now: Seconds) -> list[Effect]:
        name = ExecutionId(carry.origin, carry.number, carry.first)
        if name in self._by_id:
            return self._asked_again(self.executions[self._by_id[name]], event, carry, now)
        refusal = self._refusal(event, carry)
        if refusal:
            return [Reply(event.request, Envelope(Refused(refusal)))]
        execution = self._new_execution(name, self.onward.end(carry.first), now, event.sender)
        execution.drawn = carry.drawn
        execution.request, execution.sequences, execution.round = event.request, carry.sequences, carry.round
        self._extend(execution, carry, now)
        effects = self._supersede(execution)
        self._by_id[name] = execution.token
        job = Forward(execution.token, carry.first, execution.last, carry.sequences, carry.layout, event.envelope.blob)
        if carry.round > self.round:
            self._early.append(job)
        else:
            self.work.push(job)
        return effects

    def _supersede(self, new: StageExecution) -> list[Effect]:
        """Of a micro-batch that comes again by another way, what was held for the same layers: no route has both.

        Its sum would wait to be settled, and this execution for a step that takes the sum.
        """
        if self.stage.synchronous:
            return []
        same = [
            execution
            for execution in self.executions.values()
            if (execution.id.origin, execution.id.number) == (new.id.origin, new.id.number)
        ]
        held = [
            execution
            for execution in same
            if execution.state is ExecutionState.HELD
            and execution.id.first < new.last
            and new.id.first < execution.last
        ]
        return [effect for execution in held for effect in self._give_up(execution, Reason.MOVED)]

    def _refusal(self, event: Asked, carry: ForwardRequest) -> str:
        """Why not, in one word; empty if we take it."""
        stage = self.stage
        if not self.active:
            return Reason.NOT_READY
        if ExecutionId(carry.origin, carry.number, carry.first) in self._counted:
            return Reason.COUNTED  # an old question that took its time: its asker has long had an answer to a later one
        if stage.size(carry) == 0 or carry.origin == stage.peer:
            return Reason.SPAN
        if carry.layout != stage.layout(carry.first, carry.sequences) or len(event.envelope.blob) != stage.size(carry):
            return Reason.SHAPE
        if carry.patience_s < LEAST_S or carry.round < self.round:
            return Reason.LATE
        if carry.round > self.round + 1:
            return Reason.NOT_READY
        return "" if self._has_room(carry.first) and not self.draining else Reason.BUSY

    def _load(self, offer: Offer) -> Load | Refused:
        """How soon we would be through with one more execution."""
        stage = self.stage
        if not self.active or self.draining:
            return Refused(Reason.NOT_READY)
        if not stage.begins(offer.first):
            return Refused(Reason.SPAN)
        if not self._has_room(offer.first):
            return Refused(Reason.BUSY)
        last = self.onward.usual_end(offer.first)
        wait_s = self.workload.wait_s(self.executions.values())
        return Load(stage.run, wait_s, self.workload.execution_s(offer.first, last), last)

    def _has_room(self, first: int) -> bool:
        return self.workload.has_room(first, self.executions, self.window.size)

    def _asked_again(
        self, execution: StageExecution, event: Asked, carry: ForwardRequest, now: Seconds
    ) -> list[Effect]:
        """Whoever asked before has been given up, or is gone: the new asker gets the answer."""
        effects: list[Effect] = []
        if execution.request is not None:
            effects.append(Reply(execution.request, Envelope(Refused(Reason.MOVED))))
        execution.request, execution.asker = event.request, event.sender
        self._extend(execution, carry, now)
        if execution.answer is not None:
            effects.append(Reply(event.request, execution.answer))
            execution.request = None
        return effects

    def _extend(self, execution: StageExecution, carry: ForwardRequest, now: Seconds) -> None:
        execution.answer_by = now + SHARE * carry.patience_s
        execution.until = now + carry.hold_s + GRACE_S

    def _told(self, sender: PeerId, told: CommitDecision) -> list[Effect]:
        effects: list[Effect] = []
        for name in told.count:
            execution = self.executions.get(self._by_id.get(name, -1))
            if execution is not None and execution.state is ExecutionState.HELD and sender == name.origin:
                effects += self.ledger.settle(execution.token)
                self._remove(execution)
                self._counted[name] = None
                if len(self._counted) > COUNTED_KEPT:
                    del self._counted[next(iter(self._counted))]
        for name in told.release:
            execution = self.executions.get(self._by_id.get(name, -1))
            if execution is not None and sender in (name.origin, execution.asker):
                effects += self._give_up(execution, Reason.MOVED)
        return effects

    def _what_became(self, asker: PeerId, executions: Sequence[ExecutionId]) -> CommitDecision:
        ours = [execution for execution in executions if execution.origin == self.stage.peer]
        under_way = frozenset(execution.id.number for execution in self.executions.values() if execution.own)
        return self._settled.answer(self.stage.run, asker, ours, under_way)

    def _only(self, told: CommitDecision, asked: Sequence[ExecutionId]) -> CommitDecision:
        """Of an answer, what the question was about."""
        known = set(asked)
        count, release = (
            tuple(execution for execution in executions if execution in known)
            for executions in (told.count, told.release)
        )
        return CommitDecision(told.run, count, release)

    # What the next peer says

    def _awaited(self, event: Answered | AskFailed) -> StageExecution | None:
        """The execution that waits for this answer."""
        assert isinstance(event.tag, ExecutionTag)
        token, attempt = event.tag.token, event.tag.attempt
        execution = self.executions.get(token)
        waits = execution and execution.state is ExecutionState.AWAY and (execution.to or execution.offers)
        return execution if execution and waits and execution.attempts == attempt else None

    def _heard(self, event: Answered | AskFailed) -> bool:
        """Whether an answer to an offer changes nothing: others are still to be heard, or the execution has gone on."""
        execution = self._awaited(event)
        return execution is None or execution.offers is None or not self.onward.heard(execution, event)

    def _on(self, execution: StageExecution, way: Way) -> list[Effect]:
        return self._give_up(execution, way) if isinstance(way, str) else way

    def _from_next(self, execution: StageExecution, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        match event:
            case Answered(tag=ForwardStatusTag(), envelope=Envelope(Done())):
                self.onward.only_late(execution, event.peer, now)
                return []
            case Answered(tag=ForwardTag(), envelope=Envelope(Refused(reason))) if reason in BUSY:
                return self._on(execution, self.onward.refused(execution, now))
            case Answered(tag=ForwardTag(), envelope=Envelope(BackwardResponse() as said, blob)) if self._fits(
                execution, event.peer, said, blob
            ):
                self.onward.turns.served(event.peer, event.seconds)
                execution.state, execution.hops, execution.loss = ExecutionState.BACKWARD, said.hops, said.loss
                self.work.push(Backward(execution.token, said.layout, blob))
                return []
        return self._on(execution, self.onward.missed(execution, event.peer, now))

    def _fits(self, execution: StageExecution, peer: PeerId, returned: BackwardResponse, blob: bytes) -> bool:
        hops = returned.hops
        return (
            returned.run == self.stage.run
            and returned.tokens == execution.tokens
            and returned.layout == execution.layout[:1]
            and len(blob) == execution.layout[0].size
            and 0 < len(hops) < MAX_HOPS
            and hops[0].peer == peer
            and reaches_the_end(hops, execution.last, self.stage.layers)
        )

    # What the compute thread reports

    def _computed(self, event: ForwardDone | BackwardDone | ExecutionFailed, now: Seconds) -> list[Effect]:
        execution = self.executions.get(event.token)
        assert execution is not None, "an execution stays while it is computed"
        match event:
            case ForwardDone():
                return self._forwarded(execution, event, now)
            case BackwardDone():
                return self._backed(execution, event, now)
            case ExecutionFailed(_, reason):
                return self._hop_failed(execution, reason, now)

    def _forwarded(self, execution: StageExecution, done: ForwardDone, now: Seconds) -> list[Effect]:
        if execution.state is ExecutionState.GONE:
            return self._let_go(execution)
        if execution.own:
            execution.id = ExecutionId(self.stage.peer, done.number, 0)
        self.workload.tokens = done.tokens
        execution.sequences, execution.tokens, execution.layout, execution.payload = (
            done.sequences,
            done.tokens,
            done.layout,
            done.blob,
        )
        if execution.own and self.window.typical_s() is None:
            execution.until = execution.began + budget_s(None, self.workload.rest_s(execution.tokens, 0))
        return self._on(execution, self.onward.send(execution, now))

    def _backed(self, execution: StageExecution, done: BackwardDone, now: Seconds) -> list[Effect]:
        at_the_end = execution.last == self.stage.layers
        loss = done.loss if at_the_end else execution.loss
        entry = GradientEntry(execution.id, execution.last, done.tokens, loss, execution.own)
        if execution.own and at_the_end:
            entry = replace(entry, execution=ExecutionId(self.stage.peer, done.number, 0))
        self.workload.backed(execution, done.tokens)
        if execution.state is ExecutionState.GONE:
            self.executions.pop(execution.token)
            return self.ledger.add(execution.token, entry, CommitState.VOID)
        if execution.own:
            return self._complete(execution, entry, now)
        execution.state, execution.payload = ExecutionState.HELD, b""
        self.doubts.hold(execution.id, now, now - execution.began)
        hops = (Hop(self.stage.peer, execution.id.first, execution.last), *execution.hops)
        execution.answer = Envelope(BackwardResponse(self.stage.run, loss, done.tokens, hops, done.layout), done.blob)
        effects = self.ledger.add(execution.token, entry, CommitState.HELD)
        if execution.request is not None:
            effects.append(Reply(execution.request, execution.answer))
            execution.request = None
        return effects

    def _complete(self, execution: StageExecution, entry: GradientEntry, now: Seconds) -> list[Effect]:
        """The whole route's gradients are there: from now on they count."""
        for hop in execution.hops:
            self.outboxes.count(PeerId(hop.peer), ExecutionId(execution.id.origin, execution.id.number, hop.first))
        self.window.done(now - execution.began, tuple(PeerId(hop.peer) for hop in execution.hops))
        self.completed += 1
        self._settled.add(execution.id.number, execution.hops)
        self._remove(execution)
        if isinstance(self.ledger, ContributionRecord):
            self.ledger.ways[execution.token] = execution.hops
        return self.ledger.add(execution.token, entry, CommitState.SETTLED)

    def _hop_failed(self, execution: StageExecution, reason: str, now: Seconds) -> list[Effect]:
        if execution.state is ExecutionState.GONE:
            return self._let_go(execution)
        if execution.state is ExecutionState.BACKWARD:
            assert execution.to is not None
            return self._on(execution, self.onward.missed(execution, execution.to, now))
        return self._give_up(execution, reason)

    # The end of an execution

    def _overdue(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        for execution in list(self.executions.values()):
            if execution.state is ExecutionState.GONE:
                continue
            if now >= execution.deadline():
                effects += self._give_up(execution, Reason.LATE)
            elif execution.retry_at is not None and now >= execution.retry_at:
                effects += self._on(execution, self.onward.send(execution, now))
            elif execution.state is ExecutionState.AWAY and execution.look_at is not None and now >= execution.look_at:
                effects.append(self.onward.look_after(execution))
        return effects

    def _give_up(self, execution: StageExecution, reason: str) -> list[Effect]:
        """Its gradients, if they are in a sum already, must not count."""
        effects: list[Effect] = []
        if execution.request is not None:
            effects.append(Reply(execution.request, Envelope(Refused(reason))))
        if execution.own:
            effects.append(log("abandoned", number=execution.id.number, reason=reason, tries=len(execution.tried)))
        if execution.state is ExecutionState.HELD:
            effects += self.ledger.void(execution.token)
            self._remove(execution)
            return effects
        if execution.state is ExecutionState.AWAY and execution.to:
            self.onward.release(execution, execution.to)
        self.work.drop(execution.token)
        self._by_id.pop(execution.id, None)
        if execution.token in self.work.running:
            execution.state, execution.request = ExecutionState.GONE, None
            return effects
        return effects + self._let_go(execution)

    def _let_go(self, execution: StageExecution) -> list[Effect]:
        self.executions.pop(execution.token)
        return [Forget((execution.token,))]

    def _remove(self, execution: StageExecution) -> None:
        self.doubts.forget(execution.id)
        self.executions.pop(execution.token)
        self._by_id.pop(execution.id, None)

    # Work for the compute thread

    def _quiet(self) -> bool:
        """Whether no execution here is between its forward and its backward pass."""
        if self.stage.overlap:
            return True
        waiting = self.work.waiting
        return all(
            execution.state is ExecutionState.HELD or token in waiting for token, execution in self.executions.items()
        )

    def _draining(self) -> bool:
        """Whether gradients wait for a step: what came between now would be computed with weights of two versions."""
        return self.ledger.waiting and not self.stage.overlap

    def _is_older(self) -> Callable[[int], bool]:
        """While gradients wait for a step: which forward passes may still begin. Those of micro-batches that are older
        than one that is between its passes here.

        They make the step wait longer, but not for ever: what is new is younger. Were all kept back, two peers that
        each wait for a micro-batch whose forward pass the other one keeps back would wait until they give them up. So
        the oldest of all is kept back by none that is kept back itself (wait-die: Rosenkrantz, Stearns, Lewis 1978).
        """
        waiting = self.work.waiting
        between = [
            execution.order
            for token, execution in self.executions.items()
            if execution.state in COMPUTING_STATES and token not in waiting
        ]
        youngest = max(between, default=None)
        return lambda token: youngest is not None and self.executions[token].order < youngest

    def _begin_more(self, now: Seconds) -> list[Effect]:
        """Our own micro-batches, as many as the window has room for, while the compute thread has nothing better."""
        jobs: list[Effect] = []
        self._look_at = None
        alone = self.stage.last == self.stage.layers and not self.stage.synchronous
        if not self.active or self.draining or self.stage.first > 0 or alone:
            return jobs
        own = sum(execution.own for execution in self.executions.values())
        while self._may_begin(own):
            end = self.onward.end(0)
            if end < self.stage.layers and not self.view.successors(end):
                self._look_at = now + SUCCESSOR_RETRY_S
                break
            execution = self._new_execution(ExecutionId(self.stage.peer, 0, 0), end, now, self.stage.peer)
            execution.own, execution.until = True, now + budget_s(self.window.typical_s())
            jobs.append(self.work.begin(Draw(execution.token, execution.last)))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _may_begin(self, own: int) -> bool:
        idle = not self.work.full and self._has_room(0)
        return idle and own < self.window.size and self.quota != 0 and not self._draining()

    def _new_execution(self, name: ExecutionId, last: int, now: Seconds, asker: PeerId) -> StageExecution:
        self._last_token += 1
        room = self.workload.room_of(name.first, last)
        execution = StageExecution(
            self._last_token, name, last, room, False, now, now, now, asker, now, round=self.round
        )
        self.executions[execution.token] = execution
        return execution

    # Synchronous rounds

    def begin_round(self, round: int, active: bool, quota: int) -> list[Effect]:
        """The weights are those of this round. Micro-batches that came early are of it now."""
        self.round, self.active, self.quota, self._wake = round, active, quota, None
        early, self._early = self._early, []
        effects: list[Effect] = []
        for job in early:
            execution = self.executions.get(job.token)
            if execution is not None and execution.state is ExecutionState.FORWARD and active:
                self.work.push(job)
            elif execution is not None:
                effects += self._give_up(execution, Reason.NOT_READY)
        return effects

    @property
    def all_begun_are_over(self) -> bool:
        """Whether our own micro-batches of the round are through, or given up."""
        return self.quota == 0 and not any(
            execution.own and execution.state is not ExecutionState.GONE for execution in self.executions.values()
        )

    def give_up_own(self) -> list[Effect]:
        """Nobody is left to carry what we begin."""
        self.quota, self._wake = 0, None
        own = [
            execution
            for execution in self.executions.values()
            if execution.own and execution.state is not ExecutionState.GONE
        ]
        return [effect for execution in own for effect in self._give_up(execution, Reason.GONE)]

    def end_round(self, everything: bool = False) -> list[Effect]:
        """Nothing more of it counts: what is under way is let go of. `everything`: also what came early."""
        self._wake = None
        effects: list[Effect] = []
        for execution in list(self.executions.values()):
            if execution.state is ExecutionState.GONE or (execution.round > self.round and not everything):
                continue
            if execution.state is ExecutionState.HELD:
                self._remove(execution)
            else:
                effects += self._give_up(execution, Reason.LATE)
        return effects


__all__ = ["Router"]
