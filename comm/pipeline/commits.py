"""Two-phase commit of a micro-batch's gradients: its origin peer decides, and informs each peer of its route.

`CommitProtocol` sends and answers the messages, at both ends:

    at the origin peer    all gradients of the route are there --> commit to each hop; keep the route, to answer queries
    at a hop              gradients held --decision--> committed or aborted in the ledger (ExecutionLifecycle.decided)
                                         --wait------> CommitQuery to the origin peer, which answers:
                                                         --> committed or aborted: done
                                                         --> in flight: asked again, after twice the time
                                                         --> no answer: its micro-batches at this peer are aborted

So a lost CommitDecision, a killed origin peer, or a route that has changed costs only a short wait. If an origin peer
that still runs does not answer, its micro-batches here do not count at this stage; nothing else is lost.

`HoldLimits` bounds how long gradients wait for an origin peer's decision, by how long earlier decisions took. A sum
waits for every execution in it, so an origin peer that answers "in flight" for an hour would stop our steps for an
hour. After a few times the usual wait the execution is aborted, and the origin peer is made to rest: for a while, this
peer computes nothing for it. All unproven origin peers, which have committed nothing here since they last ran out of
time, must rest as well. So an attacker with many names blocks at most a tenth of the time, and origin peers that commit
are not affected.
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

COMMIT_DECISION_S: Seconds = 5.0  # a peer must acknowledge a CommitDecision within this time
DECISIONS_KEPT = 4096  # we queue at most this many commits, and as many aborts, for a peer; it must ask for older ones
IN_DOUBT_S = 1.0  # if an origin peer's usual time to decide is not known, we wait at least this long before we ask it
LATE_TIMES = 2.0  # we ask an origin peer for its decision after this many times its usual time to decide
LEAST_IN_DOUBT_S = 0.5  # we wait at least this long before we ask, however fast the origin peer usually decides
COMMIT_QUERY_S = 3.0  # a CommitQuery's deadline is at most this; an origin peer that takes longer counts as gone
ANSWER_TIMES = 3.0  # a CommitQuery's deadline is LOST_S plus this many times the origin peer's usual time to decide
LOST_S = 1.0  # a CommitQuery's deadline includes this time, so that a lost packet can be sent again
COMMITS_KEPT = 4096  # an origin peer remembers its latest COMMITS_KEPT routes, to answer commit queries
PEERS_CREDITED = 4096  # for at most this many other peers, we count how much they have computed

# Constants of `HoldLimits`, which limits how long gradients await a decision, and refuses origin peers that are late

USUAL_TIMES = 4.0  # gradients may await a decision for this many times the usual wait or, if longer, a route's time
MOST_TOOK_S = 100.0  # a longer usual time counts as this, so that no limit is longer than MOST_REST_S
LEAST_LIMIT_S = 60.0  # gradients may always await a decision this long: the origin peer may be slow, or its link cut
UNDECIDED_REST_TIMES = 9.0  # an origin peer is refused for this many times as long as it left gradients undecided
MOST_REST_S = 3600.0  # an origin peer's executions are refused for at most this long
# A refusal lasts at least twice as long as the last one if the last one ended less than this many times its length ago.
REMEMBERED_TIMES = 2.0
ORIGINS_KEPT = 1024  # we store the usual time to decide of this many origin peers, and the refusals of as many


@dataclass(slots=True)
class DecisionOutbox:
    """Our decisions for one other peer: those that are queued, and those in an unanswered CommitDecision."""

    commit: list[ExecutionId] = field(default_factory=list)
    abort: list[ExecutionId] = field(default_factory=list)
    asking: bool = False  # True while a CommitDecision to the peer is unanswered
    under_way: tuple[ExecutionId, ...] = ()  # commits in the unanswered CommitDecision


@dataclass(slots=True)
class CommitProtocol:
    """Sends and answers the messages of the two-phase commit: decisions to hops, and queries to origin peers."""

    run: RunId
    peer: PeerId
    boxes: dict[PeerId, DecisionOutbox] = field(default_factory=dict)
    # Peer -> what it has computed of committed micro-batches, in tokens times layers: of ours, and of the peer's own
    # micro-batches that it has sent to us directly.
    computed: dict[PeerId, int] = field(default_factory=dict)
    # The hops of each committed route, as (peer, first layer), by micro-batch number.
    _routes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)
    # For each execution in doubt: (when the next CommitQuery about it is sent, seconds from then until the one after).
    _due: dict[ExecutionId, tuple[Seconds, Seconds]] = field(default_factory=dict)
    # For each origin peer with an unanswered CommitQuery: the executions in the query.
    _asking: dict[PeerId, tuple[ExecutionId, ...]] = field(default_factory=dict)

    # Each peer gets one CommitDecision at a time, with all decisions that are queued for it.

    def commit(self, id: ExecutionId, hops: Sequence[Hop], tokens: int) -> None:
        """Queue the commit of our micro-batch `id` for each hop of its route; keep the route, to answer queries."""
        for hop in hops:
            self.credit(PeerId(hop.peer), tokens * (hop.last - hop.first))
            self._box(PeerId(hop.peer)).commit.append(ExecutionId(id.origin, id.number, hop.first))
        keep_latest(self._routes, id.number, frozenset((hop.peer, hop.first) for hop in hops), COMMITS_KEPT)

    def credit(self, peer: PeerId, token_layers: int) -> None:
        """Count that a peer has computed `token_layers` (tokens times layers) more of committed micro-batches."""
        keep_latest(self.computed, peer, self.computed.get(peer, 0) + token_layers, PEERS_CREDITED)

    def abort(self, peer: PeerId, execution: ExecutionId) -> None:
        """Queue the abort of an execution at this peer, for the next CommitDecision to the peer."""
        self._box(peer).abort.append(execution)

    def _box(self, peer: PeerId) -> DecisionOutbox:
        box = self.boxes.setdefault(peer, DecisionOutbox())
        del box.commit[:-DECISIONS_KEPT], box.abort[:-DECISIONS_KEPT]
        return box

    def told(self, outcome: Answered | AskFailed) -> None:
        """Record whether a peer has acknowledged our CommitDecision.

        Once the peer has acknowledged a commit, its later queries about that execution are answered with an abort. Such
        a query comes from a peer that restarted from an older checkpoint and got the micro-batch again in an audit,
        where the micro-batch must not count.
        """
        box = self.boxes.setdefault(outcome.peer, DecisionOutbox())
        box.asking, committed, box.under_way = False, box.under_way, ()
        for one in committed if isinstance(outcome, Answered) else ():
            if one.number in self._routes:
                self._routes[one.number] -= {(outcome.peer, one.first)}

    def tell(self) -> list[Ask]:
        """Return a CommitDecision for each peer with queued decisions and no unanswered CommitDecision."""
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
        """Return our decision on executions at another peer, as the answer to its CommitQuery.

        An origin peer that was restarted has no record of its old routes, so it answers with aborts.

        Args:
            asker: The peer that sent the query and has the executions.
            executions: The executions in its query; executions of other origin peers are ignored.
            under_way: Numbers of our micro-batches that are in flight; the decision does not name them.
        """
        over = [one for one in executions if one.origin == self.peer and one.number not in under_way]
        commit = tuple(one for one in over if (asker, one.first) in self._routes.get(one.number, ()))
        return CommitDecision(self.run, commit, tuple(one for one in over if one not in commit))

    @property
    def wake_at(self) -> Seconds | None:
        """Return when the next CommitQuery is due; None if no execution is in doubt."""
        return earliest(at for execution, (at, _) in self._due.items() if execution.origin not in self._asking)

    def ask_later(self, execution: ExecutionId, now: Seconds, took_s: Seconds, usual_s: Seconds | None) -> None:
        """Set when to ask the origin peer about an execution whose gradients are in doubt from now on.

        Args:
            execution: The execution at this peer.
            now: Present time.
            took_s: Seconds that the execution took, from its arrival here to the end of its route and back.
            usual_s: Seconds that the execution's origin peer usually takes to decide; None if unknown.
        """
        wait_s = max(IN_DOUBT_S, took_s / 4)
        if usual_s is not None:
            wait_s = min(wait_s, max(LEAST_IN_DOUBT_S, LATE_TIMES * usual_s))
        self._due[execution] = (now + wait_s, 2 * wait_s)

    def forget(self, execution: ExecutionId) -> None:
        """Stop asking about an execution, because it is decided or given up."""
        self._due.pop(execution, None)

    def ask(self, now: Seconds, usual_s: Callable[[PeerId], Seconds | None]) -> list[Ask]:
        """Return the CommitQuery messages that are due: each asks an origin peer whether it has committed executions.

        An origin peer gets one query at a time, about at most MAX_EXECUTIONS executions. Each query about an execution
        doubles the wait until the next query about it.

        Args:
            now: Present time.
            usual_s: Returns the seconds that an origin peer usually takes to decide, or None if they are not known. The
                deadline of the query depends on them.
        """
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
        """Record that the CommitQuery to this origin peer failed, so that the next CommitQuery may be sent to it."""
        self._asking.pop(origin, None)

    def answered(self, event: Answered) -> CommitDecision:
        """Record the answer to a CommitQuery, and return its decisions on the executions that the query named."""
        asked = set(self._asking.pop(event.peer, ()))
        decision = event.envelope.message
        if not isinstance(decision, CommitDecision):
            return CommitDecision(self.run, (), ())
        commit, abort = (tuple(one for one in said if one in asked) for said in (decision.commit, decision.abort))
        return CommitDecision(decision.run, commit, abort)


@dataclass(slots=True)
class HoldLimits:
    """Limits how long gradients wait for a decision; origin peers that do not decide in time have to rest.

    While an origin peer rests, this peer refuses its executions. An origin peer is proven if it has committed an
    execution here and has not run out of time since.
    """

    _waits: dict[PeerId, Seconds] = field(default_factory=dict)  # proven origin peer -> its usual time to decide
    # For each origin peer: (end, length) of the last period in which its executions were refused.
    _rests: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)
    _unproven_rest_until: Seconds = 0.0
    _blocked: tuple[Seconds, Seconds] = (0.0, 0.0)  # (begin, end) of the latest time with undecided executions

    def limit_s(self, took_s: Seconds, route_s: Seconds) -> Seconds:
        """Return the seconds for which an execution may stay in doubt.

        Args:
            took_s: Seconds that the execution took, from its arrival here to the end of its route and back. Later
                peers may have delayed it, so no more than MOST_TOOK_S counts.
            route_s: Seconds that a micro-batch takes through the whole model, by this peer's own measurements.
        """
        usual_s = median_low(self._waits.values()) if self._waits else 0.0
        return max(LEAST_LIMIT_S, USUAL_TIMES * max(usual_s, route_s, min(took_s, MOST_TOOK_S)))

    def rests(self, origin: PeerId, now: Seconds) -> bool:
        """Return whether this origin peer rests now, so that none of its executions is accepted.

        While no origin peer is proven, an origin peer rests only for its own failures. Otherwise all of
        them would rest.
        """
        proven = origin in self._waits or not self._waits
        return now < self._rests.get(origin, (0.0, 0.0))[0] or (not proven and now < self._unproven_rest_until)

    def usual_s(self, origin: PeerId) -> Seconds | None:
        """Return how long gradients usually wait here until this origin peer commits them, in seconds.

        The result is a moving average; it is None for an origin peer that is not proven.
        """
        return self._waits.get(origin)

    def committed(self, origin: PeerId, waited_s: Seconds) -> None:
        """Record that an origin peer committed an execution after it was held for `waited_s` seconds."""
        before_s = self._waits.get(origin, waited_s)
        keep_latest(self._waits, origin, before_s + NEWEST_WEIGHT * (waited_s - before_s), ORIGINS_KEPT)

    def ran_out(self, origin: PeerId, held_s: Seconds, now: Seconds) -> None:
        """Refuse an origin peer's executions for a while, because it left an execution undecided for `held_s` seconds.

        The origin peer is then no longer proven, and all other unproven origin peers are refused with it.
        """
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
