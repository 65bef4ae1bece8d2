"""Routes in virtual time: what is lost, late, killed or asked twice, each layer counts a micro-batch once at most."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from decentral import audit
from decentral.comm.codec import Envelope
from decentral.comm.leg import Stage
from decentral.comm.messages import Carry, Carrying, Hop, LegId, Refused, Returned, Settle, Unsettled
from decentral.comm.pace import DEADLINE_FLOOR_S, Prior
from decentral.comm.route import Routes
from decentral.comm.transport import Answered, Ask, Asked, Reply
from decentral.comm.workload import MOST_HELD
from decentral.core import jobs
from decentral.core.ids import PeerId
from tests.comm.route_world import RUN, Device, World, cuts_of, is_settle, layout

CUTS = cuts_of([100, 100, 100, 100])


def two_pipelines(delay_s: float = 0.01) -> World:
    """A and B start; C and D end; M and N lie in the middle, across."""
    world = World(CUTS, delay_s)
    for name, first, last in (("A", 0, 2), ("B", 0, 2), ("C", 2, 4), ("D", 2, 4), ("M", 1, 3), ("N", 1, 3)):
        world.add(name, first, last)
    return world


def result(world: World) -> audit.Audit:
    return audit.audit(world.lines(), len(CUTS))


def settled_down(world: World) -> None:
    """No new micro-batches; what is under way ends, and all is told."""
    for peer in world.peers.values():
        peer.routes.quota = 0
    world.run(200.0)


def test_every_layer_counts_every_micro_batch_once() -> None:
    world = two_pipelines()
    world.start()
    world.run(30.0)
    completed = sum(peer.routes.completed for peer in world.peers.values())
    settled_down(world)
    found = result(world)
    assert found.sound
    assert found.in_part == 0
    assert found.everywhere >= completed > 300
    assert found.dropped == 0


def test_the_journal_says_what_the_devices_took() -> None:
    world = two_pipelines()
    world.start()
    world.run(5.0)
    settled_down(world)
    for peer in world.peers.values():
        legs = [one for line in peer.lines if line["event"] == "counted" for one in line["of"]]
        taken: list[tuple[int, ...]] = peer.device.taken  # type: ignore[attr-defined]
        assert sum(map(len, taken)) == len(legs)


def test_starters_that_hand_on_to_each_other_do_not_wait_for_each_other() -> None:
    """Exact gradients: A's micro-batches go on at B, and B's at A, while both have gradients that wait for a step."""
    world = World(CUTS)
    for name, first, last in (("A", 0, 3), ("B", 0, 3), ("C", 3, 4)):
        peer = world.add(name, first, last, overlap=False)
        peer.routes.onward.prior = Prior(ends={0: {2: 1.0}, 2: {3: 1.0}})
    world.start()
    completed = [0]
    for _ in range(20):
        world.run(1.0)
        completed.append(sum(peer.routes.completed for peer in world.peers.values()))
    assert min(after - before for before, after in pairwise(completed)) > 0
    settled_down(world)
    assert result(world).sound
    assert result(world).in_part == 0


@pytest.mark.parametrize("victim", ["B", "C", "M"])
def test_a_peer_that_is_killed_costs_no_micro_batch_twice_and_the_others_go_on(victim: str) -> None:
    world = two_pipelines()
    world.start()
    world.run(10.0)
    world.kill(victim)
    starter = world.peers[PeerId("A")].routes
    before = starter.completed
    world.run(10.0)
    assert starter.completed > before + 50
    settled_down(world)
    assert result(world).sound


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_or_killed_nothing_counts_twice(seed: int) -> None:
    rng = Random(seed)
    world = two_pipelines(delay_s=rng.choice([0.001, 0.05, 0.3]))
    world.loses = lambda now, ask: rng.random() < 0.03
    world.start()
    for victim in rng.sample("BCM", 2):
        world.run(rng.uniform(1.0, 8.0))
        world.kill(victim)
    world.run(20.0)
    settled_down(world)
    found = result(world)
    assert found.sound
    assert found.everywhere > 0
    for peer in world.peers.values():
        assert not peer.routes.legs
        assert not peer.device.held  # type: ignore[attr-defined]


def lost(ask: Ask) -> bool:
    """What a starter says of held gradients, of itself or when it is asked."""
    return isinstance(ask.envelope.message, Settle | Unsettled)


def test_a_settle_that_is_lost_is_asked_for() -> None:
    world = World(CUTS)
    world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.loses = lambda now, ask: is_settle(ask)
    world.start()
    world.run(60.0)
    settled_down(world)
    found = result(world)
    assert found.sound
    assert found.in_part == found.dropped == 0
    assert found.everywhere > 100


def test_without_a_word_of_its_starter_a_layer_stays_uncounted_and_nothing_stops() -> None:
    world = World(CUTS)
    world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.loses = lambda now, ask: lost(ask) and now < 2.0
    world.start()
    world.run(120.0)
    settled_down(world)
    found = result(world)
    assert found.sound
    assert found.in_part > 0
    assert found.everywhere > 100


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_a_starter_that_was_killed_hold_up_the_others_for_less_than_two_deadlines(overlap: bool) -> None:
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("B", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last, seconds=2.0, overlap=overlap)  # slow, so that legs are held for long
    world.start()
    world.run(20.0)
    world.kill("B")
    killed_at = world.now
    starter = world.peers[PeerId("A")]
    before, steps = starter.routes.ledger.counted, []
    while world.now < killed_at + 20.0:
        world.run(0.1)
        if starter.routes.ledger.counted > before:
            before = starter.routes.ledger.counted
            steps.append(world.now)
    gaps = [late - early for early, late in pairwise([killed_at, *steps, world.now])]
    assert max(gaps) < 2 * DEADLINE_FLOOR_S
    settled_down(world)
    assert result(world).sound


def test_a_restarted_starter_does_not_know_its_old_routes_and_says_so() -> None:
    world = World(CUTS)
    starter = world.add("A", 0, 2)
    world.start()
    legs = (LegId("A", 7, 2), LegId("B", 8, 2))
    effects = starter.routes.handle(Asked(1, PeerId("C"), Envelope(Unsettled(RUN, legs))), 1.0)
    assert [one for one in effects if isinstance(one, Reply)] == [Reply(1, Envelope(Settle(RUN, (), legs[:1])))]


def test_a_hop_that_the_route_left_aside_is_told_so_when_it_asks() -> None:
    world = World(CUTS)
    starter = world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.start()
    world.run(5.0)
    (number,) = list(starter.routes._settled._routes)[-1:]
    leg = LegId("A", number, 2)
    for asker, answer in (("C", Settle(RUN, (leg,), ())), ("D", Settle(RUN, (), (leg,)))):
        effects = starter.routes.handle(Asked(9, PeerId(asker), Envelope(Unsettled(RUN, (leg,)))), world.now)
        assert Reply(9, Envelope(answer)) in effects


def test_a_leg_that_is_asked_for_again_is_carried_once_and_its_gradient_sent_again() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4)
    world.start()
    carry = Carry(RUN, "S", 7, 2, 1, 5.0, 20.0, layout(2, 1))
    seen: list[Reply] = []
    keep = world._carry

    def watched(peer: object, effect: object) -> None:
        if isinstance(effect, Reply):
            seen.append(effect)
        keep(peer, effect)  # type: ignore[arg-type]

    world._carry = watched  # type: ignore[method-assign]
    for number, asker in ((1, "M"), (2, "N")):
        world._handle(last, Asked(number, PeerId(asker), Envelope(carry, bytes(20))))
        world.run(0.2)  # before it doubts S, who is not there
    assert [reply.request for reply in seen] == [1, 2]
    assert seen[0].envelope == seen[1].envelope
    assert isinstance(seen[0].envelope.message, Returned)
    assert seen[0].envelope.message.hops == (Hop("C", 2, 4),)
    assert last.device.legs == [] or len(last.device.legs) == 1  # type: ignore[attr-defined]
    settle = Settle(RUN, (LegId("S", 7, 2),), ())
    world._handle(last, Asked(3, PeerId("X"), Envelope(settle)))  # not its starter
    world.run(0.2)
    assert not [line for line in last.lines if line["event"] == "counted"]
    world._handle(last, Asked(4, PeerId("S"), Envelope(settle)))
    world._handle(last, Asked(5, PeerId("S"), Envelope(settle)))
    world.run(0.2)
    assert [line["of"] for line in last.lines if line["event"] == "counted"] == [[["S", 7, 2, 4, 8]]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 0}, "span"),
        ({"first": 1}, "span"),
        ({"first": 4}, "span"),
        ({"starter": "C"}, "span"),
        ({"sequences": 65}, "span"),
        ({"layout": layout(2, 1)[:1]}, "shape"),
        ({"patience_s": 0.0}, "late"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_word(change: dict[str, object], reason: str) -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4)
    world.start()
    fields = {"run": RUN, "starter": "S", "number": 7, "first": 2, "sequences": 1, "patience_s": 5.0, "hold_s": 20.0}
    carry = Carry(**{**fields, "layout": layout(2, 1), **change})  # type: ignore[arg-type]
    effects = last.routes.handle(Asked(1, PeerId("M"), Envelope(carry, bytes(20))), 1.0)
    assert effects == [Reply(1, Envelope(Refused(reason)))]


def test_more_legs_than_the_memory_takes_are_refused() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4, capacity=3)
    world.start()
    replies = []
    for number in range(5):
        carry = Carry(RUN, "S", number, 2, 1, 5.0, 20.0, layout(2, 1))
        effects = last.routes.handle(Asked(number, PeerId("M"), Envelope(carry, bytes(20))), 1.0)
        replies += [effect for effect in effects if isinstance(effect, Reply)]
    assert replies == [Reply(3, Envelope(Refused("busy"))), Reply(4, Envelope(Refused("busy")))]


def test_legs_through_a_part_of_the_span_take_as_much_less_memory() -> None:
    world = World(CUTS)
    last = world.add("C", 1, 4, capacity=2, activations=(1, 6, 2, 2))
    world.start()

    def refused(number: int, first: int) -> bool:
        carry = Carry(RUN, "S", number, first, 1, 5.0, 20.0, layout(first, 1))
        effects = last.routes.handle(Asked(number, PeerId("M"), Envelope(carry, bytes(20))), 1.0)
        return Reply(number, Envelope(Refused("busy"))) in effects

    assert [refused(number, 2) for number in range(4)] == [False] * 4  # 4 times 4/10 of the span
    assert refused(4, 1)
    assert not refused(5, 2)


def test_legs_that_are_only_held_leave_their_room_to_others_up_to_a_limit() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4, capacity=2)
    world.start()

    def ask(number: int) -> list[object]:
        carry = Carry(RUN, "S", number, 2, 1, 5.0, 50.0, layout(2, 1))
        seen = last.routes.handle(Asked(number, PeerId("M"), Envelope(carry, bytes(20))), world.now)
        for effect in seen:
            world._carry(last, effect)
        world.run(0.1)  # forward, backward, answered: now it is held until its starter has settled it
        return [effect for effect in seen if isinstance(effect, Reply)]

    assert [ask(number) for number in range(MOST_HELD * 2)] == [[]] * (MOST_HELD * 2)
    assert ask(99) == [Reply(99, Envelope(Refused("busy")))]


@pytest.mark.parametrize(("number", "stages"), [(7, [Stage.HELD]), (8, [Stage.HELD, Stage.FORWARD])])
def test_what_is_held_of_a_micro_batch_does_not_keep_it_waiting_when_it_comes_by_another_way(
    number: int, stages: list[Stage]
) -> None:
    """Its sum would wait for the starter, the starter for this leg, and this leg for a step that takes the sum."""
    world = World(CUTS)
    last = world.add("C", 1, 4, overlap=False)
    world.start()

    def ask(number: int, first: int) -> None:
        carry = Carry(RUN, "S", number, first, 1, 5.0, 50.0, layout(first, 1))
        for effect in last.routes.handle(Asked(first, PeerId("M"), Envelope(carry, bytes(20))), world.now):
            world._carry(last, effect)
        world.run(0.5)

    ask(7, 2)  # held: its starter has not settled it
    ask(number, 1)
    assert [leg.stage for leg in last.routes.legs.values()] == stages


def test_a_backward_pass_goes_before_forward_passes() -> None:
    world = World(CUTS)
    middle = world.add("M", 1, 3)
    world.add("C", 2, 4)
    world.start()

    def asked(number: int) -> list[object]:
        carry = Carry(RUN, "S", number, 1, 1, 5.0, 20.0, layout(1, 1))
        return middle.routes.handle(Asked(number, PeerId("A"), Envelope(carry, bytes(20))), 1.0)

    assert [type(effect) for effect in asked(1)] == [jobs.Forward]
    (ask,) = (
        e for e in middle.routes.handle(middle.device.do(jobs.Forward(1, 1, 3, 1, (), b"")), 1.1) if isinstance(e, Ask)
    )
    assert [type(effect) for number in (2, 3, 4) for effect in asked(number)] == [jobs.Forward, jobs.Forward]
    returned = Envelope(Returned(RUN, 1.0, 8, (Hop("C", 3, 4),), layout(3, 1)[:1]), bytes(16))
    assert middle.routes.handle(Answered(ask.tag, ask.to, returned, 0.1, 0, 0), 1.2) == []
    done = middle.device.do(jobs.Forward(2, 1, 3, 1, (), b""))
    effects = middle.routes.handle(done, 1.3)
    assert [type(effect) for effect in effects if not isinstance(effect, Ask)] == [jobs.Backward]


def test_while_a_step_waits_only_micro_batches_older_than_one_under_way_here_begin() -> None:
    """Exact gradients. Were all kept back, peers that wait for each other's forward passes would wait for ever."""
    world = World(CUTS)
    middle = world.add("M", 1, 3, overlap=False)
    world.add("C", 3, 4)
    world.start()

    def carried(number: int, drawn: float) -> list[int]:
        """The legs whose forward passes begin when this micro-batch comes."""
        carry = Carry(RUN, "S", number, 1, 1, 5.0, 20.0, layout(1, 1), 0, drawn)
        effects = middle.routes.handle(Asked(number, PeerId("A"), Envelope(carry, bytes(20))), 1.0)
        return [effect.token for effect in effects if isinstance(effect, jobs.Forward)]

    def sent_on(token: int) -> Ask:
        effects = middle.routes.handle(middle.device.do(jobs.Forward(token, 1, 3, 1, (), b"")), 1.1)
        (ask,) = (effect for effect in effects if isinstance(effect, Ask))
        return ask

    assert carried(1, drawn=50.0) == [1]
    sent_on(1)
    assert carried(2, drawn=40.0) == [2]
    ask = sent_on(2)
    returned = Envelope(Returned(RUN, 1.0, 8, (Hop("C", 3, 4),), layout(3, 1)[:1]), bytes(16))
    middle.routes.handle(Answered(ask.tag, ask.to, returned, 0.1, 0, 0), 1.2)
    middle.routes.handle(middle.device.do(jobs.Backward(2, (), b"")), 1.3)
    assert middle.routes.ledger.waiting  # for the first one to come back, and then for a step
    assert carried(3, drawn=60.0) == []
    assert carried(4, drawn=30.0) == [4]


