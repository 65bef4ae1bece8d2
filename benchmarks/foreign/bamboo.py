"""Play Bamboo's preemption traces in our simulator: the share of the peers' time that ends up in the weights.

    python -m benchmarks.foreign.bamboo FOLDER [--trace p3] [--hours 12] [--only whole|parts] [--seed 0] [--json]

FOLDER is a checkout of github.com/uclasystem/bamboo (NSDI 2023). Each `add` of `traces/TRACE-trace.csv` starts a new
peer at that time, with an empty disk, and each `remove` ends one without a word (kill -9).

    useful      tokens in the weights of the peers that live at the end (lineage.py), the mean over the fragments
    available   peer-seconds from each `add` to its `remove` or the end, times a peer's tokens/s without a swarm
    share       useful / available

So these are losses: joining and downloading the state, the step under way and all since the last merged snapshot when a
peer dies, work for gossip that keeps the trainer waiting, waiting for micro-batches and for layers that nobody holds,
micro-batches that die on their way, and those that count in some layers only. Not modelled: how long a machine takes to
boot and to import its libraries, and what replicas that averaged late have learned less.

`theirs` is the same share of their own simulator for BERT: samples/s for each running instance, divided by samples/s of
an on-demand instance.
"""

import csv
import importlib.util
import io
import logging
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
from decentral.core.units import Seconds
from decentral.engine import memory
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
MODEL = {"whole": ("model.depth=2", "model.width=3584"), "parts": ("model.depth=4", "model.width=2560")}
SETTINGS = ("gossip.window_s=10", "gossip.start_window_s=10")
STEP_S, STEP_TOKENS = 4.0, 4096  # about a V100's speed with such a model
PART = 0.5  # of the whole model's memory, for peers that hold parts
LINK = TypicalLink(delay_s=0.001, up=1.25e9, down=1.25e9, spread=0.1)  # 10 Gb/s in one data centre


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a trace: a node is added or removed."""

    at: Seconds
    added: bool
    node: str


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the peers' time in one run."""

    peers: str  # what the peers hold: whole, parts
    trace: str
    hours: float
    available_s: float  # peer-seconds
    trained: float  # tokens that were trained, as a share of what available peers could have trained
    share: float  # likewise of tokens that are in the weights at the end
    theirs: float


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = shared.Parser(prog="python -m benchmarks.foreign.bamboo", description="Play Bamboo's traces.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"a checkout of {PROJECT}")
    parser.add_argument("--trace", default="p3", metavar="NAME", help="p3 (the default) or g4dn")
    parser.add_argument("--hours", type=shared.finite, default=12.0, metavar="H", help="play the first H hours only")
    parser.add_argument("--only", choices=KINDS, help="peers with the whole model, or with parts; default: both")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices; default 0")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    text = checkout.text(flags.folder, f"traces/{flags.trace}-trace.csv", PROJECT)
    own = their_share(flags.folder, text)
    found = [
        played(kind, flags.trace, changes(text), flags.hours * 3600, flags.seed, own)
        for kind in KINDS
        if flags.only in (None, kind)
    ]
    if flags.json:
        print(strict_json.dumps({"runs": found}))
        return
    for one in found:
        print(
            f"{one.trace}, {one.hours:.1f} h, peers with {one.peers}: {one.share:.4f} of {one.available_s:,.0f} "
            f"peer-seconds useful ({one.trained:.4f} trained); Bamboo's simulator {one.theirs:.2f}"
        )


def changes(text: str) -> list[Change]:
    """Return the changes of a trace in the order of time: lines of milliseconds, `add` or `remove`, and a node."""
    try:
        rows = [
            (int(at), {"add": True, "remove": False}[kind], node) for at, kind, node in csv.reader(io.StringIO(text))
        ]
    except (ValueError, KeyError):
        raise UserError("trace: expected lines of milliseconds, add or remove, and a node") from None
    return sorted((Change(at / 1e3, added, node) for at, added, node in rows), key=lambda one: one.at)


def faults_of(trace: Sequence[Change], seconds: Seconds) -> tuple[int, list[Fault]]:
    """Return how many peers there are at the start, and the joins and crashes of the first `seconds` after it.

    Peers are numbered in the order in which the trace adds them, as the simulator numbers them.
    """
    number = {one.node: at for at, one in enumerate(one for one in trace if one.added)}
    first = sum(one.added and one.at == 0 for one in trace)
    later = [one for one in trace if 0 < one.at < seconds]
    return first, [
        Fault("join", one.at, value=1) if one.added else Fault("crash", one.at, (number[one.node],)) for one in later
    ]


def available_s(trace: Sequence[Change], seconds: Seconds) -> float:
    """Return the peer-seconds from each `add` to its `remove`, in the first `seconds`."""
    return sum((1 if one.added else -1) * max(0.0, seconds - one.at) for one in trace)


def played(kind: str, name: str, trace: Sequence[Change], most: Seconds, seed: int, theirs: float) -> Played:
    """Play at most `most` seconds of a trace with peers that hold the whole model or parts of it."""
    seconds = min(most, max(one.at for one in trace))
    settings = settings_of(kind)
    peers, faults = faults_of(trace, seconds)
    lineage = Lineage(settings.fragments, routed=kind == "parts")
    scenario = Scenario(settings, peers, seconds, seed, tuple(faults), LINK, audited=False)
    with progress_bar(Console(stderr=True), seconds, quiet=not sys.stderr.isatty()) as show:
        run(scenario, lambda at: show(at, f"{at:.0f} of {seconds:.0f} virtual seconds"), watches=[lineage])
    could = available_s(trace, seconds)
    tokens = could * STEP_TOKENS / STEP_S
    trained = lineage.trained / len(settings.fragments) / tokens
    return Played(kind, name, seconds / 3600, could, trained, lineage.useful() / tokens, theirs)


def settings_of(kind: str) -> SwarmSettings:
    """Return the settings of the simulated swarm."""
    chosen = config.load(None, [*MODEL[kind], *SETTINGS])
    settings = SwarmSettings.of(chosen, Pace(STEP_S, 0.05), (1.0,), STEP_TOKENS)
    if kind == "whole":
        return settings
    needs = memory.needs(settings.config, settings.fragments)
    return replace(settings, memory=(int(PART * needs.span_bytes(0, settings.fragments[-1].last)),))


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
