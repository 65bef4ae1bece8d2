"""Plan an asynchronous swarm for throughput: spans, routes, micro-batches and gossip partners.

Start reading at `throughput_plan`. A plan's throughput can be compared with two others: an upper bound (all devices
always compute, and links cost nothing), and the throughput of equal spans that are placed at random.

A search compares plans by estimates. It ends with a few different plans (finalists), of which a `Judge` chooses one and
says what that plan reaches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decentral.core import rng as chance
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.core.units import readable_number
from decentral.scheduler.partners import mixing
from decentral.scheduler.throughput import (
    feasibility,
    layer_costs,
    max_flow,
    planned_in_flight,
    routes,
    solvers,
    span_search,
)
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology, regions_of

RANDOM_DRAWS = 5  # the baseline is the best of this many random placements
SEARCH_SHARE = 0.8  # share of the planning time for the search for spans
GOSSIP_SHARE = 0.12  # share of the planning time for the choice of gossip partners; the baseline gets the rest
STAY_MARGIN = 0.02  # peers keep their layers unless a plan promises this share more tokens/s
# Idle peers get no layers unless a plan without them loses this share of its throughput. In a swarm of 24 machines,
# five to seven idle peers with layers cost 34% to 50% of the throughput: micro-batches that they had taken were refused
# by the next peers, and were computed twice.
LOST_BY_ROUTES = 0.05
IDLE_NAMED = 8  # a plan's reason names at most this many peers without layers
FINALISTS = 4  # a judge gets at most this many plans that a search has found
HEADROOM = 1e-6  # a plan promises this share less than the solver's flow, as the solver's numbers are rounded


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's choice among plans."""

    number: int  # of the plan, counted from 0
    tokens_per_s: float  # what the plan reaches
    reason: str  # how the judge knows, as a sentence


Judge = Callable[[Sequence[ThroughputPlan]], Verdict | None]
"""A function that chooses one of several plans, which have no gossip partners yet; None: it judges no such plans."""


def throughput_plan(
    topology: Topology,
    config: Config,
    solver: str,
    seed: int,
    budget: SearchBudget,
    holders: int = 1,
    utilisation: float = layer_costs.UTILISATION,
    now: Mapping[str, Sequence[int]] | None = None,
    judge: Judge | None = None,
) -> ThroughputPlan:
    """Return the plan with the highest throughput that a solver finds within the budget.

    Args:
        topology: The swarm's devices and links.
        config: The run's config, which describes the model.
        solver: A name in `solvers.THROUGHPUT_SOLVERS`.
        seed: Seed of all random choices.
        budget: Limit of all work together: the search for spans, the search for gossip partners, and the baseline; not
            of the judge.
        holders: Smallest number of peers that must hold each layer.
        utilisation: Share of the topology's FLOP/s that training reaches; 1 if the FLOP/s were measured in training.
        now: In a running swarm, the layers [first, last) that each peer holds. The peers keep these layers unless the
            plan found promises STAY_MARGIN more.
        judge: Chooses among the best different plans that the solver has found; None: the plan with the highest
            estimate is chosen.

    Raises:
        UserError: If the swarm cannot hold the model, no such solver exists, or the swarm is too large for the solver.
    """
    progress = SearchProgress(budget, 0.0)
    problem = problem_of(topology, config, holders, utilisation)
    costs = problem.costs
    chosen = solvers.solved(problem, solver, seed, budget.part(SEARCH_SHARE).less(progress.seconds()))
    if not costs.valid(chosen):
        raise UserError(f"found no plan in which {holders} or more peers hold each layer; add memory or peers")
    chosen = _with_whole_models(problem, chosen, progress)
    held = np.minimum(np.array([(now or {}).get(name, (0, 0)) for name in topology.ids]), costs.layers)
    if stays := costs.valid(held) and _no_gain(problem, chosen, held, progress):
        spans = [held]
    else:
        found = [chosen, *(problem.finalists(FINALISTS) if judge else [])]
        needed = (without_idle(problem, spans_N2) for spans_N2 in found)
        spans = list({spans_N2.tobytes(): spans_N2 for spans_N2 in needed}.values())
    empty = _empty(topology, solver, seed, problem.bound(), _planned_for(topology, config, utilisation))
    plans = [_with_routes(empty, topology, config, problem, spans_N2) for spans_N2 in spans]
    verdict = judge(plans) if judge else None
    number = verdict.number if verdict else 0
    late_s = progress.seconds() - budget.seconds * (1 - GOSSIP_SHARE)
    left = budget.part(GOSSIP_SHARE).silent().less(max(0.0, late_s))
    partners = _partners(problem, topology, spans[number], left)
    baseline = random_throughput(problem, seed, budget.less(progress.seconds()))
    plan = replace(
        plans[number],
        seconds=round(progress.seconds(), 3),
        reason="Stay as you are: each peer keeps its layers. " if stays else "",
        gossip=partners.to_json(topology.ids),
        baselines={} if baseline is None else {"equal spans, random placement": baseline},
    )
    return _with_reason(plan, topology, config, problem, spans[number], verdict)