@pytest.mark.parametrize(
    "hops",
    [
        (),
        (Hop("C", 2, 3),),
        (Hop("C", 3, 4),),
        (Hop("D", 2, 4),),
        (Hop("C", 2, 3), Hop("D", 2, 4)),
        (Hop("C", 2, 2), Hop("D", 2, 4)),
    ],
)
def test_a_route_with_a_gap_is_no_answer(hops: tuple[Hop, ...]) -> None:
    world = World(CUTS)
    starter = world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.start()
    routes = starter.routes
    leg = next(iter(routes.legs.values()))
    (ask,) = (e for e in routes.handle(starter.device.do(jobs.Draw(leg.token, 2)), 0.1) if isinstance(e, Ask))
    returned = Envelope(Returned(RUN, 1.0, 8, hops, layout(2, 1)[:1]), bytes(16))
    effects = routes.handle(Answered(ask.tag, ask.to, returned, 0.1, 0, 0), 0.2)
    assert not [effect for effect in effects if isinstance(effect, jobs.Backward)]
    assert [effect.tag[:2] for effect in effects if isinstance(effect, Ask) and effect.tag[0] == "route"] == [
        ("route", leg.token)
    ]


def test_without_overlap_no_weights_change_between_a_forward_and_its_backward_pass() -> None:
    world = World(CUTS)
    peers = [world.add(name, *span, overlap=False) for name, span in (("A", (0, 2)), ("C", (2, 4)), ("M", (1, 3)))]
    versions: dict[tuple[str, int], int] = {}
    carried = 0
    for peer in peers:
        keep = peer.device.do

        def watched(job: object, keep: object = keep, name: str = peer.name, device: object = peer.device) -> object:
            nonlocal carried
            taken = len(device.taken)  # type: ignore[attr-defined]
            if isinstance(job, jobs.Draw | jobs.Forward):
                versions[name, job.token] = taken
            if isinstance(job, jobs.Backward):
                carried += 1
                assert versions[name, job.token] == taken
            return keep(job)  # type: ignore[operator]

        peer.device.do = watched  # type: ignore[method-assign]
    world.start()
    world.run(20.0)
    assert carried > 50
    assert result(world).sound


