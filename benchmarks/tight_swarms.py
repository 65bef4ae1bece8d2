"""Random swarms of six peers that together hold a model only tightly: the tokens/s reached over the best layout's.

    python -m benchmarks.tight_swarms [--seeds 10] [--first 0] [--seconds 900] [--set KEY=VALUE] [--json FILE]
    python -m benchmarks.tight_swarms --memory 106.398MB,94.960MB,120.172MB,99.419MB,91.805MB,120.648MB \
        --throttle 2.67,8,4,1,1,2.67 [--real]

Each peer has memory for 0.3 to 0.6 of the model, or --memory, so most layers have one or two holders, and few layouts
of layers fit. With --real, the peers are processes on this machine, which emulate the devices' speeds; otherwise time
is virtual. The best layout is the optimum of a mixed-integer programme (scheduler/throughput/milp.py). `planned` is
the flow through the layers that the peers hold at the end, over the optimum's. `counted_per_s` are the tokens/s that
the swarm counted in the last third of the time, `soon_per_s` those from 30 s to 90 s after the last peer had joined,
and `fixed_per_s` those that it counts in the last third if it starts at the optimum and never moves; `counted` is the
first over the last. `covered_s`: the seconds from the last join until all layers have a holder. Swarms that no layout
fits are drawn again.
"""

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import numpy as np
import torch

from decentral.commands import local, shared
from decentral.core import config, quantities, rng
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.events import CountedLine, JoinedLine, MoveLine, StartedLine
from decentral.core.journal.file import read
from decentral.core.journal.lines import recorded
from decentral.core.layer_work import share
from decentral.core.memory_needs import USUAL_IN_FLIGHT
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.engine.fragment import fragments_of
from decentral.scheduler.placement.evaluate import PlanTask, TrainingPeer, work_of
from decentral.scheduler.placement.span_choice import holder_of
from decentral.scheduler.throughput import max_flow, milp
from decentral.scheduler.throughput.link_limits import TokenLinks
from decentral.scheduler.topology.arrays import Ints
from decentral.sim.host import Pace
from decentral.sim.journals import SimulatedJournals
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

MODEL = [
    *("model.depth=6", "model.width=256", "model.context=128", "train.micro_batch=1"),
    *("gossip.window_s=60", "gossip.start_window_s=60", "swarm.checkpoint_every_s=60"),
]
PEERS = 6
MEMORY = (0.3, 0.6)  # a peer's memory, over that of the whole model with USUAL_IN_FLIGHT micro-batches
THROTTLES = (1.0, 1.0, 2.67, 4.0, 8.0)
STEP_S = 0.5
TOKENS = 128
LINKS = TypicalLink(0.02, 25e6, 125e6)
SOON_S = (30.0, 90.0)  # after the last join


@dataclass(frozen=True, slots=True)
class TightSwarm:
    """A swarm, and the layout of layers with the greatest flow."""

    shape: SwarmSettings
    task: PlanTask
    best: Ints
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Counted:
    """What the journals of a swarm tell. Times are in seconds from the moment at which its last peer joined."""

    steps: tuple[tuple[Seconds, float], ...]  # time of each step, and the tokens that it counts
    spans: Ints  # each peer's fragments at the end
    covered_s: Seconds | None  # when all fragments had a holder first
    ends_s: Seconds

    def tokens_per_s(self, begin: Seconds, end: Seconds) -> float:
        """Return the tokens/s that were counted between two times."""
        return sum(tokens for t, tokens in self.steps if begin <= t < end) / (end - begin)


def tight_swarm(seed: int, overrides: Sequence[str], real: bool = False) -> TightSwarm:
    """Return the random swarm of a seed that some layout of layers fits."""
    chance = rng.stream(seed, "tight swarms")
    shape = _shape(overrides, real)
    whole = shape.needs.span_bytes(0, len(shape.fragments), USUAL_IN_FLIGHT)
    while True:
        memories = tuple(round(whole * chance.uniform(*MEMORY)) for _ in range(PEERS))
        throttles = tuple(chance.choice(THROTTLES) for _ in range(PEERS))
        if (found := _with_best(shape, memories, throttles)) is not None:
            return found


def given_swarm(
    memories: Sequence[int], throttles: Sequence[float], overrides: Sequence[str], real: bool
) -> TightSwarm:
    """Return a swarm of peers with these memories (bytes) and throttles; exit if no layout of layers fits it."""
    found = _with_best(_shape(overrides, real), tuple(memories), tuple(throttles))
    if found is None:
        raise SystemExit("no layout of layers fits into this memory")
    return found


def _shape(overrides: Sequence[str], real: bool) -> SwarmSettings:
    """Return the model's settings; only the fragments of real peers differ in size."""
    run_config = config.load(None, [*MODEL, *overrides])
    shape = SwarmSettings.of(run_config, Pace(STEP_S, 0.05), THROTTLES, TOKENS)
    return replace(shape, unquantised=True, fragments=tuple(fragments_of(run_config)) if real else shape.fragments)


def _with_best(shape: SwarmSettings, memories: tuple[int, ...], throttles: tuple[float, ...]) -> TightSwarm | None:
    shape = replace(shape, memory=memories, throttles=throttles)
    members = tuple(
        (PeerId(f"sim{number:05d}"), TrainingPeer(range(0), memory_bytes, TOKENS / STEP_S / throttle))
        for number, (memory_bytes, throttle) in enumerate(zip(memories, throttles, strict=True))
    )
    needs = memory.needs(shape.config, shape.fragments)
    task = PlanTask(needs, members, TokenLinks.of(shape.config), holders=1)
    work = work_of(task)
    best = milp.best_spans(work)
    if best is None or not work.valid(best):
        return None
    return TightSwarm(shape, task, best, max_flow.maximum(work, best).tokens_per_s)