def problem_of(topology: Topology, config: Config, holders: int, utilisation: float) -> FlowProblem:
    """Return the search problem of `throughput_plan`, with the same arguments; raise UserError as it does."""
    costs = layer_costs.of_model(topology, config, holders, utilisation)
    return FlowProblem(costs, regions_of(topology), planned_in_flight.Flights(topology.delay_s, config))


def _partners(problem: FlowProblem, topology: Topology, chosen: Ints, budget: SearchBudget) -> mixing.Partners:
    """Return the gossip partners of peers that hold the spans `chosen`, beside the flow through these."""
    costs = problem.costs
    tokens_NN = problem.flow(chosen).bytes_between(costs.hidden_bytes)
    moved_L = costs.snapshot_L * layer_costs.ROUND_S
    return mixing.partners(topology, max_flow.held(costs, chosen), moved_L, tokens_NN, costs.link_share, budget)


def _empty(topology: Topology, solver: str, seed: int, bound: float, planned_for: JsonObject) -> ThroughputPlan:
    """Return a plan in which no peer holds layers."""
    return ThroughputPlan(
        solver=solver,
        seed=seed,
        seconds=0.0,
        throughput={"tokens_per_s": 0.0, "bound": bound},
        planned_for=planned_for,
        spans={},
        micro_batches={},
        routes=[],
        gossip={},
        use={},
        baselines={},
        reason="",
        digest=topology.digest(),
    )


def _planned_for(topology: Topology, config: Config, utilisation: float) -> JsonObject:
    """Return the model that is planned, and how the devices' speeds are known.

    `measured` is the number of peers whose layers' costs are measured; `utilisation` the share of the FLOP/s that
    training is assumed to reach on the others.
    """
    layers = config.model.layer_parameters
    model: JsonObject = {"model": config.name, "parameters": sum(layers), "layers": len(layers)}
    model["context"] = config.model.context
    return model | {"utilisation": utilisation, "measured": int(layer_costs.measured(topology).sum())}


def _with_routes(
    plan: ThroughputPlan, topology: Topology, config: Config, problem: FlowProblem, chosen: Ints
) -> ThroughputPlan:
    """Return the plan with the spans `chosen`, the routes through them, and their estimated throughput.

    Routes carry less than the maximum flow if memory for micro-batches in flight is scarce, or if steps wait for these
    micro-batches.
    """
    carried = problem.carried(chosen, problem.flow(chosen))
    tokens_per_s = carried.tokens_per_s * (1 - HEADROOM)
    spans = [(int(a), int(b)) for a, b in chosen]
    return replace(
        plan,
        spans={name: [a, b] for name, (a, b) in zip(topology.ids, spans, strict=True) if a < b},
        throughput=plan.throughput | {"tokens_per_s": tokens_per_s, "estimated": tokens_per_s},
        routes=_routes(topology, sorted(carried.paths, key=lambda path: (-path[0], path[1]))),
        micro_batches=_micro_batches(topology, carried, spans),
        accumulate=planned_in_flight.accumulated(config, carried.pipeline.sequences),
    )


