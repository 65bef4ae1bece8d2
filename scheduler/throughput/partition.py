"""Cutting a chain of layers into spans for devices in a given order: an exact dynamic programme.

PipeDream's partition (Narayanan et al., SOSP 2019) for unequal devices, as HetPipe uses it: minimise the slowest
stage, where a stage takes its layers' compute time and the transfer of what it sends on.
"""

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.throughput.layer_costs import LayerCosts


def cut(task: LayerCosts, order: Ints) -> tuple[float, Ints]:
    """(seconds per token of the slowest stage, cuts): peer order[i] takes layers [cuts[i], cuts[i + 1]).

    Every peer takes at least one layer. O(peers * layers^2). Raises UserError if no cut fits the memories.
    """
    peers, layers = len(order), task.layers
    best = np.full((peers + 1, layers + 1), np.inf)
    before = np.zeros((peers + 1, layers + 1), np.int64)
    best[0, 0] = 0.0
    total: Floats = np.concatenate((np.zeros((task.peers, 1)), np.cumsum(task.seconds_NL, axis=1)), axis=1)
    for place, peer in enumerate(map(int, order), start=1):
        link = task.link_NN[peer, order[place]] if place < peers else np.inf
        send = 2 * task.hidden_bytes / link if link > 0 else np.inf
        for last in range(place, layers + 1):
            for first in range(place - 1, last):
                if best[place - 1, first] < best[place, last] and task.fits(peer, first, last):
                    stage = max(total[peer, last] - total[peer, first], send)
                    slowest = max(best[place - 1, first], stage)
                    if slowest < best[place, last]:
                        best[place, last], before[place, last] = slowest, first
    if not np.isfinite(best[peers, layers]):
        raise UserError(f"partition: no cut of {layers} layers fits the memories of these {peers} peers in this order")
    cuts = [layers]
    for place in range(peers, 0, -1):
        cuts.append(int(before[place, cuts[-1]]))
    return float(best[peers, layers]), np.array(cuts[::-1])
