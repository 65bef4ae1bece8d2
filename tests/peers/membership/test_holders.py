"""Records tell which peers hold which layer, and of many holders each peer knows a few of its own."""

from dataclasses import replace

import pytest

from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.layer_work import KindCost, KindCosts, shape_of
from decentral.peers.membership.holders import NEIGHBOURS, Holders
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.scheduler.throughput.link_limits import TokenLinks

OWN = PeerId("own")
LINKS = TokenLinks(1.0, 0.8)
CUTS = tuple(Fragment(at, at, at + 1, 100) for at in range(4))


def record(first: int, last: int, phase: str = "training") -> PeerRecord:
    profile = Profile("cpu", 0, 1.0, 1.0)
    return PeerRecord(RunId("run"), 1.0, (), profile, first, last, 0, 0, 0, phase=phase)  # type: ignore[arg-type]


def published(tokens_per_s: float) -> PeerRecord:
    """The record of a peer that holds layers [0, 2)."""
    return replace(record(0, 2), profile=Profile("cpu", 0, 1.0, tokens_per_s))


def crowd(count: int, own: PeerId = OWN) -> Holders:
    holders = Holders(own, CUTS, LINKS)
    for number in range(count):
        holders.put(PeerId(f"P{number:03d}"), record(0, 2))
    return holders


def test_a_holder_is_found_at_each_of_its_layers_and_at_no_other() -> None:
    holders = Holders(OWN, CUTS, LINKS)
    holders.put(PeerId("A"), record(1, 3))
    assert [list(holders.near(layer)) for layer in range(4)] == [[], ["A"], ["A"], []]


def test_a_peer_that_moves_stops_training_or_goes_is_found_where_it_is_now() -> None:
    holders = crowd(3)
    holders.put(PeerId("P000"), record(2, 4))
    holders.put(PeerId("P001"), record(0, 2, phase=PeerPhase.LEAVING))
    assert (list(holders.near(0)), list(holders.near(2))) == (["P002"], ["P000"])
    holders.drop(PeerId("P002"))
    holders.drop(PeerId("P002"))
    assert (list(holders.near(0)), holders.count, holders.speeds) == ([], 1, {(2, 4): 1.0})


def test_a_span_that_no_model_has_costs_no_more_than_the_model() -> None:
    holders = Holders(OWN, CUTS, LINKS)
    holders.put(PeerId("A"), record(0, 1 << 60))
    assert holders.speeds == {(0, 4): 1.0}
    holders.put(PeerId("A"), record(1 << 59, 1 << 60))
    assert holders.count == 0


def test_of_many_holders_a_few_are_near_and_they_stay_the_same() -> None:
    holders = crowd(200)
    near = list(holders.near(1))
    assert len(near) == NEIGHBOURS
    holders.put(PeerId("P000"), replace(record(0, 2), time=2.0))
    assert list(holders.near(1)) == near


def test_each_peer_has_neighbours_of_its_own_so_that_all_holders_are_somebody_s() -> None:
    asked = {peer for number in range(40) for peer in crowd(200, PeerId(f"S{number}")).near(0)}
    assert len(asked) > 190


def test_the_shape_of_a_span_is_the_mean_of_its_holders_by_their_speeds() -> None:
    """Half of a token's time is the head's on one peer, and on another, which is three times as fast, none."""
    cuts = (Fragment(0, 0, 2, 1, (0.0, 1.0, 0.0)), Fragment(1, 2, 3, 1, (0.0, 0.0, 1.0)))
    holders, block = Holders(OWN, cuts, LINKS), KindCost(1.0, 1.0, 1, 1)
    for name, speed, head_s in (("A", 10.0, 2.0), ("B", 30.0, 1e-9)):
        costs = KindCosts(None, block, KindCost(head_s / 2, head_s / 2, 1, 1))
        one = published(speed)
        holders.put(PeerId(name), replace(one, profile=replace(one.profile, costs=costs)))
    assert holders.shape((0, 2)) == pytest.approx((0.0, 0.875, 0.125), abs=1e-5)
    holders.drop(PeerId("B"))
    assert holders.shape((0, 2)) == pytest.approx((0.0, 0.5, 0.5))
    holders.put(PeerId("A"), published(0.0))
    assert holders.shape((0, 2)) == shape_of(cuts)


def test_a_speed_that_is_absurd_and_gone_again_leaves_the_sums_of_the_others_as_they_were() -> None:
    holders = Holders(OWN, CUTS, LINKS)
    for name, speed in (("A", 30.25), ("B", 29.5), *((f"liar {number}", 9.9e17) for number in range(40))):
        holders.put(PeerId(name), published(speed))
    for number in range(20):
        holders.drop(PeerId(f"liar {number}"))
        holders.put(PeerId(f"liar {number + 20}"), published(1.5))
    assert holders.speeds == {(0, 2): 89.75}
    holders.put(PeerId("A"), published(1.25))
    assert holders.speeds == {(0, 2): 60.75}


def test_a_peer_that_computes_for_no_other_gets_no_activations() -> None:
    holders, one = Holders(OWN, CUTS, LINKS), record(0, 4)
    holders.put(PeerId("A"), record(0, 4))
    holders.put(PeerId("island"), replace(one, profile=replace(one.profile, alone=True)))
    assert list(holders.near(1)) == ["A"]


def test_a_holder_counts_with_what_its_links_let_it_compute_for_others() -> None:
    """10 kB/s and 100 bytes a token: 100 tokens/s enter or leave. Half of the layers takes half of a token's time."""
    profile = Profile("cpu", 0, 1.0, 1000.0, up=1e4)
    holders = Holders(OWN, CUTS, TokenLinks(100.0, 0.8))
    holders.put(PeerId("first"), replace(record(0, 2), profile=profile))
    holders.put(PeerId("middle"), replace(record(1, 3), profile=profile))
    holders.put(PeerId("all"), replace(record(0, 4), profile=profile))
    assert holders.crossings == pytest.approx({(0, 2): 100.0, (1, 3): 100.0, (0, 4): 100.0}, rel=1e-3)
    assert holders.speeds == pytest.approx({(0, 2): 50.0, (1, 3): 25.0, (0, 4): 1000.0}, rel=1e-3)
    holders.put(PeerId("first"), replace(record(0, 2), profile=replace(profile, up=5e4)))
    assert holders.speeds[0, 2] == pytest.approx(250.0, rel=1e-3)
