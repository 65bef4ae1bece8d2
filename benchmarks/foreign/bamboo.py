"""Play Bamboo's preemption traces in our simulator: the share of the peers' time that ends up in the weights.

    python -m benchmarks.foreign.bamboo FOLDER [--trace p3] [--hours 12] [--only whole|parts] [--gbps 10] [--seed 0]

FOLDER is a checkout of github.com/uclasystem/bamboo (NSDI 2023). Each `add` of `traces/TRACE-trace.csv` starts a new
peer at that time, with an empty disk, and each `remove` ends one without a word (kill -9).

    available   peer-seconds from each `add` to its `remove` or the end, times a peer's tokens/s without a swarm
    trained     tokens of optimizer steps that peers took, whether they survive or not, the mean over the fragments
    useful      tokens in the weights of the peers that live at the end (lineage.py), the mean over the fragments

`available - trained` was spent on joining and downloading the state, on work for gossip that keeps the trainer waiting,
and on waiting for micro-batches and for layers that nobody holds. `trained - useful` died with its peer: all that it
trained since its last snapshot that somebody merged, and micro-batches that count in some layers only. Not modelled:
how long a machine takes to boot and to import its libraries, and what replicas that averaged late have learned less.

`theirs` is the same share of their own simulator for BERT: samples/s for each running instance, divided by samples/s of
an on-demand instance.
"""

import csv
import importlib.util
import io
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.foreign import checkout
from benchmarks.foreign.lineage import Lineage
from decentral.commands import shared
from decentral.commands.progress_bar import progress_bar
from decentral.core import config, strict_json
from decentral.core.errors import UserError
from decentral.core.memory_needs import USUAL_IN_FLIGHT
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.scheduler.topology.topology import GBIT
from decentral.sim.faults import Fault
from decentral.sim.host import Pace
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