def _with_reason(
    plan: ThroughputPlan,
    topology: Topology,
    config: Config,
    problem: FlowProblem,
    chosen: Ints,
    verdict: Verdict | None,
) -> ThroughputPlan:
    """Return the finished plan with what its routes use, what it reaches, and a reason."""
    found, estimated = problem.flow(chosen), plan.throughput["estimated"]
    used = feasibility.uses(plan, topology, problem.costs)
    if verdict:
        plan = replace(plan, throughput=plan.throughput | {"tokens_per_s": verdict.tokens_per_s})
    return replace(
        plan,
        use={kind: use.share for kind, use in used.items()},
        reason=plan.reason
        + (f"{verdict.reason} Estimated: " if verdict else "")
        + _reason(plan, problem.costs, chosen, found)
        + _left_out([name for name in topology.ids if name not in plan.spans])
        + _lost(found.tokens_per_s, estimated, exact=not config.routes.overlap)
        + _most_used(used),
    )


def random_throughput(problem: FlowProblem, seed: int, budget: SearchBudget) -> float | None:
    """Return the throughput, in tokens/s, of the best of RANDOM_DRAWS random plans; None if the budget allows none.

    In each plan, the model is cut into stages of equally many layers, and each peer gets a random stage. A plan is
    evaluated only if the budget has time for one that takes as long as the slowest so far.
    """
    rng, progress = chance.arrays(seed, "equal spans"), SearchProgress(budget, 0.0)
    best, longest_s = 0.0, 0.0
    for _ in range(RANDOM_DRAWS):
        begin = progress.seconds()
        if progress.late(longest_s):
            break
        rate = problem.evaluate(span_search.equal_random(problem.costs, rng), progress).value
        best, longest_s = max(best, rate), max(longest_s, progress.seconds() - begin)
    return best or None


def _with_whole_models(problem: FlowProblem, spans: Ints, progress: SearchProgress) -> Ints:
    """Return spans with the whole model on each peer that can hold it, unless that lowers the flow.

    A peer with the whole model depends on no other peer, and sends no activations unless others gain by it.

    Args:
        problem: The swarm.
        spans: What a search has found.
        progress: The planning; the spans stay as they are if it lacks the time for the comparison.
    """
    layers = problem.costs.layers
    simpler = np.where((problem.reach_NL[:, 0] == layers)[:, None], (0, layers), spans)
    gains = problem.evaluate(simpler, progress).value >= problem.evaluate(spans).value * (1 - HEADROOM)
    return simpler if gains else spans


def without_idle(problem: FlowProblem, spans: Ints) -> Ints:
    """Return spans in which a peer that the routes do not need holds no layers; the first spans if that loses flow.

    A running peer with layers gets micro-batches, since others route by speeds, and so adds a hop to routes. The
    flow through the other peers is what their routes carry in the flow through `spans`: another linear programme takes
    10 s for 1,000 peers, and may find routes that carry less.
    """
    least = problem.evaluate(spans).value * (1 - LOST_BY_ROUTES)
    while True:  # routes through fewer peers may leave others idle
        whole = problem.flow(spans)
        routed = {peer for _, hops in problem.carried(spans, whole).paths for peer, _, _ in hops}
        needed = np.where(np.isin(np.arange(len(spans)), list(routed))[:, None], spans, 0)
        if (needed == spans).all() or not problem.valid(needed):
            return spans
        of_routed = [
            (share, hops) for share, hops in routes.routes(whole) if routed.issuperset(peer for peer, _, _ in hops)
        ]
        problem.keep(needed, routes.flow_of(of_routed, whole, problem.costs.seconds_NL))
        if problem.evaluate(needed).value < least:
            return spans
        spans = needed


