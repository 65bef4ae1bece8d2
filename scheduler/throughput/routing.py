"""Compute routing weights: the share of its micro-batches that a peer sends to each next peer. Start at `solve`.

Every peer solves the same linear programme (HiGHS) from its roster, which has all peers' measured speeds; equal rosters
give equal flows. Peers with the same span count as one peer with the sum of their speeds, so that the programme's
size depends on the model and hardly on the number of peers. The programme's variables are hops: span i computes from
cut a to cut b, which takes share_iab of a token's time there. A cut is a boundary between two fragments, or an end of
the model.

    z_iab >= 0                                         tokens/s on that hop
    sum_ia z_iab = sum_jc z_jbc                        at each cut b inside the model
    sum_ab z_iab share_iab <= speed_i                  no span computes more than its peers can
    sum_ab z_iab ends_ab <= crossings_i                nor receives and sends more than its peers' links carry
    maximise sum_ib z_i0b - HOP_COST sum z             a hop must carry more than it costs

Peers with the whole model train alone, but on request they execute the last layers for other peers' micro-batches. In
the programme they have only hops to the model's end. Such a hop costs a whole-model peer less throughput than the peers
of the earlier hops gain, because those peers would otherwise be idle.

ends_ab counts the hop's ends inside the model, where activations cross one way and gradients the other.
crossings_i follows from the links of the span's peers and their gossip (`TokenLinks`). HOP_COST stands for the delay of
links. Another programme (max_flow.py) plans which spans peers should hold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.core.fragments import Fragment
from decentral.core.layer_work import LEAST_PART, Shape, shape_of, shares_of

HOP_COST = 0.01  # each hop costs this share of its flow, so that routes with fewer hops are preferred
MOST_HOPS = 40_000  # with more hops, the solver would take too long, and no weights are returned
LEAST_RATE = 1e-6  # rates below this share of all peers' speed count as 0, as the solver is not exact
SOLVED_AT_ONCE = 200  # up to this many hops, the flow is solved again at once when speeds change
FLOW_PAUSE_S = 2.0  # each hop beyond SOLVED_AT_ONCE delays the next solution by this
FLOWS_KEPT = 128
SPEED_CHANGED = 0.1  # the flow is solved again once speeds have changed by this share of their sum
Span = tuple[int, int]  # fragments [begin, end)
Ends = dict[Span, dict[int, dict[int, float]]]  # span of a peer -> its `RoutingWeights.ends`
Floats = NDArray[np.float64]
Ints = NDArray[np.int_]


def rounded(speed: Mapping[Span, float]) -> dict[Span, float]:
    """Return the speeds rounded to three digits, sorted by span, so that nearly equal rosters give equal flows."""
    return {span: float(f"{one:.2e}") for span, one in sorted(speed.items())}


def changed(before: Mapping[Span, float], now: Mapping[Span, float]) -> bool:
    """Return whether the speeds, in tokens/s by span, have changed so much that the flow should be solved again."""
    if not before or not now:
        return bool(before) != bool(now)
    differing = sum(abs(before.get(span, 0.0) - now.get(span, 0.0)) for span in {*before, *now})
    return differing > SPEED_CHANGED * sum(now.values())


def _hops(spans: Sequence[Span], whole: Span | None) -> tuple[Ints, Ints, Ints]:
    """Return all hops as three arrays: the number of the hop's span, the hop's first cut, the hop's last cut.

    Only cuts at which a span begins or ends are used, because a mixture of hops to these cuts can replace a hop to any
    other cut. The span `whole` has only hops to the end of the model.
    """
    cuts = np.unique(np.array(spans))
    inside = [cuts[(begin <= cuts) & (cuts <= end)] for begin, end in spans]
    pairs = [one[np.stack(np.triu_indices(len(one), 1))] for one in inside]
    pairs = [pair[:, pair[1] == span[1]] if span == whole else pair for pair, span in zip(pairs, spans, strict=True)]
    index = np.repeat(np.arange(len(spans)), [pair.shape[1] for pair in pairs])
    a, b = np.concatenate(pairs, axis=1)
    return index, a, b


def solve(
    cuts: Sequence[Fragment],
    speed: Mapping[Span, float],
    own: Span,
    whole_alone: bool = False,
    shapes: Mapping[Span, Shape] | None = None,
    crossings: Mapping[Span, float] | None = None,
) -> RoutingWeights:
    """Return the routing weights of a peer with span `own`: which layers to compute, and which peers to send to.

    Args:
        cuts: All fragments of the model.
        speed: Tokens/s through the whole model for each span, summed over the peers with that span.
        own: This peer's span, fragments [begin, end).
        whole_alone: Whether peers with the whole model train alone.
        shapes: The shares of a token's time by kind of layer, for each span; a missing span has those of the FLOPs.
        crossings: How many tokens/s may enter or leave the peers of each span together; a missing span has no limit.

    Returns:
        The weights. They are empty if no flow reaches the last layer, if there are more than MOST_HOPS hops, or if the
        solver fails, as it may if other peers publish extreme speeds.
    """
    shares = _shares(cuts, speed, shapes)
    useful = useful_speeds(cuts, speed, shapes) if whole_alone else speed
    most = _most_through(useful, shares)
    limits = rounded(crossings or {})
    usable = tuple(
        _Usable(span, min(one, most), speed[span], shares[span], limits.get(span, math.inf))
        for span, one in useful.items()
    )
    total = sum(one.speed for one in usable)
    flow = _flow(tuple(cuts), usable, (0, len(cuts)) if whole_alone else None) if total > 0 else None
    if flow is None:
        return RoutingWeights()
    ends, weights = flow
    return replace(weights, ends=ends.get(own, {}), tokens_per_s=weights.tokens_per_s * total)


def useful_speeds(
    cuts: Sequence[Fragment], speed: Mapping[Span, float], shapes: Mapping[Span, Shape] | None = None
) -> dict[Span, float]:
    """Return the speeds, but cap the speed of whole-model peers at the tokens/s that other peers can send them.

    Without the cap, a whole-model peer with a very high published speed would push other rates below LEAST_RATE.
    """
    whole, shares = (0, len(cuts)), _shares(cuts, speed, shapes)
    begun = 0.0  # tokens/s that peers with only the first part of the model can begin
    for (first, last), one in speed.items():
        if first == 0 and last < len(cuts):
            begun += one / max(LEAST_PART, sum(shares[first, last][:last]))
    return {span: min(one, begun) if span == whole else one for span, one in speed.items()}


def _shares(
    cuts: Sequence[Fragment], speed: Mapping[Span, float], shapes: Mapping[Span, Shape] | None
) -> dict[Span, tuple[float, ...]]:
    """Return, for each span, the share of a token's time that each fragment of the model takes on the span's peers."""
    usual = shape_of(tuple(cuts))
    return {span: shares_of(tuple(cuts), (shapes or {}).get(span, usual)) for span in speed}


def _most_through(speed: Mapping[Span, float], shares: Mapping[Span, tuple[float, ...]]) -> float:
    """Return the tokens/s that the holders of the scarcest fragment could compute if they computed no other fragment.

    No span can use a higher speed. `solve` caps speeds at this rate, so that a peer that publishes a far higher speed
    does not push the other peers' rates below LEAST_RATE.
    """
    fragments = range(len(next(iter(shares.values()), ())))
    rates = [
        sum(one / max(LEAST_PART, shares[begin, end][at]) for (begin, end), one in speed.items() if begin <= at < end)
        for at in fragments
    ]
    return min(rates, default=0.0)


class _Usable(NamedTuple):
    """What the peers of one span can do together."""

    span: Span
    speed: float  # tokens/s through the whole model that they can use
    published: float  # tokens/s through the whole model
    shares: tuple[float, ...]  # each fragment's share of a token's time
    crossings: float  # tokens/s that may enter or leave them; inf: no limit


@lru_cache(maxsize=FLOWS_KEPT)
def _flow(
    cuts: tuple[Fragment, ...], spans: tuple[_Usable, ...], whole: Span | None
) -> tuple[Ends, RoutingWeights] | None:
    """Return `RoutingWeights.ends` of each span, and the weights that are common to all spans.

    Rates are shares of the sum of all usable speeds. `whole` is the span whose peers train alone, if any. The result
    is None if there is no hop, if there are more than MOST_HOPS hops, or if the solver fails.
    """
    index, a, b = hops = _hops([one.span for one in spans], whole)
    if not 0 < len(index) <= MOST_HOPS:
        return None
    rates = _rates(spans, hops)
    if rates is None:
        return None
    total = sum(one.speed for one in spans)
    begun = float(sum(rates[a == 0].tolist()))
    layers = [*(cut.first for cut in cuts), cuts[-1].last]
    ends: Ends = {}
    nexts: dict[int, dict[tuple[int, int], float]] = {}
    for hop in np.flatnonzero(rates > LEAST_RATE).tolist():
        (span, speed, published, _, _), rate, enters = spans[index[hop]], float(rates[hop]), layers[a[hop]]
        if speed < LEAST_RATE * total:
            continue  # the inexact solver may give a small rate to a span without speed
        ends.setdefault(span, {}).setdefault(enters, {})[layers[b[hop]]] = rate
        carried, held = nexts.setdefault(enters, {}), (layers[span[0]], layers[span[1]])
        carried[held] = carried.get(held, 0.0) + rate / published
    held_spans = frozenset((layers[one.span[0]], layers[one.span[1]]) for one in spans)
    return ends, RoutingWeights({}, nexts, begun, len(index), held_spans)


def _rates(spans: Sequence[_Usable], hops: tuple[Ints, Ints, Ints]) -> Floats | None:
    """Return each hop's tokens/s (z) as a share of the sum of all speeds; None if the solver fails."""
    before_SF = np.pad(np.cumsum(np.array([one.shares for one in spans]), axis=1), ((0, 0), (1, 0)))
    total = sum(one.speed for one in spans)
    index, a, b = hops
    count, inner = len(index), before_SF.shape[1] - 2
    column = np.arange(count)
    work = coo_matrix((before_SF[index, b] - before_SF[index, a], (index, column)), shape=(len(spans), count))
    into, out = b <= inner, a > 0
    limited = np.flatnonzero([one.crossings < math.inf for one in spans])
    ends = coo_matrix((into.astype(float) + out, (index, column)), shape=(len(spans), count)).tocsr()[limited]
    values = np.concatenate((np.ones(into.sum()), -np.ones(out.sum())))
    rows, columns = np.concatenate((b[into], a[out])) - 1, np.concatenate((column[into], column[out]))
    balance = coo_matrix((values, (rows, columns)), shape=(inner, count)).tocsr() if inner else None
    use = vstack((work.tocsr(), ends))
    # No span can use more crossings than this, and the solver needs numbers of similar size.
    crossings = np.minimum([spans[at].crossings / total for at in limited.tolist()], 2 / LEAST_PART)
    within = np.concatenate((np.array([one.speed for one in spans]) / total, crossings))
    cost = np.where(a == 0, -1.0, 0.0) + HOP_COST
    found = linprog(cost, use, within, balance, np.zeros(inner) if inner else None, method="highs")
    if found.status != 0:
        return None
    rates: Floats = np.maximum(0.0, found.x)
    return rates
