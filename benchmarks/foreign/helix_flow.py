"""The maximum flow of a placement by Helix's rules, compiled. Start reading at `flow`.

Vertices: node i receives at 2i and sends at 2i + 1, and the edge between them has the node's tokens/s. The source is
2N, the sink 2N + 1. An edge from i to j exists where i's span ends exactly where j's begins. Dinic's algorithm (1970).
"""

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled, inner
from decentral.scheduler.topology.arrays import Floats, Ints

LEAST = 1e-9  # tokens/s; residual capacities below this count as 0


@inner
def _joined(tail: int, head: int, rate: float, left_VV: Floats, next_VV: Ints, count_V: Ints) -> None:
    left_VV[tail, head] = rate
    left_VV[head, tail] = 0.0
    next_VV[tail, count_V[tail]] = head
    next_VV[head, count_V[head]] = tail
    count_V[tail] += 1
    count_V[head] += 1


@inner
def _graph(
    spans_N2: Ints, layers: int, rate_NS: Floats, link_NN: Floats, source_N: Floats, sink_N: Floats,
    left_VV: Floats, next_VV: Ints, count_V: Ints,
) -> None:  # fmt: skip
    nodes = len(spans_N2)
    for i in range(nodes):
        first, last = spans_N2[i, 0], spans_N2[i, 1]
        if last <= first:
            continue
        _joined(2 * i, 2 * i + 1, rate_NS[i, last - first], left_VV, next_VV, count_V)
        if first == 0:
            _joined(2 * nodes, 2 * i, source_N[i], left_VV, next_VV, count_V)
        if last == layers:
            _joined(2 * i + 1, 2 * nodes + 1, sink_N[i], left_VV, next_VV, count_V)
        for j in range(nodes):
            if spans_N2[j, 0] == last and spans_N2[j, 1] > last:
                _joined(2 * i + 1, 2 * j, link_NN[i, j], left_VV, next_VV, count_V)


@inner
def _levels(source: int, left_VV: Floats, next_VV: Ints, count_V: Ints, level_V: Ints, path_V: Ints) -> None:
    """Set each vertex's distance from the source, -1 if no residual capacity leads there; `path_V` is scratch."""
    level_V[:] = -1
    level_V[source] = 0
    path_V[0] = source
    done, known = 0, 1
    while done < known:
        at = path_V[done]
        done += 1
        for number in range(count_V[at]):
            to = next_VV[at, number]
            if level_V[to] < 0 and left_VV[at, to] > LEAST:
                level_V[to] = level_V[at] + 1
                path_V[known] = to
                known += 1


@inner
def _pushed(
    source: int, sink: int, left_VV: Floats, next_VV: Ints, count_V: Ints, level_V: Ints, path_V: Ints, tried_V: Ints
) -> float:
    """Push flow along one shortest path, and return it; 0.0 if no path is left at these levels."""
    depth = 0
    path_V[0] = source
    while path_V[depth] != sink:
        at = path_V[depth]
        onward = False
        while tried_V[at] < count_V[at]:
            to = next_VV[at, tried_V[at]]
            if left_VV[at, to] > LEAST and level_V[to] == level_V[at] + 1:
                onward = True
                break
            tried_V[at] += 1
        if onward:
            depth += 1
            path_V[depth] = to
        elif depth == 0:
            return 0.0
        else:
            depth -= 1
            tried_V[path_V[depth]] += 1
    pushed = np.inf
    for k in range(depth):
        pushed = min(pushed, left_VV[path_V[k], path_V[k + 1]])
    for k in range(depth):
        left_VV[path_V[k], path_V[k + 1]] -= pushed
        left_VV[path_V[k + 1], path_V[k]] += pushed
    return pushed


@compiled
def flow(
    spans_N2: Ints, layers: int, rate_NS: Floats, link_NN: Floats, source_N: Floats, sink_N: Floats
) -> tuple[float, Floats]:
    """Return the maximum flow, in tokens/s, and the flow through each node.

    Args:
        spans_N2: Each node's layers [first, last); (0, 0) for a node that is left out.
        layers: Number of layers.
        rate_NS: tokens/s of each node when it holds s layers.
        link_NN: Capacity from node to node, in tokens/s.
        source_N: Capacity from the source to each node.
        sink_N: Capacity from each node to the sink.
    """
    nodes = len(spans_N2)
    vertices, source, sink = 2 * nodes + 2, 2 * nodes, 2 * nodes + 1
    left_VV = np.empty((vertices, vertices))
    next_VV = np.empty((vertices, vertices), np.int64)
    count_V, level_V = np.zeros(vertices, np.int64), np.empty(vertices, np.int64)
    path_V, tried_V = np.empty(vertices, np.int64), np.empty(vertices, np.int64)
    _graph(spans_N2, layers, rate_NS, link_NN, source_N, sink_N, left_VV, next_VV, count_V)
    total = 0.0
    while True:
        _levels(source, left_VV, next_VV, count_V, level_V, path_V)
        if level_V[sink] < 0:
            break
        tried_V[:] = 0
        pushed = np.inf
        while pushed > 0:
            pushed = _pushed(source, sink, left_VV, next_VV, count_V, level_V, path_V, tried_V)
            total += pushed
    through_N = np.zeros(nodes)
    for i in range(nodes):
        if spans_N2[i, 1] > spans_N2[i, 0]:
            through_N[i] = left_VV[2 * i + 1, 2 * i]
    return total, through_N


@compiled
def supply(spans_N2: Ints, layers: int, rate_NS: Floats, least: float) -> NDArray[np.float64]:
    """Return the sum of the tokens/s of each layer's holders, or `least` where it is larger."""
    supply_L = np.full(layers, least)
    for i in range(len(spans_N2)):
        for layer in range(spans_N2[i, 0], spans_N2[i, 1]):
            supply_L[layer] += rate_NS[i, spans_N2[i, 1] - spans_N2[i, 0]]
    return supply_L
