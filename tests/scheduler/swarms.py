"""Swarms for the scheduler's tests."""

from collections.abc import Sequence

import numpy as np

from decentral.scheduler.topology.topology import Topology


def subset(swarm: Topology, keep: Sequence[int]) -> Topology:
    """The same swarm with only these peers, in this order."""
    index = np.asarray(keep, dtype=np.int64)
    grid = np.ix_(index, index)
    names = [tuple(field[i] for i in keep) for field in (swarm.ids, swarm.regions, swarm.devices)]
    numbers = (swarm.memory_bytes[index], swarm.flops[index], swarm.delay_s[grid], swarm.bandwidth[grid])
    limits = (swarm.up[index], swarm.down[index], swarm.loss[grid])
    return Topology(names[0], names[1], names[2], *numbers, *limits, swarm.workload)
