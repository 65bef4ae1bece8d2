"""Split a flow of tokens (max_flow.py) into routes (`routes`), and add up routes to a flow (`flow_of`)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.scheduler.throughput.max_flow import MaxFlow
from decentral.scheduler.topology.arrays import Floats

ROUNDING_SHARE = 1e-9  # a flow of less than this share of all tokens is a rounding error of the solver

Hop = tuple[int, int, int]
"""(peer, first, last): the peer computes the layers [first, last)."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Tokens that have taken the same route so far."""

    rate: float  # tokens/s
    path: tuple[tuple[int, int], ...]  # (peer, first layer) of each hop


def routes(flow: MaxFlow) -> list[tuple[float, list[Hop]]]:
    """Return the routes of a flow, those with the largest share of tokens first.

    The streams of tokens are followed from layer to layer. Where a part of a peer's tokens moves to another peer, whole
    streams move, and at most one is split. So there are at most as many routes as peers and transfers.

    Returns:
        (share of all tokens, hops) of each route. The shares sum to 1 but for the solver's rounding errors.
    """
    least = ROUNDING_SHARE * flow.tokens_per_s
    moves: dict[int, dict[int, list[tuple[int, float]]]] = {}  # layer -> sender -> (receiver, tokens/s)
    for sender, receiver, layer, rate in flow.transfers:
        moves.setdefault(layer, {}).setdefault(sender, []).append((receiver, rate))
    begun = np.flatnonzero(flow.computed_NL[:, 0] > least).tolist()
    streams = {peer: [_Stream(float(flow.computed_NL[peer, 0]), ((peer, 0),))] for peer in begun}
    for layer in sorted(moves):
        arrived: list[tuple[int, _Stream]] = []
        for sender, sent in moves[layer].items():
            there = sorted(streams.get(sender, []), key=lambda one: one.rate)
            for receiver, rate in sent:
                moved = _taken(there, rate, least)
                arrived += [(receiver, _Stream(one.rate, (*one.path, (receiver, layer)))) for one in moved]
            streams[sender] = there
        for receiver, stream in arrived:
            streams.setdefault(receiver, []).append(stream)
    layers, total = flow.computed_NL.shape[1], flow.tokens_per_s
    found = [
        (stream.rate / total, _hops(stream.path, layers))
        for peer, there in streams.items()
        if flow.computed_NL[peer, layers - 1] > least
        for stream in there
    ]
    return sorted(found, key=lambda route: (-route[0], route[1]))


def without_return(hops: Sequence[Hop]) -> list[Hop]:
    """Return the route that running peers take instead of one that returns to its origin peer, as none does.

    The origin peer, which has the first hop, computes all layers up to the end of its last hop.
    """
    origin = hops[0][0]
    last = max(at for at, (peer, _, _) in enumerate(hops) if peer == origin)
    return [(origin, hops[0][1], hops[last][2]), *hops[last + 1 :]]


def flow_of(taken: Sequence[tuple[float, Sequence[Hop]]], flow: MaxFlow, seconds_NL: Floats) -> MaxFlow:
    """Return the part of a flow that takes some of its routes.

    Args:
        taken: These routes, from `routes(flow)`.
        flow: The whole flow. Layers are as scarce in the part as in the whole.
        seconds_NL: Seconds for a token of each layer on each peer.
    """
    computed_NL, sent = np.zeros_like(flow.computed_NL), dict[tuple[int, int, int], float]()
    for share, hops in taken:
        rate = share * flow.tokens_per_s
        for peer, first, last in hops:
            computed_NL[peer, first:last] += rate
        for (sender, _, last), (receiver, _, _) in itertools.pairwise(hops):
            sent[sender, receiver, last] = sent.get((sender, receiver, last), 0.0) + rate
    return MaxFlow(
        tokens_per_s=float(computed_NL[:, 0].sum()),
        computed_NL=computed_NL,
        transfers=tuple((*move, rate) for move, rate in sent.items()),
        idle_N=1 - (computed_NL * seconds_NL).sum(axis=1),
        price_L=flow.price_L,
    )


def _taken(there: list[_Stream], rate: float, least: float) -> list[_Stream]:
    """Remove streams of `rate` tokens/s in all from `there`, the largest first, and return them; split the last one."""
    moved: list[_Stream] = []
    while rate > least and there:
        one = there.pop()
        if one.rate > rate + least:
            there.append(_Stream(one.rate - rate, one.path))
            one = _Stream(rate, one.path)
        moved.append(one)
        rate -= one.rate
    return moved


def _hops(path: tuple[tuple[int, int], ...], layers: int) -> list[Hop]:
    ends = [*(first for _, first in path[1:]), layers]
    return [(peer, first, last) for (peer, first), last in zip(path, ends, strict=True)]