def test_without_overlap_lost_questions_do_not_stop_it_for_good() -> None:
    rng = Random(5)
    world = World(CUTS)
    for name, span in (("A", (0, 2)), ("B", (0, 2)), ("C", (2, 4)), ("D", (2, 4)), ("M", (1, 3))):
        world.add(name, *span, overlap=False)
    world.loses = lambda now, ask: now < 20.0 and rng.random() < 0.05
    world.start()
    world.run(100.0)
    before = sum(peer.routes.completed for peer in world.peers.values())
    world.run(20.0)
    assert sum(peer.routes.completed for peer in world.peers.values()) > before + 50
    assert result(world).sound


def test_a_leg_that_is_only_late_is_asked_after_and_not_sent_twice() -> None:
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last, seconds=1.0)
    sent: list[LegId] = []
    asked_after: list[Ask] = []

    def seen(now: float, ask: Ask) -> bool:
        match ask.envelope.message:
            case Carry() as carry:
                sent.append(LegId(carry.starter, carry.number, carry.first))
            case Carrying():
                asked_after.append(ask)
        return False

    world.loses = seen
    world.start()
    world.run(60.0)
    world.peers[PeerId("C")].seconds = world.peers[PeerId("D")].seconds = 4.0  # both later than any deadline
    world.run(60.0)
    assert asked_after
    assert len(sent) == len(set(sent))
    settled_down(world)
    assert result(world).sound


