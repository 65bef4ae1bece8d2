"""Layouts that a person would draw by hand: starts for the searches, and what their result is held against.

On the published geo-distributed cases the best known layout *is* one of these, so a plan always names their cost
beside its own.
"""

from collections.abc import Callable

import numpy as np

from decentral.scheduler.shared.arrays import Ints

Start = Callable[[Ints, int, int, np.random.Generator], Ints]
"""(region of each peer, stages, replicas, rng) -> the peers by slot: S stages of R, then the unused."""


def random(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Anyone anywhere."""
    return rng.permutation(len(region_N))


def region_pipeline(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """A pipeline stays inside a region as far as the region's size allows: activations stay local."""
    peers = _by_region(region_N, stages, rng)
    used = peers[: stages * replicas].reshape(replicas, stages)
    return np.concatenate((used.T.ravel(), peers[stages * replicas :]))


def region_data(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """A stage stays inside a region as far as the region's size allows: gradients stay local."""
    return _by_region(region_N, replicas, rng)


def deal(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Each region dealt over the stages like cards, so that every stage has a bit of every region."""
    peers = _by_region(region_N, 1, rng)
    used = peers[: stages * replicas]
    return np.concatenate((used.reshape(replicas, stages).T.ravel(), peers[stages * replicas :]))


def blocks(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Runs of stages between which every pipeline stays in its region, the longest runs first.

    A run of k stages needs R groups of k peers of one region. On a swarm of small regions (spot machines) this
    gives some joints that are fast for all pipelines, where `region_pipeline` has a slow pair in each.
    """
    left = [list(rng.permutation(np.flatnonzero(region_N == r))) for r in range(int(region_N.max()) + 1)]
    slots: list[list[int]] = []
    while len(slots) < stages:
        length = stages - len(slots)
        while length > 1 and sum(len(peers) // length for peers in left) < replicas:
            length -= 1
        groups: list[list[int]] = []
        for peers in sorted(left, key=len, reverse=True):
            while len(peers) >= length and len(groups) < replicas:
                groups.append([peers.pop() for _ in range(length)])
        slots += [[group[i] for group in groups] for i in range(length)]
    return np.array([peer for stage in slots for peer in stage] + [peer for peers in left for peer in peers])


def random_blocks(region_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Such runs of random lengths, from regions in about their proportions: one draw of many, for long pipelines.

    Where two runs have nearly the same regions, the joint between them needs few slow pairs, and only between near
    regions.
    """
    left = [list(rng.permutation(np.flatnonzero(region_N == r))) for r in range(int(region_N.max()) + 1)]
    noise = float(rng.choice([0.0, 0.5, 1.0, 2.0]))
    slots: list[list[int]] = []
    while len(slots) < stages:
        longest = stages - len(slots)
        while longest > 1 and sum(len(peers) // longest for peers in left) < replicas:
            longest -= 1
        length = int(rng.integers(1, longest + 1)) if rng.random() < 0.3 else -(-longest // int(rng.integers(1, 4)))
        groups: list[list[int]] = []
        for _ in range(replicas):
            room = [len(peers) + noise * length * rng.random() if len(peers) >= length else -1.0 for peers in left]
            largest = left[int(np.argmax(room))]
            groups.append([largest.pop() for _ in range(length)])
        slots += [[group[i] for group in groups] for i in range(length)]
    return np.array([peer for stage in slots for peer in stage] + [peer for peers in left for peer in peers])


STARTS: dict[str, Start] = {
    "region-pipeline": region_pipeline,
    "region-data": region_data,
    "deal": deal,
    "blocks": blocks,
    "random": random,
}
HAND = ("random", "region-pipeline", "region-data")


def _by_region(region_N: Ints, multiple: int, rng: np.random.Generator) -> Ints:
    """All peers, regions one after the other in a random order, whole multiples of a region first.

    What is left of each region follows at the end, again region by region.
    """
    whole: list[Ints] = []
    rest: list[Ints] = []
    for region in rng.permutation(int(region_N.max()) + 1):
        peers = rng.permutation(np.flatnonzero(region_N == region))
        cut = len(peers) - len(peers) % multiple
        whole.append(peers[:cut])
        rest.append(peers[cut:])
    return np.concatenate(whole + rest)
