"""Predict a swarm's speed, memory and traffic from its devices and links. Start at `forecast`.

Where every peer holds the whole model, none waits for a link: the swarm's tokens/s are the sum over its devices. Else
the planner lays out spans and routes (scheduler/throughput/plan.py).
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from decentral.commands.estimates.figures import Figure
from decentral.commands.estimates.machines import Machine
from decentral.commands.estimates.traffic import GossipTraffic, traffic
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.memory_needs import widest_span
from decentral.scheduler.throughput import feasibility, layer_costs
from decentral.scheduler.throughput.plan import throughput_plan
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology

TRAINING_SHARE = 0.985  # of a peer's time; the rest is gossip, evaluation, checkpoints (docs/results/benchmarks.md)
ROUTED_SHARE = 0.6  # of a plan's tokens/s with routes that a swarm reaches
ROUTED_RANGE = (0.15, 1.0)  # range of what a swarm with routes reaches, over the plan's tokens/s
EASE = (0.55, 1.8)  # links and cores over what is assumed: the range of traffic is that of the windows that follow
BYTES_RANGE = 1.2  # a further factor of that range
BUSY = 0.95  # a resource that is used so much limits the swarm


@dataclass(frozen=True, slots=True, eq=False)
class PairTraffic:
    """Predicted bytes/s from the row's peer to the column's peer, and their range."""

    mid_NN: Floats
    low_NN: Floats
    high_NN: Floats

    def between(self, senders: Sequence[int], receivers: Sequence[int]) -> Figure:
        """Return the bytes/s that these senders send to these receivers together."""
        grid = np.ix_(senders, receivers)
        return Figure(float(self.mid_NN[grid].sum()), float(self.low_NN[grid].sum()), float(self.high_NN[grid].sum()))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a swarm of N peers reaches, in a steady state."""

    tokens_per_s: Figure
    spans: tuple[tuple[int, int], ...]  # each peer's layers [first, last); (0, 0): none
    pairs: PairTraffic
    gossip: GossipTraffic | None  # None: one peer alone
    limit: str  # what limits tokens/s, as text for people


def forecast(run: Config, topology: Topology | None, machines: Sequence[Machine], seconds: float = 3.0) -> Forecast:
    """Return what the swarm reaches.

    Args:
        run: The run's config, with a built-in model, gossip by pull, and a number as `train.micro_batch`.
        topology: The peers and their links; None: one peer alone.
        machines: Each peer's machine, in the topology's order.
        seconds: Limit of the search for a plan.

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    whole = [one.whole_bytes <= one.memory_bytes for one in machines]
    if topology is None or all(whole):
        if not all(whole):
            needs, has = machines[0].whole_bytes / 1e9, machines[0].memory_bytes / 1e9
            raise UserError(f"--peers: one peer alone needs {needs:.1f} GB for this model and has {has:.1f}; add peers")
        return _whole_models(run, topology, machines)
    topology = replace(topology, costs=tuple(one.costs for one in machines))
    plan = throughput_plan(topology, run, "genetic", 0, SearchBudget(seconds, clock=time.monotonic))
    spans = tuple((first, last) for first, last in (plan.spans.get(name, (0, 0)) for name in topology.ids))
    promised, (low, high) = plan.throughput["tokens_per_s"], ROUTED_RANGE
    speed = Figure(
        promised * ROUTED_SHARE,
        promised * low * min(one.low for one in machines),
        promised * high * max(one.high for one in machines),
    )
    gossip, pairs = _traffic(run, topology, machines, spans, _routed(plan, topology, run, promised))
    return Forecast(speed, spans, pairs, gossip, _limit(plan, topology, run))


def _whole_models(run: Config, topology: Topology | None, machines: Sequence[Machine]) -> Forecast:
    """Return the forecast of a swarm whose peers all hold the whole model."""
    spans = ((0, run.model.depth + 2),) * len(machines)
    speed = Figure(
        TRAINING_SHARE * sum(one.tokens_per_s for one in machines),
        sum(one.low * one.tokens_per_s for one in machines),
        sum(one.high * one.tokens_per_s for one in machines),
    )
    limit, nothing_NN = "compute: each peer holds the whole model, and training waits for no link", np.zeros((1, 1))
    if topology is None:
        return Forecast(speed, spans, PairTraffic(nothing_NN, nothing_NN, nothing_NN), None, limit)
    gossip, pairs = _traffic(run, topology, machines, spans, np.zeros((len(topology), len(topology))))
    return Forecast(speed, spans, pairs, gossip, limit)


def _limit(plan: ThroughputPlan, topology: Topology, run: Config) -> str:
    """Return which resource of a plan with routes is used up, and whose."""
    used = feasibility.uses(plan, topology, layer_costs.of_model(topology, run))
    names = {"device": "compute"}
    shown = [f"{names.get(kind, kind)} of {use.whose}" for kind, use in used.items() if use.share >= BUSY]
    return f"{', '.join(shown) or 'memory'}; not every peer holds the whole model, so micro-batches travel"


def _routed(plan: ThroughputPlan, topology: Topology, run: Config, tokens_per_s: float) -> Floats:
    """Return the bytes/s of activations and gradients between each two peers at this speed."""
    index = {name: number for number, name in enumerate(topology.ids)}
    hidden, sent_NN = 2.0 * run.model.d_model, np.zeros((len(topology), len(topology)))
    for route in plan.routes:
        for (sender, _, _), (receiver, _, _) in itertools.pairwise(route["hops"]):
            sent_NN[index[sender], index[receiver]] += route["share"] * tokens_per_s * hidden
    return sent_NN + sent_NN.T


def _traffic(
    run: Config, topology: Topology, machines: Sequence[Machine], spans: Sequence[tuple[int, int]], routed_NN: Floats
) -> tuple[GossipTraffic, PairTraffic]:
    """Return the peers' gossip, and what it and routes together send; `routed_NN` is at the plan's tokens/s."""
    peers, cuts = [one.gossiper for one in machines], machines[0].needs.fragments
    gossip = traffic(topology, run.gossip, cuts, spans, peers)
    cases = [gossip.sent_NN, *(traffic(topology, run.gossip, cuts, spans, peers, ease).sent_NN for ease in EASE)]
    return gossip, PairTraffic(
        gossip.sent_NN + ROUTED_SHARE * routed_NN,
        np.minimum.reduce(cases) / BYTES_RANGE + ROUTED_RANGE[0] * routed_NN,
        np.maximum.reduce(cases) * BYTES_RANGE + ROUTED_RANGE[1] * routed_NN,
    )


def held_share(machine: Machine) -> float:
    """Return the largest share of the model's parameters, 0 to 1, that fits into a machine's memory in one span."""
    cuts, widest = machine.needs.fragments, widest_span(machine.needs, int(machine.memory_bytes))
    total = sum(cut.parameters for cut in cuts)
    return max(sum(cut.parameters for cut in cuts[begin : widest(begin)]) for begin in range(len(cuts))) / total
