"""Of the peers that could be next, the one that is through first gets it; and how long to wait when all are busy."""

from decentral.comm.pipeline.offers import FEW, LONGEST_PAUSE_S, Offers, pause_s
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ForwardRequest, Load, Offer, Refused
from decentral.comm.wire.transport import Ask, Asked, Reply
from decentral.core.ids import PeerId
from tests.comm.pipeline.route_world import RUN, World, cuts_of, layout

A, B = PeerId("A"), PeerId("B")
CUTS = cuts_of([100, 100, 100, 100])


def load(wait_s: float, seconds: float, last: int = 4) -> Load:
    return Load(RUN, wait_s, seconds, last)


def chosen(first: Load | None, second: Load | None, parts: tuple[float, float] = (0.5, 0.5)) -> PeerId | None:
    offers = Offers({A, B})
    offers.answered(A, first, parts[0])
    assert offers.asked == {B}
    offers.answered(B, second, parts[1])
    return offers.best


def test_the_one_where_less_waits_is_chosen() -> None:
    assert chosen(load(3.0, 1.0), load(1.0, 1.0)) == B


def test_a_slow_device_that_idles_goes_before_a_fast_one_with_a_queue() -> None:
    assert chosen(load(2.0, 1.0), load(0.0, 4.0)) == B


def test_of_two_that_idle_the_one_that_takes_it_farther_is_chosen() -> None:
    assert chosen(load(0.0, 1.0), load(0.0, 2.0), (0.1, 0.4)) == B


def test_a_peer_that_refuses_or_is_gone_is_not_chosen() -> None:
    assert chosen(None, load(9.0, 1.0)) == B
    assert chosen(None, None) is None


def test_pauses_grow_with_refusals_up_to_what_an_execution_takes() -> None:
    pauses = [pause_s(refusals, 60.0) for refusals in range(0, 120, 6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0
    assert pause_s(1000, 0.1) == LONGEST_PAUSE_S


def many(seconds: float = 1.0) -> World:
    """One origin peer, and more ends than it sends to without a question; one of them is busy with others' work."""
    world = World(CUTS)
    world.add("S", 0, 2, seconds=seconds)
    for number in range(FEW + 2):
        world.add(f"E{number}", 2, 4, seconds=seconds)
    return world


def test_where_many_could_be_next_activations_go_to_one_that_was_asked_first() -> None:
    world = many()
    asked: list[tuple[str, PeerId]] = []

    def seen(now: float, ask: Ask) -> bool:
        if isinstance(ask.envelope.message, Offer | ForwardRequest):
            asked.append((type(ask.envelope.message).__name__, ask.to))
        return False

    world.loses = seen
    world.start()
    world.run(20.0)
    assert world.peers[PeerId("S")].routes.completed > 20
    sent = [to for kind, to in asked if kind == "ForwardRequest"]
    offers = [to for kind, to in asked if kind == "Offer"]
    assert set(sent) <= set(offers)
    assert len(offers) >= (FEW + 2) * len(sent)  # so few holders are all asked
    assert len(set(sent)) == FEW + 2  # all ends get their share


def test_a_peer_without_memory_says_so_before_anything_is_sent() -> None:
    world = World(CUTS)
    end = world.add("E", 2, 4, capacity=2)
    world.start()
    for number in range(2):
        request = ForwardRequest(RUN, "S", number, 2, 1, 5.0, 20.0, layout(2, 1))
        end.routes.handle(Asked(number, PeerId("M"), Envelope(request, bytes(20))), 1.0)
    (reply,) = end.routes.handle(Asked(7, PeerId("M"), Envelope(Offer(RUN, 2, 1))), 1.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("busy")
    (reply,) = end.routes.handle(Asked(8, PeerId("M"), Envelope(Offer(RUN, 1, 1))), 1.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("span")
