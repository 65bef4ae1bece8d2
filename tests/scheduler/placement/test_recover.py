"""One peer takes the layers whose holders are gone, and all peers agree which one."""

from dataclasses import replace
from random import Random

from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds
from decentral.scheduler.placement.evaluate import TrainingPeer
from decentral.scheduler.placement.recover import (
    INITIALISE_AFTER_S,
    JOINING_S,
    RECOVERY_BACKOFF_S,
    RELIEF_PAUSE_S,
    RELIEF_TURN_S,
    RELIEVE_AFTER_S,
    RETURN_S,
    TURN_S,
    LayerRecovery,
    ranked,
)

CUTS = tuple(Fragment(index, index, index + 1, 100) for index in range(4))
NEEDS = MemoryNeeds(CUTS, (10,) * 4, (0,) * 4, (0,) * 4)


def members(**held: tuple[range, int]) -> dict[PeerId, TrainingPeer]:
    """Peers by name, each with its fragments and with memory for so many."""
    return {PeerId(name): TrainingPeer(span, 10 * fitting, 1.0) for name, (span, fitting) in held.items()}


SWARM = members(A=(range(0, 2), 2), B=(range(0, 2), 2), C=(range(1, 3), 2))  # fragment 3 is lost


class RecoveringSwarm:
    """The layer recovery of every peer of a swarm."""

    def __init__(self, swarm: dict[PeerId, TrainingPeer], retained: bool = True) -> None:
        self.swarm, self.retained, self.now = swarm, retained, 0.0
        self.recoveries = {name: LayerRecovery(name, NEEDS, Random(name)) for name in swarm}

    def pass_time(self, seconds: float) -> dict[PeerId, tuple[range, bool]]:
        """The moves that peers would begin at the end of this time."""
        end, found = self.now + seconds, {}
        while self.now < end:
            self.now += 0.5
            spans = {
                name: one.span_to_take(self.swarm, (), self.now, lambda index: self.retained)
                for name, one in self.recoveries.items()
            }
            found = {name: span for name, span in spans.items() if span is not None}
        return found


def test_one_takes_a_lost_layer_and_gives_up_only_what_others_hold() -> None:
    swarm = RecoveringSwarm(SWARM)
    assert swarm.pass_time(RECOVERY_BACKOFF_S + 1) == {"C": (range(2, 4), False)}


def test_the_next_one_has_its_turn_where_the_first_does_not_come() -> None:
    swarm = RecoveringSwarm(SWARM)
    swarm.pass_time(RECOVERY_BACKOFF_S)
    assert set(swarm.pass_time(TURN_S)) == {"A", "C"}


def test_a_holder_that_is_joining_is_waited_for_but_not_for_ever() -> None:
    """Anybody may say that it joins with all layers, for as long as it likes, and under one name after another."""
    one, end = LayerRecovery(PeerId("C"), NEEDS, Random(0)), int(JOINING_S)
    for second in range(end):
        joining = [range(4)] if second % 2 else [range(3, 4)]
        assert one.span_to_take(SWARM, joining, float(second), lambda index: True) is None
    one.span_to_take(SWARM, [range(4)], end, lambda index: True)  # the back-off begins
    assert one.span_to_take(SWARM, [range(4)], end + RECOVERY_BACKOFF_S, lambda index: True) == (range(2, 4), False)


def test_layers_that_stay_lost_begin_with_initial_weights() -> None:
    swarm = RecoveringSwarm(SWARM, retained=False)
    assert swarm.pass_time(INITIALISE_AFTER_S) == {}
    assert swarm.pass_time(RECOVERY_BACKOFF_S + 1) == {"C": (range(2, 4), True)}


