"""Predict a swarm's speed, memory and traffic from its devices and links. Start at `forecast`.

If every peer holds the whole model, no peer waits for a link, and the swarm's tokens/s are the sum over its devices.
Otherwise the planner chooses the peers' layers and the routes (scheduler/throughput/planning.py). The simulator plays
routes and gossip. Formulas predict swarms that are too large for it, and gossip that it has no time to let settle.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from decentral.commands.estimates import limits, playing
from decentral.commands.estimates.figures import Figure
from decentral.commands.estimates.judging import LEAST_COUNTED
from decentral.commands.estimates.peer_devices import PeerDevice
from decentral.commands.estimates.playing import MOST_PLAYED, Rates, play, play_routes
from decentral.commands.estimates.traffic import PredictedGossip, traffic, within_links
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.memory_needs import widest_span
from decentral.core.units import Seconds
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology

# A peer trains in this share of its time. The rest is gossip, evaluation and checkpoints (docs/results/benchmarks.md).
TRAINING_SHARE = 0.985
ROUTED_S = 20.0  # the search for a plan and its simulation together get at most so many seconds of work
PLANNING_SHARE = 0.3  # the search for a plan gets this share of them, and the simulator gets the rest
# Of the seconds for a simulation with routes, at most this many, and at most this share, are kept for routes alone.
ROUTES_ALONE_S, ROUTES_ALONE_SHARE = 2.0, 0.5
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
MOST_OF_ESTIMATE = (
    2.0  # a plan is not played if even this many times its estimate is too little; plans reached up to 1.9
)


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

    def within_larger(self, places: Sequence[int], count: int) -> "PairTraffic":
        """Return the traffic in a swarm of `count` peers, of which those at `places` have this traffic."""
        mid_NN, low_NN, high_NN = np.zeros((3, count, count))
        grid = np.ix_(places, places)
        mid_NN[grid], low_NN[grid], high_NN[grid] = self.mid_NN, self.low_NN, self.high_NN
        return PairTraffic(mid_NN, low_NN, high_NN)

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
    until_s: Seconds | None = None  # virtual time at which the simulation was cut short; None: it was not


@dataclass(frozen=True, slots=True)
class _Played:
    """What is known of a swarm's gossip and, if it has them, its routes, by the simulator or by formulas."""

    speed: Figure | None  # tokens/s of routes; None: they were not simulated, or do not exist
    pairs: PairTraffic  # of gossip and of simulated routes
    windows: Windows
    until_s: Seconds | None = None  # virtual time at which the budget ended a simulation that had not settled


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted speed and layers of a swarm of N peers, without the traffic of peers with the whole model."""

    tokens_per_s: Figure
    spans: tuple[tuple[int, int], ...]  # each peer's layers [first, last); (0, 0): none
    limit: str  # what limits tokens/s, as text for people
    traffic: tuple[PairTraffic, Windows] | None = None  # with routes: bytes and windows, which are played with them
    until_s: Seconds | None = None  # with routes: virtual time at which their simulation was cut short

    def within_larger(self, places: Sequence[int], count: int) -> "Outlook":
        """Return the outlook of a swarm of `count` peers, of which only those at `places` hold layers, as here."""
        assert self.traffic is not None, "peers with the whole model are those of the whole swarm"
        pairs, lengths = self.traffic
        spans, windows = [(0, 0)] * count, [(0.0, "")] * count
        for place, span, window in zip(places, self.spans, lengths, strict=True):
            spans[place], windows[place] = span, window
        return replace(self, spans=tuple(spans), traffic=(pairs.within_larger(places, count), tuple(windows)))

    @property
    def busy(self) -> list[int]:
        """The numbers of the peers that hold layers."""
        return [peer for peer, (first, last) in enumerate(self.spans) if first < last]


def outlook(run: Config, topology: Topology | None, devices: Sequence[PeerDevice], seconds: float) -> Outlook:
    """Predict the speed and layers of a swarm: the best of three layouts, as peers without layers cost nothing.

    In the first layout, all peers that can hold the whole model hold it, and the others nothing. In the second, a plan
    divides the model, and micro-batches travel. The third is such a plan without the slowest kind of device, since a
    search may be led astray by devices of little use. A plan is searched for and played in ROUTED_S at most, so that a
    table of several models has the same figures as `forecast`.

    Args:
        run: As for `forecast`, like the next two.
        topology: The peers and their links.
        devices: Each peer's device.
        seconds: Limit of the search for a plan and of the simulation, in seconds of work on a quiet core.

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    holders = [peer for peer, one in enumerate(devices) if one.whole_bytes <= one.memory_bytes]
    apart = _whole_models(run, devices, holders) if holders else None
    if apart and len(holders) == len(devices):
        return apart
    if topology is None:
        needs, has = devices[0].whole_bytes / 1e9, devices[0].memory_bytes / 1e9
        raise UserError(f"--peers: one peer alone needs {needs:.1f} GB for this model and has {has:.1f}; add peers")
    topology, slowest = _with_costs(topology, devices), min(one.tokens_per_s for one in devices)
    found = _divided(run, topology, devices, min(seconds, ROUTED_S), apart) or apart
    faster = [peer for peer, one in enumerate(devices) if one.tokens_per_s > slowest]
    if len(faster) > 1 and not set(faster).issubset(holders):
        having, among = [devices[peer] for peer in faster], topologies.among(topology, faster)
        with suppress(UserError):  # these peers cannot hold the model
            fewer = _divided(run, among, having, min(seconds, ROUTED_S), found)
            found = fewer.within_larger(faster, len(devices)) if fewer else found
    assert found is not None, "a swarm without holders of the whole model has a plan, or has raised an error"
    return found


