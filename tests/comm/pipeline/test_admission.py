"""Where memory is full, older micro-batches come before younger ones, wherever they arrive."""

from decentral.comm.pipeline.router import Router
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ForwardRequest, Load, Offer, Refused
from decentral.comm.wire.transport import Asked, Effect, Reply
from decentral.core import jobs
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from tests.comm.pipeline.route_world import RUN, TOKENS, World, layout

CUTS = tuple(Fragment(index, index, index + 1, 100) for index in range(4))
M = PeerId("M")


def full(first: int, last: int) -> Router:
    """A peer with memory for four, which has micro-batches 1 to 4; the last is the youngest. Its thread has 1 and 2."""
    routes = World(CUTS).add("C", first, last, capacity=4).routes
    routes.start()
    for number in range(1, 5):
        assert not refused(ask(routes, number, drawn=10.0 + number))
    return routes


def ask(routes: Router, number: int, drawn: float, origin: str = "S") -> list[Effect]:
    first = routes.stage.first
    request = ForwardRequest(RUN, origin, number, first, 1, 60.0, 60.0, layout(first, 1), drawn=drawn)
    return routes.handle(Asked(number, M, Envelope(request, bytes(20))), 1.0)


def refused(effects: list[Effect]) -> list[tuple[int, str]]:
    messages = [(one.request, one.envelope.message) for one in effects if isinstance(one, Reply)]
    return [(request, message.reason) for request, message in messages if isinstance(message, Refused)]


def numbers(routes: Router) -> set[int]:
    return {execution.id.number for execution in routes.executions.values()}


def test_an_older_micro_batch_takes_the_place_of_the_youngest_that_has_not_begun() -> None:
    routes = full(2, 4)
    assert refused(ask(routes, 5, drawn=1.0)) == [(4, "busy")]
    assert numbers(routes) == {1, 2, 3, 5}


def test_an_origin_peer_with_half_of_the_memory_takes_none_from_another() -> None:
    """Its micro-batches claim to be the oldest of all."""
    routes = World(CUTS).add("C", 2, 4, capacity=8).routes
    routes.start()
    for number in range(1, 9):
        ask(routes, number, drawn=10.0 + number)
    for number in range(11, 19):
        ask(routes, number, drawn=0.0, origin="L")
    assert len([number for number in numbers(routes) if number > 10]) == 4


def test_a_younger_micro_batch_is_refused_and_displaces_nobody() -> None:
    routes = full(2, 4)
    assert refused(ask(routes, 5, drawn=99.0)) == [(5, "busy")]
    assert numbers(routes) == {1, 2, 3, 4}


def test_a_pass_that_has_begun_is_displaced_by_nobody() -> None:
    routes = full(2, 4)
    for number in (5, 6):
        assert not [one for one in refused(ask(routes, number, drawn=1.0)) if one[0] == number]
    assert numbers(routes) == {1, 2, 5, 6}
    assert refused(ask(routes, 7, drawn=2.0)) == [(7, "busy")]


def test_a_micro_batch_for_which_no_next_peer_has_memory_makes_way_for_an_older_one() -> None:
    routes = full(1, 2)  # nobody holds layer 2
    for local_id in range(1, 5):
        routes.handle(jobs.ForwardDone(local_id, 0, 1, TOKENS, layout(2, 1), bytes(20)), 2.0)
    assert refused(ask(routes, 5, drawn=1.0)) == [(4, "busy")]
    assert numbers(routes) == {1, 2, 3, 5}


def test_a_full_peer_accepts_offers_of_older_micro_batches_only() -> None:
    routes, said = full(2, 4), []
    for drawn in (1.0, 99.0):
        (reply,) = routes.handle(Asked(9, M, Envelope(Offer(RUN, 2, 1, drawn))), 1.0)
        assert isinstance(reply, Reply)
        said.append(type(reply.envelope.message))
    assert said == [Load, Refused]
    assert numbers(routes) == {1, 2, 3, 4}
