"""What a synchronous step needs of each device and link: bytes of memory, FLOPs, and transfers that end in time.

All functions take a divided workload: the gigabytes of one stage and of one replica (`divided`).

    bytes   = 4 * gradient bytes + activation bytes / 4     weights, gradients and two moments of AdamW; and the
                                                            inputs of the stage's micro-batches in flight
    FLOPs   = 6 * parameters * tokens                       forward and backward of a stage for one replica's tokens
    seconds = FLOPs / FLOP/s * (M + S - 1) / M              of the slowest device, for which all S stages wait;
                                                            M = 4 S micro-batches

A gradient has 4 bytes, as in the published cases (arXiv 2206.01288). Fill and drain of a pipeline are those of GPipe
(arXiv 1811.06965), whose bubble is small from M = 4 S on; a device holds the inputs of at most S of the M micro-batches
(1F1B, arXiv 2104.04473) and computes what is inside a stage again for the backward pass.
"""

from dataclasses import replace

import numpy as np
from scipy.sparse.csgraph import connected_components

from decentral.core.errors import UserError
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.topology import GBIT, Topology, Workload

GRADIENT_BYTES = 4.0
STATE_RATIO = 4.0  # bytes of a stage's state, for each byte of its gradients
TOKEN_BYTES = 8096.0  # bytes of a token's activations between stages: 2,024 channels of 4 bytes, as in published cases
TRAINING_FLOPS = 6.0  # FLOPs of training, for each parameter and token (arXiv 2001.08361)
UTILISATION = 0.35  # share of peak FLOP/s that training reaches: 1 B parameters on an H200 (docs/results/gpu.md)
MICRO_BATCHES = 4  # number of micro-batches in a step for each stage of a pipeline: M = 4 S
SLOWEST_TRANSFER_S = 3600.0  # a link on which every transfer of a step takes longer is of no use


def divided(workload: Workload, stages: int, replicas: int) -> Workload:
    """Return the workload with these numbers of stages and replicas, and the gigabytes of one stage and one replica.

    If `workload.stages` is None, the workload's gradients are those of the whole model, and are divided by `stages`. If
    `workload.replicas` is None, its activations are those of the whole batch, and are divided by `replicas`.
    """
    gradient, activation = workload.gradient_gbytes, workload.activation_gbytes
    return replace(
        workload,
        stages=stages,
        replicas=replicas,
        gradient_gbytes=gradient / stages if workload.stages is None else gradient,
        activation_gbytes=activation / replicas if workload.replicas is None else activation,
    )


def pair(workload: Workload) -> tuple[int, int]:
    """Return the numbers of stages and replicas of a divided workload."""
    assert workload.stages is not None
    assert workload.replicas is not None
    return workload.stages, workload.replicas


def named(stages: int, replicas: int) -> str:
    """Return a pair of stages and replicas in words."""
    return f"{stages} stage{'s' * (stages > 1)} of {replicas} replica{'s' * (replicas > 1)}"


def parameters(workload: Workload) -> float:
    """Return the number of parameters of the whole model of a divided workload."""
    return stage_parameters(workload) * pair(workload)[0]


def tokens(workload: Workload) -> float:
    """Return the number of tokens in the whole batch of a divided workload."""
    return replica_tokens(workload) * pair(workload)[1]


def stage_parameters(workload: Workload) -> float:
    """Return the number of parameters of one stage of a divided workload."""
    return workload.gradient_gbytes * 1e9 / GRADIENT_BYTES


def replica_tokens(workload: Workload) -> float:
    """Return the number of tokens on which one replica trains in a step of a divided workload."""
    if workload.tokens is not None:
        return workload.tokens / pair(workload)[1]
    return workload.activation_gbytes * 1e9 / TOKEN_BYTES


def stage_bytes(workload: Workload) -> float:
    """Return the bytes of memory that a device needs to hold one stage of a divided workload."""
    return 1e9 * (STATE_RATIO * workload.gradient_gbytes + workload.activation_gbytes / MICRO_BATCHES)


def compute_seconds(workload: Workload, flops: float) -> float:
    """Return the seconds of a step's computation if the slowest device reaches `flops` FLOP/s."""
    stages, _ = pair(workload)
    device_flops = TRAINING_FLOPS * stage_parameters(workload) * replica_tokens(workload)
    bubble = (stages - 1) / (MICRO_BATCHES * stages)
    return float(device_flops / flops * (1 + bubble))


def memory_N(topology: Topology) -> Floats:
    """Return each peer's bytes of memory; memory that is not given counts as unlimited."""
    return np.where(topology.memory_bytes > 0, topology.memory_bytes, np.inf)


def parts(topology: Topology, workloads: list[Workload]) -> list[Ints]:
    """Return the parts of the swarm that links which can carry a step connect, largest first, as indices of peers.

    Args:
        topology: The peers and their links.
        workloads: The divided workloads between which the planner chooses. A link is of use if a transfer of one of
            them ends within SLOWEST_TRANSFER_S on it.

    Raises:
        UserError: If no link is of use.
    """
    seconds_NN = 2 * topology.delay_s + _least_bytes(workloads) / topology.bandwidth
    seconds_NN = (seconds_NN + seconds_NN.T) / 2
    number, part_N = connected_components(seconds_NN <= SLOWEST_TRANSFER_S, directed=False)
    if number == len(topology):
        np.fill_diagonal(seconds_NN, np.inf)
        a, b = (int(peer) for peer in np.unravel_index(np.argmin(seconds_NN), seconds_NN.shape))
        raise UserError(
            f"topology: links cut the swarm into {'two' if number == 2 else number} parts of one peer each: even the "
            f"fastest link, {topology.ids[a]} to {topology.ids[b]} with {topology.bandwidth[a, b] / GBIT:.2g} Gb/s, "
            f"needs {seconds_NN[a, b]:.2g} s for the smallest transfer of a step; at most {SLOWEST_TRANSFER_S:.0f} s "
            "are of use: raise bandwidth_gbps (or up_gbps and down_gbps)"
        )
    found = [np.flatnonzero(part_N == part) for part in range(number)]
    return sorted(found, key=len, reverse=True)


def _least_bytes(workloads: list[Workload]) -> float:
    """Return the bytes of the smallest transfer over a link, there and back, in any of the divided workloads."""
    sizes = []
    for workload in workloads:
        stages, replicas = pair(workload)
        sizes += [workload.gradient_gbytes / replicas] * (replicas > 1) + [workload.activation_gbytes] * (stages > 1)
    return 2e9 * min(sizes, default=0.0)
