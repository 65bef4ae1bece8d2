"""Budgets of searches: counted work decides what a search finds, and the clock only ends one that is much slower."""

from collections.abc import Callable

import numpy as np
import pytest

from decentral.core import config
from decentral.scheduler.partners import mixing
from decentral.scheduler.spans.searches import SEARCHES
from decentral.scheduler.sync.sync_plan import SYNC_SOLVERS, sync_plan
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.search_budget import MOST_SOLVING_S, RESERVE, SearchBudget, SearchProgress

SMALL = ["model.depth=8", "model.width=1024", "model.heads=8", "model.context=256"]
Plan = Callable[[SearchBudget], dict[str, object]]


def still() -> float:
    return 0.0


def slow() -> Callable[[], float]:
    """A clock on which each look takes a microsecond: much less than the work that is counted meanwhile."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    return clock


def found(plan: Plan, clock: Callable[[], float], seconds: float) -> dict[str, object]:
    fields = plan(SearchBudget(seconds, clock=clock))
    assert fields.pop("seconds") is not None
    return fields


def of_throughput(solver: str) -> Plan:
    swarm, run = topology.load("tests/scheduler/topologies/seven.yaml"), config.load(None, SMALL)
    return lambda budget: dict(throughput_plan(swarm, run, solver, 3, budget).to_json())


def of_sync(solver: str) -> Plan:
    swarm = topology.load("eight-cities")
    return lambda budget: dict(sync_plan(swarm, solver, 3, budget).to_json())


PLANS = [(name, of_throughput) for name in SEARCHES] + [
    (name, of_sync) for name, solver in SYNC_SOLVERS.items() if solver.compared
]


@pytest.mark.parametrize(("solver", "objective"), PLANS)
def test_equal_seeds_and_seconds_give_equal_plans_however_slowly_the_clock_moves(
    solver: str, objective: Callable[[str], Plan]
) -> None:
    plan = objective(solver)
    assert found(plan, still, 0.2) == found(plan, slow(), 0.2)


def test_equal_seconds_give_equal_gossip_partners_however_slowly_the_clock_moves() -> None:
    swarm, holds = topology.load("ten-cities"), np.ones((10, 1), dtype=bool)
    weights = [
        mixing.partners(swarm, holds, np.array([1e8]), np.zeros((10, 10)), 0.8, SearchBudget(0.05, clock=clock))
        for clock in (still, slow())
    ]
    np.testing.assert_array_equal(weights[0].weight_NN, weights[1].weight_NN)


def test_work_takes_its_reserve_and_the_parts_of_a_search_count_together() -> None:
    whole = SearchProgress(SearchBudget(10.0), np.inf)
    part = SearchProgress(whole.budget.part(0.5), np.inf)
    part.count(1.0)
    assert part.seconds() == whole.seconds() == RESERVE
    assert SearchProgress(whole.budget.part(0.5), np.inf).seconds() == 0.0
    assert part.work_left_s() == pytest.approx((5.0 - RESERVE) / RESERVE)
    assert not part.late(2.9)
    assert part.late(3.0)


def test_the_clock_ends_a_search_whose_work_takes_much_longer_than_on_a_quiet_core() -> None:
    now = [100.0]
    whole = SearchProgress(SearchBudget(10.0, clock=lambda: now[0]), np.inf)
    part = SearchProgress(whole.budget.part(0.5), np.inf)
    for elapsed, used in ((5.0, 0.0), (6.0, 2.0), (9.0, 8.0), (10.0, 10.0)):
        now[0] = 100.0 + elapsed
        assert whole.seconds() == part.seconds() == used
        assert whole.clock_left_s() == 10.0 - elapsed
        assert part.late() == (elapsed > 7.5)
        assert whole.late() == (elapsed >= 10.0)


def test_a_busy_core_ends_no_solver_early_where_only_work_counts() -> None:
    """A search of 0.03 s gave another plan when the solver took longer than that by the clock."""
    assert SearchProgress(SearchBudget(0.03), np.inf).clock_left_s() == MOST_SOLVING_S


def test_a_search_without_a_result_never_lacks_the_time_for_one() -> None:
    progress = SearchProgress(SearchBudget(10.0), np.inf)
    assert not progress.lacks(100.0)
    progress.report(-5.0)
    assert progress.lacks(10.0 / RESERVE)
    assert not progress.lacks(9.0 / RESERVE)
