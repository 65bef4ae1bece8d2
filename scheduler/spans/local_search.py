"""Search spans by random moves, each of which is accepted if the throughput does not fall. Start at `search`."""

import numpy as np

from decentral.scheduler.spans.moves import filled, mutated
from decentral.scheduler.spans.trials import SLIGHTLY, Candidate, Trials
from decentral.scheduler.topology.arrays import Ints

PATIENCE = 12  # after this many moves per peer without a gain, the search begins again from other spans
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
    """Return the spans that moves from `here` reach when `patience` moves in a row gain nothing, or the budget ends."""
    stuck = 0
    while stuck < patience and trials.goes_on():
        spans_N2 = mutated(trials.problem, here.spans_N2, here.found, trials.rng)
        if trials.excluded(spans_N2, here.value):
            stuck += 1
            continue
        child = trials.evaluated(spans_N2)
        stuck = 0 if child.value > here.value * (1 + SLIGHTLY) else stuck + 1
        if child.value > here.value * (1 - SLIGHTLY):  # spans that are equally good are accepted, too
            here = child
    return here
