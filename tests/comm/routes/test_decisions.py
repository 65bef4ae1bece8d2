"""Outboxes: what peers are told of executions, one question at a time."""

from decentral.comm.routes.commits import DECISIONS_KEPT, CommitProtocol
from decentral.comm.routes.tags import CommitDecisionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, Done, ExecutionId, Hop
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.ids import PeerId, RunId

A, B = PeerId("A"), PeerId("B")
DONE = Answered(CommitDecisionTag(), A, Envelope(Done()), 0.1, 0.1, 100, 10)
LOST = AskFailed(CommitDecisionTag(), A, "deadline", 5.0)


def execution(number: int) -> ExecutionId:
    return ExecutionId("S", number, 1)


def told(asks: list[Ask]) -> list[tuple[PeerId, list[int], list[int]]]:
    found = []
    for ask in asks:
        decision = ask.envelope.message
        assert isinstance(decision, CommitDecision)
        found.append((ask.to, [one.number for one in decision.commit], [one.number for one in decision.abort]))
    return found


def test_what_comes_up_while_a_peer_is_asked_travels_with_the_next_question() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)])
    boxes.abort(B, execution(2))
    assert told(boxes.tell()) == [(A, [1], []), (B, [], [2])]
    boxes.commit(execution(3), [Hop(A, 1, 2)])
    boxes.abort(A, execution(4))
    assert boxes.tell() == []
    boxes.told(DONE)
    assert told(boxes.tell()) == [(A, [3], [4])]


def test_a_peer_that_has_heard_everything_is_forgotten() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)])
    boxes.tell()
    boxes.told(DONE)
    assert boxes.tell() == []
    assert not boxes.boxes


def test_no_more_is_kept_for_a_peer_that_does_not_answer_than_the_newest() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    for number in range(3 * DECISIONS_KEPT):
        boxes.commit(execution(number), [Hop(A, 1, 2)])
    assert len(boxes.boxes[A].commit) <= DECISIONS_KEPT + 1
    ((_, counted, _),) = told(boxes.tell())
    assert len(counted) == MAX_EXECUTIONS
    assert counted[0] >= 2 * DECISIONS_KEPT - 1


def test_a_micro_batch_is_committed_to_a_peer_once_however_often_it_comes_to_it() -> None:
    """Killed, it goes on from its checkpoint and knows no more what counts there; then it gets the same as an audit."""
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2), Hop(B, 2, 3)])
    boxes.tell()
    assert boxes.answer(A, [execution(1)], ()).commit == (execution(1),), "its question has crossed ours"
    boxes.told(DONE)
    assert boxes.answer(A, [execution(1)], ()).abort == (execution(1),)
    other = ExecutionId("S", 1, 2)
    assert boxes.answer(B, [other], ()).commit == (other,), "B has not answered yet"


def test_a_peer_that_may_not_have_heard_of_a_commit_hears_of_it_when_it_asks() -> None:
    boxes = CommitProtocol(RunId("run"), PeerId("S"))
    boxes.commit(execution(1), [Hop(A, 1, 2)])
    boxes.tell()
    boxes.told(LOST)
    assert boxes.answer(A, [execution(1)], ()).commit == (execution(1),)