PROJECT = "Bamboo (github.com/uclasystem/bamboo)"
SIMULATOR = "project_pactum/simulation/simulator.py"
KINDS = ("whole", "parts")
# A model of 308 M to 315 M parameters (BERT-large has 340 M) in few fragments, as each costs events. The surrogate
# workload stands for the model, so its other sizes do not count.
MODEL = {
    "whole": ("model.depth=2", "model.width=3584"),
    "parts": ("model.depth=4", "model.width=2560", "routes.overlap=true"),
}
# Windows of about seven steps, as shorter ones cost events; few checkpoints, as a machine's disk ends with it.
SETTINGS = ("gossip.window_s=30", "gossip.start_window_s=30", "swarm.checkpoint_every_s=600")
STEP_S, STEP_TOKENS = 4.0, 4096  # about a V100's speed with such a model
# Bytes/s of jobs that keep the trainer waiting: 0.23 ms for a window of 6.25 M parameters (results/gpu.md), 3.3 MB.
# The rest of gossip is done beside training, on cores that a GPU leaves free.
JOB_BYTES = 14e9
PART = 0.5  # of the whole model's memory, for peers that hold parts
DELAY_S, SPREAD = 0.001, 0.1  # of links in one data centre


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the peers' time in one run."""

    peers: str  # what the peers hold: whole, parts
    trace: str
    hours: float
    available_s: float  # peer-seconds
    trained: float  # share of `available_s`
    useful: float  # share of `available_s`
    theirs: float


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = shared.Parser(prog="python -m benchmarks.foreign.bamboo", description="Play Bamboo's traces.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"a checkout of {PROJECT}")
    parser.add_argument("--trace", default="p3", metavar="NAME", help="p3 (the default) or g4dn")
    parser.add_argument("--hours", type=shared.finite, default=12.0, metavar="H", help="play the first H hours only")
    parser.add_argument("--only", choices=KINDS, help="peers with the whole model, or with parts; default: both")
    parser.add_argument("--gbps", type=shared.finite, default=10.0, metavar="G", help="rate of each peer's link")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices; default 0")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    text = checkout.text(flags.folder, f"traces/{flags.trace}-trace.csv", PROJECT)
    own = their_share(flags.folder, text)
    link = TypicalLink(DELAY_S, flags.gbps * GBIT, flags.gbps * GBIT, SPREAD)
    found = [
        played(kind, flags.trace, text, flags.hours * 3600, link, flags.seed, own)
        for kind in KINDS
        if flags.only in (None, kind)
    ]
    if flags.json:
        print(strict_json.dumps({"runs": found}))
        return
    for one in found:
        print(
            f"{one.trace}, {one.hours:.1f} h, peers with {one.peers}: {one.useful:.4f} of {one.available_s:,.0f} "
            f"peer-seconds useful ({one.trained:.4f} trained); Bamboo's simulator {one.theirs:.2f}"
        )


def churn(text: str) -> tuple[int, list[Fault]]:
    """Return how many peers a trace starts with, and the joins and crashes after it, in the order of time.

    Peers are numbered in the order in which the trace adds them, as the simulator numbers them.

    Args:
        text: The trace: lines of milliseconds, `add` or `remove`, and a node.

    Raises:
        UserError: If a line has another form, or removes a node that is not there.
    """
    try:
        rows = [
            (int(at), {"add": True, "remove": False}[kind], node) for at, kind, node in csv.reader(io.StringIO(text))
        ]
        number: dict[str, int] = {}
        found = []
        for at, added, node in sorted(rows, key=lambda row: row[0]):
            if added:
                number[node] = len(number)
            found.append(Fault("join", at / 1e3, value=1) if added else Fault("crash", at / 1e3, (number[node],)))
    except (ValueError, KeyError):
        raise UserError("trace: expected lines of milliseconds, add or remove, and a node") from None
    return sum(one.kind == "join" and one.at == 0 for one in found), [one for one in found if one.at > 0]


def available_s(peers: int, faults: Sequence[Fault], seconds: Seconds) -> float:
    """Return the peer-seconds of the first `seconds`, from each peer's start or join to its crash."""
    sign = {"join": 1, "crash": -1}
    return peers * seconds + sum(sign[one.kind] * max(0.0, seconds - one.at) for one in faults)


def played(
    kind: str, name: str, text: str, most: Seconds, link: TypicalLink, seed: int, theirs: float = math.nan
) -> Played:
    """Play at most `most` seconds of the trace `text` with peers that hold the whole model or parts of it."""
    peers, faults = churn(text)
    seconds = min(most, max(one.at for one in faults))
    faults = [one for one in faults if one.at < seconds]
    settings = settings_of(kind)
    lineage = Lineage(settings.fragments, routed=kind == "parts")
    scenario = Scenario(settings, peers, seconds, seed, tuple(faults), link, audited=False)
    with progress_bar(Console(stderr=True), seconds, quiet=not sys.stderr.isatty()) as show:
        run(scenario, lambda at: show(at, f"{at:.0f} of {seconds:.0f} virtual seconds"), watches=[lineage])
    could = available_s(peers, faults, seconds)
    tokens = could * STEP_TOKENS / STEP_S
    trained = lineage.trained / len(settings.fragments) / tokens
    return Played(kind, name, seconds / 3600, could, trained, lineage.useful() / tokens, theirs)


def settings_of(kind: str) -> SwarmSettings:
    """Return the settings of the simulated swarm."""
    chosen = config.load(None, [*MODEL[kind], *SETTINGS])
    settings = SwarmSettings.of(chosen, Pace(STEP_S, 0.05, job_bytes=JOB_BYTES, report_s=STEP_S), (1.0,), STEP_TOKENS)
    if kind == "whole":
        return settings
    needs = memory.needs(settings.config, settings.fragments)
    return replace(settings, memory=(int(PART * needs.span_bytes(0, settings.fragments[-1].last, USUAL_IN_FLIGHT)),))


def their_share(folder: Path, text: str) -> float:
    """Return the share of useful time in their own simulator."""
    path = folder / SIMULATOR
    checkout.text(folder, SIMULATOR, PROJECT)
    spec = importlib.util.spec_from_file_location("bamboo_simulator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    logging.getLogger(spec.name).setLevel(logging.WARNING)
    simulator = module.Simulator(seed=1, start_hour=0, model="BERT", spot_instance_trace=io.StringIO(text))
    result = simulator.simulate(duration=43_200_000)
    on_demand = simulator.on_demand_performance / simulator.on_demand_num_instances
    return float(result.average_performance / result.average_instances / on_demand)


if __name__ == "__main__":
    sys.exit(main())
