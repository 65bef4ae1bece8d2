"""Play the finalists of a search for a plan, and choose the one that reaches the most tokens/s. Start at `judge`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decentral.commands.estimates.playing import MOST_PLAYED, PLAYED_S, STEP_NOISE_SHARE, simulate_within
from decentral.core import rng
from decentral.core.config import Config
from decentral.scheduler.throughput.planning import Judge, Verdict, problem_of
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology
from decentral.sim import planned

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
    rates = simulate_within(planned.scenario_of(plan, topology, settled, seconds, seed, STEP_NOISE_SHARE), budget)
    return rates.tokens if rates and rates.counted >= LEAST_COUNTED * len(plan.spans) * micro_batch else None
