"""Simple layouts that a person would choose: the first layouts of the searches, and baselines for their results.

On the published geo-distributed cases, one of these layouts is the best known layout. A plan therefore always states
the costs of the HAND layouts.

Every public function takes each peer's region (region_N, numbered from 0), the numbers of stages S and replicas R, and
a random generator. It returns slots: the peers of S stages, R peers for each stage, then the unused peers.
"""

from collections.abc import Callable, Sequence

import numpy as np

from decentral.scheduler.topology.arrays import Ints

Start = Callable[[Ints, int, int, np.random.Generator], Ints]
"""A function (region_N, stages, replicas, rng) -> slots."""


def random(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout with every peer at a random place."""
    return rng.permutation(len(region_N))


def region_pipeline(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout whose pipelines stay inside regions as far as sizes allow, so that activations stay local."""
    return _dealt(_by_region(region_N, stages, rng), stages, replicas)


def region_data(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout whose stages stay inside regions as far as sizes allow, so that gradients stay local."""
    return _by_region(region_N, replicas, rng)


def deal(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout that deals each region's peers over the stages in turn, so that each stage has all regions."""
    return _dealt(_by_region(region_N, 1, rng), stages, replicas)


def blocks(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout of runs of stages, longest run first; within a run, every pipeline stays in one region.

    A run of k stages needs, for each of R pipelines, k peers of one region. With small regions (spot machines), all
    links of the boundaries inside a run are fast, while `region_pipeline` has a slow link in each boundary.
    """
    left = _shuffled_regions(region_N, rng)
    slots: list[Sequence[int]] = []
    while len(slots) < stages:
        length = _longest_run(left, stages - len(slots), replicas)
        groups: list[list[int]] = []
        for peers in sorted(left, key=len, reverse=True):
            while len(peers) >= length and len(groups) < replicas:
                groups.append([peers.pop() for _ in range(length)])
        slots += [[group[at] for group in groups] for at in range(length)]
    return _flat(slots, left)


def random_blocks(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout of runs of stages; the runs have random lengths, and each has about the swarm's mix of regions.

    In a run, the peers of each pipeline come from the region with the most unplaced peers, up to random noise. So few
    pipelines change regions between two runs, which helps long pipelines. Searches use the best of many such layouts.
    """
    left = _shuffled_regions(region_N, rng)
    noise = float(rng.choice([0.0, 0.5, 1.0, 2.0]))
    slots: list[Sequence[int]] = []
    while len(slots) < stages:
        longest = _longest_run(left, stages - len(slots), replicas)
        length = int(rng.integers(1, longest + 1)) if rng.random() < 0.3 else -(-longest // int(rng.integers(1, 4)))
        groups: list[list[int]] = []
        for _ in range(replicas):
            size = [len(peers) + noise * length * rng.random() if len(peers) >= length else -1.0 for peers in left]
            largest = left[int(np.argmax(size))]
            groups.append([largest.pop() for _ in range(length)])
        slots += [[group[at] for group in groups] for at in range(length)]
    return _flat(slots, left)


STARTS: dict[str, Start] = {
    "region-pipeline": region_pipeline,
    "region-data": region_data,
    "deal": deal,
    "blocks": blocks,
    "random": random,
}
HAND = ("random", "region-pipeline", "region-data")  # hand-made layouts with which every plan is compared


def _shuffled_regions(region_N: Ints, rng: np.random.Generator) -> list[list[int]]:
    return [list(rng.permutation(np.flatnonzero(region_N == r))) for r in range(int(region_N.max()) + 1)]


def _longest_run(left: list[list[int]], stages: int, replicas: int) -> int:
    """Return the largest k, at most `stages`, for which each replica can get k unplaced peers of one region."""
    runs = range(stages, 1, -1)
    return next((length for length in runs if sum(len(peers) // length for peers in left) >= replicas), 1)


def _dealt(peers: Ints, stages: int, replicas: int) -> Ints:
    """Return a layout that puts the i-th of `peers` into stage i mod `stages`; unused peers come last."""
    used = stages * replicas
    return np.concatenate((peers[:used].reshape(replicas, stages).T.ravel(), peers[used:]))


def _flat(stages: Sequence[Sequence[int]], unused: Sequence[Sequence[int]]) -> Ints:
    return np.array([peer for members in [*stages, *unused] for peer in members])


def _by_region(region_N: Ints, multiple: int, rng: np.random.Generator) -> Ints:
    """Return all peers, first a multiple of `multiple` from each region (in random order), then the remaining peers."""
    regions = [rng.permutation(np.flatnonzero(region_N == r)) for r in rng.permutation(int(region_N.max()) + 1)]
    cuts = [len(peers) - len(peers) % multiple for peers in regions]
    parts = [np.split(peers, [cut]) for peers, cut in zip(regions, cuts, strict=True)]
    return np.concatenate([whole for whole, _ in parts] + [rest for _, rest in parts])
