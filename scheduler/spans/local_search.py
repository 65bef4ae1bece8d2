"""Search spans by random moves, each of which is accepted if the throughput does not fall. Start at `search`."""

import numpy as np

from decentral.scheduler.spans.moves import filled, mutated
from decentral.scheduler.spans.trials import SLIGHTLY, Candidate, Trials
from decentral.scheduler.topology.arrays import Ints

PATIENCE = 12  # after this many moves per peer without a gain, the search begins again from other spans
GUIDE_SMOOTH = 0.7  # weight of the soft minimum in the estimate that decides which moves are evaluated
GUIDE_LOSS = 0.01  # moves that lower the estimate by more than this share seem worse; one in ten moves that gain does
SEEMING_WORSE_SHARE = 0.1  # this share of the moves that seem worse are evaluated all the same
KEPT_SHARE = 0.7  # in half of these new beginnings, about this share of the peers keep their spans of the best plan


def search(trials: Trials, starts: list[Ints]) -> None:
    """Climb from the best start, and then from mixtures of random spans with the best spans, until the budget ends."""
    problem, rng = trials.problem, trials.rng
    peers = len(problem.reach_NL)
    here = max(trials.begun(starts), key=lambda one: one.value)
    while trials.goes_on():
        best = climbed(trials, here, PATIENCE * peers)
        best = best if trials.best is None else trials.best
        spans_N2 = filled(problem, rng)
        if rng.random() < 0.5:
            spans_N2 = np.where((rng.random(peers) < KEPT_SHARE)[:, None], best.spans_N2, spans_N2)
        if trials.goes_on():
            here = trials.evaluated(problem.repaired(spans_N2))


def climbed(trials: Trials, here: Candidate, patience: int) -> Candidate:
    """Return the spans that moves from `here` reach when `patience` moves in a row gain nothing, or the budget ends.

    Most moves that lower the problem's estimate by GUIDE_LOSS are not evaluated, as an evaluation takes far longer.
    """
    stuck, guide = 0, trials.problem.guide(here.spans_N2, GUIDE_SMOOTH)
    while stuck < patience and trials.goes_on():
        spans_N2 = mutated(trials.problem, here.spans_N2, here.found, trials.rng)
        seems_worse = trials.problem.guide(spans_N2, GUIDE_SMOOTH) < (1 - GUIDE_LOSS) * guide
        if trials.excluded(spans_N2, here.value) or (seems_worse and trials.rng.random() > SEEMING_WORSE_SHARE):
            stuck += 1
            continue
        child = trials.evaluated(spans_N2)
        stuck = 0 if child.value > here.value * (1 + SLIGHTLY) else stuck + 1
        if child.value > here.value * (1 - SLIGHTLY):  # spans that are equally good are accepted, too
            here, guide = child, trials.problem.guide(child.spans_N2, GUIDE_SMOOTH)
    return here
