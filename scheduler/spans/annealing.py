"""Search spans by simulated annealing of the problem's smooth estimate (`SpanProblem.guide`). Start at `search`."""

import math

from decentral.scheduler.spans.moves import filled, in_a_row, proposal
from decentral.scheduler.spans.trials import Candidate, Trials
from decentral.scheduler.topology.arrays import Ints

ROUND_MOVES = 100  # moves between two looks at the budget; they count as one round of the budget
LEAST_STEPS = 100  # an annealing has at least this many moves per peer, unless the budget ends
PART = 0.25  # an annealing has at least this share of the moves of all earlier ones together, so it cools more slowly
# Weights of the soft minimum: 0.7 suits unequal peers, 0.3 swarms with little spare memory, 1 slow links.
SMOOTH_WEIGHTS = (0.7, 0.3, 1.0)
WEIGHT_TURNS = (
    4  # after the first of each weight, one in this many annealings takes them in turn; the others use the best one
)
HOT, COLD = 0.03, 0.0015  # first and last temperature, as shares of the best estimate


def search(trials: Trials, starts: list[Ints]) -> None:
    """Anneal from random spans, each time more slowly, until the budget ends; `starts` are only evaluated."""
    trials.begun(starts)
    while trials.goes_on():
        annealed(trials, begin(trials), PART, HOT)


def begin(trials: Trials) -> Ints:
    """Return random spans to anneal from, made by `in_a_row` or `filled` with equal probability."""
    make = in_a_row if trials.rng.random() < 0.5 else filled
    return make(trials.problem, trials.rng)


def annealed(trials: Trials, spans_N2: Ints, part: float, hot: float) -> Candidate | None:
    """Anneal from these spans, and return the better of two results: the last spans, and those of the best estimate.

    Args:
        trials: The search's state.
        spans_N2: Spans to begin from.
        part: Number of moves, as a share of all moves so far; fewer if the budget does not allow so many.
        hot: First temperature, as a share of the best estimate. The last temperature is COLD.

    Returns:
        The better candidate; None if the budget does not allow another evaluation.
    """
    problem, rng = trials.problem, trials.rng
    peers, layers = problem.reach_NL.shape
    steps = trials.affordable(max(LEAST_STEPS * peers, int(part * trials.steps)), ROUND_MOVES)
    smooth = smooth_weight(trials)
    reach = problem.reach_NL.tolist()
    spans_N2 = spans_N2.copy()
    rows = [(int(first), int(last)) for first, last in spans_N2]
    here = best = problem.guide(spans_N2, smooth)
    best_N2, heat = spans_N2.copy(), hot * best
    for step in range(steps):
        if step % ROUND_MOVES == 0 and step:
            trials.worked(ROUND_MOVES)
            if not trials.goes_on():
                break
            heat = best * hot * (COLD / hot) ** (step / steps)
        changes = proposal(rows, reach, layers, rng)
        for peer, first, last in changes:
            spans_N2[peer] = first, last
        value = problem.guide(spans_N2, smooth) if changes else here
        if value >= here or rng.random() < math.exp((value - here) / heat):
            for peer, first, last in changes:
                rows[peer] = first, last
            here = value
            if here > best:
                best, best_N2 = here, spans_N2.copy()
        else:
            for peer, _, _ in changes:
                spans_N2[peer] = rows[peer]
    ends = [problem.repaired(one) for one in (best_N2, spans_N2)]
    if not trials.goes_on():
        return None
    found = max(trials.begun(ends), key=lambda one: one.value)
    trials.annealed_to[smooth] = max(found.value, trials.annealed_to.get(smooth, found.value))
    return found


def smooth_weight(trials: Trials) -> float:
    """Return the weight of the soft minimum for the annealing that begins: one in turn, or the best one so far."""
    number, many = trials.next_annealing(), len(SMOOTH_WEIGHTS)
    if number < many:
        return SMOOTH_WEIGHTS[number]
    if number % WEIGHT_TURNS == 0:
        return SMOOTH_WEIGHTS[number // WEIGHT_TURNS % many]
    return max(SMOOTH_WEIGHTS, key=lambda weight: trials.annealed_to.get(weight, -math.inf))
