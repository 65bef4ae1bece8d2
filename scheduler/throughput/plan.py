"""The plan for the objective `throughput` of an asynchronous swarm: spans, routes, micro-batches, gossip partners.

Two figures stand beside the plan's own: an upper bound (all devices compute all the time, and links cost nothing), so
that a user sees what the network and the memory cost, and the flow through equal spans placed at random.
"""

from collections.abc import Callable

import numpy as np

from decentral.core import rng as chance
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.scheduler.partners import mixing
from decentral.scheduler.throughput import layer_costs, max_flow, milp, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, regions_of

RANDOM_DRAWS = 5
GOSSIP_SHARE = 0.2  # of the seconds for the search of partners


def throughput_plan(
    topology: Topology, config: Config, solver: str, seed: int, budget: SearchBudget, holders: int = 1
) -> ThroughputPlan:
    """The plan of greatest throughput for this model, with at least `holders` peers for each layer, in budget.seconds.

    Raises UserError if the swarm cannot hold the model, or if the solver is unknown.
    """
    start = budget.clock()
    costs = layer_costs.of_model(topology, config, holders)
    baseline = random_throughput(costs, seed)
    rest = budget.less(budget.clock() - start)
    chosen = _solve(costs, regions_of(topology), solver, seed, rest.part(1 - GOSSIP_SHARE))
    if not costs.valid(chosen):
        raise UserError(f"--holders {holders}: no spans found that give every layer its holders; add memory or peers")
    found = max_flow.maximum(costs, chosen)
    bound = costs.compute_bound()
    share = rest.part(GOSSIP_SHARE).silent()
    share = share.less(max(0.0, budget.clock() - start + share.seconds - budget.seconds))
    moved_L, held_NL = costs.snapshot_L * layer_costs.ROUND_S, max_flow.held(costs, chosen)
    partners = mixing.partners(topology, held_NL, moved_L, share)
    return ThroughputPlan(
        solver=solver,
        seed=seed,
        seconds=round(budget.clock() - start, 3),
        throughput={"tokens_per_s": found.tokens_per_s, "bound": bound},
        spans={name: [int(a), int(b)] for name, (a, b) in zip(topology.ids, chosen, strict=True) if a < b},
        micro_batches=_micro_batches(topology, costs, chosen),
        routes=_routes(topology, found),
        gossip=partners.to_json(topology.ids),
        baselines={"equal spans, random placement": baseline},
        reason=_reason(costs, chosen, found, baseline),
        digest=topology.digest(),
    )


def _solve(costs: LayerCosts, region_N: Ints, solver: str, seed: int, budget: SearchBudget) -> Ints:
    """The spans that the solver of this name chooses."""
    rng = chance.arrays(seed, "spans", solver)
    if solver not in THROUGHPUT_SOLVERS:
        known = ", ".join(THROUGHPUT_SOLVERS)
        raise UserError(f"--solver {solver} is not one for --objective throughput; there are: {known}")
    return THROUGHPUT_SOLVERS[solver](costs, region_N, budget, rng)


def _exact(costs: LayerCosts, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    found = milp.best_spans(costs, budget.seconds) if milp.options(costs) <= 2_000 else None
    if found is None:
        raise UserError("--solver exact takes up to about 6 peers and 8 layers; use --solver genetic")
    return found


def _flow(costs: LayerCosts, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the hand-drawn chains with the greatest flow."""
    chains = [span_search.chains(costs, groups, rng) for groups in span_search.groupings(costs, region_N)]
    valid = [spans for spans in chains if costs.valid(spans)]
    valid = valid or [span_search.repaired(costs, span_search.fill(costs, rng))]
    return max(valid, key=lambda spans: max_flow.maximum(costs, spans).tokens_per_s)


THROUGHPUT_SOLVERS: dict[str, Callable[[LayerCosts, Ints, SearchBudget, np.random.Generator], Ints]] = {
    "genetic": span_search.search,
    "exact": _exact,
    "flow": _flow,
    "random": lambda costs, region_N, budget, rng: span_search.equal_random(costs, rng),
}


def random_throughput(costs: LayerCosts, seed: int) -> float:
    """Tokens/s through equal spans placed at random, the best of RANDOM_DRAWS draws."""
    rng = chance.arrays(seed, "equal spans")
    return max(max_flow.maximum(costs, span_search.equal_random(costs, rng)).tokens_per_s for _ in range(RANDOM_DRAWS))


def _micro_batches(topology: Topology, costs: LayerCosts, chosen: Ints) -> dict[str, int]:
    """Sequences in each peer's micro-batch: as many as fit into its memory beside its layers."""
    named = zip(topology.ids, chosen, strict=True)
    return {name: costs.sequences(i, int(a), int(b)) for i, (name, (a, b)) in enumerate(named) if a < b}


def _routes(topology: Topology, found: max_flow.MaxFlow) -> list[JsonObject]:
    return [
        {"share": round(share, 6), "hops": [[topology.ids[peer], first, last] for peer, first, last in hops]}
        for share, hops in max_flow.routes(found)
    ]


def _reason(costs: LayerCosts, chosen: Ints, found: max_flow.MaxFlow, baseline: float) -> str:
    """One paragraph of plain words: what the plan reaches, and how much computing waits for links or layers."""
    bound = costs.compute_bound()
    whole = int(((chosen[:, 1] - chosen[:, 0]) == costs.layers).sum())
    speed = 1 / costs.seconds_NL.sum(axis=1)
    idle = max(0.0, float((found.idle_N * speed).sum() / speed.sum()))
    shape = "every peer holds the whole model, so the swarm is purely data-parallel" if whole == costs.peers else (
        f"{whole} of {costs.peers} peers hold the whole model" if whole else "no peer holds the whole model"
    )  # fmt: skip
    times = f", {found.tokens_per_s / baseline:.2f} times what equal spans placed at random reach" if baseline else ""
    return (
        f"{found.tokens_per_s:.4g} tokens/s, {found.tokens_per_s / bound:.1%} of what all devices could compute with "
        f"free links{times}. {shape[0].upper()}{shape[1:]}. {idle:.1%} of the swarm's computing power waits for "
        f"links or for layers that it does not hold. Each layer has at least "
        f"{int(np.min(max_flow.held(costs, chosen).sum(axis=0)))} holder(s)."
    )
