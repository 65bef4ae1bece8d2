"""Let Sailor's simulator judge our plans, and its measured plans our cost model (SOSP 2025, sections 5.1 and 5.4).

    python -m benchmarks.foreign.sailor FOLDER [--seconds 3] [--seed 0] [--json]

FOLDER is a checkout of github.com/eth-easl/sailor, branch sosp25_ae; its simulator is run from there.

Clusters are those of the artifact's figure 10: OPT-350, 1,024 sequences a step, and A100-40 in nodes of four, as
many in each of five zones. The plan's memory and iterations/s are what their `Simulator` says. Every replica of a plan
computes whole pipelines, as their simulator ignores replicas that lack a stage. Plans are those of
`benchmarks/foreign/sailor_plan.py`: the scheduler's search places groups, all else is decided there.

`measured`: their 36 plans with measured seconds (simulations/validation), each priced by the model that plans are
compared by and by the scheduler's own. A plan's error is |promised / measured - 1|. Two entries of the artifact are
copies of another plan's time (GPT-NEO/N4/plan_config_N4_D4 of OPT-350's, mit/N3/plan_config_N3_D1 of N6_D2's); they
count.
"""

import contextlib
import csv
import importlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.foreign import checkout
from benchmarks.foreign.sailor_plan import Cluster, Degrees, Plan, best_plan, scheduler_s, step_of
from benchmarks.foreign.sailor_profiles import PROJECT, SIMULATIONS, TRAINING, Profiles, Site
from decentral.commands import shared
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.scheduler.sync import evolve
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.topology.search_budget import SearchBudget

PUBLISHED = {160: 0.415, 400: 0.728, 640: 1.020}  # Sailor's iterations/s by devices
MODEL = "OPT-350"


@dataclass(frozen=True, slots=True)
class Judged:
    """Our plan of a cluster, and what their simulator says of it."""

    devices: int
    iterations_per_s: float
    promised: float  # iterations/s by our cost model
    published: float  # iterations/s of Sailor's plan
    search_s: float
    fits: bool
    degrees: Degrees
    layers: list[int]
    used: dict[str, int]  # devices by zone


