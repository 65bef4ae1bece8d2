"""Predict a swarm's speed, memory and traffic from its devices and links. Start at `forecast`.

If every peer holds the whole model, no peer waits for a link, and the swarm's tokens/s are the sum over its devices.
Otherwise the planner chooses the peers' layers and the routes (scheduler/throughput/planning.py). The simulator plays
routes and gossip; a swarm that is too large for the simulator is predicted by formulas.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decentral.commands.estimates.figures import Figure
from decentral.commands.estimates.peer_devices import PeerDevice
from decentral.commands.estimates.playing import MOST_PLAYED, Rates, play
from decentral.commands.estimates.traffic import PredictedGossip, traffic, within_links
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.memory_needs import widest_span
from decentral.scheduler.throughput import feasibility, layer_costs
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology

# A peer trains in this share of its time. The rest is gossip, evaluation and checkpoints (docs/results/benchmarks.md).
TRAINING_SHARE = 0.985
PLANNING_SHARE = 0.3  # the search for a plan gets this share of the time limit, and the simulator gets the rest
# A swarm with routes that is not simulated is expected to reach this share of the tokens/s that its plan promises
# (docs/results/planner.md). Simulated swarms reached shares in the range below: homes the least, labs the most.
ROUTED_SHARE, ROUTED_SHARES = 0.3, (0.1, 2.4)
ROUTED_RANGE = 1.4  # with routes, tokens/s may be lower or higher than simulated by up to this factor
# Windows double or halve (comm/gossip/gossip_cost.py), so those of a run may be longer or shorter by this factor.
WINDOW_STEP = 2
# Without the simulator, traffic is also computed with links and cores that are this many times as fast as assumed. The
# range of traffic includes both results.
EASE = (0.55, 1.8)
BYTES_RANGE = 1.2  # the range of bytes that follows from the windows is extended by this factor at both ends
USED_UP = 0.95  # a resource of which at least this share is used limits the swarm


Windows = tuple[tuple[float, str], ...]
"""For each peer: the length of its windows in seconds (0: unknown), and what bounds it."""


@dataclass(frozen=True, slots=True, eq=False)
class PairTraffic:
    """Predicted bytes/s from the row's peer to the column's peer, and their range."""

    mid_NN: Floats
    low_NN: Floats
    high_NN: Floats

    def plus(self, sent_NN: Floats, share: float) -> "PairTraffic":
        """Return the sum with uncertain traffic: `low` adds none of `sent_NN`, `mid` adds `share` of it, `high` all."""
        return PairTraffic(self.mid_NN + share * sent_NN, self.low_NN, self.high_NN + sent_NN)

    def within(self, topology: Topology) -> "PairTraffic":
        """Return the traffic that links carry."""
        return PairTraffic(
            within_links(topology, self.mid_NN),
            within_links(topology, self.low_NN),
            within_links(topology, self.high_NN),
        )

    def between(self, senders: Sequence[int], receivers: Sequence[int]) -> Figure:
        """Return the bytes/s that these senders send to these receivers together."""
        grid = np.ix_(senders, receivers)
        return Figure(float(self.mid_NN[grid].sum()), float(self.low_NN[grid].sum()), float(self.high_NN[grid].sum()))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted speed, layers and traffic of a swarm of N peers that has trained for some time."""

    tokens_per_s: Figure
    spans: tuple[tuple[int, int], ...]  # each peer's layers [first, last); (0, 0): none
    pairs: PairTraffic
    windows: Windows
    limit: str  # what limits tokens/s, as text for people


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted speed and layers of a swarm of N peers, without its traffic."""

    tokens_per_s: Figure
    spans: tuple[tuple[int, int], ...]  # each peer's layers [first, last); (0, 0): none
    limit: str  # what limits tokens/s, as text for people
    plan: ThroughputPlan | None  # layers and routes; None: each peer holds the whole model


def outlook(
    run: Config,
    topology: Topology | None,
    devices: Sequence[PeerDevice],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Outlook:
    """Predict the speed and layers of a swarm without simulating it.

    Args:
        run: As for `forecast`, like the next two.
        topology: The peers and their links.
        devices: Each peer's device.
        seconds: Limit of the search for a plan, if not every peer can hold the whole model.
        clock: Time in seconds, which ends a search that is much slower than on a quiet core (search_budget.py).

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    if all(one.whole_bytes <= one.memory_bytes for one in devices):
        speed = Figure(
            TRAINING_SHARE * sum(one.tokens_per_s for one in devices),
            sum(one.low * one.tokens_per_s for one in devices),
            sum(one.high * one.tokens_per_s for one in devices),
        )
        limit = "compute: each peer holds the whole model, and training waits for no link"
        return Outlook(speed, ((0, run.model.depth + 2),) * len(devices), limit, None)
    if topology is None:
        needs, has = devices[0].whole_bytes / 1e9, devices[0].memory_bytes / 1e9
        raise UserError(f"--peers: one peer alone needs {needs:.1f} GB for this model and has {has:.1f}; add peers")
    topology = _with_costs(topology, devices)
    plan = throughput_plan(topology, run, "genetic", 0, SearchBudget(seconds, clock=clock))
    spans = tuple((first, last) for first, last in (plan.spans.get(name, (0, 0)) for name in topology.ids))
    promised = plan.throughput["estimated"]
    low, high = ROUTED_SHARES
    speed = _of_devices(Figure(ROUTED_SHARE * promised, low * promised, high * promised), devices)
    return Outlook(speed, spans, _limit(plan, topology, run), plan)


