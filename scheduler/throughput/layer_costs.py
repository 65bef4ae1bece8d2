"""Estimate what a model's layers cost each peer: seconds per token, bytes on links, and device memory.

    bytes of a span = parameters * 36 + tokens in flight * 34 * width * blocks + bytes of the logits

36 bytes per parameter: eight vectors in float32 (32: the weights, four vectors of gossip, the gradient, two moments of
AdamW), and two snapshots of int8 and 4-bit values (3; rounded up for the codec's scales). 34 bytes per channel and
token: a block's activations in 16 bits without the attention matrix, which the attention kernel never writes
(Korthikanti et al., arXiv 2205.05198, equation 2).
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import numpy as np

from decentral.comm.wire.slow_start import MOST_BYTES
from decentral.core.config import Config, GossipConfig
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.layer_work import UNMEASURED, KindCosts, shape_of, shares_of, token_seconds
from decentral.core.memory_needs import LEAST_IN_FLIGHT, fitting
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.topology import Topology, sites_of

if TYPE_CHECKING:
    from decentral.scheduler.throughput.max_flow import MaxFlow

STATE_BYTES = 36.0  # device memory per parameter; the module's docstring has the sum
FETCHED_BYTES = 4.0  # bytes per parameter that a newcomer downloads: the weights in fp32, but no moments
SNAPSHOT_BYTES = 1.5  # bytes per parameter that a gossip exchange sends in each direction
ROUND_S = 600.0  # a peer is assumed to pull the snapshots of its layers once in this time: the longest gossip window
UTILISATION = 0.35  # share of peak FLOP/s that training reaches: 1 B parameters on an H200 (docs/results/gpu.md)
MOST_PLANNED_SEQUENCES = 64  # larger micro-batches are not planned, as no device is faster with them
LEAST_ROUND_TRIP_S = 1e-6
COSTS_REMEMBERED = 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """The time, memory and traffic that each of L layers costs each of N peers of an asynchronous swarm."""

    seconds_NL: Floats  # each peer's seconds per token in each layer, forward and backward
    state_L: Floats  # bytes of each layer's weights, moments and gossip state
    fetched_L: Floats  # bytes that a newcomer downloads for each layer
    activation_L: Floats  # bytes of each layer's activations per sequence
    snapshot_L: Floats  # bytes/s of gossip about each layer that a holder sends, and that it receives
    memory_N: Floats  # bytes
    link_NN: Floats  # bytes/s in the slower direction of one connection; 0 from a peer to itself
    hidden_bytes: float  # bytes of one token between two layers, one way (`crossing_bytes`)
    holders: int  # each layer must be trained by at least this many peers
    rate_N: Floats  # bytes/s of the slower of each peer's uplink and downlink, for all its links; inf: unlimited
    site_N: Ints  # each peer's site, whose peers share a link to all other peers; -1: none
    site_rate_Z: Floats  # bytes/s of the slower direction of each site's shared link; inf: unlimited
    link_share: float = field(
        default=GossipConfig().share_beside_tokens, kw_only=True
    )  # share of each link that gossip may use

    @property
    def peers(self) -> int:
        """Return the number of peers, N."""
        return len(self.memory_N)

    @property
    def layers(self) -> int:
        """Return the number of layers, L."""
        return len(self.state_L)

    def of_peers(self, peers_G: Ints) -> Self:
        """Return the costs of a part of the swarm, the peers with these numbers; their sites stay as they are."""
        return replace(
            self,
            seconds_NL=self.seconds_NL[peers_G],
            memory_N=self.memory_N[peers_G],
            link_NN=self.link_NN[np.ix_(peers_G, peers_G)],
            rate_N=self.rate_N[peers_G],
            site_N=self.site_N[peers_G],
        )

    def compute_bound(self) -> float:
        """Return the tokens/s that the swarm would train if every device always computed and links cost nothing."""
        return float((1 / self.seconds_NL.sum(axis=1)).sum())

    def reached(self, spans_N2: Ints, flow: "MaxFlow") -> float:
        """Return the tokens/s of a flow through spans."""
        return flow.tokens_per_s

    def fits(self, peer: int, first: int, last: int) -> bool:
        """Return whether layers [first, last) and their `least_in_flight` micro-batches fit in a peer's memory."""
        return bool(span_bytes(self)[first, last] <= self.memory_N[peer])

    def least_in_flight(self, first: int, last: int) -> int:
        """Return how many micro-batches of one sequence must fit in memory beside layers [first, last).

        The result is 1 for the whole model, and LEAST_IN_FLIGHT for a part, as at the running peers. With so few, a
        device often waits; planned_in_flight.py computes the resulting throughput.
        """
        return 1 if last - first >= self.layers else LEAST_IN_FLIGHT

    def bytes_of(self, first: int, last: int, sequences: int) -> float:
        """Return the bytes that layers [first, last) take with a micro-batch of `sequences` sequences."""
        return float(self.state_L[first:last].sum() + sequences * self.activation_L[first:last].sum())

    def capacity(self, peer: int, first: int, last: int, sequences: int) -> int:
        """Return how many micro-batches of `sequences` sequences a peer keeps in memory beside layers [first, last)."""
        free_bytes = float(self.memory_N[peer] - self.state_L[first:last].sum())
        each_bytes = sequences * float(self.activation_L[first:last].sum())
        return fitting(free_bytes, each_bytes, self.least_in_flight(first, last))

    def reach(self, peer: int, first: int) -> int:
        """Return the end of the longest span from `first` that fits in a peer's memory; `first` if no layer fits."""
        last = first
        while last < self.layers and self.fits(peer, first, last + 1):
            last += 1
        return last

    def sequences(self, peer: int, first: int, last: int) -> int:
        """Return the largest micro-batch, in sequences, of which `least_in_flight` fit in a peer's memory.

        The result is between 1 and MOST_PLANNED_SEQUENCES, and 1 even if no sequence fits.
        """
        free_bytes = self.memory_N[peer] - self.state_L[first:last].sum()
        least_bytes = self.least_in_flight(first, last) * self.activation_L[first:last].sum()
        return int(min(MOST_PLANNED_SEQUENCES, max(1, free_bytes // max(1.0, least_bytes))))

    def valid(self, spans_N2: Ints) -> bool:
        """Return whether every span fits in its peer's memory, and every layer has at least `self.holders` holders."""
        first_N, last_N = spans_N2.T
        if (span_bytes(self)[first_N, last_N] > self.memory_N).any():
            return False
        change_E = np.bincount(first_N, minlength=self.layers + 1) - np.bincount(last_N, minlength=self.layers + 1)
        return bool((np.cumsum(change_E[:-1]) >= self.holders).all())


@lru_cache(maxsize=COSTS_REMEMBERED)
def reaches(costs: LayerCosts) -> Ints:
    """Return reach_NL: the end of each peer's longest span from each layer; the layer itself if it does not fit."""
    memory_M, kind_N = np.unique(costs.memory_N, return_index=True, return_inverse=True)[1:]
    reach_ML = [[costs.reach(int(peer), first) for first in range(costs.layers)] for peer in memory_M]
    return np.array(reach_ML)[kind_N.ravel()]


@lru_cache(maxsize=COSTS_REMEMBERED)
def span_bytes(costs: LayerCosts) -> Floats:
    """Return the bytes of each span with its `least_in_flight` micro-batches, at [first, last]; 0 for no layers."""
    bytes_EE = np.zeros((costs.layers + 1, costs.layers + 1))
    for first in range(costs.layers):
        for last in range(first + 1, costs.layers + 1):
            bytes_EE[first, last] = costs.bytes_of(first, last, costs.least_in_flight(first, last))
    return bytes_EE


def of_model(topology: Topology, config: Config, holders: int = 1, utilisation: float = UTILISATION) -> LayerCosts:
    """Return what a run's model costs the peers of a topology.

    Args:
        topology: Peers with their FLOP/s and memory.
        config: The run's config, which describes the model.
        holders: Smallest number of peers that must train each layer.
        utilisation: Share of the topology's FLOP/s that training reaches; 1 if the FLOP/s were measured in training. It
            has no effect on peers whose layers' costs are measured.

    Raises:
        UserError: If the peers' memory cannot hold the model, a peer's FLOP/s or memory is 0, or the model is user
            code (`model.layers`).
    """
    flops_L, parameters_L = _layers(config)
    measured_N = measured(topology)
    known_N = np.where(measured_N, 1.0, topology.flops)
    if not (known_N > 0).all() or not (topology.memory_bytes > 0).all():
        bad = topology.ids[int(np.argmin(np.minimum(known_N, topology.memory_bytes)))]
        raise UserError(f"topology: the throughput objective needs tflops and memory_gb above 0; for {bad} one is 0")
    cuts = _cuts(flops_L)
    seconds_NL = flops_L / (utilisation * known_N[:, None])
    for peer in np.flatnonzero(measured_N):
        costs = topology.costs[peer]
        seconds_NL[peer] = np.array(shares_of(cuts, shape_of(cuts, costs))) * token_seconds(cuts, costs)
    model = config.model
    activation_L = np.full(len(flops_L), 34.0 * model.d_model * model.context)
    activation_L[0] = 2.0 * model.d_model * model.context
    activation_L[-1] = 6.0 * model.vocabulary * model.context  # the head: 6 bytes for each logit and its gradient
    state_L = STATE_BYTES * parameters_L
    _use_measured_bytes(topology, model.context, activation_L, state_L)
    link_NN = np.minimum(topology.bandwidth, topology.bandwidth.T)
    round_trip_NN = topology.delay_s + topology.delay_s.T
    connection_NN = MOST_BYTES / np.maximum(round_trip_NN, LEAST_ROUND_TRIP_S)
    found = LayerCosts(
        seconds_NL=seconds_NL,
        state_L=state_L,
        fetched_L=FETCHED_BYTES * parameters_L,
        activation_L=activation_L,
        snapshot_L=SNAPSHOT_BYTES * parameters_L / ROUND_S,
        memory_N=topology.memory_bytes,
        link_NN=np.where(np.isinf(link_NN), 0.0, np.minimum(link_NN, connection_NN)),
        hidden_bytes=crossing_bytes(config, value_bytes=2.0),
        holders=holders,
        rate_N=np.minimum(topology.up, topology.down),
        site_N=sites_of(topology),
        site_rate_Z=np.array([min(site.up, site.down) for site in topology.sites]),
        link_share=config.gossip.share_beside_tokens,
    )
    _check_memory(found)
    return found


def crossing_bytes(config: Config, value_bytes: float) -> float:
    """Return the bytes in which a route sends a token from one peer to the next: its hidden values and its ids.

    The ids are the token's target and, with `model.bottleneck`, its input (comm/pipeline/activations.py). The gradient
    that comes back has no ids, but counts as much, so that links are not planned too full.

    Args:
        config: The run's config.
        value_bytes: Bytes of a hidden value in the run's encoding.
    """
    id_bytes = 2 if config.model.vocabulary + (config.data.format != "text") <= 1 << 16 else 4
    ids = 1 + (config.model.bottleneck is not None)
    return value_bytes * config.model.d_written + ids * id_bytes


def measured(topology: Topology) -> Flags:
    """Return flags of peers, (N,), that have measured a block or the head of the model."""
    costs_N = topology.costs or (UNMEASURED,) * len(topology)
    return np.array([costs.block is not None or costs.head is not None for costs in costs_N])


def at_speed(costs: KindCosts, config: Config, tokens_per_s: float) -> KindCosts:
    """Return measured costs, scaled so that a device with them trains the model at `tokens_per_s`, if that is not 0.

    A peer measures its layers once, and its speed all the time.
    """
    cuts = _cuts(_layers(config)[0])
    measured_s = token_seconds(cuts, costs)
    if not measured_s or not tokens_per_s:
        return costs
    times = 1 / tokens_per_s / measured_s
    embedding, block, head = (
        cost and cost._replace(forward_s=cost.forward_s * times, backward_s=cost.backward_s * times) for cost in costs
    )
    return KindCosts(embedding, block, head)


def _cuts(flops_L: Floats) -> tuple[Fragment, ...]:
    """Return each layer of the model as a fragment."""
    last = len(flops_L) - 1
    work_L3 = np.zeros((len(flops_L), 3))
    work_L3[np.arange(len(flops_L)), [0, *[1] * (last - 1), 2]] = flops_L
    return tuple(Fragment(at, at, at + 1, 0, (work[0], work[1], work[2])) for at, work in enumerate(work_L3.tolist()))


def _use_measured_bytes(topology: Topology, context: int, activation_L: Floats, state_L: Floats) -> None:
    """Overwrite the bytes of each layer by the median of what the peers have measured, where that is not 0.

    With the median, one peer with absurd measurements cannot exclude all spans.
    """
    for kind, layers in enumerate((slice(0, 1), slice(1, -1), slice(-1, None))):
        known = [cost for costs in topology.costs if (cost := costs[kind]) is not None]
        if activation := float(np.median([cost.activation_bytes for cost in known] or [0])):
            activation_L[layers] = activation * context
        if state := float(np.median([cost.state_bytes for cost in known] or [0])):
            state_L[layers] = state


def flops_per_token(config: Config) -> float:
    """Return the FLOPs per token that training all layers takes, forward and backward.

    Raises:
        UserError: If the model is user code (`model.layers`).
    """
    return float(_layers(config)[0].sum())


def _layers(config: Config) -> tuple[Floats, Floats]:
    """Return FLOPs per token (forward and backward) and parameters of each layer: embedding, blocks, head."""
    model = config.model
    if model.layers is not None:
        raise UserError("--model: the costs of user code (model.layers) are unknown; plan with model.depth and width")
    return np.array(model.layer_flops), np.array(model.layer_parameters, dtype=np.float64)


def _check_memory(costs: LayerCosts) -> None:
    """Raise UserError if the peers together cannot hold `costs.holders` copies, or the largest layer fits no device."""
    need, have = costs.holders * float(costs.state_L.sum()), float(costs.memory_N.sum())
    if have < need:
        copies = f"{costs.holders} copies of the model need" if costs.holders > 1 else "the model needs"
        raise UserError(
            f"{copies} {need / 1e9:.1f} GB of memory; the peers together have {have / 1e9:.1f} GB: add peers, or plan "
            f"a smaller model"
        )
    largest = float((costs.state_L + costs.activation_L).max())
    if costs.memory_N.max() < largest:
        raise UserError(
            f"the largest layer needs {largest / 1e9:.1f} GB; the largest device has "
            f"{costs.memory_N.max() / 1e9:.1f} GB: plan a narrower model"
        )
