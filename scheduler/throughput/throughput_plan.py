"""The plan of greatest throughput for the asynchronous swarm: spans, routes, micro-batches, gossip partners.

Reports an upper bound beside it (all devices computing all the time, no links), so that a user sees what the
network and the memory cost, and the flow through equal spans placed at random.
"""

from typing import Any

import numpy as np

from decentral.core import rng as chance
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology
from decentral.scheduler.sync.sync_plan import Plan, regions_of
from decentral.scheduler.throughput import layer_costs, max_flow, milp, partner_weights, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts

RANDOM_DRAWS = 5
GOSSIP_SHARE = 0.2  # of the seconds, for the partners
THROUGHPUT_SOLVERS = ("genetic", "exact", "flow", "random")


def throughput_plan(
    topology: Topology, config: Config, solver: str, seed: int, budget: SearchBudget, holders: int = 1
) -> Plan:
    """Raises UserError if the swarm cannot hold the model, or the solver is unknown.

    The budget's seconds are for all of it.
    """
    start = budget.clock()
    task = layer_costs.of(topology, config, holders)
    baseline = random_throughput(task, seed)
    rest = budget.less(budget.clock() - start)
    chosen = solved(task, regions_of(topology), solver, seed, rest.part(1 - GOSSIP_SHARE))
    if not task.valid(chosen):
        raise UserError(f"--holders {holders}: no spans found that give every layer its holders; add memory or peers")
    found = max_flow.maximum(task, chosen)
    bound = task.compute_bound()
    share = rest.part(GOSSIP_SHARE).silent()
    share = share.less(max(0.0, budget.clock() - start + share.seconds - budget.seconds))
    partners = partner_weights.partners(
        topology, max_flow.held(task, chosen), task.snapshot_L * layer_costs.ROUND_S, share
    )
    return Plan(
        objective="throughput",
        solver=solver,
        seed=seed,
        seconds=round(budget.clock() - start, 3),
        throughput={"tokens_per_s": found.tokens_per_s, "bound": bound},
        spans={name: [int(a), int(b)] for name, (a, b) in zip(topology.ids, chosen, strict=True) if a < b},
        micro_batches=_micro_batches(topology, task, chosen),
        routes=_routes(topology, task, chosen, found),
        gossip=partners.to_json(topology.ids),
        baselines={"equal spans, random placement": baseline},
        reason=_reason(task, chosen, found, baseline),
        digest=topology.digest(),
    )


def solved(task: LayerCosts, region_N: Ints, solver: str, seed: int, budget: SearchBudget) -> Ints:
    """The spans that the solver of this name chooses."""
    rng = chance.arrays(seed, "spans", solver)
    match solver:
        case "genetic":
            return span_search.search(task, region_N, budget, rng)
        case "flow":  # the best of the hand-drawn chains, judged by its flow
            ways = [span_search.chains(task, groups, rng) for groups in span_search.groupings(task, region_N)]
            ways = [way for way in ways if task.valid(way)] or [span_search.repaired(task, span_search.fill(task, rng))]
            return max(ways, key=lambda way: max_flow.maximum(task, way).tokens_per_s)
        case "random":
            return span_search.equal_random(task, rng)
        case "exact":
            exact = milp.best_spans(task, budget.seconds) if milp.options(task) <= 2_000 else None
            if exact is None:
                raise UserError("--solver exact takes up to about 6 peers and 8 layers; use --solver genetic")
            return exact
    raise UserError(
        f"--solver {solver} is not one for --objective throughput; there are: {', '.join(THROUGHPUT_SOLVERS)}"
    )


def random_throughput(task: LayerCosts, seed: int) -> float:
    """The best of RANDOM_DRAWS flows through equal spans placed at random, tokens/s."""
    rng = chance.arrays(seed, "equal spans")
    return max(max_flow.maximum(task, span_search.equal_random(task, rng)).tokens_per_s for _ in range(RANDOM_DRAWS))


def _micro_batches(topology: Topology, task: LayerCosts, chosen: Ints) -> dict[str, Any]:
    """Sequences in each peer's micro-batch: as many as its memory leaves room for."""
    named = zip(topology.ids, chosen, strict=True)
    return {name: task.sequences(i, int(a), int(b)) for i, (name, (a, b)) in enumerate(named) if a < b}


def _routes(topology: Topology, task: LayerCosts, chosen: Ints, found: max_flow.MaxFlow) -> list[dict[str, Any]]:
    return [
        {"share": round(share, 6), "hops": [[topology.ids[peer], first, last] for peer, first, last in hops]}
        for share, hops in max_flow.routes(task, chosen, found)
    ]


def _reason(task: LayerCosts, chosen: Ints, found: max_flow.MaxFlow, baseline: float) -> str:
    """Why it is not more: idle devices, by the links or by the layers that they hold."""
    bound = task.compute_bound()
    whole = int(((chosen[:, 1] - chosen[:, 0]) == task.layers).sum())
    speed = 1 / task.seconds_NL.sum(axis=1)
    idle = max(0.0, float((found.idle_N * speed).sum() / speed.sum()))
    shape = "every peer holds the whole model, so the swarm is purely data-parallel" if whole == task.peers else (
        f"{whole} of {task.peers} peers hold the whole model" if whole else "no peer holds the whole model"
    )  # fmt: skip
    times = f", {found.tokens_per_s / baseline:.2f} times what equal spans placed at random reach" if baseline else ""
    return (
        f"{found.tokens_per_s:.4g} tokens/s, {found.tokens_per_s / bound:.1%} of what all devices could compute with "
        f"free links{times}. {shape[0].upper()}{shape[1:]}. {idle:.1%} of the swarm's computing power waits for "
        f"links or for layers that it does not hold. Each layer has at least "
        f"{int(np.min(max_flow.held(task, chosen).sum(axis=0)))} holder(s)."
    )
