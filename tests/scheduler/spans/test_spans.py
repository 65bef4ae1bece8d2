"""The searches for spans, on a problem whose optimum is known, and the moves that they make."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from decentral.scheduler.spans import annealing, genetic, local_search, moves
from decentral.scheduler.spans.problem import SpanValue, soft_minimum
from decentral.scheduler.spans.searches import SEARCHES, search
from decentral.scheduler.spans.trials import LIMITS_A_ROUND, Candidate, Trials
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress


@dataclass(frozen=True, eq=False)
class Shelves:
    """Peers that hold a few layers each; the throughput is the supply of the scarcest layer."""

    reach_NL: Ints
    speed: float = 6.0
    guide_s: float = 0.0
    evaluated: list[bytes] = field(default_factory=list)

    def supply(self, peer: int, first: int, last: int) -> float:
        return self.speed / (last - first)

    def supplies(self, spans_N2: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        supply_L = np.full(self.reach_NL.shape[1], 1e-6)
        for peer, (first, last) in enumerate(spans_N2):
            if first < last:
                supply_L[first:last] += self.supply(peer, first, last)
        return supply_L

    def evaluate(self, spans_N2: Ints, progress: SearchProgress | None = None) -> SpanValue:
        self.evaluated.append(spans_N2.tobytes())
        supply_L = self.supplies(spans_N2)
        least = float(supply_L.min())
        return SpanValue(least, np.ones(len(spans_N2)), least / supply_L)

    def guide(self, spans_N2: Ints, smooth: float) -> float:
        return soft_minimum(self.supplies(spans_N2))

    def limit(self, spans_N2: Ints) -> float:
        return float(self.supplies(spans_N2).min())

    def valid(self, spans_N2: Ints) -> bool:
        return bool(moves.layers_held(self.reach_NL.shape[1], spans_N2).any(axis=0).all())

    def repaired(self, spans_N2: Ints) -> Ints:
        return spans_N2 if self.valid(spans_N2) else moves.repaired(self.reach_NL, spans_N2, 1)

    def bound(self) -> float:
        return self.speed * len(self.reach_NL) / int(self.reach_NL.shape[1]) + 1e-6

    def starts(self, rng: np.random.Generator) -> list[Ints]:
        return [moves.filled(self, rng)]


def shelves(peers: int = 6, layers: int = 9, most: int = 4) -> Shelves:
    return Shelves(np.tile(np.minimum(np.arange(layers) + most, layers), (peers, 1)))


@pytest.mark.parametrize("solver", ["genetic", "annealing"])
def test_a_search_finds_the_layout_in_which_no_layer_is_scarce(solver: str) -> None:
    found = search(shelves(), solver, SearchBudget(rounds=3000), np.random.default_rng(0))
    assert found.value == pytest.approx(4.0)  # six peers with three layers each, two peers for each layer


def test_the_policy_learns_more_than_its_first_plans() -> None:
    problem = shelves()
    few = search(problem, "policy", SearchBudget(rounds=16), np.random.default_rng(0))
    many = search(problem, "policy", SearchBudget(rounds=600), np.random.default_rng(0))
    assert many.value > few.value


@pytest.mark.parametrize("solver", SEARCHES)
def test_rounds_and_seed_decide_what_a_search_finds(solver: str) -> None:
    spans = [search(shelves(7), solver, SearchBudget(rounds=60), np.random.default_rng(3)).spans_N2 for _ in range(2)]
    np.testing.assert_array_equal(spans[0], spans[1])


@pytest.mark.parametrize("solver", SEARCHES)
def test_a_search_begins_with_the_spans_that_its_caller_has(solver: str) -> None:
    best = np.array([[0, 3], [0, 3], [3, 6], [3, 6], [6, 9], [6, 9]])
    problem = shelves()
    found = search(problem, solver, SearchBudget(rounds=9), np.random.default_rng(0), first=best)
    np.testing.assert_array_equal(found.spans_N2, best)
    assert len(problem.evaluated) == 1  # the bound is reached


@pytest.mark.parametrize("solver", SEARCHES)
def test_a_search_ends_with_its_seconds(solver: str) -> None:
    looks = [0.0]

    def clock() -> float:
        looks[0] += 0.01
        return looks[0]

    search(shelves(7), solver, SearchBudget(5.0, clock=clock), np.random.default_rng(0))
    assert 4.0 < looks[0] < 5.5


def test_spans_that_the_limit_excludes_cost_a_hundredth_of_an_evaluation() -> None:
    best, worse = np.array([[0, 3], [0, 3], [3, 6], [3, 6], [6, 9], [6, 9]]), np.array([[0, 3]] * 2 + [[3, 6]] * 4)
    trials = Trials(shelves(), SearchProgress(SearchBudget(rounds=9), np.inf), np.random.default_rng(0))
    least = trials.evaluated(best).value
    assert trials.excluded(worse, least)
    assert not trials.excluded(best, least)
    for _ in range(LIMITS_A_ROUND - 2):
        trials.excluded(worse, least)
    assert trials.progress.rounds == 2


def test_the_default_search_anneals_for_its_share_before_it_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[float]()

    def climbed(trials: Trials, here: Candidate, _patience: int) -> Candidate:
        used.append(trials.progress.used())
        return here

    monkeypatch.setattr(genetic, "climbed", climbed)
    search(shelves(7), "genetic", SearchBudget(rounds=100), np.random.default_rng(0))
    assert genetic.ANNEALING_SHARE <= used[0] < 0.7


def test_annealing_prefers_the_weight_that_has_led_to_the_best_spans() -> None:
    """On thirty homes with thin links, one weight reached 640 to 690 tokens/s, another 420 to 630."""
    problem = shelves()
    trials = Trials(problem, SearchProgress(SearchBudget(rounds=1e6), np.inf), np.random.default_rng(0))
    trials.evaluated(problem.starts(trials.rng)[0])
    used = [annealing.smooth_weight(trials) for _ in annealing.SMOOTH_WEIGHTS]
    assert tuple(used) == annealing.SMOOTH_WEIGHTS
    trials.annealed_to |= dict(zip(used, (1.0, 3.0, 2.0), strict=True))
    later = [annealing.smooth_weight(trials) for _ in range(12 * annealing.WEIGHT_TURNS)]
    assert later.count(used[1]) >= 10 * annealing.WEIGHT_TURNS
    assert set(later) == set(used)


def test_moves_that_lower_the_estimate_are_seldom_evaluated() -> None:
    """An evaluation takes 200 times as long as an estimate, and of ten moves that gain nine do not lower it by 1%."""

    class Blind(Shelves):
        """Any other spans than the first ones seem worse."""

        def guide(self, spans_N2: Ints, smooth: float) -> float:
            return 1.0 if spans_N2.tobytes() == self.evaluated[0] else 0.9

        def limit(self, spans_N2: Ints) -> float:
            return np.inf

    problem = Blind(shelves().reach_NL)
    trials = Trials(problem, SearchProgress(SearchBudget(rounds=1e6), np.inf), np.random.default_rng(0))
    best = Candidate(problem.starts(trials.rng)[0], SpanValue(1e6, np.ones(6), np.ones(9)))
    problem.evaluated.append(best.spans_N2.tobytes())
    local_search.climbed(trials, best, 1000)
    others = [spans for spans in problem.evaluated if spans != problem.evaluated[0]]
    assert 30 <= len(others) <= 130


def test_a_child_has_early_layers_of_one_parent_and_late_layers_of_the_other() -> None:
    one, two = np.array([[0, 2], [2, 4], [4, 6]]), np.array([[4, 6], [2, 4], [0, 2]])
    children = {moves.crossover(one, two, 6, np.random.default_rng(seed)).tobytes() for seed in range(40)}
    assert np.array([[0, 2], [2, 4], [0, 2]]).tobytes() in children
    assert all(
        (row == one[peer]).all() or (row == two[peer]).all()
        for child in children
        for peer, row in enumerate(np.frombuffer(child, np.int64).reshape(-1, 2))
    )


@pytest.mark.parametrize("seed", range(3))
def test_moves_keep_spans_within_reach(seed: int) -> None:
    problem, rng = shelves(), np.random.default_rng(seed)
    rows = [(int(first), int(last)) for first, last in moves.in_a_row(problem, rng)]
    for _ in range(300):
        for peer, first, last in moves.proposal(rows, problem.reach_NL.tolist(), 9, rng):
            assert 0 <= first < last <= problem.reach_NL[peer, first]
            rows[peer] = first, last


def test_the_best_pace_makes_the_best_single_row() -> None:
    """Five peers hold three layers at most; ten layers need two of each."""
    problem = shelves(peers=5, layers=10, most=3)
    pace = moves.paces(problem)[0]
    spans_N2 = moves.in_a_row(problem, np.random.default_rng(0), pace)
    assert pace == problem.supply(0, 0, 2)
    assert problem.evaluate(spans_N2).value == pytest.approx(pace)


def test_grown_spans_fill_the_memory_and_stay_within_the_layers() -> None:
    reach_L = np.array([3, 4, 5, 6, 6, 6])
    assert moves.grown(reach_L, 4, 5) == (3, 6)
    assert moves.grown(reach_L, 0, 6) == (0, 3)
    assert moves.grown(np.array([0, 3, 3]), 0, 1) == (0, 0)


def test_the_soft_minimum_is_the_supply_where_all_layers_are_equal_and_grows_with_each() -> None:
    assert soft_minimum(np.full(5, 7.0)) == pytest.approx(7.0)
    assert 1.0 < soft_minimum(np.array([1.0, 2.0])) < soft_minimum(np.array([1.0, 3.0])) < 1.1


def test_spans_that_are_not_valid_are_worth_nothing() -> None:
    trials = Trials(shelves(), SearchProgress(SearchBudget(rounds=5), np.inf), np.random.default_rng(0))
    assert trials.evaluated(np.zeros((6, 2), np.int64)).value == -np.inf
