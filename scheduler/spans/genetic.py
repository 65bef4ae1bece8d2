"""The default search: a memetic one (genetic, with annealing and a local search on every child). Start at `search`.

A child has the first layers of one parent and the last layers of another (`moves.crossover`). Annealing of the smooth
estimate then joins the two halves, and a local search of the true throughput finishes it. The parents are the best
spans of distinct throughput. Every fourth child is random, so that the parents do not all become alike.
"""

import numpy as np

from decentral.scheduler.spans import annealing
from decentral.scheduler.spans.local_search import PATIENCE, climbed
from decentral.scheduler.spans.moves import crossover
from decentral.scheduler.spans.trials import SLIGHTLY, Candidate, Trials
from decentral.scheduler.topology.arrays import Ints

ANNEALING_SHARE = 0.5  # this share of the budget is spent on annealing before the first local search
MOST_PARENTS = 8
WARM = 0.01  # first temperature of a crossover's annealing: at annealing.HOT, a child would lose its parents' spans
CHILD_PART = 0.1  # number of moves of a crossover's annealing, as a share of all moves so far
FRESH = 4  # one in this many children is random


def search(trials: Trials, starts: list[Ints]) -> None:
    """Anneal for ANNEALING_SHARE of the budget, climb from the best, then make children until the budget ends."""
    pool: list[Candidate] = []
    for start in trials.begun(starts):
        _offer(pool, start)
    peers, layers = trials.problem.reach_NL.shape
    while trials.goes_on() and (not trials.annealings or trials.progress.used() < ANNEALING_SHARE):
        child = annealing.annealed(trials, annealing.begin(trials), annealing.PART, annealing.HOT)
        if child is not None:
            _offer(pool, child)
    if pool:
        _offer(pool, climbed(trials, pool[0], PATIENCE * peers))
    number = 0
    while trials.goes_on():
        if number % FRESH == FRESH - 1 or len(pool) < 2:
            child = annealing.annealed(trials, annealing.begin(trials), annealing.PART, annealing.HOT)
        else:
            one, two = trials.rng.choice(len(pool), 2, replace=False)
            spans_N2 = crossover(pool[one].spans_N2, pool[two].spans_N2, layers, trials.rng)
            child = annealing.annealed(trials, spans_N2, CHILD_PART, WARM)
        if child is not None:
            _offer(pool, climbed(trials, child, PATIENCE * peers))
        number += 1


def _offer(pool: list[Candidate], one: Candidate) -> None:
    """Add a candidate to the pool if its throughput is new and among the MOST_PARENTS highest."""
    if np.isfinite(one.value) and all(abs(one.value - other.value) > SLIGHTLY * other.value for other in pool):
        pool.append(one)
        pool.sort(key=lambda one: -one.value)
        del pool[MOST_PARENTS:]
