"""Windows and bytes of gossip, predicted."""

from collections.abc import Sequence

import pytest

from decentral.comm.codecs import blockwise
from decentral.commands.estimates.places import MBIT, groups_of, topology_of
from decentral.commands.estimates.traffic import Gossiper, PredictedGossip, traffic
from decentral.core.config import GossipConfig
from decentral.core.fragments import Fragment

FRAGMENTS = [Fragment(0, 0, 1, 1_000_000), Fragment(1, 1, 2, 1_000_000)]
WHOLE = (0, 2)


def predicted(peers: str, gossipers: Sequence[Gossiper], gossip: GossipConfig | None = None) -> PredictedGossip:
    groups = groups_of(peers)
    topology = topology_of(groups, [1.0] * len(groups), [1.0] * len(groups))
    return traffic(topology, gossip or GossipConfig(), FRAGMENTS, [WHOLE] * len(topology), gossipers)


def test_over_a_fast_link_windows_have_the_configured_length_and_four_bits() -> None:
    found = predicted("2x4090 lab", [Gossiper(0.01, None)] * 2)
    assert (set(found.period_s), set(found.bound)) == ({0.5}, {""})
    light = 2 * blockwise.size("q4", 1_000_000) / 0.5
    whole = 2 * blockwise.size("int8", 1_000_000) / 9 / 0.5
    assert found.sent_NN[0, 1] == pytest.approx(light + whole, rel=0.02)


def test_a_thin_uplink_lengthens_windows_by_powers_of_two_and_sends_signs_only() -> None:
    found = predicted("4090 home1:2/100, 4090 home2:2/100", [Gossiper(0.01, None)] * 2)
    assert set(found.bound) == {"link"}
    assert found.period_s[0] / 0.5 in (2, 4, 8)
    assert found.sent_NN.sum(axis=1).max() <= 2 * MBIT


def test_steps_longer_than_a_window_set_its_pace() -> None:
    found = predicted("2x4090 lab", [Gossiper(3.0, None)] * 2)
    assert set(found.bound) == {"steps"}
    assert found.period_s[0] == pytest.approx(6.0)


def test_a_busy_processor_lengthens_windows() -> None:
    idle = predicted("2x4090 lab", [Gossiper(0.01, 1.0, idle_cores=8.0)] * 2)
    busy = predicted("2x4090 lab", [Gossiper(0.01, 1.0)] * 2)
    assert set(busy.bound) == {"cores"}
    assert busy.period_s[0] > idle.period_s[0]


def test_windows_are_the_longer_the_more_their_computation_costs_this_machine() -> None:
    periods = [predicted("2x4090 lab", [Gossiper(0.01, 1.0, slower=times)] * 2).period_s[0] for times in (1.0, 4.0)]
    assert periods[0] < periods[1] <= 4 * periods[0]


def test_no_place_sends_more_than_its_link_carries() -> None:
    found = predicted("4x4090 home:5/50, 4xA100 oregon", [Gossiper(0.01, None)] * 8)
    assert found.sent_NN[:4, 4:].sum() <= 5 * MBIT * 1.001


def test_a_peer_without_layers_gossips_nothing() -> None:
    groups = groups_of("3x4090 lab")
    topology = topology_of(groups, [1.0], [1.0])
    found = traffic(topology, GossipConfig(), FRAGMENTS, [WHOLE, WHOLE, (0, 0)], [Gossiper(0.01, None)] * 3)
    probes = found.sent_NN[2, 0]
    assert found.sent_NN[0, 2] == probes < found.sent_NN[0, 1]
