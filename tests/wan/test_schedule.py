"""Changes of the lab's network: how they are read, and what the links are under several of them."""

import numpy as np
import pytest

from benchmarks.wan.description import Description, from_json, from_topology, parse_nat
from benchmarks.wan.schedule import conditions, parse
from decentral.core.errors import UserError
from decentral.scheduler.topology import topology

HOMES = {
    "regions": {"homes": {"count": 4, "up_gbps": 0.02, "down_gbps": 0.1}},
    "inside": {"delay_ms": 50, "bandwidth_gbps": 1, "loss": 0.1},
}
MBIT = 1e6 / 8


@pytest.fixture
def homes() -> Description:
    return from_topology(topology.parse(HOMES))


def test_a_description_has_the_rates_of_peers_and_of_pairs(homes: Description) -> None:
    assert homes.up.tolist() == pytest.approx([20 * MBIT] * 4)
    assert homes.down.tolist() == pytest.approx([100 * MBIT] * 4)
    assert homes.rate(0, 1) == pytest.approx(20 * MBIT)
    assert homes.round_trip_s(0, 1) == pytest.approx(0.1)


def test_a_description_survives_the_way_to_the_router(homes: Description) -> None:
    read = from_json(homes.to_json())
    assert read.to_json() == homes.to_json()
    assert np.isinf(read.path[0, 0])


def test_scaled_rates_leave_delays_as_they_are(homes: Description) -> None:
    tenth = homes.scaled(0.1)
    assert tenth.rate(2, 3) == pytest.approx(2 * MBIT)
    assert tenth.round_trip_s(2, 3) == pytest.approx(0.1)


def test_times_and_targets_are_read() -> None:
    part, degrade, move = parse("degrade 0-1 x0.1 at 5 for 10; part 0,1 | 2-3 at 2.5\nmove 2 at 40", 4)
    groups = (frozenset({0, 1}), frozenset({2, 3}))
    assert (part.kind, part.groups, part.at, part.lasts) == ("part", groups, 2.5, None)
    assert (degrade.peers, degrade.value, degrade.at, degrade.lasts) == ((0, 1), 0.1, 5, 10)
    assert (move.kind, move.peers, move.at) == ("move", (2,), 40)


def test_a_partition_of_some_parts_them_from_all_others() -> None:
    (part,) = parse("part 1,3", 5)
    assert part.groups == (frozenset({1, 3}), frozenset({0, 2, 4}))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("cut 0,1 at 5", "is no change of the network"),
        ("degrade 0-1 at 5", "is not complete"),
        ("degrade 0 at 5", "is not complete"),
        ("delay 0-0 x2", "is not complete"),
        ("loss 1.5", "is not complete"),
        ("part 0,1 | 1,2", "is not complete"),
        ("oneway 0-1", "is not complete"),
        ("part 0 in 5", "is no change of the network"),
        ("move 7 at 1", "names peer 7; there are 0 to 3"),
    ],
)
def test_a_mistake_is_named(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        parse(text, 4)


def test_a_partition_cuts_both_ways_and_leaves_groups_whole(homes: Description) -> None:
    now = conditions(homes, parse("part 0,1 | 2", 4))
    assert now.open[0, 1]
    assert now.open[1, 0]
    assert not now.open[[0, 1, 2, 2], [2, 2, 0, 1]].any()
    assert not now.open[3, :3].any(), "a peer in no group reaches nobody"


def test_a_degraded_pair_has_a_share_of_what_it_could_carry(homes: Description) -> None:
    now = conditions(homes, parse("degrade 0-1 x0.1", 4))
    assert now.path[0, 1] == now.path[1, 0] == pytest.approx(2 * MBIT)
    assert now.up.tolist() == homes.up.tolist()


def test_changes_add_up(homes: Description) -> None:
    now = conditions(
        homes, parse("degrade 2 x0.5; degrade 2 x0.5; loss 0.5; loss 0-1 x0.5; delay 0-1 x3; oneway 0>1", 4)
    )
    assert now.up[2] == pytest.approx(5 * MBIT)
    assert now.down[2] == pytest.approx(25 * MBIT)
    assert now.loss[2, 3] == pytest.approx(1 - 0.9 * 0.5)
    assert now.loss[0, 1] == pytest.approx(1 - 0.9 * 0.5 * 0.5)
    assert now.delay_s[1, 0] == pytest.approx(0.15)
    assert not now.open[0, 1]
    assert now.open[1, 0]


def test_conditions_do_not_change_the_description(homes: Description) -> None:
    before = homes.to_json()
    conditions(homes, parse("degrade 2 x0.5; loss 0.5; delay 0-1 x3", 4))
    assert homes.to_json() == before


def test_who_is_behind_a_router_is_read() -> None:
    assert parse_nat("2,3:symmetric", 4) == {2: "home", 3: "symmetric"}
    assert parse_nat("", 4) == {}
    with pytest.raises(UserError, match="--nat expects numbers below 4"):
        parse_nat("4", 4)
    with pytest.raises(UserError, match="--nat expects"):
        parse_nat("1:conical", 4)