def _no_gain(problem: FlowProblem, found: Ints, held: Ints, progress: SearchProgress) -> bool:
    """Return whether the spans `found` reach at most STAY_MARGIN more tokens/s than the spans `held`.

    The result is False if the planning lacks the time to evaluate the spans `held`.
    """
    return problem.evaluate(found).value <= problem.evaluate(held, progress).value * (1 + STAY_MARGIN)


def _micro_batches(
    topology: Topology, carried: planned_in_flight.Carried, spans: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Return the number of sequences in each peer's micro-batch: that of routes or, for a lone peer, what fits."""
    routed, pipeline = carried.routed, carried.pipeline
    return {
        topology.ids[peer]: pipeline.sequences if peer in routed else pipeline.costs.sequences(peer, first, last)
        for peer, (first, last) in enumerate(spans)
        if first < last
    }


def _left_out(names: Sequence[str]) -> str:
    """Return a sentence about peers without layers; "" if there are none."""
    shown = ", ".join(names[:IDLE_NAMED]) + (f" and {len(names) - IDLE_NAMED} more" if len(names) > IDLE_NAMED else "")
    return f" No route needs {shown}: no layers for these." if names else ""


def _lost(flow: float, carried: float, exact: bool) -> str:
    """Return a sentence about what micro-batches in flight cost; "" if it is less than 1%."""
    if carried >= 0.99 * flow:
        return ""
    why = ", and steps wait for them: routes.overlap or a larger train.accumulate would lose less" if exact else ""
    return f" Routes carry {carried / flow:.1%} of the flow, as memory holds few micro-batches in flight{why}."


def _routes(topology: Topology, paths: Sequence[planned_in_flight.Path]) -> list[JsonObject]:
    """Return the routes of a plan; their shares sum to 1."""
    total = sum(share for share, _ in paths)
    return [
        {"share": round(share / total, 9), "hops": [[topology.ids[peer], first, last] for peer, first, last in hops]}
        for share, hops in paths
    ]


def _reason(plan: ThroughputPlan, costs: LayerCosts, chosen: Ints, found: max_flow.MaxFlow) -> str:
    """Return a paragraph for the user: the plan's throughput, for which model, and how much computing power is idle."""
    rate, bound = plan.throughput["estimated"], plan.throughput["bound"]
    whole = int(((chosen[:, 1] - chosen[:, 0]) == costs.layers).sum())
    speed = 1 / costs.seconds_NL.sum(axis=1)
    idle = max(0.0, float((found.idle_N * speed).sum() / speed.sum()))
    shape = "every peer holds the whole model, so the swarm is purely data-parallel" if whole == costs.peers else (
        f"{whole} of {costs.peers} peers hold the whole model" if whole else "no peer holds the whole model"
    )  # fmt: skip
    baseline = max(plan.baselines.values(), default=0.0)
    times = f", {rate / baseline:.2f} times what equal spans placed at random reach" if baseline else ""
    utilisation, measured = plan.planned_for["utilisation"], plan.planned_for["measured"]
    speeds = f"{utilisation:.0%} of the devices' peak FLOP/s" if utilisation < 1 else "the speeds that peers measured"
    if measured:
        rest = f" and, for the other peers, {speeds}" if measured < costs.peers else ""
        speeds = f"the times of layers that {measured} of {costs.peers} peers measured{rest}"
    return (
        f"{rate:.4g} tokens/s, {rate / bound:.1%} of what all devices could compute with free links{times}; for "
        f"{plan.planned_for['model']} ({readable_number(plan.planned_for['parameters'])} parameters, {costs.layers} "
        f"layers) at {speeds}. {shape[0].upper()}{shape[1:]}. {idle:.1%} of the swarm's computing power waits for "
        f"links, or for layers that the waiting peers do not hold. Each layer has at least "
        f"{int(np.min(max_flow.held(costs, chosen).sum(axis=0)))} holder(s)."
    )


def _most_used(used: Mapping[str, feasibility.Use]) -> str:
    """Return a sentence with the highest utilisation of each kind of resource."""
    shown = [f"{kind} {use.share:.1%} ({use.whose})" for kind, use in used.items() if use.share > 0]
    return f" Greatest use: {', '.join(shown)}."
