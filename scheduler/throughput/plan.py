"""Plan an asynchronous swarm for throughput: spans, routes, micro-batches and gossip partners.

Start reading at `throughput_plan`. A plan's throughput can be compared with two figures: an upper bound (all devices
always compute, and links cost nothing), and the throughput of equal spans that are placed at random.
"""

import numpy as np

from decentral.core import rng as chance
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.scheduler.partners import mixing
from decentral.scheduler.throughput import layer_costs, max_flow, solvers, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, regions_of

RANDOM_DRAWS = 5  # the baseline is the best of this many random placements
GOSSIP_SHARE = 0.2  # share of the planning time for the choice of gossip partners


def throughput_plan(
    topology: Topology, config: Config, solver: str, seed: int, budget: SearchBudget, holders: int = 1
) -> ThroughputPlan:
    """Return the plan with the greatest throughput that a solver finds within the budget.

    Args:
        topology: The swarm's devices and links.
        config: The run's config, which describes the model.
        solver: A name in `solvers.THROUGHPUT_SOLVERS`.
        seed: Seed of all random choices.
        budget: Limit of the whole search, first for spans, then for gossip partners.
        holders: Smallest number of peers that must hold each layer.

    Raises:
        UserError: If the swarm cannot hold the model, no such solver exists, or the swarm is too large for the solver.
    """
    start = budget.clock()
    costs = layer_costs.of_model(topology, config, holders)
    baseline = random_throughput(costs, seed)
    rest = budget.less(budget.clock() - start)
    chosen = solvers.solved(costs, regions_of(topology), solver, seed, rest.part(1 - GOSSIP_SHARE))
    if not costs.valid(chosen):
        raise UserError(f"--holders {holders}: found no plan where so many peers hold each layer; add memory or peers")
    found = max_flow.maximum(costs, chosen)
    bound = FlowProblem(costs, regions_of(topology)).bound()
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


def random_throughput(costs: LayerCosts, seed: int) -> float:
    """Return the throughput, in tokens/s, of the best of RANDOM_DRAWS random plans.

    In each, the model is cut into stages of equally many layers, and each peer gets a random stage.
    """
    rng = chance.arrays(seed, "equal spans")
    return max(max_flow.maximum(costs, span_search.equal_random(costs, rng)).tokens_per_s for _ in range(RANDOM_DRAWS))


def _micro_batches(topology: Topology, costs: LayerCosts, chosen: Ints) -> dict[str, int]:
    """Return the sequences in each peer's micro-batch: as many as fit in its memory beside its layers."""
    named = zip(topology.ids, chosen, strict=True)
    return {name: costs.sequences(i, int(a), int(b)) for i, (name, (a, b)) in enumerate(named) if a < b}


def _routes(topology: Topology, found: max_flow.MaxFlow) -> list[JsonObject]:
    return [
        {"share": round(share, 6), "hops": [[topology.ids[peer], first, last] for peer, first, last in hops]}
        for share, hops in max_flow.routes(found)
    ]


def _reason(costs: LayerCosts, chosen: Ints, found: max_flow.MaxFlow, baseline: float) -> str:
    """Return a paragraph for the user: the plan's throughput, and the share of computing power that stays idle."""
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
        f"links, or for layers that the waiting peers do not hold. Each layer has at least "
        f"{int(np.min(max_flow.held(costs, chosen).sum(axis=0)))} holder(s)."
    )
