"""The shortest synchronous step of a small swarm, by enumeration: every set of peers, stages, and order of these.

    step          = computation + data parallel + pipeline, in seconds
    computation   = 6 * parameters / S * tokens / R / (0.35 * FLOP/s of the slowest device) * (5 S - 1) / (4 S)
    data parallel = max over devices, of the sum over the others in its stage, of 2 (delay + gradient / S / (R rate))
    pipeline      = 2 * sum over boundaries of the least, over matchings, of the largest delay + activation / R / rate
    bytes         = 16 a parameter of the stage, and a quarter of its activations

A link's two directions count with the mean of their seconds. Parameters are gradient bytes / 4; tokens are the
workload's, or activation bytes / 8,096. Nothing of the planner's cost code is used, so that both can be compared.
Start at `best_step`; it takes seconds for eight peers.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.topology import Topology, Workload

Stages = list[tuple[int, ...]]
CITIES, CARDS = 3, ((6, 10), (12, 35), (24, 71), (16, 112), (40, 312))  # GB and TFLOP/s


def best_step(swarm: Topology) -> tuple[float, Stages]:
    """The seconds of the shortest step of any plan, and its stages; infinite if no plan fits."""
    workload = swarm.workload or Workload(None, None)
    best, found = float("inf"), Stages()
    for used in range(1, len(swarm) + 1):
        for stages in (stages for stages in range(1, used + 1) if used % stages == 0):
            for peers in itertools.combinations(range(len(swarm)), used):
                step, layout = _best_of(swarm, workload, peers, stages, best)
                if step < best:
                    best, found = step, layout
    return best, found


def _best_of(
    swarm: Topology, workload: Workload, peers: Sequence[int], stages: int, best: float
) -> tuple[float, Stages]:
    """The shortest step of exactly these peers in so many stages; infinite if it is not below `best`."""
    replicas = len(peers) // stages
    gradient, activation = workload.gradient_gbytes * 1e9 / stages, workload.activation_gbytes * 1e9 / replicas
    if any(0 < swarm.memory_bytes[peer] < 4 * gradient + activation / 4 for peer in peers):
        return float("inf"), []
    tokens = workload.tokens or workload.activation_gbytes * 1e9 / 8096
    slowest = min(float(swarm.flops[peer]) for peer in peers)
    computation = 6 * gradient / 4 * tokens / replicas / (0.35 * slowest) * (5 * stages - 1) / (4 * stages)
    step, layout = best, Stages()
    if computation >= best:
        return float("inf"), []
    for partition in _partitions(list(peers), replicas):
        rest = computation + max(
            sum(_seconds(swarm, a, b, 2 * gradient / replicas, 2) for b in stage if b != a)
            for stage in partition
            for a in stage
        )
        if rest >= step:
            continue
        joint = {
            (one, two): min(
                max((_seconds(swarm, a, b, activation, 1) for a, b in zip(one, order, strict=True)), default=0.0)
                for order in itertools.permutations(two)
            )
            for one, two in itertools.permutations(partition, 2)
        }
        for order in itertools.permutations(partition):
            if order[0] <= order[-1]:
                whole = rest + 2 * sum(joint[pair] for pair in itertools.pairwise(order))
                if whole < step:
                    step, layout = whole, list(order)
    return (step, layout) if layout else (float("inf"), [])


def _seconds(swarm: Topology, a: int, b: int, size: float, delays: int) -> float:
    """Mean over both directions of the seconds for `size` bytes and so many delays."""
    return (
        sum(delays * float(swarm.delay_s[i, j]) + size / float(swarm.bandwidth[i, j]) for i, j in ((a, b), (b, a))) / 2
    )


def _partitions(peers: list[int], size: int) -> Iterator[Stages]:
    """All ways to divide the peers into stages of this size; the order of stages and within stages does not count."""
    if not peers:
        yield []
        return
    for others in itertools.combinations(peers[1:], size - 1):
        rest = [peer for peer in peers[1:] if peer not in others]
        for later in _partitions(rest, size):
            yield [(peers[0], *others), *later]


def random_swarm(rng: np.random.Generator, most: int = 8) -> Topology:
    """Unequal devices in three cities, at most `most`, some behind slow links; few or none can hold the model alone."""
    peers = []
    for number in range(int(rng.integers(most // 2, most + 1))):
        memory, tflops = CARDS[int(rng.integers(len(CARDS)))]
        peers.append({
            "id": f"p{number}", "region": f"city {rng.integers(CITIES)}", "memory_gb": memory, "tflops": tflops,
            "up_gbps": float(rng.lognormal(2, 1.5)), "down_gbps": float(rng.lognormal(3, 1)),
        })  # fmt: skip
    model = float(rng.choice([1.0, 4.0, 8.0, 15.0]))
    return topologies.parse({
        "peers": peers,
        "inside": {"delay_ms": 1, "bandwidth_gbps": 50},
        "across": {"delay_ms": float(rng.uniform(5, 80)), "bandwidth_gbps": float(rng.lognormal(1, 1))},
        "workload": {
            "gradient_gbytes": model,
            "activation_gbytes": float(rng.uniform(0.2, 4)),
            "tokens": float(rng.choice([5e5, 4e6, 1e7])),
        },
    })  # fmt: skip