def test_a_peer_waits_until_all_lost_layers_that_it_would_take_have_a_state() -> None:
    two = members(A=(range(0, 2), 2), B=(range(0, 2), 2))
    one = LayerRecovery(PeerId("A"), NEEDS, Random(0))
    found = [one.span_to_take(two, (), float(at), lambda index: index == 3) for at in range(int(INITIALISE_AFTER_S))]
    assert not any(found)
    assert not one.stuck
    one.span_to_take(two, (), 100.0, lambda index: True)
    assert one.span_to_take(two, (), 100.0 + RECOVERY_BACKOFF_S, lambda index: True) == (range(2, 4), False)


def test_layers_of_which_nobody_else_has_a_state_wait_long_for_a_holder_that_comes_back() -> None:
    """Its download may take many minutes, and initial weights that train would be taken for newer than its own."""
    one = LayerRecovery(PeerId("C"), NEEDS, Random(0))
    end = int(RETURN_S + INITIALISE_AFTER_S)
    found = [one.span_to_take(SWARM, [range(3, 4)], float(at), lambda index: False) for at in range(end + 3)]
    assert not any(found[:end])
    assert found[-1] == (range(2, 4), True)


def test_a_layer_that_comes_back_in_time_is_not_taken() -> None:
    swarm = RecoveringSwarm(SWARM, retained=False)
    swarm.pass_time(INITIALISE_AFTER_S - 1)
    full = SWARM | members(D=(range(2, 4), 2))
    for name, one in swarm.recoveries.items():
        assert one.span_to_take(full, (), swarm.now, lambda index: False) is None, name
    assert swarm.pass_time(INITIALISE_AFTER_S - 1) == {}


def test_before_anybody_has_trained_layers_begin_with_initial_weights_at_once() -> None:
    untrained = {name: replace(one, lr_step=0) for name, one in SWARM.items()}
    swarm = RecoveringSwarm(untrained, retained=False)
    assert swarm.pass_time(RECOVERY_BACKOFF_S + 1) == {"C": (range(2, 4), True)}


def test_recovery_is_stuck_while_no_single_move_gives_a_layer_a_holder() -> None:
    tight = members(A=(range(0, 2), 3), B=(range(2, 3), 1))  # A alone holds 0 and 1, B alone 2, nobody 3
    one = LayerRecovery(PeerId("A"), NEEDS, Random(0))
    assert one.span_to_take(tight, (), 0.0, lambda index: True) is None
    assert one.stuck
    one.span_to_take(tight, (), 1.0, lambda index: True, planned=[range(0, 3), range(3, 4)])
    assert not one.stuck  # a plan gives fragment 3 to B
    one.span_to_take(SWARM, (), 2.0, lambda index: True)
    assert not one.stuck  # C may take fragment 3


def test_nobody_leaves_a_layer_that_only_it_holds() -> None:
    assert ranked(NEEDS, members(A=(range(0, 2), 2), C=(range(2, 3), 1)), [3]) == []


def test_a_peer_with_memory_to_spare_comes_first() -> None:
    swarm = members(A=(range(0, 2), 2), B=(range(1, 3), 3), C=(range(0, 2), 2))
    assert ranked(NEEDS, swarm, [3])[0] == ("B", range(1, 4))


def test_of_several_lost_layers_as_many_as_fit_are_taken() -> None:
    swarm = members(A=(range(0, 2), 2), B=(range(0, 2), 2))
    assert ranked(NEEDS, swarm, [2, 3]) == [("A", range(2, 4)), ("B", range(2, 4))]


def test_where_only_peers_with_the_whole_model_hold_the_first_layers_one_with_a_part_takes_them() -> None:
    """They begin nothing for others: those with parts had nothing to do for good (seed 495583 of the sweep)."""
    idle = RecoveringSwarm(members(A=(range(0, 4), 4), B=(range(1, 4), 3), C=(range(2, 4), 2)), retained=False)
    assert idle.pass_time(RECOVERY_BACKOFF_S + 1) == {"B": (range(0, 3), False)}


def donating(swarm: dict[PeerId, TrainingPeer], *names: str) -> dict[PeerId, TrainingPeer]:
    """The same peers, of which these may not train on data of their own."""
    return {peer: replace(one, originates=peer not in names) for peer, one in swarm.items()}