def simulated(swarm: TightSwarm, folder: Path, seed: int, seconds: Seconds, fixed: bool) -> None:
    """Play the swarm for `seconds`, from the best layout and without moves if `fixed`; write journals to the folder."""
    shape, cuts = swarm.shape, swarm.shape.fragments
    if fixed:
        layers = tuple((cuts[a].first, cuts[b - 1].last) if a < b else (0, 0) for a, b in swarm.best)
        shape = replace(shape, spans=layers)
    peers = len(swarm.task.members)
    run(Scenario(shape, peers, seconds, seed, (), LINKS, audited=False), watches=[SimulatedJournals(folder)])


def processes(swarm: TightSwarm, folder: Path, overrides: Sequence[str], seconds: Seconds) -> None:
    """Play the swarm as real peers for `seconds` from the last join; they write their journals to the folder."""
    settings = [*MODEL, f"train.emulated_micro_batch_s={STEP_S}", *overrides]
    flags = ["--memory", ",".join(map(str, swarm.shape.memory)), "--peers", str(len(swarm.shape.memory))]
    flags += ["--throttle", ",".join(map(str, swarm.shape.throttles)), "--device", "cpu"]
    flags += [part for one in settings for part in ("--set", one)]
    started = local.LocalSwarm(local.parse(flags), folder)
    try:
        started.begin(len(swarm.shape.memory))
        sleep(seconds)
        started.stop()
    finally:
        started.kill()


def counted(folder: Path, cuts: tuple[Fragment, ...]) -> Counted:
    """Return what the journals in a swarm's folder tell."""
    lines = []
    for number, journal in enumerate(sorted(folder.glob("peer-*/journal.jsonl"))):
        lines += [(one.t, number, one.event) for one in recorded(read(journal))]
    lines.sort(key=lambda one: one[0])
    joined_at = max(t for t, _, event in lines if isinstance(event, JoinedLine))
    spans: dict[int, tuple[int, int]] = {}
    steps, covered_s = list[tuple[Seconds, float]](), None
    for t, number, event in lines:
        match event:
            case StartedLine(first=first, last=last) | MoveLine(outcome="done", first=first, last=last):
                held = holder_of(cuts, first, last, 0.0)
                spans[number] = held.begin, held.end
            case CountedLine(of=executions):
                steps.append((t - joined_at, sum(one.tokens * share(cuts, one.first, one.last) for one in executions)))
        if covered_s is None and {at for a, b in spans.values() for at in range(a, b)} == set(range(len(cuts))):
            covered_s = t - joined_at
    by_number = np.array([spans[number] for number in sorted(spans)])
    return Counted(tuple(steps), by_number, covered_s, lines[-1][0] - joined_at)


def row(
    swarm: TightSwarm, seed: int, seconds: Seconds, overrides: Sequence[str], real: bool
) -> dict[str, float | int | None]:
    """Return the figures of one swarm."""
    cuts = swarm.shape.fragments
    with TemporaryDirectory() as folder:
        if real:
            processes(swarm, Path(folder), overrides, seconds)
        else:
            simulated(swarm, Path(folder), seed, seconds, fixed=False)
        found = counted(Path(folder), cuts)
    reached = max_flow.maximum(work_of(swarm.task), found.spans).tokens_per_s
    figures: dict[str, float | int | None] = {
        "seed": seed,
        "optimum": round(swarm.tokens_per_s, 1),
        "planned": round(reached / swarm.tokens_per_s, 3),
        "covered_s": None if found.covered_s is None else round(found.covered_s, 1),
        "soon_per_s": round(found.tokens_per_s(*SOON_S), 1),
        "counted_per_s": round(found.tokens_per_s(found.ends_s - seconds / 3, found.ends_s), 1),
    }
    if real:
        return figures
    with TemporaryDirectory() as folder:
        simulated(swarm, Path(folder), seed, seconds, fixed=True)
        best = counted(Path(folder), cuts)
    fixed = best.tokens_per_s(best.ends_s - seconds / 3, best.ends_s)
    share_counted = round(float(figures["counted_per_s"] or 0) / fixed, 3) if fixed else None
    return figures | {"fixed_per_s": round(fixed, 1), "counted": share_counted}


def seeds_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags of `play_seeds`, to which a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser


def play_seeds(args: argparse.Namespace, row_of: Callable[[int], dict[str, float | int | None]]) -> None:
    """Print the row of figures of each seed as a line of JSON, and write all rows to the file of --json.

    Args:
        args: Parsed by `seeds_parser`.
        row_of: Plays the swarm of a seed, and returns its figures.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    torch.set_num_threads(1)
    rows = []
    for seed in range(args.first, args.first + args.seeds):
        rows.append(row_of(seed))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Play the swarms of some seeds, and print a line for each."""
    parser = seeds_parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="seconds of each swarm; --real: from the last join"
    )
    parser.add_argument("--memory", metavar="BYTES,...", help="each peer's memory, instead of a random swarm")
    parser.add_argument("--throttle", metavar="F,...", help="with --memory: times that each peer is slower")
    parser.add_argument("--real", action="store_true", help="play processes on this machine")
    args = parser.parse_args()

    def row_of(seed: int) -> dict[str, float | int | None]:
        if args.memory:
            sizes = shared.several(args.memory, quantities.size_bytes)
            swarm = given_swarm(sizes, shared.several(args.throttle, shared.finite), args.set, args.real)
        else:
            swarm = tight_swarm(seed, args.set, args.real)
        return row(swarm, seed, args.seconds, args.set, args.real)

    play_seeds(args, row_of)


if __name__ == "__main__":
    main()
