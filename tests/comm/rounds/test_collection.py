"""Members are asked for what they have to say, and the others where members are gone, with the same result for all."""

from decentral.comm.rounds.collection import COLLECT_RETRY_S, GONE_S, Collection, Wanted
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Done, Message, Refused
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId

X, B, C = PeerId("X"), PeerId("B"), PeerId("C")


class OnlyDone:
    """A round that takes nothing else."""

    def accept(self, wanted: Wanted, envelope: Envelope) -> None:
        if not isinstance(envelope.message, Done):
            raise ProtocolError("unexpected", "only Done is good here")

    def deadline_s(self, peer: PeerId, size: int) -> float:
        return 3.0


def collection(others: tuple[PeerId, ...] = (B, C), size: int = 0) -> Collection:
    found = Collection("run", 7, True, OnlyDone())
    found.want(X, None, size, others, 0.0)
    return found


def asked(found: Collection, now: float) -> list[Ask]:
    return [effect for effect in found.ask(now) if isinstance(effect, Ask)]


def answered(ask: Ask, message: Message, seconds: float = 0.1) -> Answered:
    return Answered(ask.tag, ask.to, Envelope(message), seconds, seconds, 0, 0)


def gone(found: Collection) -> list[Ask]:
    """Lets X fail from 0 s on, and returns the questions to the others that follow."""
    now = 0.0
    while not found.wanted[X, None].origin_lost:
        (ask,) = asked(found, now)
        assert ask.to == X
        found.handle(AskFailed(ask.tag, X, "unreachable", 0.0), now)
        now += COLLECT_RETRY_S
    assert now >= GONE_S
    return asked(found, now)


def test_the_origin_is_asked_until_it_is_done() -> None:
    found = collection()
    (ask,) = asked(found, 0.0)
    assert isinstance(ask.envelope.message, CollectRequest)
    found.handle(answered(ask, Refused("nothing-newer"), seconds=3.0), 3.0)
    (again,) = asked(found, 3.0)
    assert (again.to, found.complete) == (X, False)
    found.handle(answered(again, Done()), 3.1)
    assert found.complete
    assert found.answer_for(X, None) == Envelope(Done())


def test_an_origin_that_lives_is_never_given_up() -> None:
    found = collection()
    for second in range(100):
        (ask,) = asked(found, second)
        found.handle(answered(ask, Refused("nothing-newer"), seconds=0.9), second + 0.9)
    assert not found.wanted[X, None].origin_lost


def test_when_the_origin_is_gone_the_others_are_asked() -> None:
    found = collection()
    b, c = gone(found)
    assert {b.to, c.to} == {B, C}
    found.handle(answered(b, Refused("without")), 6.0)
    assert not found.complete
    found.handle(answered(c, Done()), 6.1)
    assert found.complete
    assert found.answer_for(X, None) == Envelope(Done())


def test_a_report_that_nobody_has_is_over() -> None:
    found = collection()
    for ask in gone(found):
        found.handle(answered(ask, Refused("without")), 6.0)
    assert found.complete
    assert found.answer_for(X, None) == Envelope(Refused("without"))
    assert found.wanted[X, None].reason == "unreachable"


def test_others_are_told_that_we_go_without_it_only_when_we_have_given_the_origin_up() -> None:
    found = collection()
    asked(found, 0.0)
    assert found.answer_for(X, None) is None
    gone(collection_ := collection())
    assert collection_.answer_for(X, None) == Envelope(Refused("without"))


def test_an_answer_of_an_origin_that_was_given_up_comes_too_late() -> None:
    found = collection()
    (ask,) = asked(found, 0.0)
    found.wanted[X, None].lose_origin("gone", 1.0)
    found.handle(answered(ask, Done()), 1.1)
    assert found.answer_for(X, None) == Envelope(Refused("without"))


def test_another_member_that_is_gone_too_is_not_waited_for() -> None:
    found = collection(others=(B,))
    (b,) = gone(found)
    found.handle(AskFailed(b.tag, B, "deadline", 6.0), 12.0)
    assert found.complete


def test_a_large_blob_is_asked_of_one_other_at_a_time() -> None:
    assert len(gone(collection(size=1000))) == 1


def test_an_origin_that_answers_nonsense_counts_as_gone() -> None:
    found = collection()
    (ask,) = asked(found, 0.0)
    found.handle(answered(ask, Refused("nothing-newer", "x")), 0.1)
    (ask,) = asked(found, 1.0)
    found.handle(Answered(ask.tag, X, Envelope(CollectRequest("run", 7, "X", None, 1.0, True)), 0.1, 0.1, 0, 0), 1.1)
    assert found.wanted[X, None].reason == "unexpected"


def test_a_peer_that_hears_that_the_others_have_gone_on_knows_that_it_is_behind() -> None:
    for reason in ("late", "expelled"):
        found = collection()
        (ask,) = asked(found, 0.0)
        found.handle(answered(ask, Refused(reason)), 0.1)
        assert found.behind == reason
