"""Swarms for the scheduler's tests."""

from collections.abc import Sequence

import numpy as np

from decentral.scheduler.topology.topology import Topology


def subset(swarm: Topology, keep: Sequence[int]) -> Topology:
    """The same swarm with only these peers, in this order."""
    index = np.asarray(keep, dtype=np.int64)
    names = [tuple(field[i] for i in keep) for field in (swarm.ids, swarm.regions, swarm.devices)]
    memory, flops, links = swarm.memory_bytes[index], swarm.flops[index], swarm.links.among(keep)
    return Topology(
        names[0], names[1], names[2], memory, flops, links, swarm.up[index], swarm.down[index], swarm.workload
    )
