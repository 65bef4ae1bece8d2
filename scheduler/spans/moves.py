"""Make spans from spans: random starts, repairs, crossover, and the moves of annealing and of the local search."""

from collections.abc import Sequence

import numpy as np

from decentral.scheduler.spans.problem import SpanProblem, SpanValue
from decentral.scheduler.topology.arrays import Flags, Ints

IDLE_FLOOR, PRICE_FLOOR = 0.02, 1e-3  # smallest weights in random choices, so that each peer and layer can be chosen
EDGE_STEPS = (1, 1, 1, 1, 2, -1, -1, -1, -1, -2)  # an edge moves by one of these numbers of layers, chosen at random

Span = tuple[int, int]
Change = tuple[int, int, int]
"""A peer's new span: (peer, first, last)."""


def layers_held(layers: int, spans_N2: Ints) -> Flags:
    """Return an N x L array of flags: whether each peer's span includes each layer."""
    layer = np.arange(layers)
    return np.asarray((spans_N2[:, :1] <= layer) & (layer < spans_N2[:, 1:]))


def grown(reach_L: Ints, first: int, last: int) -> Span:
    """Return the span [first, last), shortened to fit in a peer's memory or widened on both sides to fill it.

    Args:
        reach_L: The end of the peer's longest span from each layer.
        first: First layer.
        last: End of the span.

    Returns:
        The new span; (0, 0) if not even layer `first` fits.
    """
    if reach_L[first] == first:
        return 0, 0
    last = min(last, int(reach_L[first]))
    before = None
    while before != (first, last):
        before = first, last
        last += last < int(reach_L[first])
        first -= first > 0 and int(reach_L[first - 1]) >= last
    return first, last


def filled(problem: SpanProblem, rng: np.random.Generator) -> Ints:
    """Return spans that fill every peer's memory; peers in random order get the layers whose holders are slowest."""
    peers, layers = problem.reach_NL.shape
    spans, supply_L = np.zeros((peers, 2), np.int64), np.zeros(layers)
    for peer in rng.permutation(peers):
        before = np.concatenate(([0.0], np.cumsum(supply_L)))
        first_F = np.flatnonzero(problem.reach_NL[peer] > np.arange(layers))
        if not len(first_F):
            continue
        last_F = problem.reach_NL[peer, first_F]
        size_F = last_F - first_F
        level_F = (before[last_F] - before[first_F]) / size_F * (1 + 0.02 * rng.random(len(first_F))) - 1e-9 * size_F
        best = int(np.argmin(level_F))
        first, last = int(first_F[best]), int(last_F[best])
        spans[peer] = first, last
        supply_L[first:last] += problem.supply(int(peer), first, last)
    return spans


def in_a_row(problem: SpanProblem, rng: np.random.Generator, pace: float = 0.0) -> Ints:
    """Return spans in which each peer, in random order, begins where the peer before it ends.

    After the last layer, the next peer begins at layer 0. A peer gets as many layers as it can compute at `pace`
    tokens/s and hold in memory; it gets no span if that is not even one layer.
    """
    peers, layers = problem.reach_NL.shape
    spans, at = np.zeros((peers, 2), np.int64), 0
    for peer in rng.permutation(peers):
        lasts = range(int(problem.reach_NL[peer, at]), at, -1)
        last = next((last for last in lasts if problem.supply(int(peer), at, last) >= pace), at)
        if last > at:
            spans[peer] = at, last
            at = last % layers
    return spans


