"""Simulate a swarm for a few seconds, to find out how many bytes its links really carry. Start at `play`.

`judge` plays the finalists of a search for a plan, and chooses the one that reaches the most tokens/s.

The peers run the real protocol in virtual time: they measure their links while gossip uses them, lengthen windows, and
carry micro-batches along routes. All peers have the model from the start, but must still measure their links.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from decentral.commands.estimates.machines import Machine, step_tokens
from decentral.core import rng
from decentral.core.config import Config
from decentral.core.ids import PeerId
from decentral.core.journal.events import StatusLine, StepLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.scheduler.throughput.plan import Judge, Verdict, problem_of
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.arrays import Floats
from decentral.scheduler.topology.plan import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology
from decentral.sim import planned
from decentral.sim.host import Pace
from decentral.sim.run import Scenario, StopRun, run
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

# Tokens and bytes count only after this much virtual time; if less than twice as much is simulated, only in its second
# half.
WARM_UP_S = 600.0
STEP_NOISE_SHARE = 0.05  # relative standard deviation of the duration of a step
PLAYED_S = 2400.0  # at most this many virtual seconds are simulated; windows change once in 5 to 20 minutes
LEAST_SAMPLES = 4  # a simulation that is cut short has at least this many samples, so that some follow the warm-up
# Processor time of the simulator on a quiet core: of an event, and of computing a transfer's rate.
EVENT_S, RATE_S = 6e-5, 8e-6
MOST_PLAYED = 64  # a swarm with more peers takes too long to simulate
# Of a plan that is too large, a part with at most so many peers is played, in this share of the time.
PART_PEERS, PART_SHARE = 16, 0.4
# A finalist is played for the time in which it trains this many micro-batches by its estimate, but at most PLAYED_S.
PLAYED_MICRO_BATCHES = 3000
# With routes, windows of large models have grown to about this length, or longer, after some minutes (gossip_cost.py).
SETTLED_WINDOW_S = 60.0
LEAST_COUNTED = 2  # micro-batches that a play must count for each peer
JUDGED_S = 5.0  # seconds of a budget for the finalists of a plan
# Routes of which not even a part is played are said to reach this share of their estimate. Played ones reached 0.2 to
# 1.09 of theirs (docs/results/planner.md).
UNPLAYED_SHARE = 0.2
# A part whose peers share routes with peers outside keeps more of its estimate than the plan does (64 volunteers: 1.0
# and 0.58). So the plan is said to keep this share of what the part keeps.
CUT_SHARE = 0.6


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """What a played swarm of N peers did, per second of virtual time after the warm-up."""

    tokens: float  # tokens/s
    sent_NN: Floats  # bytes/s from the row's peer to the column's peer
    windows: tuple[tuple[Seconds, str], ...]  # each peer's last windows of gossip: their length, and what bounds it
    counted: float = 0.0  # tokens since the warm-up

    def among(self, names: Sequence[str], played: Sequence[str]) -> Self:
        """Return the rates of a larger swarm in which only the peers `played` do anything.

        Args:
            names: All peers of the larger swarm.
            played: Those of them that were simulated, in the order of this object's arrays.
        """
        places = [names.index(name) for name in played]
        sent_NN, windows = np.zeros((len(names), len(names))), [(0.0, "")] * len(names)
        sent_NN[np.ix_(places, places)] = self.sent_NN
        for place, window in zip(places, self.windows, strict=True):
            windows[place] = window
        return replace(self, sent_NN=sent_NN, windows=tuple(windows))


@dataclass(slots=True)
class PlayedSwarm:
    """An observer of a simulated run (a `Watch`) that counts training tokens and sent bytes over virtual time.

    A routed micro-batch counts when its gradient is back at its origin peer. The steps that apply it come in larger and
    rarer portions, from which a short run would not tell the rate.
    """

    tokens: float = 0.0  # of steps of peers with the whole model
    number: dict[PeerId, int] = field(default_factory=dict)  # of each peer, in the topology's order
    windows: dict[PeerId, tuple[Seconds, str]] = field(default_factory=dict)
    at: list[tuple[Seconds, float, Counter[tuple[PeerId, PeerId]]]] = field(default_factory=list)
    _swarm: SimulatedSwarm | None = None

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Prepare to count in this swarm."""
        self._swarm = swarm

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Count the tokens of a step of a peer with the whole model, and note the length of windows."""
        assert self._swarm is not None
        cuts = self._swarm.settings.fragments
        match log.event:
            case StepLine() as step if self._swarm.by_peer[peer].span == (0, cuts[-1].last):
                self.tokens += step.tokens
            case StatusLine(window_s=window_s, bound=bound):
                self.windows[peer] = window_s, bound

    @property
    def work_s(self) -> Seconds:
        """Return in how many seconds of a quiet core's time the simulator has done its work until now."""
        assert self._swarm is not None
        return EVENT_S * self._swarm.agenda.events + RATE_S * self._swarm.network.links.rates_set

    def end(self) -> None:
        """Do nothing: `rates` counts between samples."""

    def sample(self) -> None:
        """Record the virtual time with the numbers of tokens and bytes that were counted until now."""
        assert self._swarm is not None
        self.number = {member.peer: place for place, member in enumerate(self._swarm.members)}
        routers = [member.life.node.routes for member in self._swarm.members if member.life]
        completed = sum(router.completed for router in routers if router)
        tokens = self.tokens + completed * self._swarm.settings.tokens_per_step
        self.at.append((self._swarm.agenda.now, tokens, Counter(self._swarm.network.links.sent)))

    def rates(self) -> Rates:
        """Return the rates since the warm-up.

        A rate is the slope of a line through the samples (least squares), since most bytes come at once after a window.
        Until twice the time of the first tokens, pipelines fill.
        """
        begin = min(WARM_UP_S, self.at[-1][0] / 2)
        filled = 2 * next((t for t, tokens, _ in self.at if tokens > 0), 0.0)
        if filled < self.at[-2][0]:
            begin = max(begin, filled)
        counted = [one for one in self.at if one[0] >= begin]
        sent_TNN = np.zeros((len(counted), len(self.number), len(self.number)))
        for place, (_, _, sent) in enumerate(counted):
            for (source, target), size in sent.items():
                sent_TNN[place, self.number[source], self.number[target]] = size
        away_T = np.array([t for t, _, _ in counted])
        away_T -= away_T.mean()
        weights_T = away_T / max(1e-9, float(away_T @ away_T))
        tokens = float(weights_T @ np.array([tokens for _, tokens, _ in counted]))
        windows = tuple(self.windows.get(peer, (0.0, "")) for peer in self.number)
        sent_NN = np.tensordot(weights_T, sent_TNN, axes=1)
        return Rates(tokens, sent_NN, windows, counted[-1][1] - counted[0][1])


