"""python -m decentral.plan: plan which peers hold which layers, and which peers send data to each other.

python -m decentral.plan eight-cities                       the shortest synchronous step
python -m decentral.plan swarm.yaml --model default         the asynchronous swarm's throughput
python -m decentral.plan --join ADDR                        a running swarm, by its peers' own measurements
python -m decentral.plan spot --solver annealing --json     another solver; the plan as JSON
python -m decentral.plan spot --compare --plot spot.png     cost over search time for all solvers
"""

import argparse
import asyncio
import dataclasses
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from decentral.commands import shared
from decentral.commands.progress_bar import progress_bar
from decentral.core import quantities, strict_json
from decentral.core.config import Config
from decentral.core.config import load as load_config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.layer_work import KindCosts
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import JsonObject
from decentral.scheduler.throughput import layer_costs
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.plan_forms import Plan, SyncPlan, ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology

if TYPE_CHECKING:
    from decentral.peers.membership.records import PeerRecord

PLAN_REASON_CHARS = 1000
ROWS = 32
MOST_PAIRS = 8  # at most this many pairs (number of stages, number of replicas) are shown, the best first
PLAN_LOOKS = 4  # peers' records are read from the DHT up to this many times, because some may arrive late
LOOK_PAUSE_S = 0.5
# A search for throughput gets this share of --seconds. The simulator, which plays the best plans, gets the rest and
# `judging.JUDGED_S`.
SEARCHED_SHARE = 0.7
LEAST_FLOPS = 1.0  # a peer whose record has fewer FLOP/s, or no memory, is left out: it can compute nothing


@dataclass(frozen=True, slots=True)
class LiveSwarm:
    """A running swarm, as its peers' records describe it."""

    config: Config
    profiles: dict[str, JsonObject]  # peer id -> its profile, as fields of JSON
    spans: dict[str, tuple[int, int]]  # peer id -> the layers [first, last) that it holds
    costs: dict[str, KindCosts]  # peer id -> what a layer of each kind costs it


History = Mapping[str, Sequence[tuple[float, float]]]
"""For each solver the best cost (s) or rate (tokens/s) so far, with the seconds since the search began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """One value of `--objective`: how its plans are found, compared and shown."""

    help: str
    solvers: tuple[str, ...]  # typed here, since the solvers' modules load scipy
    unit: str  # unit of the objective's value, by which plans are compared
    compared: str  # heading of the column with this value
    baseline: str  # heading of the column with the values of `Plan.baselines`
    digits: str  # format of the objective's value in tables
    most_is_best: bool
    searched_share: float  # share of --seconds that the search gets

    @abstractmethod
    def plan(
        self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace, budget: SearchBudget
    ) -> Plan:
        """Return the best plan that the chosen solver finds within the budget; `swarm`: with --join, the live swarm."""

    @abstractmethod
    def records(self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace) -> tuple[History, str]:
        """Return the history of each solver on the topology, and the title of their comparison."""

    @abstractmethod
    def tables(self, plan: Plan, region: Mapping[str, str]) -> list[Table]:
        """Return the tables that show a plan of this objective; `region` has each peer's region."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(arguments)))


