"""Estimate the throughput of spans in microseconds, without a linear programme. Start reading at `Estimates.of`.

Three estimates are made. The first is a limit, which no flow exceeds: the largest t, in tokens/s, that satisfies these:

    t * sum over layers of share_x <= sum of the speeds of the peers that hold any of them     for every set of layers
    t <= what the holders of a layer can receive, or compute after the layer before            for every layer but one
    t <= what the holders of a layer can send, or compute in the layer after                   for every layer but one

The set of layers that limits t most is found by Dinkelbach's method (1967): for a given t, the best set is a shortest
path over the layers, because a peer's layers are consecutive. The other estimates assume that tokens enter a peer at
its first layer and leave it after its last. They are what the links and memories of each layer's holders carry, and
what the holders supply if they also divide their time equally among their layers. What a memory carries follows from
the number of micro-batches of one sequence that fit in it. Each of them is kept until all later layers are computed, on
an equal device, and the links between the later stages are passed (planned_in_flight.py).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from decentral.core.compiled import compiled, inner
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.scheduler.throughput import link_limits
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.planned_in_flight import JOBS_S, WAITING, Flights
from decentral.scheduler.topology.arrays import Floats, Ints

STEPS = 20  # Dinkelbach's method ends after this many steps; it usually takes two or three


@dataclass(frozen=True, eq=False)
class Estimates:
    """The estimates of throughput for any spans of one swarm."""

    costs: LayerCosts
    flights: Flights | None = None  # None: do not count micro-batches in flight

    def of(self, spans_N2: Ints) -> tuple[float, float, Floats]:
        """Return three estimates in tokens/s for these spans.

        Returns:
            The limit; what links and memories carry, but at most the limit; what each layer's holders supply, (L,).
        """
        return _estimate(spans_N2, self._room, self.costs.link_share, *self._arrays)

    def kept(self, peers_P: Ints, spans_P2: Ints) -> Floats:
        """Return the highest tokens/s, (P,), at which peers with these spans can keep their micro-batches in memory."""
        return _kept_rates(self._room, self._arrays[0], peers_P, spans_P2)

    @cached_property
    def _room(self) -> "_Room":
        costs, flights = self.costs, self.flights
        state_E, activation_E = (np.pad(np.cumsum(one_L), (1, 0)) for one_L in (costs.state_L, costs.activation_L))
        link_s_N = np.zeros(costs.peers) if flights is None else flights.usual_link_s(costs)
        context = 0 if flights is None else flights.run.model.context
        return _Room(context, state_E, activation_E, costs.memory_N.astype(np.float64), link_s_N)

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        """Return the arrays that `_estimate` takes as arguments, from `before_NL` to `link_NN`."""
        costs = self.costs
        share_L = costs.seconds_NL.min(axis=0) / costs.seconds_NL.min(axis=0).sum()
        return (
            np.pad(np.cumsum(costs.seconds_NL, axis=1), ((0, 0), (1, 0))),
            share_L,
            (share_L / costs.seconds_NL).max(axis=1),
            costs.rate_N / costs.hidden_bytes,
            np.concatenate(([0.0], np.cumsum(costs.snapshot_L))) / costs.hidden_bytes,
            link_limits.pair_left(costs, np.arange(costs.peers)) / costs.hidden_bytes,
        )


class _Room(NamedTuple):
    """What decides how many micro-batches fit in the memory of each peer."""

    context: int  # tokens in a sequence; 0: memory is no limit
    state_E: Floats  # bytes of all layers before each layer, [L + 1]
    activation_E: Floats  # bytes of one sequence's activations in all layers before each layer, [L + 1]
    memory_N: Floats  # bytes of each peer's memory
    link_s_N: Floats  # seconds to send a sequence over a typical link of each peer and get its gradient back


@compiled
def _estimate(
    spans_N2: Ints, room: _Room, link_share: float, before_NL: Floats, share_L: Floats, speed_N: Floats, rate_N: Floats,
    gossip_L: Floats, link_NN: Floats,
) -> tuple[float, float, Floats]:  # fmt: skip
    """Return the three estimates of `Estimates.of`.

    Args:
        spans_N2: Each peer's layers [first, last); (0, 0) for a peer without layers.
        room: The peers' memory.
        link_share: Share of a link that gossip may use.
        before_NL: Seconds per token of all layers before each layer, [N, L + 1].
        share_L: Each layer's share of the work of a token.
        speed_N: tokens/s that each peer computes in all layers together, at most.
        rate_N: tokens/s that each peer's links carry together.
        gossip_L: tokens/s by which gossip about all layers before each layer lowers `rate_N`, [L + 1].
        link_NN: tokens/s that each link carries.
    """
    peers, layers = len(spans_N2), len(share_L)
    left_N = np.zeros(peers)
    held_LL = np.zeros((layers, layers + 1))  # at [q, p]: speed of the peers that hold layer q and begin before p
    for j in range(peers):
        first, last = spans_N2[j, 0], spans_N2[j, 1]
        gossip = gossip_L[last] - gossip_L[first]
        left_N[j] = rate_N[j] - min(link_share * rate_N[j], gossip) if rate_N[j] < np.inf else np.inf
        for layer in range(first, last):
            held_LL[layer, first + 1] += speed_N[j]
    for layer in range(layers):
        for first in range(layers):
            held_LL[layer, first + 1] += held_LL[layer, first]
    supply_L, linked_L = np.zeros(layers), np.zeros(layers)
    receive_L, send_L = np.zeros(layers + 1), np.zeros(layers + 1)
    for j in range(peers):
        first, last = spans_N2[j, 0], spans_N2[j, 1]
        if last <= first:
            continue
        into, out = 0.0, 0.0
        for i in range(peers):
            if spans_N2[i, 0] < first <= spans_N2[i, 1]:
                into += min(link_NN[i, j], left_N[i])
            if spans_N2[i, 0] <= last < spans_N2[i, 1]:
                out += min(link_NN[i, j], left_N[i])
        access = left_N[j] / 2 if first > 0 and last < layers else left_N[j]  # each token arrives and leaves
        into = min(into, access) if first > 0 else np.inf
        out = min(out, access) if last < layers else np.inf
        kept = _kept_rate(room, before_NL, j, first, last)
        supply_L[first:last] += min(1 / (before_NL[j, last] - before_NL[j, first]), into, out, kept)
        linked_L[first:last] += min(into, out, kept)
        for layer in range(first, last):
            alone = 1 / (before_NL[j, layer + 1] - before_NL[j, layer])
            receive_L[layer] += min(alone, into) if layer == first else alone
            send_L[layer + 1] += min(alone, out) if layer + 1 == last else alone
    limit = _scarcest(held_LL, share_L)
    for layer in range(1, layers):
        limit = min(limit, receive_L[layer], send_L[layer])
    return limit, min(limit, linked_L.min()), supply_L


@compiled
def _kept_rates(room: _Room, before_NL: Floats, peers_P: Ints, spans_P2: Ints) -> Floats:
    """Return the result of `Estimates.kept`."""
    rates = np.empty(len(peers_P))
    for at in range(len(peers_P)):
        rates[at] = _kept_rate(room, before_NL, peers_P[at], spans_P2[at, 0], spans_P2[at, 1])
    return rates


@inner
def _kept_rate(room: _Room, before_NL: Floats, peer: int, first: int, last: int) -> float:
    """Return the highest tokens/s at which a peer can keep its micro-batches in memory; inf for the whole model."""
    layers = before_NL.shape[1] - 1
    if not room.context or last - first in (0, layers):
        return np.inf
    free = room.memory_N[peer] - room.state_E[last] + room.state_E[first]
    many = min(MOST_UNDER_WAY, max(1.0, free / (room.activation_E[last] - room.activation_E[first])))
    stages = (layers - first) / (last - first)
    device_s = room.context * (before_NL[peer, layers] - before_NL[peer, first]) + stages * JOBS_S
    kept_s = (1 + WAITING) * device_s + (stages - 1) * room.link_s_N[peer]
    return float(many * room.context / kept_s)


@inner
def _scarcest(held_LL: Floats, share_L: Floats) -> float:
    """Return the lowest tokens/s to which any set of layers limits the swarm.

    A set's limit is the speed of all peers that hold any of its layers, divided by its share of a token's work.

    Args:
        held_LL: The speed of the peers that hold layer q and begin before layer p, at [q, p].
        share_L: Each layer's share of the work of a token.
    """
    layers = len(share_L)
    speed_L, work_L = np.empty(layers), np.empty(layers)  # speed and share of the best set that ends with each layer
    limit = np.inf
    for layer in range(layers):
        limit = min(limit, held_LL[layer, layer + 1] / share_L[layer])
    for _ in range(STEPS):
        least, ratio = 0.0, limit
        for layer in range(layers):
            best, speed, work = held_LL[layer, layer + 1], held_LL[layer, layer + 1], 0.0
            for other in range(layer):
                more = speed_L[other] + held_LL[layer, layer + 1] - held_LL[layer, other + 1]
                if more - limit * work_L[other] < best:
                    best, speed, work = more - limit * work_L[other], more, work_L[other]
            speed_L[layer], work_L[layer] = speed, work + share_L[layer]
            if best - limit * share_L[layer] < least:
                least, ratio = best - limit * share_L[layer], speed_L[layer] / work_L[layer]
        if ratio >= limit * (1 - 1e-9):
            break
        limit = ratio
    return limit