def test_who_does_not_know_of_a_leg_any_more_says_so_and_another_gets_it() -> None:
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last)
    world.start()
    world.run(5.0)
    starter, restarted = world.peers[PeerId("A")].routes, world.peers[PeerId("C")]
    assert restarted.routes.legs
    restarted.routes, restarted.device = Routes(restarted.routes.terms, restarted.routes.view, True), Device(end=4)
    world.forget_what_was_for("C")
    before = starter.completed
    world.run(DEADLINE_FLOOR_S + 20.0)
    assert starter.completed > before + 50
    settled_down(world)
    assert result(world).sound


def test_a_question_that_took_so_long_that_its_leg_is_counted_is_refused() -> None:
    world = World(CUTS)
    end = world.add("C", 2, 4)
    world.start()
    carry = Asked(1, PeerId("M"), Envelope(Carry(RUN, "S", 1, 2, 1, 5.0, 20.0, layout(2, 1)), bytes(20)))
    end.routes.handle(carry, 1.0)
    world.run(2.0)
    end.routes.handle(jobs.Backed(1, 8, 1.0, layout(2, 1)[:1], bytes(16)), 2.0)
    end.routes.handle(Asked(2, PeerId("S"), Envelope(Settle(RUN, (LegId("S", 1, 2),), ()))), 3.0)
    (reply,) = end.routes.handle(replace(carry, request=3), 4.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("counted")


def test_a_starter_keeps_room_for_legs_that_enter_behind_its_first_layer_and_for_its_own() -> None:
    world = World(CUTS)
    starter = world.add("A", 0, 3, capacity=16).routes
    ours = [starter._new_leg(LegId("A", number, 0), 3, 0.0, PeerId("A")) for number in range(14)]
    for leg in ours:
        leg.own = True
    assert not starter._has_room(0)
    assert starter._has_room(1)
    for leg in ours[10:]:
        starter.legs.pop(leg.token)
    starter.window.size = 16
    others = [starter._new_leg(LegId("B", number, 1), 3, 0.0, PeerId("B")) for number in range(2)]
    assert starter._has_room(0)
    assert not starter._has_room(1)  # what is left is wanted for micro-batches that only it can begin
    starter.window.size = 10
    assert starter._has_room(1)
    assert len(others) == 2