def _whole_models(run: Config, devices: Sequence[PeerDevice], holders: Sequence[int]) -> Outlook:
    """Return the outlook of a swarm in which the peers `holders` hold the whole model, and the others nothing."""
    having = [devices[peer] for peer in holders]
    speed = Figure(
        TRAINING_SHARE * sum(one.tokens_per_s for one in having),
        sum(one.low * one.tokens_per_s for one in having),
        sum(one.high * one.tokens_per_s for one in having),
    )
    whole = (0, run.model.depth + 2)
    spans = tuple(whole if peer in holders else (0, 0) for peer in range(len(devices)))
    return Outlook(speed, spans, limits.of_whole_models(devices, holders))


def _divided(
    run: Config, topology: Topology, devices: Sequence[PeerDevice], seconds: float, other: Outlook | None
) -> Outlook | None:
    """Return the outlook of a plan that divides the model; None if it is no faster than `other`.

    Args:
        run: As for `outlook`, like the next two.
        topology: The peers, with their costs, and their links.
        devices: Each peer's device.
        seconds: Limit of the search and of the simulation.
        other: The outlook of another layout; None if there is none.

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    plan = throughput_plan(topology, run, "genetic", 0, SearchBudget(PLANNING_SHARE * seconds))
    estimated, least = plan.throughput["estimated"], other.tokens_per_s.mid if other else 0.0
    if MOST_OF_ESTIMATE * estimated <= least:
        return None
    spans = tuple((first, last) for first, last in (plan.spans.get(name, (0, 0)) for name in topology.ids))
    budget = SearchBudget((1 - PLANNING_SHARE) * seconds)
    played = _played(run, topology, devices, spans, plan, budget)
    speed, pairs = played.speed, played.pairs
    if speed is None:
        pairs = pairs.plus(_by_routes(plan, topology, run, estimated), ROUTED_SHARE)
        low, high = ROUTED_SHARES
        speed = Figure(ROUTED_SHARE * estimated, low * estimated, high * estimated)
    if speed.mid <= least:
        return None
    limit = limits.of_routes(plan, topology, run, devices, spans, speed.mid)
    return Outlook(_of_devices(speed, devices), spans, limit, (pairs, played.windows), played.until_s)


def forecast(run: Config, topology: Topology | None, devices: Sequence[PeerDevice], seconds: float = 60.0) -> Forecast:
    """Predict the speed, layers and traffic of a swarm. Equal swarms have equal forecasts on any machine.

    Args:
        run: The run's config, with a built-in model, gossip by pull, and a number as `train.micro_batch`.
        topology: The peers and their links; None: one peer alone.
        devices: Each peer's device, in the topology's order.
        seconds: Limit of the search for a plan and of the simulation, in seconds of work on a quiet core.

    Raises:
        UserError: If the peers together cannot hold the model.
    """
    first = outlook(run, topology, devices, seconds)
    if first.traffic:
        pairs, windows = first.traffic
        return Forecast(first.tokens_per_s, first.spans, pairs, windows, first.limit, first.until_s)
    found = _of_whole_models(run, topology, devices, first, seconds)
    return Forecast(first.tokens_per_s, first.spans, found.pairs, found.windows, first.limit, found.until_s)


def _of_whole_models(
    run: Config, topology: Topology | None, devices: Sequence[PeerDevice], found: Outlook, seconds: float
) -> _Played:
    """Return the traffic and windows of peers with the whole model; peers without layers have none."""
    busy, nothing_NN = found.busy, np.zeros((len(devices), len(devices)))
    pairs, windows = PairTraffic(nothing_NN, nothing_NN, nothing_NN), [(0.0, "")] * len(devices)
    if topology is None or len(busy) < 2:
        return _Played(None, pairs, tuple(windows))
    among = topology if len(busy) == len(devices) else topologies.among(topology, busy)
    spans, having = tuple(found.spans[peer] for peer in busy), [devices[peer] for peer in busy]
    played = _played(run, among, having, spans, None, SearchBudget(seconds))
    for peer, window in zip(busy, played.windows, strict=True):
        windows[peer] = window
    return replace(played, pairs=played.pairs.within_larger(busy, len(devices)), windows=tuple(windows))


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
) -> _Played:
    """Return what the simulator measured, as far as the budget allows; see `_Played`.

    If the swarm is too large to simulate, or gossip does not settle within the budget, the traffic of gossip is that of
    formulas. A part of the budget is kept for routes without gossip, whose simulation takes less work.

    The simulator does not limit gossip by processors. So it gets windows that are at least as long as the upper median
    of the lengths that the peers' processors need.
    """
    gossip = _gossip(run, topology, devices, spans)
    cases = [gossip, *_eased(run, topology, devices, spans)]
    by_formulas = _Played(
        None, _predicted(gossip, cases), tuple(zip(gossip.period_s.tolist(), gossip.bound, strict=True))
    )
    if len(topology) > MOST_PLAYED:
        return by_formulas
    kept = min(ROUTES_ALONE_S / budget.seconds, ROUTES_ALONE_SHARE) if plan else 0.0
    least_s = max(run.gossip.window_s, float(np.sort(gossip.cores_s)[len(topology) // 2]))
    rates = play(run, topology, devices, plan, least_s, budget.part(1 - kept), least_samples=2)
    if rates.until_s < (playing.ROUTES_SETTLED_S if plan else playing.GOSSIP_SETTLED_S):
        by_formulas = replace(by_formulas, until_s=rates.until_s)
        return _with_routes_alone(run, topology, devices, plan, by_formulas, budget.part(kept)) if plan else by_formulas
    by_cores = least_s > run.gossip.window_s
    pairs = between_codes(between_windows(rates, run.gossip.window_s, gossip.cycle_s), cases)
    if plan:  # bytes of routes vary with their tokens/s
        low_NN = np.minimum(pairs.low_NN, pairs.mid_NN / ROUTED_RANGE)
        pairs = PairTraffic(pairs.mid_NN, low_NN, np.maximum(pairs.high_NN, pairs.mid_NN * ROUTED_RANGE))
    pairs = pairs.within(topology)
    windows = tuple((length, bound or ("cores" if by_cores else "")) for length, bound in rates.windows)
    speed = Figure(rates.tokens, rates.tokens / ROUTED_RANGE, rates.tokens * ROUTED_RANGE)
    return _Played(speed, pairs, windows)


def _with_routes_alone(
    run: Config,
    topology: Topology,
    devices: Sequence[PeerDevice],
    plan: ThroughputPlan,
    gossip: _Played,
    budget: SearchBudget,
) -> _Played:
    """Return `gossip`, predicted by formulas, with tokens/s and bytes of the plan's routes, simulated alone.

    Beside settled gossip, routes of seven swarms of 4 to 8 peers reached 0.78 to 1.29 of that, in the mean 1.0. At the
    low end, gossip takes as much of the links as it may beside tokens. If the routes complete too few micro-batches,
    the result has no tokens/s.
    """
    alone = play_routes(run, topology, devices, plan, budget)
    micro_batch = min(plan.micro_batches.values()) * run.model.context
    if alone.counted < LEAST_COUNTED * len(plan.spans) * micro_batch:
        return gossip
    routed = sum(route["share"] for route in plan.routes if len(route["hops"]) > 1)
    low = (1 - routed * run.gossip.share_beside_tokens) / ROUTED_RANGE
    pairs = PairTraffic(
        gossip.pairs.mid_NN + alone.sent_NN,
        gossip.pairs.low_NN + low * alone.sent_NN,
        gossip.pairs.high_NN + ROUTED_RANGE * alone.sent_NN,
    )
    speed = Figure(alone.tokens, low * alone.tokens, ROUTED_RANGE * alone.tokens)
    return replace(gossip, speed=speed, pairs=pairs.within(topology))


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


def _predicted(gossip: PredictedGossip, cases: Sequence[PredictedGossip]) -> PairTraffic:
    """Return the traffic of gossip by formulas, for a swarm that is not simulated; its range is that of `cases`."""
    sent = [one.sent_NN for one in cases]
    return PairTraffic(gossip.sent_NN, np.minimum.reduce(sent) / BYTES_RANGE, np.maximum.reduce(sent) * BYTES_RANGE)


def held_share(device: PeerDevice) -> float:
    """Return the largest share of the model's parameters, 0 to 1, that fits into a device's memory in one span."""
    cuts, widest = device.needs.fragments, widest_span(device.needs, int(device.memory_bytes))
    total = sum(cut.parameters for cut in cuts)
    return max(sum(cut.parameters for cut in cuts[begin : widest(begin)]) for begin in range(len(cuts))) / total