def play(
    run_config: Config,
    topology: Topology,
    machines: Sequence[Machine],
    plan: ThroughputPlan | None,
    window_s: Seconds,
    budget: SearchBudget,
) -> Rates:
    """Simulate the swarm for up to PLAYED_S of virtual time, and return its rates after the warm-up.

    Args:
        run_config: The run's config.
        topology: The peers and their links.
        machines: Each peer's machine.
        plan: The peers' layers and routes; None: each peer holds the whole model.
        window_s: Length of the shortest gossip window, which replaces that of the config; it is longer if the peers'
            processors need longer windows.
        budget: Limit of playing. The simulator's events count, so that equal swarms have equal rates.

    Raises:
        UserError: If the plan cuts the model within a fragment.
    """
    scenario = scenario_of(run_config, topology, machines, plan, window_s, PLAYED_S, 0)
    rates = _played(scenario, budget, LEAST_SAMPLES)
    assert rates is not None
    return rates if plan is None else rates.among(topology.ids, list(plan.spans))


def _played(scenario: Scenario, budget: SearchBudget, least_samples: int = 1) -> Rates | None:
    """Play a scenario until its end or that of the budget, and return its rates after the warm-up.

    The play goes on beyond the budget until it has `least_samples` samples. None if it has fewer than LEAST_SAMPLES.
    """
    watch, progress = PlayedSwarm(), SearchProgress(budget, 0.0)
    counted_s = 0.0

    def sampled(_: Seconds) -> None:
        nonlocal counted_s
        watch.sample()
        progress.count(watch.work_s - counted_s)
        counted_s = watch.work_s
        if progress.late() and len(watch.at) >= least_samples:
            raise StopRun

    run(scenario, sampled, watches=[watch])
    return watch.rates() if len(watch.at) >= LEAST_SAMPLES else None


