"""Outboxes: what peers are told of executions, one question at a time."""

import pytest

from decentral.comm.pipeline.commits import COMMIT_QUERY_S, DECISIONS_KEPT, IN_DOUBT_S, LEAST_IN_DOUBT_S, CommitProtocol
from decentral.comm.pipeline.execution import ForwardedExecution
from decentral.comm.pipeline.ledger import GradientLedger
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.pipeline.tags import CommitDecisionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, Done, ExecutionId, Hop, Refused
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Reply
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Forward
from decentral.core.reasons import Reason
from tests.comm.pipeline.one_form import one_form
from tests.comm.pipeline.route_world import View, World

A, B = PeerId("A"), PeerId("B")
DONE = Answered(CommitDecisionTag(), A, Envelope(Done()), 0.1, 0.1, 100, 10)
LOST = AskFailed(CommitDecisionTag(), A, "deadline", 5.0)


def execution(number: int) -> ExecutionId:
    return execution_of(PeerId("S"), number)


def execution_of(origin: PeerId, number: int) -> ExecutionId:
    return ExecutionId(origin, number, 1)


def told(asks: list[Ask]) -> list[tuple[PeerId, list[int], list[int]]]:
    found = []
    for ask in asks:
        decision = ask.envelope.message
        assert isinstance(decision, CommitDecision)
        found.append((ask.to, [one.number for one in decision.commit], [one.number for one in decision.abort]))
    return found


def test_what_comes_up_while_a_peer_is_asked_travels_with_the_next_question() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)], 8)
    boxes.abort(B, execution(2))
    assert told(boxes.tell()) == [(A, [1], []), (B, [], [2])]
    boxes.commit(execution(3), [Hop(A, 1, 2)], 8)
    boxes.abort(A, execution(4))
    assert boxes.tell() == []
    boxes.told(DONE)
    assert told(boxes.tell()) == [(A, [3], [4])]


def test_a_peer_that_has_heard_everything_is_forgotten() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)], 8)
    boxes.tell()
    boxes.told(DONE)
    assert boxes.tell() == []
    assert not boxes.boxes


def test_no_more_is_kept_for_a_peer_that_does_not_answer_than_the_newest() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    for number in range(3 * DECISIONS_KEPT):
        boxes.commit(execution(number), [Hop(A, 1, 2)], 8)
    assert len(boxes.boxes[A].commit) <= DECISIONS_KEPT + 1
    ((_, counted, _),) = told(boxes.tell())
    assert len(counted) == MAX_EXECUTIONS
    assert counted[0] >= 2 * DECISIONS_KEPT - 1


def test_a_micro_batch_is_committed_to_a_peer_once_however_often_it_comes_to_it() -> None:
    """Killed, it goes on from its checkpoint and knows no more what counts there; then it gets the same as an audit."""
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2), Hop(B, 2, 3)], 8)
    boxes.tell()
    assert boxes.answer(A, [execution(1)], ()).commit == (execution(1),), "its question has crossed ours"
    boxes.told(DONE)
    assert boxes.answer(A, [execution(1)], ()).abort == (execution(1),)
    other = ExecutionId("S", 1, 2)
    assert boxes.answer(B, [other], ()).commit == (other,), "B has not answered yet"


def test_a_peer_that_may_not_have_heard_of_a_commit_hears_of_it_when_it_asks() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)], 8)
    boxes.tell()
    boxes.told(LOST)
    assert boxes.answer(A, [execution(1)], ()).commit == (execution(1),)


@pytest.mark.parametrize(
    ("took_s", "usual_s", "asked_after_s", "answers_within_s"),
    [
        (0.1, None, IN_DOUBT_S, COMMIT_QUERY_S),
        (0.1, 0.05, LEAST_IN_DOUBT_S, 1.15),
        (0.1, 0.4, 0.8, 2.2),
        (8.0, 0.7, 1.4, COMMIT_QUERY_S),
        (8.0, 5.0, 2.0, COMMIT_QUERY_S),
    ],
)
def test_an_origin_peer_is_asked_and_given_up_the_sooner_the_sooner_it_usually_decides(
    took_s: float, usual_s: float | None, asked_after_s: float, answers_within_s: float
) -> None:
    commits = CommitProtocol(RunId("run"), PeerId("S"))
    commits.ask_later(execution_of(A, 1), 0.0, took_s, usual_s)
    assert commits.wake_at == asked_after_s
    (ask,) = commits.ask(asked_after_s, lambda origin: usual_s)
    assert ask.deadline_s == pytest.approx(answers_within_s)


@pytest.mark.parametrize(("exact", "left"), [(True, [2, 3]), (False, [1, 2, 3])])
def test_of_an_origin_peer_that_does_not_answer_only_what_it_has_sent_here_itself_and_waits_is_given_up(
    exact: bool, left: list[int]
) -> None:
    """The next sum with that would wait for it, too. What another peer has sent on is that one's to withdraw, and what
    the training thread has is computed whatever we say: asked for again, it would be in a sum twice."""
    own = RunId("run"), PeerId("S"), 1, 2, (Fragment(0, 0, 1, 100), Fragment(1, 1, 2, 100))
    stage = StageConfig(*own, 8, 4, 1, lambda layer, sequences: one_form(()), overlap=not exact)
    routes = Router(stage, View(World([]), stage.peer), GradientLedger(1))
    table = routes.table
    for number, asker in ((1, A), (2, B), (3, A)):
        table.add(
            ForwardedExecution(
                local_id=number,
                id=execution_of(A, number),
                last=2,
                memory_share=1.0,
                started_at=0.0,
                until=99.0,
                drawn=0.0,
                round=0,
                askers={asker: 10 + number},
                answer_by=99.0,
            )
        )
        if number != 3:
            table.jobs.push(Forward(number, 1, 2, 1, (), b""))
    replies = [effect for effect in routes.lifecycle.origin_is_gone(A) if isinstance(effect, Reply)]
    assert replies == [Reply(11, Envelope(Refused(Reason.MOVED)))][: 3 - len(left)]
    assert [one.id.number for one in table.by_local_id.values()] == left