def test_first_layers_at_which_only_donors_are_a_part_takes_that_may_begin_there() -> None:
    parts = members(A=(range(0, 2), 2), B=(range(0, 2), 2), C=(range(2, 4), 2), D=(range(2, 4), 2))
    assert RecoveringSwarm(donating(parts, "A")).pass_time(RECOVERY_BACKOFF_S + 1) == {}, "B begins"
    assert RecoveringSwarm(donating(parts, "A", "B")).pass_time(RECOVERY_BACKOFF_S + 1) == {"C": (range(0, 2), False)}
    assert RecoveringSwarm(donating(parts, *"ABCD")).pass_time(2 * TURN_S) == {}, "nobody may begin anywhere"


def test_a_donor_takes_lost_layers_but_no_first_ones() -> None:
    swarm = members(A=(range(2, 4), 2), B=(range(2, 4), 2), C=(range(2, 4), 2))
    assert ranked(NEEDS, donating(swarm, "A"), [0, 1])[:2] == [("B", range(0, 2)), ("C", range(0, 2))]
    assert ranked(NEEDS, donating(swarm, "A", "B", "C"), [0, 1])[0] == ("A", range(1, 3))
    assert ranked(NEEDS, donating(swarm, "A", "B", "C"), [0]) == []


def test_nobody_leaves_the_first_layers_to_donors() -> None:
    swarm = members(A=(range(0, 2), 2), B=(range(0, 2), 2), C=(range(0, 2), 2))
    assert ranked(NEEDS, donating(swarm, "B"), [3], 1) == [(peer, range(2, 4)) for peer in ("A", "B", "C")], (
        "of A and C one is left"
    )
    assert ranked(NEEDS, donating(swarm, "B", "C"), [3], 1) == [("B", range(2, 4)), ("C", range(2, 4))]
    two = members(A=(range(0, 2), 2), B=(range(0, 2), 2))
    assert ranked(NEEDS, donating(two, "B"), [2, 3]) == [("B", range(2, 4))]


def test_first_layers_that_a_part_holds_or_joins_with_are_left_to_it() -> None:
    swarm = members(A=(range(0, 4), 4), B=(range(1, 4), 3))
    one = LayerRecovery(PeerId("B"), NEEDS, Random(0))
    for second in range(100):
        assert one.span_to_take(swarm, [range(0, 2)], float(second), lambda index: True) is None
        assert one.span_to_take(swarm | members(C=(range(0, 2), 2)), (), float(second), lambda index: True) is None
        assert one.span_to_take(members(A=(range(0, 4), 4)), (), float(second), lambda index: True) is None
    assert one.span_to_take(swarm, [range(0, 4)], 100.0, lambda index: True) is None  # the back-off begins
    assert one.span_to_take(swarm, [range(0, 4)], 103.0, lambda index: True) == (range(0, 3), False)


class RelievingSwarm:
    """Who would take layers from peers with the whole model, of every peer of a swarm."""

    def __init__(self, swarm: dict[PeerId, TrainingPeer]) -> None:
        self.swarm, self.now = swarm, 0.0
        self.recoveries = {name: LayerRecovery(name, NEEDS, Random(name)) for name in swarm}

    def pass_time(self, seconds: float, joining: tuple[range, ...] = ()) -> dict[PeerId, range]:
        end, found = self.now + seconds, {}
        while self.now < end:
            self.now += 0.5
            spans = {
                name: one.span_to_relieve(self.swarm, joining, self.now, 2) for name, one in self.recoveries.items()
            }
            found = {name: span for name, span in spans.items() if span is not None}
        return found


CROWDED = members(A=(range(0, 2), 2), B=(range(0, 2), 2), C=(range(0, 2), 2), W=(range(0, 4), 4))