def judge(run_config: Config, topology: Topology, budget: SearchBudget) -> Judge:
    """Return a judge that plays plans for a run on a topology within a budget.

    Each plan is played for an equal part of the first half of the budget. The best is then played for the rest, with
    other random choices. It is said to reach the lower of both figures, as luck in one play is no promise. Plans with
    fewer peers are played faster, and come first. Once the time is too short for a plan, no larger one is played. If it
    is too short for all, the plan with the fewest peers takes the place of the best. If even that cannot be played, the
    plan with the highest estimate is chosen, and a part of it is played (`part_of`); if the time is too short for that,
    its routes are said to reach UNPLAYED_SHARE of their estimate.
    """

    def judged(plans: Sequence[ThroughputPlan]) -> Verdict | None:
        if not any(map(_is_routed, plans)):
            return None
        progress, longer = SearchProgress(budget, 0.0), None
        first: list[float | None] = [None for _ in plans]
        smallest_first = sorted(range(len(plans)), key=lambda one: len(plans[one].spans))
        for one in smallest_first:
            if len(plans[one].spans) <= MOST_PLAYED:
                first[one] = _reached(run_config, topology, plans[one], budget.part(0.5 / len(plans)), 0)
            if first[one] is None:
                break
        known = [one for one in first if one is not None]
        number = first.index(max(known)) if known else smallest_first[0]
        within = budget if known else budget.part(1 - PART_SHARE)
        if len(plans[number].spans) <= MOST_PLAYED and progress.seconds() < within.seconds:
            longer = _reached(run_config, topology, plans[number], within.less(progress.seconds()), 1)
        played = [one for one in (max(known, default=None), longer) if one is not None]
        if not played:
            return _judged_by_part(run_config, topology, plans[0], budget.less(progress.seconds()))
        reached = min(played)
        shown = ", ".join("?" if one is None else f"{one:.4g}" for one in first)
        reason = f"Played: {reached:.4g} tokens/s." + (f" In shorter plays, plans reached {shown}." if known else "")
        return Verdict(number, reached, reason)

    return judged


def _judged_by_part(run_config: Config, topology: Topology, plan: ThroughputPlan, budget: SearchBudget) -> Verdict:
    """Return what a plan that is too large to be played reaches, if its routes do as well as those of a part of it.

    The part's peers are played within the budget. Routes of one hop reach their estimate. If the part's peers share
    routes with others, the plan is said to reach CUT_SHARE of that.
    """
    estimated, routed = plan.throughput["estimated"], sum(r["share"] for r in plan.routes if len(r["hops"]) > 1)
    part = part_of(run_config, topology, plan, PART_PEERS) if routed else None
    reached = part and _reached(run_config, topology, part, budget, 0)
    if part is None or not reached:
        share = 1 - (1 - UNPLAYED_SHARE) * routed
        reason = f"Not played, as the swarm is too large for the time: promised is {share:.0%} of the estimate."
        return Verdict(0, share * estimated, reason)
    kept = min(1.0, reached / part.throughput["estimated"])
    through = sum(not part.spans.keys().isdisjoint(name for name, _, _ in route["hops"]) for route in plan.routes)
    if through > len(part.routes):
        kept *= CUT_SHARE
    reason = f"Played for {len(part.spans)} peers only; promised is {kept:.0%} of the estimate of all routes."
    return Verdict(0, (1 - (1 - kept) * routed) * estimated, reason)


