"""An origin peer that does not decide holds up a peer's steps for a short time, and not again and again."""

import pytest

from decentral.comm.pipeline.commits import LEAST_LIMIT_S, MOST_REST_S, ORIGINS_KEPT, UNDECIDED_REST_TIMES, HoldLimits
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.tags import CommitQueryTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CommitDecision, CommitQuery, ExecutionId, ForwardRequest
from decentral.comm.wire.transport import Answered, Ask, Asked, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.machine import Woke
from tests.comm.pipeline.route_world import RUN, Device, World, cuts_of, layout

LIAR, HONEST = PeerId("liar"), PeerId("honest")


class LastStage:
    """The last peer of routes, whose origin peers are a liar, that is always still at work, and an honest one."""

    def __init__(self) -> None:
        self.device = Device(end=2)
        peer = World(cuts_of([100, 100])).add("last", 1, 2, overlap=False, device=self.device)
        self.routes: Router = peer.routes
        self.routes.start()
        self.now, self.asked = 0.0, 0

    def handle(self, event: Event) -> list[Effect]:
        found: list[Effect] = []
        waiting = list(self.routes.handle(event, self.now))
        while waiting:
            match waiting.pop(0):
                case Ask(CommitQueryTag() as tag, to, Envelope(CommitQuery(executions=executions))):
                    said = Envelope(CommitDecision(RUN, executions if to == HONEST else (), ()))
                    waiting += self.routes.handle(Answered(tag, to, said, 0.01, 0.01, 1, 1), self.now)
                case Ask() | Reply() as effect:
                    found.append(effect)
                case effect if type(effect).__module__.endswith("core.jobs"):
                    waiting += self.routes.handle(self.device.do(effect), self.now)
        return found

    def take(self, origin: PeerId, hold_s: float = 3600.0) -> bool:
        """Whether an execution is taken."""
        self.asked += 1
        request = ForwardRequest(RUN, origin, self.asked, 1, 1, 60.0, hold_s, layout(1, 1), 0, 0.0)
        found = self.handle(Asked(self.asked, origin, Envelope(request, bytes(20))))
        return not any(isinstance(effect, Reply) and "busy" in str(effect.envelope.message) for effect in found)

    def commit(self, origin: PeerId) -> None:
        decision = CommitDecision(RUN, (ExecutionId(origin, self.asked, 1),), ())
        self.handle(Asked(10_000 + self.asked, origin, Envelope(decision)))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.routes.wake_at or end) if (self.routes.wake_at or end) > self.now else self.now + 1
            self.handle(Woke())

    def steps_in(self, seconds: float) -> int:
        """How many steps are taken with the honest peer's micro-batches, one in ten seconds."""
        before = len(self.device.taken)
        for _ in range(int(seconds / 10)):
            if self.take(HONEST):
                self.commit(HONEST)
            self.pass_time(10.0)
        return len(self.device.taken) - before


def test_an_origin_peer_that_asks_for_an_hour_holds_up_our_steps_for_a_minute() -> None:
    last = LastStage()
    assert last.steps_in(100.0) == 10
    assert last.take(LIAR)
    assert last.steps_in(LEAST_LIMIT_S + 100.0) >= 9


@pytest.mark.parametrize("known", [True, False])
def test_whoever_was_stopped_itself_blames_no_origin_peer_that_has_not_decided(known: bool) -> None:
    """In an hour of faults the only peer with the last layers was frozen for a minute, and then rested for nine."""
    last, stopped_s = LastStage(), LEAST_LIMIT_S + 5.0
    last.steps_in(100.0)
    assert last.take(LIAR)
    last.now += stopped_s
    if known:
        last.routes.was_stopped(stopped_s)
    last.handle(Woke())
    assert last.take(PeerId("newcomer")) == known


def test_one_that_does_it_again_and_again_under_ever_new_names_costs_a_part_of_the_time() -> None:
    last = LastStage()
    last.steps_in(100.0)
    steps = 0
    for number in range(360):
        if not last.take(LIAR):
            last.take(PeerId(f"{LIAR} {number}"))
        steps += last.steps_in(10.0)
    assert steps > 0.8 * 360


def test_what_usually_takes_long_is_waited_for() -> None:
    limits = HoldLimits()
    assert limits.limit_s(0.0, 100.0) == 400.0
    assert limits.limit_s(30.0, 1.0) == 120.0
    assert limits.limit_s(3000.0, 1.0) == MOST_REST_S / UNDECIDED_REST_TIMES
    for origin, waited_s in (("A", 50.0), ("B", 60.0), ("liar", 3000.0)):
        limits.committed(PeerId(origin), waited_s)
    assert limits.limit_s(0.0, 1.0) == 240.0


def test_who_commits_is_taken_while_others_rest_and_who_fails_again_rests_longer() -> None:
    limits = HoldLimits()
    limits.committed(HONEST, 1.0)
    limits.ran_out(LIAR, 60.0, 100.0)
    stranger = PeerId("stranger")
    assert [limits.rests(one, 101.0) for one in (LIAR, stranger, HONEST)] == [True, True, False]
    end = 100.0 + UNDECIDED_REST_TIMES * 60.0
    assert [limits.rests(one, end) for one in (LIAR, stranger, HONEST)] == [False, False, False]
    limits.ran_out(LIAR, 60.0, end)
    assert limits.rests(LIAR, end + 2 * UNDECIDED_REST_TIMES * 60.0 - 1)
    assert not limits.rests(LIAR, end + MOST_REST_S)


def test_of_so_many_origin_peers_something_is_remembered() -> None:
    limits = HoldLimits()
    for number in range(2 * ORIGINS_KEPT):
        limits.committed(PeerId(f"a{number}"), 1.0)
        limits.ran_out(PeerId(f"b{number}"), 1.0, 1.0)
    assert len(limits._waits) == len(limits._rests) == ORIGINS_KEPT
