"""Two-phase commit of a micro-batch's gradients: its origin peer decides, and each peer of its route is told.

    at the origin peer    all gradients of the route are there --> commit to each hop; kept, to answer commit queries
    at a hop              gradients held --decision--> committed or aborted in the ledger (ExecutionLifecycle.decided)
                                         --wait------> the origin peer is asked what became of them:
                                                         --> committed or aborted, as if it had told us by itself
                                                         --> still under way: asked again, after twice the time
                                                         --> no answer: it is gone, and its micro-batches are aborted

So a lost CommitDecision, a killed origin peer, and a route that left this peer aside cost only a moment. If a living
origin peer is taken for dead, its micro-batches here do not count at this stage, and nothing worse happens.

How long gradients in doubt are held for an origin peer, whatever it asks for, follows from what decisions took us
before (`HoldLimits`). A sum waits for every execution in it, so an origin peer that says "still under way" for an hour
would stop our steps for an hour. After a few times the usual wait its execution is aborted, and it rests. So do all
origin peers together that have not committed anything here yet, or not since they ran out of time: whoever has many
names blocks us for a tenth of the time, and those that commit are not concerned.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT
from decentral.comm.pipeline.tags import CommitDecisionTag, CommitQueryTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, CommitQuery, ExecutionId, Hop
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.ids import PeerId, RunId
from decentral.core.latest import keep_latest
from decentral.core.machine import earliest
from decentral.core.units import Seconds

COMMIT_DECISION_S: Seconds = 5.0  # deadline of a CommitDecision
DECISIONS_KEPT = 4096  # decisions of either kind that wait for one peer; older ones run out of time there
IN_DOUBT_S = 1.0  # an execution is held for at least so long before its origin peer is asked ...
LATE_TIMES = 2.0  # ... or for so many times as long as this one usually takes to decide, if that is sooner ...
LEAST_IN_DOUBT_S = 0.5  # ... but for so long: where gradients are exact, steps wait until a silent one is found out
COMMIT_QUERY_S = 3.0  # most for the answer to a CommitQuery; an origin peer that takes longer is gone ...
ANSWER_TIMES = 3.0  # it may take so many times as long as decisions usually take, ...
LOST_S = 1.0  # ... and as long as a packet takes that was lost once
COMMITS_KEPT = 4096  # routes that an origin peer remembers, to answer commit queries

# Limits of what is held in doubt

USUAL_TIMES = 4.0  # what decisions usually take, or a micro-batch through the whole model
LEAST_LIMIT_S = 60.0  # a slow origin peer's own passes, and a link that is cut for a while
UNDECIDED_REST_TIMES = 9.0  # as long as the execution was held: a tenth of the time is lost at most
MOST_REST_S = 3600.0
REMEMBERED_TIMES = 2.0  # a rest's length after its end, in which the next one is twice as long
ORIGINS_KEPT = 1024  # origin peers, of either kind


@dataclass(slots=True)
class DecisionOutbox:
    """The decisions that one peer has not been told yet."""

    commit: list[ExecutionId] = field(default_factory=list)
    abort: list[ExecutionId] = field(default_factory=list)
    asking: bool = False
    under_way: tuple[ExecutionId, ...] = ()  # commits in the question that it has not answered yet


@dataclass(slots=True)
class CommitProtocol:
    run: RunId
    peer: PeerId
    boxes: dict[PeerId, DecisionOutbox] = field(default_factory=dict)
    _routes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # by number: (peer, first layer)
    _due: dict[ExecutionId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # when, and the wait after that
    _asking: dict[PeerId, tuple[ExecutionId, ...]] = field(default_factory=dict)

    # What others are told: one question at a time to each; what comes up meanwhile travels with the next

    def commit(self, id: ExecutionId, hops: Sequence[Hop]) -> None:
        """A micro-batch of ours has its gradients at every hop: from now on they count."""
        for hop in hops:
            self._box(PeerId(hop.peer)).commit.append(ExecutionId(id.origin, id.number, hop.first))
        keep_latest(self._routes, id.number, frozenset((hop.peer, hop.first) for hop in hops), COMMITS_KEPT)

    def abort(self, peer: PeerId, execution: ExecutionId) -> None:
        self._box(peer).abort.append(execution)

    def _box(self, peer: PeerId) -> DecisionOutbox:
        box = self.boxes.setdefault(peer, DecisionOutbox())
        del box.commit[:-DECISIONS_KEPT], box.abort[:-DECISIONS_KEPT]
        return box

    def told(self, outcome: Answered | AskFailed) -> None:
        """The last question to this peer was answered, or failed.

        What it knows to be committed is committed to it once: a peer that was killed and goes on from its checkpoint
        has forgotten what counts there, and the micro-batch may come to it again, to be audited.
        """
        box = self.boxes.setdefault(outcome.peer, DecisionOutbox())
        box.asking, committed, box.under_way = False, box.under_way, ()
        for one in committed if isinstance(outcome, Answered) else ():
            if one.number in self._routes:
                self._routes[one.number] -= {(outcome.peer, one.first)}

    def tell(self) -> list[Ask]:
        asks: list[Ask] = []
        for peer, box in list(self.boxes.items()):
            if box.asking:
                continue
            if not (box.commit or box.abort):
                del self.boxes[peer]
                continue
            told = CommitDecision(self.run, tuple(box.commit[:MAX_EXECUTIONS]), tuple(box.abort[:MAX_EXECUTIONS]))
            del box.commit[:MAX_EXECUTIONS], box.abort[:MAX_EXECUTIONS]
            box.asking, box.under_way = True, told.commit
            asks.append(Ask(CommitDecisionTag(), peer, Envelope(told), COMMIT_DECISION_S))
        return asks

    def answer(self, asker: PeerId, executions: Sequence[ExecutionId], under_way: Collection[int]) -> CommitDecision:
        """Decides on executions at the asker of which this peer is the origin. What is still under way is left out.

        A peer that was restarted knows none of its old routes, and so aborts them.
        """
        over = [one for one in executions if one.origin == self.peer and one.number not in under_way]
        commit = tuple(one for one in over if (asker, one.first) in self._routes.get(one.number, ()))
        return CommitDecision(self.run, commit, tuple(one for one in over if one not in commit))

    # What others are asked: which held executions they have decided on

    @property
    def wake_at(self) -> Seconds | None:
        return earliest(at for execution, (at, _) in self._due.items() if execution.origin not in self._asking)

    def hold(self, execution: ExecutionId, now: Seconds, took_s: Seconds, usual_s: Seconds | None) -> None:
        """`took_s`: from here to the end of its route and back. The way back to the origin peer takes about as long.
        `usual_s`: how long its origin peer usually takes to decide."""
        wait_s = max(IN_DOUBT_S, took_s / 4)
        if usual_s is not None:
            wait_s = min(wait_s, max(LEAST_IN_DOUBT_S, LATE_TIMES * usual_s))
        self._due[execution] = (now + wait_s, 2 * wait_s)

    def forget(self, execution: ExecutionId) -> None:
        self._due.pop(execution, None)

    def ask(self, now: Seconds, usual_s: Callable[[PeerId], Seconds | None]) -> list[Ask]:
        """One question at a time to each origin peer, about all of its executions that are due. `usual_s`: how long it
        usually takes to decide; by that goes how long it may take to answer."""
        due: dict[PeerId, list[ExecutionId]] = {}
        for execution, (at, _) in self._due.items():
            if at <= now and execution.origin not in self._asking:
                due.setdefault(PeerId(execution.origin), []).append(execution)
        asks = []
        for origin, executions in due.items():
            self._asking[origin] = asked = tuple(executions[:MAX_EXECUTIONS])
            for execution in asked:
                wait_s = self._due[execution][1]
                self._due[execution] = (now + wait_s, 2 * wait_s)
            decides_s = usual_s(origin)
            answers_s = COMMIT_QUERY_S if decides_s is None else LOST_S + ANSWER_TIMES * decides_s
            query = Envelope(CommitQuery(self.run, asked))
            asks.append(Ask(CommitQueryTag(), origin, query, min(COMMIT_QUERY_S, answers_s)))
        return asks

    def unanswered(self, origin: PeerId) -> None:
        """Our question to this origin peer has failed."""
        self._asking.pop(origin, None)

    def answered(self, event: Answered) -> CommitDecision:
        """What the answer to our question decides."""
        asked = set(self._asking.pop(event.peer, ()))
        decision = event.envelope.message
        if not isinstance(decision, CommitDecision):
            return CommitDecision(self.run, (), ())
        commit, abort = (tuple(one for one in said if one in asked) for said in (decision.commit, decision.abort))
        return CommitDecision(decision.run, commit, abort)


@dataclass(slots=True)
class HoldLimits:
    _waits: dict[PeerId, Seconds] = field(default_factory=dict)  # of who commits: from our gradients to the decision
    _rests: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # until when, and how long
    _unproven_rest_until: Seconds = 0.0
    _blocked: tuple[Seconds, Seconds] = (0.0, 0.0)  # the last time in which executions that ran out were held

    def limit_s(self, route_s: Seconds) -> Seconds:
        """How long an execution may be held. `route_s`: of a micro-batch through the model, by our own figures."""
        usual_s = median_low(self._waits.values()) if self._waits else 0.0
        return max(LEAST_LIMIT_S, USUAL_TIMES * max(usual_s, route_s))

    def rests(self, origin: PeerId, now: Seconds) -> bool:
        """Whether nothing is computed for this origin peer now.

        While nobody has committed anything here, the others do not rest with it: there would be nobody left.
        """
        proven = origin in self._waits or not self._waits
        return now < self._rests.get(origin, (0.0, 0.0))[0] or (not proven and now < self._unproven_rest_until)

    def usual_s(self, origin: PeerId) -> Seconds | None:
        """How long this origin peer usually takes to decide; None: it has committed nothing here lately."""
        return self._waits.get(origin)

    def committed(self, origin: PeerId, waited_s: Seconds) -> None:
        before_s = self._waits.get(origin, waited_s)
        keep_latest(self._waits, origin, before_s + NEWEST_WEIGHT * (waited_s - before_s), ORIGINS_KEPT)

    def ran_out(self, origin: PeerId, held_s: Seconds, now: Seconds) -> None:
        """The origin peer has not decided in time."""
        self._waits.pop(origin, None)
        until, before_s = self._rests.get(origin, (0.0, 0.0))
        rest_s = UNDECIDED_REST_TIMES * held_s
        if now < until + REMEMBERED_TIMES * before_s:
            rest_s = max(rest_s, 2 * before_s)
        rest_s = min(MOST_REST_S, rest_s)
        keep_latest(self._rests, origin, (now + rest_s, rest_s), ORIGINS_KEPT)
        began, ended = self._blocked
        self._blocked = (began if now - held_s <= ended else now - held_s), now
        self._unproven_rest_until = now + min(MOST_REST_S, UNDECIDED_REST_TIMES * (now - self._blocked[0]))