def part_of(run_config: Config, topology: Topology, plan: ThroughputPlan, most_peers: int) -> ThroughputPlan | None:
    """Return the part of a plan with some of its routes of several hops, and only their peers, with its own estimate.

    Routes are drawn at random by their share of the tokens, with all routes that share peers with them as far as
    `most_peers` allows; without these, if no route allows that.

    Args:
        run_config: The run's config.
        topology: The whole swarm.
        plan: A plan with such routes.
        most_peers: The largest number of peers in the part.

    Returns:
        None if no route of several hops has so few peers.
    """
    several = [(route, {name for name, _, _ in route["hops"]}) for route in plan.routes if len(route["hops"]) > 1]
    share_R = np.array([route["share"] for route, _ in several])
    order_R = rng.arrays(plan.seed, "part").choice(len(several), len(several), replace=False, p=share_R / share_R.sum())
    chosen = set[str]()
    for group_R in _connected([names for _, names in several]), [names for _, names in several]:
        for number in order_R.tolist() if not chosen else ():
            if len(chosen | group_R[number]) <= most_peers:
                chosen |= group_R[number]
    if not chosen:
        return None
    spans = {name: span for name, span in plan.spans.items() if name in chosen}
    among = topologies.among(topology, [topology.ids.index(name) for name in spans])
    problem = problem_of(among, run_config, 1, float(plan.planned_for["utilisation"]))
    spans_N2 = np.array(list(spans.values()))
    return replace(
        plan,
        spans=spans,
        micro_batches={name: count for name, count in plan.micro_batches.items() if name in chosen},
        routes=[route for route, names in several if names <= chosen],
        throughput=plan.throughput | {"estimated": problem.reached(spans_N2, problem.flow(spans_N2))},
    )


def _connected(routes: Sequence[set[str]]) -> list[set[str]]:
    """Return, for each route, the peers of all routes that it is connected with by shared peers, directly or not."""
    groups = list[set[str]]()
    for names in routes:
        joined = names | {name for group in groups if group & names for name in group}
        groups = [joined] + [group for group in groups if not group & names]
    return [next(group for group in groups if names <= group) for names in routes]


def _is_routed(plan: ThroughputPlan) -> bool:
    """Return whether micro-batches pass through several peers."""
    return any(len(route["hops"]) > 1 for route in plan.routes)


def _reached(
    run_config: Config, topology: Topology, plan: ThroughputPlan, budget: SearchBudget, seed: int
) -> float | None:
    """Return the tokens/s of a plan that is played within a budget, with windows as long as they become in time.

    None if the budget suffices for too few samples, or for fewer than LEAST_COUNTED micro-batches a peer.
    """
    settled_s = max(run_config.gossip.window_s, SETTLED_WINDOW_S)
    settings = {"start_steps": 0, "fragment_parameters": 1, "window_s": settled_s}
    settled = run_config.model_copy(update={"gossip": run_config.gossip.model_copy(update=settings)})
    micro_batch = min(plan.micro_batches.values()) * run_config.model.context
    seconds = min(PLAYED_S, PLAYED_MICRO_BATCHES * micro_batch / plan.throughput["estimated"])
    rates = _played(planned.scenario_of(plan, topology, settled, seconds, seed, STEP_NOISE_SHARE), budget)
    return rates.tokens if rates and rates.counted >= LEAST_COUNTED * len(plan.spans) * micro_batch else None


def scenario_of(
    run_config: Config,
    topology: Topology,
    machines: Sequence[Machine],
    plan: ThroughputPlan | None,
    window_s: Seconds,
    seconds: Seconds,
    seed: int,
) -> Scenario:
    """Return the simulated run in which these machines train, as `play` describes, for so many virtual seconds."""
    gossip = run_config.gossip.model_copy(update={"start_steps": 0, "window_s": window_s})
    settled = run_config.model_copy(update={"gossip": gossip})
    if plan is not None:
        return planned.scenario_of(plan, topology, settled, seconds, seed, STEP_NOISE_SHARE)
    tokens = step_tokens(run_config)
    steps_s = [tokens / one.tokens_per_s for one in machines]
    settings = SwarmSettings.of(settled, Pace(1.0, STEP_NOISE_SHARE, report_s=1.0), steps_s, tokens)
    settings = replace(settings, saved=True, unquantised=True)
    return Scenario(settings, len(topology), seconds, seed, topology=topology, audited=False)