@dataclass(frozen=True, slots=True)
class Measured:
    """One of their measured plans, in seconds of a step."""

    name: str
    measured: float
    promised: float  # by `step_of`
    scheduler: float  # by the scheduler's own model


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = shared.Parser(prog="python -m benchmarks.foreign.sailor", description="Let Sailor judge our plans.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"a checkout of {PROJECT}")
    parser.add_argument("--seconds", type=shared.finite, default=3.0, metavar="S", help="of each search; default 3")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices; default 0")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    flags = parser.parse_args(argv)
    plans = judged(flags.folder, flags.seconds, flags.seed)
    steps = measured(flags.folder)
    median = statistics.median(abs(one.promised / one.measured - 1) for one in steps)
    scheduler = statistics.median(abs(one.scheduler / one.measured - 1) for one in steps)
    if flags.json:
        medians = {"median_error": median, "scheduler_median_error": scheduler}
        print(strict_json.dumps({"plans": plans, "measured": steps} | medians))
        return
    for one in plans:
        print(
            f"{one.devices} A100: {one.iterations_per_s:.4f} iterations/s (promised {one.promised:.4f}, Sailor "
            f"{one.published:.3f}) in {one.search_s:.1f} s, {'fits' if one.fits else 'out of memory'}: "
            f"{_described(one)}"
        )
    print(f"{len(steps)} measured plans: median error {median:.1%}, of the scheduler's own model {scheduler:.1%}")


def _described(one: Judged) -> str:
    degrees = one.degrees
    return (
        f"tensor {degrees.tensor} x {degrees.stages} stages x {degrees.replicas} replicas, micro-batch "
        f"{degrees.micro_batch}, layers {one.layers}, {sum(one.used.values())} devices"
    )


def judged(folder: Path, seconds: float, seed: int) -> list[Judged]:
    """Return our plan of each cluster of figure 10, as their simulator judges it."""
    profiles = Profiles.read(folder, MODEL)
    sequences = _training(folder, MODEL)["global_batch_size"]
    _compile()
    with _simulator(folder) as judge:
        found = []
        for cluster in clusters(folder):
            begin = time.process_time()
            plan = best_plan(profiles, cluster, sequences, seed, seconds, time.process_time)
            search_s = time.process_time() - begin
            theirs = as_sailor(plan)
            devices = sum(cluster.devices.values())
            found.append(
                Judged(
                    devices=devices,
                    iterations_per_s=1 / judge.seconds(theirs),
                    promised=1 / step_of(profiles, plan).seconds,
                    published=PUBLISHED.get(devices, float("nan")),
                    search_s=search_s,
                    fits=judge.fits(theirs),
                    degrees=plan.degrees,
                    layers=[len(span) for span in plan.spans],
                    used=_used(plan),
                )
            )
    return found


def measured(folder: Path) -> list[Measured]:
    """Return their measured plans, priced by both of our cost models."""
    root = folder / SIMULATIONS / "validation"
    profiles = {name: Profiles.read(folder, name) for name in TRAINING}
    found = []
    for path in sorted(root.rglob("plan_config*.json")):
        name = str(path.relative_to(root))
        entry = checkout.tree(folder, str(path.relative_to(folder)), PROJECT)
        model = "GPT-Neo-2.7" if "GPT-NEO" in name else MODEL
        plan, profile = from_sailor(entry), profiles[model]
        found.append(Measured(name, entry["real"], step_of(profile, plan).seconds, scheduler_s(profile, plan)))
    if not found:
        raise UserError(f"{folder} is no checkout of {PROJECT}: no plans in {SIMULATIONS}/validation")
    return found


def clusters(folder: Path) -> list[Cluster]:
    """Return the clusters of the trace of five zones; the first two columns are a number and a time."""
    rows = csv.DictReader(io.StringIO(checkout.text(folder, f"{SIMULATIONS}/configs/gpu_trace_multizone.csv", PROJECT)))
    nodes = checkout.tree(folder, f"{SIMULATIONS}/configs/basic_cluster_config.json", PROJECT)
    found = []
    for row in rows:
        counts = {name: int(count) for name, count in list(row.items())[2:]}
        device = next(iter(counts)).split("_")[0]
        zones = {name.split("_")[1]: count for name, count in counts.items()}
        found.append(Cluster(device, zones, nodes[device]["gpus_per_node"], nodes[device]["mem_per_gpu"]))
    return found


def as_sailor(plan: Plan) -> dict[str, Any]:
    """Return a plan in the form that their simulator reads."""
    degree = plan.degrees.tensor
    groups = [[[[[site.device, degree, site.zone]], degree] for site in stage] for stage in plan.sites]
    pipeline = {
        "num_stages": plan.degrees.stages,
        "layers_per_stage": [list(span) for span in plan.spans],
        "tmp_per_stage": groups,
        "dp": [plan.degrees.replicas] * plan.degrees.stages,
    }
    return {"pipeline_list": [pipeline], "mbs": plan.degrees.micro_batch}


def from_sailor(entry: dict[str, Any]) -> Plan:
    """Return one of their measured plans. All groups have one tensor degree, and each group is in one node."""
    pipeline = entry["pipeline_list"][0]
    stages = pipeline["layers_per_stage"]
    sites = tuple(tuple(Site(nodes[0][2], nodes[0][0]) for nodes, _ in stage) for stage in pipeline["tmp_per_stage"])
    replicas, degree = pipeline["dp"][0], pipeline["tmp_per_stage"][0][0][1]
    count = -(-entry["gbs"] // (entry["mbs"] * replicas))
    degrees = Degrees(degree, len(stages), replicas, entry["mbs"], count)
    return Plan(degrees, (*(stage[0] for stage in stages), stages[-1][-1] + 1), sites)


@dataclass(frozen=True, slots=True)
class Judge:
    """Their simulator, without what it prints."""

    simulator: Any

    def seconds(self, plan: dict[str, Any]) -> float:
        """Return the seconds of a step."""
        with contextlib.redirect_stdout(io.StringIO()):
            return float(self.simulator.simulate_iteration_time(plan)[0])

    def fits(self, plan: dict[str, Any]) -> bool:
        """Return whether every device has the memory that the plan needs."""
        with contextlib.redirect_stdout(io.StringIO()):
            return bool(self.simulator.check_config_fits(plan))


@contextlib.contextmanager
def _simulator(folder: Path) -> Any:
    """Give their simulator. It looks for its files in a folder `sailor`, whatever the checkout's name is."""
    sizes = checkout.tree(folder, "sailor/Planner/llm_info.json", PROJECT)
    times = checkout.tree(folder, f"{SIMULATIONS}/profiles_tmp.json", PROJECT)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "sailor").symlink_to(folder.resolve(), target_is_directory=True)
        sys.path.insert(0, str(folder.resolve()))
        try:
            module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
            training = _training(folder, MODEL)
            yield Judge(module.Simulator(name, training, sizes, False, times, "us-central1-a"))
        except ImportError as error:
            raise UserError(f"Sailor's simulator cannot be loaded from {folder}: {error}") from None
        finally:
            sys.path.pop(0)


def _training(folder: Path, model: str) -> dict[str, Any]:
    found: dict[str, Any] = checkout.tree(folder, f"{SIMULATIONS}/configs/{TRAINING[model]}", PROJECT)
    return found


def _used(plan: Plan) -> dict[str, int]:
    zones = [site.zone for stage in plan.sites for site in stage]
    return {zone: zones.count(zone) * plan.degrees.tensor for zone in dict.fromkeys(zones)}


def _compile() -> None:
    """Compile the search, or load it from disk, before time is taken; `sync_plan` counts its seconds alike."""
    same = 1.0 - np.eye(8)
    evolve.search(Problem(same, same, 2, 4), np.zeros(8, np.int64), SearchBudget(rounds=1), np.random.default_rng(0))


if __name__ == "__main__":
    sys.exit(main())