def paces(problem: SpanProblem) -> list[float]:
    """Return the paces for `in_a_row`, in tokens/s, sorted by the tokens/s that the rows carry together, highest first.

    Each layer is taken to cost as much as layer 0. So the first pace is the best if all layers are alike and links do
    not limit the throughput.
    """
    peers, layers = problem.reach_NL.shape
    supply_NS = np.zeros((peers, layers + 1))
    for peer in range(peers):
        sizes = range(1, int(problem.reach_NL[peer, 0]) + 1)
        supply_NS[peer, 1 : len(sizes) + 1] = [problem.supply(peer, 0, size) for size in sizes]
    carried = {}
    for pace in np.unique(supply_NS[supply_NS > 0]).tolist():
        most_N = ((supply_NS >= pace) * np.arange(layers + 1)).max(axis=1)
        carried[pace] = pace * (most_N.sum() // layers)
    return sorted((pace for pace in carried if carried[pace]), key=lambda pace: -carried[pace])


def repaired(reach_NL: Ints, spans_N2: Ints, holders: int) -> Ints:
    """Return a copy of the spans in which layers with too few holders get peers from layers with the most holders.

    The number of moves is limited, so a layer may still have too few holders.
    """
    spans = spans_N2.copy()
    peers, layers = reach_NL.shape
    for _ in range(4 * peers):
        count_L = layers_held(layers, spans).sum(axis=0)
        if (count_L >= holders).all():
            break
        layer = int(np.argmin(count_L))
        spare = [
            (int(count_L[first:last].min()) if last > first else 99, peer)
            for peer, (first, last) in enumerate(spans)
            if reach_NL[peer, layer] > layer and not first <= layer < last
        ]
        if not spare:
            break
        peer = max(spare)[1]
        spans[peer] = grown(reach_NL[peer], layer, layer + 1)
    return spans


def crossover(one_N2: Ints, two_N2: Ints, layers: int, rng: np.random.Generator) -> Ints:
    """Return a child that takes the layers before a random cut from one parent, and the rest from the other.

    A peer gets its span of the first parent if that span's middle is before the cut, and its span of the second parent
    if that span's middle is after the cut. If both or neither hold, the peer gets one of the two at random.
    """
    cut = int(rng.integers(1, layers)) if layers > 1 else 1
    either_N = rng.random(len(one_N2)) < 0.5
    early_N = one_N2.sum(axis=1) < 2 * cut
    late_N = two_N2.sum(axis=1) >= 2 * cut
    return np.where(np.where(early_N == late_N, either_N, early_N)[:, None], one_N2, two_N2)


def mutated(problem: SpanProblem, spans_N2: Ints, found: SpanValue, rng: np.random.Generator) -> Ints:
    """Return a copy of the spans with one move of a random peer, more often of an idle peer.

    The peer goes to a scarce layer, begins elsewhere, gets a random span, swaps spans with another peer, or moves an
    edge. `found`, the value of the spans, tells which peers are idle and which layers are scarce.
    """
    child, reach_NL = spans_N2.copy(), problem.reach_NL
    peers, layers = reach_NL.shape
    idle_N = np.maximum(0.0, found.idle_N) + IDLE_FLOOR
    peer = int(rng.choice(peers, p=idle_N / idle_N.sum()))
    first, last = (int(edge) for edge in child[peer])
    match int(rng.integers(6)):
        case 0:
            weight_L = found.price_L + PRICE_FLOOR * found.price_L.max() + 1e-12
            layer = int(rng.choice(layers, p=weight_L / weight_L.sum()))
            child[peer] = grown(reach_NL[peer], max(0, layer - int(rng.integers(0, 3))), layer + 1)
        case 1:
            first = int(np.clip(first + rng.integers(-3, 4), 0, layers - 1))
            child[peer] = first, reach_NL[peer, first]
        case 2:
            first = int(rng.integers(layers))
            end = int(reach_NL[peer, first])
            child[peer] = first, int(rng.integers(first, end)) + 1 if end > first else first
        case 3:
            other = int(rng.integers(peers))
            taken = child[other].copy()
            child[other] = grown(reach_NL[other], first, last) if last > first else (0, 0)
            child[peer] = grown(reach_NL[peer], int(taken[0]), int(taken[1])) if taken[1] > taken[0] else (0, 0)
        case 4:
            first, last = max(0, first + int(rng.integers(-1, 2))), min(layers, last + int(rng.integers(-1, 2)))
            if first < last <= reach_NL[peer, first]:
                child[peer] = first, last
        case _:
            rows = [(int(first), int(last)) for first, last in child]
            for other, first, last in proposal(rows, reach_NL.tolist(), layers, rng):
                child[other] = first, last
    return child


def proposal(
    rows: Sequence[Span], reach: Sequence[Sequence[int]], layers: int, rng: np.random.Generator
) -> list[Change]:
    """Return the changes of one random move that keeps edges of spans aligned; none if the move does not fit.

    A peer goes to an edge of another peer's span, takes another peer's span, swaps with another peer, or spans from one
    peer's end to another's begin; an edge moves by one or two layers, for one peer or for all peers that have it.

    Args:
        rows: Each peer's span.
        reach: `SpanProblem.reach_NL` as lists.
        layers: Number of layers.
        rng: Source of random choices.
    """
    pick, peers = rng.random, len(rows)
    peer, other, kind = int(pick() * peers), int(pick() * peers), int(pick() * 10)
    first, last = rows[peer]
    if kind < 2:
        edge = rows[other][int(pick() * 2)]
        if pick() < 0.5:
            most = reach[peer][edge] - edge if edge < layers else 0
            return [(peer, edge, edge + 1 + int(pick() * most))] if most else []
        begin = edge - 1 - int(pick() * (max(reach[peer][0], 1)))
        return [(peer, begin, edge)] if begin >= 0 and reach[peer][begin] >= edge else []
    if kind < 4:
        changes = [(peer, rows[other][0], rows[other][1])]
    elif kind < 5:
        changes = [(peer, rows[other][0], rows[other][1]), (other, first, last)]
    elif kind < 8:
        return _edge_moved(rows, reach, rows[peer][int(pick() * 2)], EDGE_STEPS[int(pick() * len(EDGE_STEPS))])
    elif kind < 9:
        third = int(pick() * peers)
        begin = rows[other][1] if pick() < 0.9 else 0
        changes = [(peer, begin, rows[third][0] if pick() < 0.9 else layers)]
    else:
        changes = [(peer, first + int(pick() * 3) - 1, last + int(pick() * 3) - 1)]
    fit = all(0 <= begin < end <= layers and reach[one][begin] >= end for one, begin, end in changes)
    return changes if fit else []


def _edge_moved(rows: Sequence[Span], reach: Sequence[Sequence[int]], edge: int, step: int) -> list[Change]:
    """Return the changes that move an edge by `step` layers for every peer that has it, where the new span fits."""
    layers = len(reach[0])
    if not 0 < edge < layers:
        return []
    changes = []
    for peer, (first, last) in enumerate(rows):
        if edge in (first, last):
            begin, end = (first + step, last) if first == edge else (first, last + step)
            if 0 <= begin < end <= layers and reach[peer][begin] >= end:
                changes.append((peer, begin, end))
    return changes
