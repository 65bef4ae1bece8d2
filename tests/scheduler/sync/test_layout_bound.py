"""The proof that no layout is cheaper: it finds each optimum, never claims more, and says when it was cut short."""

import numpy as np
import pytest

from benchmarks import layout_bound
from decentral.core.errors import UserError
from decentral.scheduler.sync import exact
from decentral.scheduler.sync.layout_cost import Problem, best_layout, problem_of
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Workload

SHAPES = [(4, 3, 5), (3, 3, 9), (3, 4, 4), (6, 2, 4), (2, 5, 3), (5, 2, 6), (1, 5, 2), (5, 2, 1)]
WHOLE = SearchBudget(rounds=1e9)


def few_kinds(seed: int, stages: int, replicas: int, kinds: int) -> Problem:
    """Peers of a few kinds at random; now and then the links within a kind are slower than those to another."""
    rng = np.random.default_rng(seed)
    kind = np.concatenate((np.arange(kinds), rng.integers(0, kinds, stages * replicas - kinds)))
    pipe = rng.integers(2, 9, (kinds, kinds)) + rng.random((kinds, kinds)) * (rng.random() < 0.5)
    pipe = (pipe + pipe.T) / 2
    np.fill_diagonal(pipe, 1 + rng.random(kinds) * (rng.random() < 0.5) * 4)
    data = rng.random((kinds, kinds)) * rng.choice([1, 3, 8])
    data = data + data.T
    pipe, data = pipe[np.ix_(kind, kind)], data[np.ix_(kind, kind)]
    np.fill_diagonal(pipe, 0.0)
    np.fill_diagonal(data, 0.0)
    return Problem(data, pipe, stages, replicas)


def optimum(problem: Problem) -> float:
    slots = exact.search(problem, np.zeros(problem.peers, np.int64), SearchBudget(rounds=1), np.random.default_rng(0))
    return best_layout(problem, slots).cost.total


@pytest.mark.parametrize("shape", SHAPES)
def test_below_any_cut_above_the_optimum_the_optimum_is_found_and_at_it_nothing(shape: tuple[int, int, int]) -> None:
    for seed in [*range(6), 63]:
        problem = few_kinds(seed, *shape)
        best = optimum(problem)
        for cut in (best + 1e-4, best * 1.1, np.inf):
            found = layout_bound.below(problem, cut, WHOLE)
            assert found.proven
            assert found.slots is not None
            assert sorted(found.slots) == list(range(problem.peers))
            assert found.cost == pytest.approx(best, abs=1e-8)
            assert best_layout(problem, found.slots).cost.total == pytest.approx(best, abs=1e-8)
        nothing = layout_bound.below(problem, best, WHOLE)
        assert nothing.proven
        assert nothing.slots is None


def test_a_search_cut_off_proves_nothing() -> None:
    problem = few_kinds(0, 4, 3, 5)
    assert not layout_bound.below(problem, optimum(problem), SearchBudget(rounds=1)).proven


def test_the_published_optimum_of_four_regions_is_one() -> None:
    swarm = topology.load("four-regions")
    assert swarm.workload is not None
    verdict = layout_bound.below(problem_of(swarm, swarm.workload), 34.8020, WHOLE)
    assert verdict.proven
    assert verdict.slots is None


def test_swarms_that_it_cannot_enumerate_are_refused() -> None:
    spot = topology.load("ten-cities")
    with pytest.raises(UserError, match="peers to spare"):
        layout_bound.below(problem_of(spot, Workload(4, 2)), 1.0, WHOLE)
    noisy = np.random.default_rng(0).random((64, 64))
    with pytest.raises(UserError, match="few kinds"):
        layout_bound.below(Problem(noisy + noisy.T, noisy + noisy.T, 8, 8), 1.0, WHOLE)
