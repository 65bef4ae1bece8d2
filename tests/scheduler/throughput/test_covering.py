"""Spans that hold all layers are found wherever there are any."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from decentral.core import rng
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds
from decentral.scheduler.placement.evaluate import FragmentCosts, PlanTask, TrainingPeer, work_of
from decentral.scheduler.throughput.covering import covering
from decentral.scheduler.throughput.link_limits import TokenLinks


def tight(seed: int, peers: int, fragments: int, most: int = 70) -> FragmentCosts:
    """Peers with memory for a part of the model, and for the least number of micro-batches beside it."""
    chance = rng.stream(seed, "tight")
    cuts = tuple(Fragment(index, index, index + 1, 100) for index in range(fragments))
    state = tuple(chance.choice([5, 20, 40]) for _ in cuts)
    needs = MemoryNeeds(cuts, state, (0,) * fragments, (1,) * fragments)
    held = [TrainingPeer(range(0), chance.randint(15, most), 1.0) for _ in range(peers)]
    members = tuple((PeerId(f"p{number}"), one) for number, one in enumerate(held))
    return replace(work_of(PlanTask(needs, members, TokenLinks(2.0, 0.8), holders=1)), tight=True)


def can_be_covered(costs: FragmentCosts) -> bool:
    """Return whether some order of the peers, with some cuts between them, fits: by trying all of them."""
    for some in range(1, costs.peers + 1):
        for order in itertools.permutations(range(costs.peers), some):
            for cuts in itertools.combinations(range(1, costs.layers), some - 1):
                edges = [0, *cuts, costs.layers]
                if all(costs.fits(p, a, b) for p, (a, b) in zip(order, itertools.pairwise(edges), strict=True)):
                    return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_all_layers_are_covered_exactly_where_some_layout_fits(seed: int) -> None:
    costs = tight(seed, peers=4, fragments=5)
    found = covering(costs)
    assert (found is not None) == can_be_covered(costs)
    assert found is None or costs.valid(found)


def test_some_of_these_swarms_can_be_covered_and_some_cannot() -> None:
    fitting = [covering(tight(seed, peers=4, fragments=5)) is not None for seed in range(20)]
    assert 4 <= np.sum(fitting) <= 16


def test_a_thousand_peers_cover_a_deep_model() -> None:
    costs = tight(0, peers=1000, fragments=80, most=200)
    found = covering(costs)
    assert found is not None
    assert costs.valid(found)
