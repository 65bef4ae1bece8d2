"""What a model's layers cost: FLOPs and bytes per token and layer, and how much device memory a span takes.

    bytes of a span = parameters * 36 + micro-batch tokens * 34 * width * blocks + logits

36 bytes a parameter: theta, phi, b, m, e, the gradient and two moments of AdamW in float32 (32), and two snapshots
of int8 and 4-bit values (3; rounded up for the codec's scales). 34 bytes per channel and token are a block's
activations in 16 bits without the attention matrix (Korthikanti et al., arXiv 2205.05198, equation 2; the attention
kernel here never writes that matrix).
"""

from dataclasses import dataclass

import numpy as np

from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.topology import Topology

STATE_BYTES = 36.0  # per parameter
FETCHED_BYTES = 4.0  # per parameter: donors give weights in fp32, and no moments (`donated` of the update rules)
SNAPSHOT_BYTES = 1.5  # per parameter: what one exchange moves in one direction
ROUND_S = 600.0  # any two holders of a layer exchange it once in this time
MOST_PLANNED_SEQUENCES = 64  # a larger micro-batch makes no device faster


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """What the layers cost each peer, for the asynchronous swarm's throughput."""

    seconds_NL: Floats  # a peer's seconds per token in a layer, forward and backward
    state_L: Floats  # bytes of a layer's state
    fetched_L: Floats  # bytes that a peer downloads to take over a layer
    activation_L: Floats  # bytes of a layer's activations per sequence
    snapshot_L: Floats  # bytes per second that gossip of a layer puts on each direction between two holders
    memory_N: Floats  # bytes
    link_NN: Floats  # bytes/s, the lesser of both directions
    hidden_bytes: float  # bytes of one token between two layers, one way
    holders: int  # the least number of peers that must hold each layer

    @property
    def peers(self) -> int:
        return len(self.memory_N)

    @property
    def layers(self) -> int:
        return len(self.state_L)

    def compute_bound(self) -> float:
        """Tokens/s if every device computed all the time and links cost nothing."""
        return float((1 / self.seconds_NL.sum(axis=1)).sum())

    def fits(self, peer: int, first: int, last: int) -> bool:
        """Whether the peer's memory takes layers [first, last) with a micro-batch of one sequence."""
        return bool(self.bytes_of(first, last, 1) <= self.memory_N[peer])

    def bytes_of(self, first: int, last: int, sequences: int) -> float:
        """Bytes that layers [first, last) take with a micro-batch of so many sequences."""
        return float(self.state_L[first:last].sum() + sequences * self.activation_L[first:last].sum())

    def reach(self, peer: int, first: int) -> int:
        """Where the longest span from `first` that fits this peer ends; `first` if no layer fits."""
        last = first
        while last < self.layers and self.fits(peer, first, last + 1):
            last += 1
        return last

    def sequences(self, peer: int, first: int, last: int) -> int:
        """The largest micro-batch of this span that fits the peer, up to MOST_PLANNED_SEQUENCES."""
        free_bytes = self.memory_N[peer] - self.state_L[first:last].sum()
        return int(min(MOST_PLANNED_SEQUENCES, max(1, free_bytes // max(1.0, self.activation_L[first:last].sum()))))

    def valid(self, spans_N2: Ints) -> bool:
        """Whether every span fits its peer and every layer has enough holders."""
        held = np.zeros(self.layers, np.int64)
        for peer, (first, last) in enumerate(spans_N2):
            if first < last and not self.fits(peer, first, last):
                return False
            held[first:last] += 1
        return bool((held >= self.holders).all())


def of_model(topology: Topology, config: Config, holders: int = 1) -> LayerCosts:
    """What this run's model costs these peers. Raises UserError if they cannot hold it, or were not measured."""
    flops_L, parameters_L = _layers(config)
    if not (topology.flops > 0).all() or not (topology.memory_bytes > 0).all():
        bad = topology.ids[int(np.argmin(np.minimum(topology.flops, topology.memory_bytes)))]
        raise UserError(f"topology: the throughput objective needs tflops and memory_gb above 0; peer {bad} lacks one")
    model = config.model
    activation_L = np.full(len(flops_L), 34.0 * model.d_model * model.context)
    activation_L[0] = 2.0 * model.d_model * model.context
    activation_L[-1] = 6.0 * model.vocabulary * model.context  # logits and their gradient
    state_L = STATE_BYTES * parameters_L
    link_NN = np.minimum(topology.bandwidth, topology.bandwidth.T)
    costs = LayerCosts(
        seconds_NL=flops_L / topology.flops[:, None],
        state_L=state_L,
        fetched_L=FETCHED_BYTES * parameters_L,
        activation_L=activation_L,
        snapshot_L=SNAPSHOT_BYTES * parameters_L / ROUND_S,
        memory_N=topology.memory_bytes,
        link_NN=np.where(np.isinf(link_NN), 0.0, link_NN),
        hidden_bytes=2.0 * model.d_model,
        holders=holders,
    )
    _check_memory(costs)
    return costs


def flops_per_token(config: Config) -> float:
    """FLOPs for training all layers on one token: it turns a measured rate of tokens into one of FLOPs."""
    return float(_layers(config)[0].sum())


def _layers(config: Config) -> tuple[Floats, Floats]:
    """Training FLOPs per token (three times forward) and parameters of embedding, blocks and head."""
    model = config.model
    if model.layers is not None:
        raise UserError("--model: a model given as model.layers has no known costs; plan with depth and width")
    parameters_L = np.array(model.layer_parameters, dtype=np.float64)
    flops_L = 2 * parameters_L
    flops_L[0] = 2 * model.d_model  # a table is read, not multiplied
    reach = min(model.window or model.context, model.context)
    attended = reach - reach**2 / (2 * model.context)  # positions, on average: half of them where there is no window
    flops_L[1:-1] += 4 * attended * model.d_queries  # scores and values
    return 3 * flops_L, parameters_L


def _check_memory(costs: LayerCosts) -> None:
    """Raises UserError if the peers cannot hold every layer often enough, or none can hold the largest layer."""
    need, have = costs.holders * float(costs.state_L.sum()), float(costs.memory_N.sum())
    if have < need:
        raise UserError(
            f"topology: {costs.holders} holder(s) of every layer need {need / 1e9:.1f} GB of memory; the whole pool "
            f"has {have / 1e9:.1f} GB: add peers, or plan a smaller model"
        )
    largest = float((costs.state_L + costs.activation_L).max())
    if costs.memory_N.max() < largest:
        raise UserError(
            f"topology: the largest layer needs {largest / 1e9:.1f} GB; the largest device has "
            f"{costs.memory_N.max() / 1e9:.1f} GB: plan a narrower model"
        )
