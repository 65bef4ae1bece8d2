"""The greatest flow: what is merged changes nothing, few bytes move, and links, sites and gossip limit it."""

from dataclasses import replace

import numpy as np
import pytest

from decentral.scheduler.throughput import link_limits, max_flow, peer_kinds
from decentral.scheduler.throughput.layer_costs import LayerCosts
from tests.scheduler.throughput.plain_flow import plain_flow


def swarm(
    speeds: list[float], rates: list[float], sites: list[int] | None = None, site_rates: list[float] | None = None
) -> LayerCosts:
    """Peers with these tokens/s, bytes/s and sites, and four layers; a token has 10 bytes, and gossip none."""
    count, ones, rate_N = len(speeds), np.ones(4), np.array(rates, dtype=np.float64)
    link = np.minimum.outer(rate_N, rate_N)
    link[~np.isfinite(link)] = 1e9
    np.fill_diagonal(link, 0.0)
    seconds = 1 / np.array(speeds)[:, None] / 4 * ones
    site_N = np.array(sites or [-1] * count)
    memory = np.full(count, 9.0)
    return LayerCosts(
        seconds, ones, ones, 0 * ones, 0 * ones, memory, link, 10.0, 1, rate_N, site_N, np.array(site_rates or [])
    )


def random_swarm(seed: int) -> tuple[LayerCosts, np.ndarray]:
    """Some peers are alike, some have only slow links to others, and some are in two sites."""
    rng = np.random.default_rng(seed)
    peers, layers = int(rng.integers(3, 7)), int(rng.integers(3, 6))
    rate = rng.choice([3e5, 1e6, np.inf], peers, p=[0.4, 0.4, 0.2]) if seed % 3 else rng.choice([3e5, 1e6], peers)
    site = rng.integers(-1, 2, peers) if seed % 2 else np.full(peers, -1)
    site_rate = rng.choice([2e5, 5e5], 2) if seed % 2 else np.zeros(0)
    link = np.minimum(np.minimum.outer(rate, rate), rng.choice([2e5, 4e5]) if seed % 4 else 1e7)
    site_rate_N = np.append(site_rate, np.inf)[site]
    apart = site[:, None] != site[None, :]
    link = np.where(apart, np.minimum(link, np.minimum.outer(site_rate_N, site_rate_N)), link)
    np.fill_diagonal(link, 0.0)
    ones = np.ones(layers)
    seconds = np.outer(1 / rng.choice([1.0, 2.0], peers), rng.uniform(0.5, 1.5, layers)) / 200
    first = rng.integers(0, layers, peers)
    spans = np.column_stack((first, rng.integers(first + 1, layers + 1)))
    spans[: peers // 2] = (0, layers // 2)
    spans[peers // 2 : peers // 2 * 2] = (layers // 3, layers)
    return LayerCosts(
        seconds, ones, ones, ones, 2e4 * ones, 9 * np.ones(peers), link, 2000.0, 1, rate, site, site_rate
    ), spans


@pytest.mark.parametrize("seed", range(24))
def test_merging_peers_layers_and_pairs_changes_no_flow(seed: int) -> None:
    costs, spans = random_swarm(seed)
    assert max_flow.maximum(costs, spans).tokens_per_s == pytest.approx(plain_flow(costs, spans), rel=1e-3)


def test_what_a_peer_sends_to_all_others_fits_its_uplink_once() -> None:
    """The first peer would feed three others with 60 tokens/s each, but its uplink carries 90 tokens/s, both ways."""
    costs = swarm([360.0, 120.0, 120.0, 120.0], [900.0, 1e6, 1e6, 1e6])
    spans = np.array([(0, 2), (2, 4), (2, 4), (2, 4)])
    assert max_flow.maximum(costs, spans).tokens_per_s == pytest.approx(90.0)


def test_a_site_sends_no_more_than_its_shared_link_carries() -> None:
    costs = swarm([100.0] * 4, [np.inf] * 4, [0, 0, -1, -1], [500.0])
    spans = np.array([(0, 2), (0, 2), (2, 4), (2, 4)])
    assert max_flow.maximum(costs, spans).tokens_per_s == pytest.approx(50.0)
    inside = np.array([(0, 2), (2, 4), (0, 2), (2, 4)])
    assert max_flow.maximum(costs, inside).tokens_per_s == pytest.approx(400.0)


def test_gossip_about_a_span_takes_its_part_of_the_uplink_but_its_share_at_most() -> None:
    costs = swarm([1e3, 1e3], [1000.0, 1000.0])
    spans = np.array([(0, 2), (2, 4)])
    assert max_flow.maximum(costs, spans).tokens_per_s == pytest.approx(100.0)
    assert max_flow.maximum(replace(costs, snapshot_L=np.full(4, 100.0)), spans).tokens_per_s == pytest.approx(80.0)
    assert max_flow.maximum(replace(costs, snapshot_L=np.full(4, 1e4)), spans).tokens_per_s == pytest.approx(50.0)


def test_peers_with_the_whole_model_pass_nothing_on() -> None:
    flow = max_flow.maximum(swarm([100.0, 200.0, 300.0], [1e6] * 3), np.array([(0, 4)] * 3))
    assert flow.tokens_per_s == pytest.approx(600.0)
    assert flow.transfers == ()


def test_a_peer_with_the_whole_model_carries_for_others_where_that_pays() -> None:
    """Alone, the first peer trains 100 tokens/s. Of each token of the second, it computes half the layers."""
    costs = swarm([100.0, 1000.0], [1e6, 1e6])
    assert max_flow.maximum(costs, np.array([(0, 4), (0, 2)])).tokens_per_s == pytest.approx(200.0)


def test_equal_flows_move_the_fewest_bytes() -> None:
    """Both peers hold the middle layers, so tokens could pass to and fro; each must pass once."""
    flow = max_flow.maximum(swarm([100.0, 100.0], [1e6] * 2), np.array([(0, 3), (1, 4)]))
    assert flow.tokens_per_s == pytest.approx(200.0)
    assert sum(rate for *_, rate in flow.transfers) == pytest.approx(200.0)


def test_peers_are_alike_if_a_swap_changes_nothing() -> None:
    costs = swarm([100.0, 100.0, 100.0, 50.0], [1e6, 1e6, 2e6, 1e6])
    kind = peer_kinds.kinds(costs)
    assert kind[0] == kind[1]
    assert len(set(kind.tolist())) == 3
    link = costs.link_NN.copy()
    link[0, 3] = link[3, 0] = 1.0
    assert len(set(peer_kinds.kinds(replace(costs, link_NN=link)).tolist())) == 4


def test_downloads_share_the_links_of_those_who_have_the_layers() -> None:
    """Two newcomers fetch two bytes each of the one holder, whose uplink takes a second for a byte."""
    costs = swarm([100.0] * 3, [1.0, 8.0, 8.0])
    before, after = np.array([(0, 4), (0, 0), (0, 0)]), np.array([(0, 4), (0, 2), (0, 2)])
    held = [max_flow.held(costs, spans) for spans in (before, after)]
    assert link_limits.download_s(costs, held[0], held[1]) == pytest.approx(4.0)
    assert link_limits.download_s(costs, held[1], held[1]) == 0.0