def _main(options: argparse.Namespace) -> None:
    if options.join is None:
        topology, swarm = topologies.load(options.topology), None
    else:
        topology, swarm = _swarm(options)
    if options.compare:
        _compare(topology, swarm, options)
        return
    plan = _plan(topology, swarm, options)
    if options.plot:
        from decentral.view.plan_picture import draw_plan

        draw_plan(plan, topology, options.plot)
    print(strict_json.dumps(plan.to_json())) if options.json else _show(plan, topology, shared.result_console())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    parser = shared.Parser(prog="python -m decentral.plan", description=(__doc__ or "").split("\n")[0])
    place = "YAML or JSON file, or the name of a shipped one such as eight-cities"
    parser.add_argument("topology", metavar="TOPOLOGY", nargs="?", help=place)
    live = "instead of TOPOLOGY: the address of a peer of a running swarm"
    parser.add_argument("--join", type=shared.peer_address, metavar="ADDR", help=live)
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    parser.add_argument("--model", metavar="CONFIG", help="plan the throughput of this run's model")
    objectives = "; ".join(f"{name}: {one.help}" for name, one in OBJECTIVES.items())
    parser.add_argument("--objective", choices=[*OBJECTIVES], help=objectives)
    solvers = "; ".join(f"for {name} {', '.join(one.solvers)}" for name, one in OBJECTIVES.items())
    parser.add_argument("--solver", default="genetic", help=f"default genetic; {solvers}")
    parser.add_argument(
        "--seconds", type=quantities.duration_s, default=5.0, help="time limit of everything (default 5 s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    holders = "least number of peers that hold each layer; for throughput (default 1)"
    parser.add_argument("--holders", type=int, default=1, help=holders)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the plan, or with --compare the cost over search time")
    parser.add_argument("--compare", action="store_true", help="run all solvers on the topology")
    options = parser.parse_args(arguments)
    if (options.topology is None) == (options.join is None):
        raise UserError("give either a TOPOLOGY (such as eight-cities, or a file) or --join ADDR (see --help)")
    if options.holders < 1:
        raise UserError(f"--holders expects at least 1; got {options.holders}")
    return options


def _swarm(options: argparse.Namespace) -> tuple[Topology, LiveSwarm]:
    """Return a running swarm's topology and its peers' records; raise UserError if it has fewer than 2 peers."""
    swarm = asyncio.run(_live(options.join, options.invite))
    if len(swarm.profiles) < 2:
        raise UserError(f"--join: a plan needs at least 2 peers; that swarm has {len(swarm.profiles)}; try again later")
    return topologies.topology_from_profiles(swarm.profiles, {}, {} if options.model else swarm.costs), swarm


def _plan(topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace) -> Plan:
    name = _objective(options)
    objective = OBJECTIVES[name]
    with progress_bar(Console(stderr=True), 1.0, quiet=options.json) as show:
        budget = SearchBudget(
            seconds=objective.searched_share * options.seconds,
            clock=time.monotonic,
            report=lambda used, best: show(used, f"{name}: best {best:.5g}"),
        )
        return objective.plan(topology, swarm, options, budget)


def _objective(options: argparse.Namespace) -> str:
    return options.objective or ("throughput" if options.model or options.join else "sync")


async def _live(address: str, invite: str | None) -> LiveSwarm:
    """Return what the peers' signed records say of a running swarm. Raise UserError if no peer answers."""
    from decentral.peers.startup.invitation_files import read_holding
    from decentral.peers.startup.visit import visit

    async with visit([address], read_holding(Path(invite)) if invite else None) as swarm:
        known = dict[PeerId, "PeerRecord"]()
        for _ in range(PLAN_LOOKS):
            known |= await swarm.records()
            if len(known) > 1:
                break
            await asyncio.sleep(LOOK_PAUSE_S)
        return live_swarm(swarm.config, known)


def live_swarm(config: Config, known: Mapping[PeerId, "PeerRecord"]) -> LiveSwarm:
    """Return what records say of a swarm, without peers that could compute nothing, or compute nothing for others."""
    profiles = {peer: _profile(record, config) for peer, record in known.items() if not record.profile.alone}
    able = {peer: one for peer, one in profiles.items() if one["memory_bytes"] > 0 and one["flops"] >= LEAST_FLOPS}
    return LiveSwarm(
        config,
        {str(peer): profile for peer, profile in able.items()},
        {peer: (known[peer].first, known[peer].last) for peer in able},
        {
            peer: layer_costs.at_speed(known[peer].profile.costs, config, known[peer].profile.tokens_per_s)
            for peer in able
        },
    )


def _profile(record: "PeerRecord", config: Config) -> JsonObject:
    """Return a peer's profile. If the peer has trained, compute its FLOP/s from its tokens/s on the run's model."""
    reached = record.profile.tokens_per_s * layer_costs.flops_per_token(config)
    return dataclasses.asdict(record.profile) | {"flops": reached or record.profile.flops}


def _compare(topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace) -> None:
    """Run all solvers of the objective; print or draw the best plan of each over its search time."""
    objective = OBJECTIVES[_objective(options)]
    records, title = objective.records(topology, swarm, options)
    if options.plot:
        from decentral.view.plan_picture import draw_comparison

        draw_comparison(records, options.plot, objective.unit)
    if options.json:
        print(strict_json.dumps(records))
        return
    table = Table("solver", objective.compared, "found after, s", title=title)
    for name, record in sorted(records.items(), key=lambda item: item[1][-1][1], reverse=objective.most_is_best):
        when = next(seconds for seconds, best in record if best == record[-1][1])
        table.add_row(name, f"{record[-1][1]:{objective.digits}}", f"{when:.2f}")
    shared.result_console().print(table)


def _show(plan: Plan, topology: Topology, console: Console) -> None:
    """Print the plan as tables, and its reason."""
    region = {peer: plain_text(name) for peer, name in zip(topology.ids, topology.regions, strict=True)}
    objective = OBJECTIVES[plan.objective]
    for table in objective.tables(plan, region):
        console.print(table)
    if plan.baselines:
        table = Table("for comparison", objective.baseline)
        for name, value in sorted(plan.baselines.items(), key=lambda item: item[1]):
            table.add_row(name, f"{value:.5g}")
        console.print(table)
    console.print(plain_text(plan.reason, PLAN_REASON_CHARS))


class SyncObjective(Objective):
    """The shortest synchronous step."""

    def plan(
        self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace, budget: SearchBudget
    ) -> SyncPlan:
        """Return the plan with the shortest step that the solver finds."""
        from decentral.scheduler.sync.step_needs import UTILISATION
        from decentral.scheduler.sync.sync_plan import sync_plan

        utilisation = UTILISATION if swarm is None else 1.0  # live peers' FLOP/s are those of training
        return sync_plan(topology, options.solver, options.seed, budget, utilisation)

    def records(self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace) -> tuple[History, str]:
        """Return the history of each solver that takes a swarm of this size."""
        from decentral.scheduler.sync.sync_plan import solver_records

        return solver_records(topology, options.seed, options.seconds, time.monotonic), "all solvers"

    def tables(self, plan: Plan, region: Mapping[str, str]) -> list[Table]:
        """Return a table of the first ROWS stages, with their peers counted by region, and one of the pairs tried."""
        assert isinstance(plan, SyncPlan)
        table = Table("stage", "peers by region", title=f"{plan.objective}, {plan.solver}: {plan.cost['total']:.5f} s")
        for number, stage in enumerate(plan.stages[:ROWS]):
            names = [region[peer] for peer in stage]
            table.add_row(str(number), ", ".join(f"{name} x{names.count(name)}" for name in dict.fromkeys(names)))
        degrees = Table("stages x replicas", "step, s")
        for pair, seconds in list(plan.degrees.items())[:MOST_PAIRS]:
            degrees.add_row(pair, f"{seconds:.5g}")
        return [table, degrees] if plan.degrees else [table]


class ThroughputObjective(Objective):
    """The most tokens/s of an asynchronous swarm."""

    def plan(
        self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace, budget: SearchBudget
    ) -> ThroughputPlan:
        """Return the plan with the most tokens/s, as the simulator plays the best that the solver finds."""
        from decentral.commands.estimates import judging
        from decentral.scheduler.throughput.planning import throughput_plan

        config = load_config(options.model) if options.model or swarm is None else swarm.config
        played_s = judging.JUDGED_S + (1 - SEARCHED_SHARE) * options.seconds
        judge = judging.judge(config, topology, SearchBudget(played_s, clock=time.monotonic))
        utilisation = layer_costs.UTILISATION if swarm is None else 1.0
        now = None if options.model or swarm is None else swarm.spans
        solver, seed, holders = options.solver, options.seed, options.holders
        return throughput_plan(topology, config, solver, seed, budget, holders, utilisation, now, judge)

    def records(self, topology: Topology, swarm: LiveSwarm | None, options: argparse.Namespace) -> tuple[History, str]:
        """Return the history of each solver that takes a swarm of this size; the title has what no plan exceeds."""
        from decentral.scheduler.throughput import solvers
        from decentral.scheduler.throughput.planning import problem_of

        config = load_config(options.model) if options.model or swarm is None else swarm.config
        utilisation = layer_costs.UTILISATION if swarm is None else 1.0
        problem = problem_of(topology, config, options.holders, utilisation)
        records = solvers.solver_records(problem, options.seed, options.seconds, time.monotonic)
        return records, f"all solvers; no plan exceeds {problem.bound():.5g} tokens/s"

    def tables(self, plan: Plan, region: Mapping[str, str]) -> list[Table]:
        """Return a table of the layers and micro-batches of the first ROWS peers."""
        assert isinstance(plan, ThroughputPlan)
        rate, bound = plan.throughput["tokens_per_s"], plan.throughput["bound"]
        table = Table(
            "peer",
            "region",
            "layers",
            "micro-batch",
            title=f"{rate:.4g} tokens/s of at most {bound:.4g} ({rate / bound:.1%})",
        )
        for peer, (first, last) in list(plan.spans.items())[:ROWS]:
            table.add_row(plain_text(peer), region[peer], f"{first}-{last - 1}", str(plan.micro_batches.get(peer, "")))
        return [table]


OBJECTIVES: dict[str, Objective] = {
    SyncPlan.objective: SyncObjective(
        help="shortest synchronous step (default)",
        solvers=("genetic", "annealing", "gcma", "exact"),
        unit="s",
        compared="cost, s",
        baseline="communication, s",
        digits=".5f",
        most_is_best=False,
        searched_share=1.0,
    ),
    ThroughputPlan.objective: ThroughputObjective(
        help="most tokens/s of an asynchronous swarm (default with --model or --join)",
        solvers=("genetic", "annealing", "local", "policy", "exact", "flow", "random"),
        unit="tokens/s",
        compared="tokens/s",
        baseline="tokens/s",
        digits=".5g",
        most_is_best=True,
        searched_share=SEARCHED_SHARE,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
