"""The linear programme of live routes: which share of micro-batches each peer sends to which next peer.

The planner's programme, of which spans peers should hold, is another one (max_flow.py). Every peer solves this for
itself from the roster, in which speeds are measured; equal rosters give equal flows. Peers with the same span count as
one that is as fast as all of them, so the program grows with the model and hardly with the swarm. It is a linear
program (HiGHS) over hops (span i carries from cut a to cut b; cuts are where fragments meet):

    z_iab >= 0                                         micro-batches' tokens/s on that hop
    sum_ia z_iab = sum_jc z_jbc                        at each cut b between the ends
    sum_ab z_iab share_ab <= speed_i                   no span computes more than its peers can
    maximise sum_ib z_i0b - HOP_COST sum z             a hop must carry more than it costs

Peers with the whole model train by themselves, but carry others' micro-batches to the end when they are asked. They are
in the program with only the hops that end there. So they take others' micro-batches where spans would be idle without
them, for what a whole-model peer loses by one stage is less than what the stages before it gain, and no others.

Links are not in it: each hop costs a little for their delay, and what they cannot carry shows in the times that routes
measure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.core.fragments import Fragment

HOP_COST = 0.01  # the part of the flow that may be lost for one hop less
MOST_HOPS = 40_000  # variables, some seconds; with more different spans routes go by measured times alone
LEAST_RATE = 1e-6  # smaller rates, relative to the sum of all speeds, count as none
SOLVED_AT_ONCE = 200  # variables of a small swarm's flow, which is solved whenever enough has changed
FLOW_PAUSE_S = 2.0  # between two solutions for each variable beyond these: one peer changes little in a large swarm
FLOWS_KEPT = 128  # solutions in the cache: many simulated peers know the same roster
SPEED_CHANGED = 0.1  # the part of all speed that has to change before the flow is solved again
Span = tuple[int, int]  # fragments [begin, end)
Ends = dict[Span, dict[int, dict[int, float]]]  # RoutingWeights.ends of the peers with each span
Floats = NDArray[np.float64]
Ints = NDArray[np.int_]


def rounded(speed: Mapping[Span, float]) -> dict[Span, float]:
    """Speeds with three digits, in order, so that rosters that differ only by rounding give equal flows."""
    return {span: float(f"{one:.2e}") for span, one in sorted(speed.items())}


def changed(before: Mapping[Span, float], now: Mapping[Span, float]) -> bool:
    """Whether the speeds have changed enough to solve the flow again."""
    if not before or not now:
        return bool(before) != bool(now)
    differing = sum(abs(before.get(span, 0.0) - now.get(span, 0.0)) for span in {*before, *now})
    return differing > SPEED_CHANGED * sum(now.values())


def _hops(spans: Sequence[Span], whole: Span | None) -> tuple[Ints, Ints, Ints]:
    """(number of the span, from cut, to cut) of each hop, between cuts at which some span begins or ends.

    Any other cut could be replaced by taking turns between its two neighbours, so no hop needs it. The hops of the span
    `whole` end where it ends.
    """
    cuts = np.unique(np.array(spans))
    inside = [cuts[(begin <= cuts) & (cuts <= end)] for begin, end in spans]
    pairs = [one[np.stack(np.triu_indices(len(one), 1))] for one in inside]
    pairs = [pair[:, pair[1] == span[1]] if span == whole else pair for pair, span in zip(pairs, spans, strict=True)]
    index = np.repeat(np.arange(len(spans)), [pair.shape[1] for pair in pairs])
    a, b = np.concatenate(pairs, axis=1)
    return index, a, b


def solve(
    cuts: Sequence[Fragment], speed: Mapping[Span, float], own: Span, whole_alone: bool = False
) -> RoutingWeights:
    """The routing weights of a peer with the span `own`: how far to carry what enters, and which peers come next.

    `speed`: tokens/s of the whole model, by span. `whole_alone`: peers with the whole model train by themselves. The
    weights are empty if nothing can flow from the first layer to the last, if there are too many different spans, or if
    the solver fails: speeds are what others publish.
    """
    useful = useful_speeds(cuts, speed) if whole_alone else speed
    most = _most_through(cuts, useful)
    usable = tuple((span, min(one, most), speed[span]) for span, one in useful.items())
    total = sum(one for _, one, _ in usable)
    flow = _flow(tuple(cuts), usable, (0, len(cuts)) if whole_alone else None) if total > 0 else None
    if flow is None:
        return RoutingWeights()
    ends, weights = flow
    return replace(weights, ends=ends.get(own, {}), tokens_per_s=weights.tokens_per_s * total)


def useful_speeds(cuts: Sequence[Fragment], speed: Mapping[Span, float]) -> dict[Span, float]:
    """The speeds, that of peers with the whole model cut down to what the other spans can hand to them.

    However fast such peers are, or say that they are, what the others do stays visible beside it.
    """
    whole, model = (0, len(cuts)), sum(cut.parameters for cut in cuts)
    begun = 0.0  # tokens/s that enter the model at the others, each busy with the whole of its span
    for (first, last), one in speed.items():
        if first == 0 and last < len(cuts):
            begun += one * model / max(1, sum(cut.parameters for cut in cuts[:last]))
    return {span: min(one, begun) if span == whole else one for span, one in speed.items()}


def _most_through(cuts: Sequence[Fragment], speed: Mapping[Span, float]) -> float:
    """Tokens/s: what the holders of the scarcest fragment could compute in it, if they did nothing else.

    No span can use more, and one that publishes far more must not make the others' flow too small to count.
    """
    whole = sum(cut.parameters for cut in cuts)
    held = [sum(one for (begin, end), one in speed.items() if begin <= i < end) for i in range(len(cuts))]
    return min(one * whole / max(1, cut.parameters) for one, cut in zip(held, cuts, strict=True))


@lru_cache(maxsize=FLOWS_KEPT)
def _flow(
    cuts: tuple[Fragment, ...], speeds: tuple[tuple[Span, float, float], ...], whole: Span | None
) -> tuple[Ends, RoutingWeights] | None:
    """The `ends` of each span, and all other weights, in parts of the sum of all speeds.

    `speeds`: of each span, what it can use and what is published. `whole`: the span that trains by itself.
    None if there is no hop, if there are too many different spans, or if the solver fails.
    """
    spans = [span for span, _, _ in speeds]
    index, a, b = hops = _hops(spans, whole)
    if not 0 < len(index) <= MOST_HOPS:
        return None
    rates = _rates(cuts, [speed for _, speed, _ in speeds], hops)
    if rates is None:
        return None
    total = sum(speed for _, speed, _ in speeds)
    begun = float(sum(rates[a == 0].tolist()))
    layers = [*(cut.first for cut in cuts), cuts[-1].last]
    ends: Ends = {}
    nexts: dict[int, dict[tuple[int, int], float]] = {}
    for hop in np.flatnonzero(rates > LEAST_RATE).tolist():
        (span, speed, published), rate, enters = speeds[index[hop]], float(rates[hop]), layers[a[hop]]
        if speed < LEAST_RATE * total:
            continue  # the solver's tolerance lets it carry something all the same
        ends.setdefault(span, {}).setdefault(enters, {})[layers[b[hop]]] = rate
        carried, held = nexts.setdefault(enters, {}), (layers[span[0]], layers[span[1]])
        carried[held] = carried.get(held, 0.0) + rate / published
    held_spans = frozenset((layers[begin], layers[end]) for begin, end in spans)
    return ends, RoutingWeights({}, nexts, begun, len(index), held_spans)


def _rates(cuts: Sequence[Fragment], speeds: Sequence[float], hops: tuple[Ints, Ints, Ints]) -> Floats | None:
    """z of each hop, as a part of the sum of all speeds; None if the solver fails."""
    whole = sum(cut.parameters for cut in cuts)
    before = np.concatenate(([0.0], np.cumsum([cut.parameters / whole for cut in cuts])))
    index, a, b = hops
    count, inner = len(index), len(cuts) - 1
    column = np.arange(count)
    work = coo_matrix((before[b] - before[a], (index, column)), shape=(len(speeds), count))
    into, out = b < len(cuts), a > 0
    values = np.concatenate((np.ones(into.sum()), -np.ones(out.sum())))
    rows, columns = np.concatenate((b[into], a[out])) - 1, np.concatenate((column[into], column[out]))
    balance = coo_matrix((values, (rows, columns)), shape=(inner, count)).tocsr() if inner else None
    within = np.array(speeds) / sum(speeds)
    cost = np.where(a == 0, -1.0, 0.0) + HOP_COST
    found = linprog(cost, work.tocsr(), within, balance, np.zeros(inner) if inner else None, method="highs")
    if found.status != 0:
        return None
    rates: Floats = np.maximum(0.0, found.x)
    return rates
