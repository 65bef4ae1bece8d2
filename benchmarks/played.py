"""Play plans: the tokens/s that `decentral.plan` promises, and those that a swarm with that layout reaches.

    python -m benchmarks.played [--model FILE] [--plan-seconds 5] [--seconds 300] [--set KEY=VALUE] [TOPOLOGY ...]

Each topology is planned for throughput, and the plan is played in virtual time on the topology's links, as
`decentral.simulate --plan` does. Without TOPOLOGY, all shipped ones and those of the planner's tests are played. A row
has the tokens/s promised and reached, the hops of a mean route, the share of the time that the mean device trains, what
it waits for in the rest (the remainder are jobs of gossip and checkpoints), and the link that is used most.
"""

import argparse
import json
import time
from importlib.resources import files
from pathlib import Path

import torch

from decentral.commands.estimates import judging
from decentral.core import config
from decentral.core.errors import UserError
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.sim import planned
from decentral.sim.run import run

SHIPPED = Path(str(files("decentral.configs") / "topologies"))
TESTED = Path("tests/scheduler/topologies")
MODEL = TESTED / "m125-model.yaml"
# A swarm is played for the time of this many micro-batches, if that is longer than --seconds. Over slow links, one
# takes minutes from its begin to the step that applies it, and the first steps come after a quarter of an hour.
MICRO_BATCHES = 500


def row(where: Path, args: argparse.Namespace) -> dict[str, str | float]:
    """Return the figures of one topology; raise UserError if it fits no plan."""
    swarm, run_config = topology.load(where), config.load(args.model, args.set)
    planning = time.process_time()
    budget = SearchBudget(args.plan_seconds)  # whatever else runs here, a seed gives one plan
    judge = None if args.alone else judging.judge(run_config, swarm, SearchBudget(args.judge_seconds))
    plan = throughput_plan(swarm, run_config, "genetic", args.seed, budget, judge=judge)
    planning_s = time.process_time() - planning
    tokens = min(plan.micro_batches.values()) * run_config.model.context
    seconds = max(args.seconds, MICRO_BATCHES * tokens / plan.throughput["tokens_per_s"])
    scenario = planned.scenario_of(plan, swarm, run_config, seconds, args.seed + 100, noise=0.05)
    played = planned.PlayedPlan(plan, scenario)
    began = time.process_time()
    run(scenario, watches=[played])
    result = played.result()
    return {
        "estimated": round(plan.throughput["estimated"], 1),
        "promised": round(result.promised, 1),
        "reached": round(result.reached, 1),
        "share": round(result.reached / result.promised, 3),
        "hops": round(sum(route["share"] * len(route["hops"]) for route in plan.routes), 2),
        "peers": len(plan.spans),
        "busy": round(sum(result.busy.values()) / len(result.busy), 3),
        "dropped": round(result.dropped / max(1, result.executions + result.dropped), 4),
        "abandoned": result.abandoned,
        "busiest_link": result.busiest_link,
        "busiest_share": round(result.busiest_share, 3),
        **{f"waits for {what}": round(share, 3) for what, share in result.waits.items()},
        "planning_s": round(planning_s, 1),
        "cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    """Plan and play topologies, and print a line of JSON for each."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", metavar="TOPOLOGY", type=Path)
    parser.add_argument("--model", default=str(MODEL), metavar="FILE", help="config of the run")
    parser.add_argument("--plan-seconds", type=float, default=5.0, help="seconds of each search for a plan")
    parser.add_argument("--judge-seconds", type=float, default=10.0, help="seconds in which the best plans are played")
    parser.add_argument("--alone", action="store_true", help="take the plan of the highest estimate, without a judge")
    parser.add_argument("--seconds", type=float, default=300.0, help="least virtual seconds of each swarm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    tested = [path for path in TESTED.glob("*.yaml") if not path.stem.endswith("-model")]
    for where in args.topologies or [*sorted(SHIPPED.glob("*.yaml")), *sorted(tested)]:
        name: dict[str, str | float] = {"topology": where.stem, "model": Path(args.model).stem}
        try:
            figures = row(where, args)
        except UserError as error:
            figures = {"refused": str(error)}
        print(json.dumps(name | figures), flush=True)


if __name__ == "__main__":
    main()