def forecast(
    run: Config,
    topology: Topology | None,
    devices: Sequence[PeerDevice],
    seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Forecast:
    """Predict the speed, layers and traffic of a swarm.

    Args:
        run: The run's config, with a built-in model, gossip by pull, and a number as `train.micro_batch`.
        topology: The peers and their links; None: one peer alone.
        devices: Each peer's device, in the topology's order.
        seconds: Limit of the search for a plan and of the simulation.
        clock: As for `outlook`.

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    first = outlook(run, topology, devices, PLANNING_SHARE * seconds, clock)
    speed, spans, plan = first.tokens_per_s, first.spans, first.plan
    if topology is None:
        nothing_NN = np.zeros((1, 1))
        alone = PairTraffic(nothing_NN, nothing_NN, nothing_NN)
        return Forecast(speed, spans, alone, ((0.0, ""),), first.limit)
    if plan is None:
        _, pairs, windows = _played(run, topology, devices, spans, None, SearchBudget(seconds, clock=clock))
        return Forecast(speed, spans, pairs, windows, first.limit)
    topology = _with_costs(topology, devices)
    budget = SearchBudget((1 - PLANNING_SHARE) * seconds, clock=clock)
    rates, pairs, windows = _played(run, topology, devices, spans, plan, budget)
    promised = plan.throughput["tokens_per_s"]
    if rates is None:
        pairs = pairs.plus(_by_routes(plan, topology, run, promised), ROUTED_SHARE)
    else:
        played = Figure(rates.tokens, rates.tokens / ROUTED_RANGE, rates.tokens * ROUTED_RANGE)
        speed = _of_devices(played, devices)
    return Forecast(speed, spans, pairs, windows, first.limit)


def _with_costs(topology: Topology, devices: Sequence[PeerDevice]) -> Topology:
    return replace(topology, costs=tuple(one.costs for one in devices))


def _of_devices(speed: Figure, devices: Sequence[PeerDevice]) -> Figure:
    """Return a swarm's speed with its range extended by the range of the devices' speeds."""
    low, high = min(one.low for one in devices), max(one.high for one in devices)
    return Figure(speed.mid, speed.low * low, speed.high * high)


def _played(
    run: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    spans: tuple[tuple[int, int], ...],
    plan: ThroughputPlan | None,
    budget: SearchBudget,
) -> tuple[Rates | None, PairTraffic, Windows]:
    """Return the rates that the simulator measured, the traffic, and the windows.

    If the swarm is too large to simulate, the rates are None, and the traffic is that of gossip only. The simulator
    does not limit gossip by processors. So it gets windows that are at least as long as the upper median of the lengths
    that the peers' processors need.
    """
    gossip = _gossip(run, topology, devices, spans)
    if len(topology) > MOST_PLAYED:
        windows = tuple(zip(gossip.period_s.tolist(), gossip.bound, strict=True))
        return None, _predicted(run, topology, devices, spans, gossip), windows
    least_s = max(run.gossip.window_s, float(np.sort(gossip.cores_s)[len(topology) // 2]))
    rates = play(run, topology, devices, plan, least_s, budget)
    by_cores = least_s > run.gossip.window_s
    cases = [gossip, *_eased(run, topology, devices, spans)]
    pairs = between_codes(between_windows(rates, run.gossip.window_s, gossip.cycle_s), cases).within(topology)
    return rates, pairs, tuple((length, bound or ("cores" if by_cores else "")) for length, bound in rates.windows)


def between_windows(rates: Rates, window_s: float, cycle_N: Floats) -> PairTraffic:
    """Return the traffic that was played; its range is that of windows which are one step longer or shorter.

    Args:
        rates: What was played. A peer sends a window's bytes to a partner once in the longer one of both periods.
        window_s: The shortest windows, in seconds.
        cycle_N: (N,) the shortest period that steps and transfers allow, in seconds.
    """
    played_N = np.maximum(window_s, [length for length, _ in rates.windows])
    cases = played_N, played_N * WINDOW_STEP, np.maximum(window_s, played_N / WINDOW_STEP)
    period_NN, longer_NN, shorter_NN = (
        np.maximum.outer(one, one) for one in (np.maximum(one, cycle_N) for one in cases)
    )
    low_NN = rates.sent_NN * period_NN / longer_NN / BYTES_RANGE
    return PairTraffic(rates.sent_NN, low_NN, rates.sent_NN * period_NN / shorter_NN * BYTES_RANGE)


def between_codes(pairs: PairTraffic, cases: Sequence[PredictedGossip]) -> PairTraffic:
    """Return traffic whose range includes that of `cases`, for each peer that has not the same code in all of them.

    Its link is about as fast as windows in the dense code need, so it may use that code or a shorter one.
    """
    low_NN, high_NN = pairs.low_NN.copy(), pairs.high_NN.copy()
    sent_CNN = np.stack([one.sent_NN for one in cases])
    for peer in range(len(low_NN)):
        if len({one.codes[peer] for one in cases}) > 1:
            low_NN[peer] = np.minimum(low_NN[peer], sent_CNN[:, peer].min(0) / BYTES_RANGE)
            high_NN[peer] = np.maximum(high_NN[peer], sent_CNN[:, peer].max(0) * BYTES_RANGE)
    return PairTraffic(pairs.mid_NN, low_NN, high_NN)


def _limit(plan: ThroughputPlan, topology: Topology, run: Config) -> str:
    """Return as text for people which resources a plan with routes uses up, and whose resources these are."""
    used = feasibility.uses(plan, topology, layer_costs.of_model(topology, run))
    names = {"device": "compute"}
    shown = [f"{names.get(kind, kind)} of {use.whose}" for kind, use in used.items() if use.share >= USED_UP]
    return f"{', '.join(shown) or 'memory'}; not every peer holds the whole model, so micro-batches travel"


def _by_routes(plan: ThroughputPlan, topology: Topology, run: Config, tokens_per_s: float) -> Floats:
    """Return the bytes/s of activations and gradients between each two peers at this speed."""
    index = {name: number for number, name in enumerate(topology.ids)}
    hidden, sent_NN = 2.0 * run.model.d_written, np.zeros((len(topology), len(topology)))
    for route in plan.routes:
        for (sender, _, _), (receiver, _, _) in itertools.pairwise(route["hops"]):
            sent_NN[index[sender], index[receiver]] += route["share"] * tokens_per_s * hidden
    return sent_NN + sent_NN.T


def _gossip(
    run: Config, topology: Topology, devices: Sequence[PeerDevice], spans: Sequence[tuple[int, int]], ease: float = 1.0
) -> PredictedGossip:
    return traffic(topology, run.gossip, devices[0].needs.fragments, spans, [one.gossiper for one in devices], ease)


def _eased(
    run: Config, topology: Topology, devices: Sequence[PeerDevice], spans: Sequence[tuple[int, int]]
) -> list[PredictedGossip]:
    """Return the gossip of peers whose links and cores are slower, and faster, than assumed (EASE)."""
    return [_gossip(run, topology, devices, spans, ease) for ease in EASE]


def _predicted(
    run: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    spans: Sequence[tuple[int, int]],
    gossip: PredictedGossip,
) -> PairTraffic:
    """Return the traffic of gossip by formulas, for a swarm that is too large to simulate."""
    cases = [one.sent_NN for one in (gossip, *_eased(run, topology, devices, spans))]
    low_NN, high_NN = np.minimum.reduce(cases) / BYTES_RANGE, np.maximum.reduce(cases) * BYTES_RANGE
    return PairTraffic(gossip.sent_NN, low_NN, high_NN)


def held_share(device: PeerDevice) -> float:
    """Return the largest share of the model's parameters, 0 to 1, that fits into a device's memory in one span."""
    cuts, widest = device.needs.fragments, widest_span(device.needs, int(device.memory_bytes))
    total = sum(cut.parameters for cut in cuts)
    return max(sum(cut.parameters for cut in cuts[begin : widest(begin)]) for begin in range(len(cuts))) / total
