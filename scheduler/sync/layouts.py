"""Layouts that a person would draw by hand: starts for the searches, and baselines for their results.

On the published geo-distributed cases the best known layout *is* one of these, so a plan always names their cost
beside its own.

Every function here takes each peer's region (region_N, numbered from 0), the numbers of stages S and replicas R, and a
random generator, and returns slots: the peers of S stages of R, one stage after the other, then the unused ones.
"""

from collections.abc import Callable, Sequence

import numpy as np

from decentral.scheduler.topology.arrays import Ints

Start = Callable[[Ints, int, int, np.random.Generator], Ints]
"""(region_N, stages, replicas, rng) -> slots"""


def random(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Every peer at a random place."""
    return rng.permutation(len(region_N))


def region_pipeline(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Each pipeline stays inside a region as far as the region's size allows, so that activations stay local."""
    return _dealt(_by_region(region_N, stages, rng), stages, replicas)


def region_data(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Each stage stays inside a region as far as the region's size allows, so that gradients stay local."""
    return _by_region(region_N, replicas, rng)


def deal(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Each region is dealt over the stages like cards, so that every stage has some peers of every region."""
    return _dealt(_by_region(region_N, 1, rng), stages, replicas)


def blocks(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Runs of stages between which every pipeline stays in its region, the longest runs first.

    A run of k stages needs R groups of k peers of one region. On a swarm of small regions (spot machines) this gives
    some stage boundaries that are fast for all pipelines, where `region_pipeline` has a slow pair in each.
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
    """As `blocks`, with runs of random lengths, from regions in about their proportions; for long pipelines.

    Where two runs have nearly the same regions, the boundary between them needs few slow pairs, and only between near
    regions. One draw is worth little: searches take the best of many.
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
HAND = ("random", "region-pipeline", "region-data")


def _shuffled_regions(region_N: Ints, rng: np.random.Generator) -> list[list[int]]:
    return [list(rng.permutation(np.flatnonzero(region_N == r))) for r in range(int(region_N.max()) + 1)]


def _longest_run(left: list[list[int]], stages: int, replicas: int) -> int:
    """The longest run, of `stages` at most, for which the peers that are left form a group for each replica."""
    runs = range(stages, 1, -1)
    return next((length for length in runs if sum(len(peers) // length for peers in left) >= replicas), 1)


def _dealt(peers: Ints, stages: int, replicas: int) -> Ints:
    """The peers dealt over the stages in turn, and those that are over."""
    used = stages * replicas
    return np.concatenate((peers[:used].reshape(replicas, stages).T.ravel(), peers[used:]))


def _flat(stages: Sequence[Sequence[int]], unused: Sequence[Sequence[int]]) -> Ints:
    return np.array([peer for members in [*stages, *unused] for peer in members])


def _by_region(region_N: Ints, multiple: int, rng: np.random.Generator) -> Ints:
    """All peers, region by region in random order: of each a whole multiple of `multiple`, and at the end the rests."""
    regions = [rng.permutation(np.flatnonzero(region_N == r)) for r in rng.permutation(int(region_N.max()) + 1)]
    cuts = [len(peers) - len(peers) % multiple for peers in regions]
    parts = [np.split(peers, [cut]) for peers, cut in zip(regions, cuts, strict=True)]
    return np.concatenate([whole for whole, _ in parts] + [rest for _, rest in parts])