def test_what_only_whole_models_hold_for_long_one_part_takes_whatever_speeds_are_measured() -> None:
    swarm = RelievingSwarm(CROWDED)
    assert swarm.pass_time(RELIEVE_AFTER_S) == {}
    assert swarm.pass_time(1.0) == {"A": range(2, 4)}
    swarm.swarm = CROWDED | {PeerId("B"): TrainingPeer(range(0, 2), 20, 1.1)}
    assert swarm.pass_time(1.0) == {"A": range(2, 4)}


def test_a_part_that_has_tried_waits_ever_longer_until_nothing_is_left() -> None:
    swarm = RelievingSwarm(CROWDED)
    one, tried = swarm.recoveries[PeerId("A")], list[float]()
    for half_seconds in range(600):
        now = half_seconds / 2
        if one.span_to_relieve(CROWDED, (), now, 2) is not None:
            one.relief_tried(now)
            tried.append(now)
    assert tried == [RELIEVE_AFTER_S, RELIEVE_AFTER_S + RELIEF_PAUSE_S, RELIEVE_AFTER_S + 3 * RELIEF_PAUSE_S]
    full = CROWDED | members(D=(range(2, 4), 2))
    assert one.span_to_relieve(full, (), 300.0, 2) is None
    assert not one.is_left(range(2, 4))
    assert one.span_to_relieve(CROWDED, (), 301.0, 2) is None
    assert one.is_left(range(1, 3))
    assert one.span_to_relieve(CROWDED, (), 301.0 + RELIEVE_AFTER_S, 2) == range(2, 4)


def test_the_next_part_has_its_turn_much_later() -> None:
    swarm = RelievingSwarm(CROWDED)
    assert set(swarm.pass_time(RELIEVE_AFTER_S + RELIEF_TURN_S - 1)) == {"A"}
    assert set(swarm.pass_time(2.0)) == {"A", "B"}


def test_a_holder_that_is_back_or_joins_in_time_is_waited_for() -> None:
    swarm = RelievingSwarm(CROWDED)
    swarm.pass_time(RELIEVE_AFTER_S - 1)
    swarm.pass_time(1.0, joining=(range(2, 4),))
    assert swarm.pass_time(RELIEVE_AFTER_S) == {}
    assert swarm.pass_time(1.0, joining=(range(0, 4),)) == {"A": range(2, 4)}, "one with the whole model is no part"
    swarm.swarm = CROWDED | members(D=(range(2, 4), 2))
    assert swarm.pass_time(2 * RELIEVE_AFTER_S) == {}


def test_a_peer_that_joins_for_ever_keeps_nobody_from_them() -> None:
    swarm, joining = RelievingSwarm(CROWDED), (range(2, 4),)
    assert swarm.pass_time(JOINING_S + RELIEVE_AFTER_S, joining) == {}
    assert swarm.pass_time(1.0, joining) == {"A": range(2, 4)}


def test_no_part_takes_them_whose_own_layers_two_other_parts_do_not_hold() -> None:
    two = RelievingSwarm(members(A=(range(0, 2), 2), B=(range(0, 2), 2), W=(range(0, 4), 4), V=(range(0, 4), 4)))
    assert two.pass_time(3 * RELIEVE_AFTER_S) == {}


def test_lost_layers_and_first_ones_are_not_waited_for_here() -> None:
    lost = RelievingSwarm(members(A=(range(0, 2), 2), B=(range(0, 2), 2), C=(range(0, 2), 2)))
    assert lost.pass_time(2 * RELIEVE_AFTER_S) == {}
    first = RelievingSwarm(members(A=(range(2, 4), 2), B=(range(2, 4), 2), C=(range(2, 4), 2), W=(range(0, 4), 4)))
    assert first.pass_time(2 * RELIEVE_AFTER_S) == {}


def test_a_swarm_of_whole_models_has_nobody_to_relieve_them() -> None:
    assert RelievingSwarm(members(V=(range(0, 4), 4), W=(range(0, 4), 4))).pass_time(2 * RELIEVE_AFTER_S) == {}
