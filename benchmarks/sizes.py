"""Tokens/s of real peers beside bare loops of the same model, for models of several sizes.

    python -m benchmarks.sizes [--sizes 0.5M,10M,85M] [--swarms 1,2,4] [--seconds 40] [--repetitions 2] [--json FILE]
    python -m benchmarks.sizes --quick              # 0.5 M alone and in a swarm of two, 15 s each
    python -m benchmarks.sizes --device cuda        # 125 M, 350 M and 1 B in bf16, compiled

For each size and each N, N bare loops (bare_loop.py) and a swarm of N peers, as `decentral.local` starts them, take
turns on this machine, one torch thread each: A B A B, so that a change of the machine's load meets both. An interval
begins `--settle` seconds after all N train and, if they are peers, the first has evaluated. Peers keep the config's
gossip and checkpoints, and do not evaluate again; `--evaluate` leaves the config's evaluations. The ratio is that of
the mean rates; beside it stand the least and the largest ratio of one repetition.

What makes the ratio fall: work of a peer on its training thread between two steps (gossip, checkpoints, states for
newcomers), whatever it does on other threads when the swarm has all cores of the machine, and its use of the memory's
bandwidth. `beside` is what it used of a core on other threads and in its network daemon.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console

from benchmarks import processes
from benchmarks.kernels import kernel_rates
from benchmarks.processes import CpuSeconds
from benchmarks.shapes import SIZES, utilisation
from benchmarks.straggler import Child
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.commands.local_peer import LocalPeer
from decentral.core import config
from decentral.core.journal.events import EvalLine, StepLine
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.model import decoder

Line = dict[str, Any]
START_S = 300.0  # for a process to begin training
EVALUATED_S = 600.0  # for its first evaluation, which is done in slices between steps
POLL_S = 0.1
MEMORY_S = 2.0  # a peer's memory is read this often
HEAD_START_S = 0.5  # between saying when an interval begins and its beginning
CHECKPOINT_S = 2.0  # before a checkpoint's line in the journal: steps in this time may have been held up by it
ON_CPU, ON_CUDA = ("0.5M", "10M", "85M"), ("125M", "350M", "1B")
COMPILED = ["train.compile=true"]
ONE_EVALUATION = ["train.eval_every_s=1e6"]
TINY = ["model.depth=1", "model.width=32", "model.context=32"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one interval shows of N peers, or of N bare loops; figures of a peer are means over them."""

    tokens_per_s: float  # of all N
    resident_bytes: float  # in the mean over the interval
    most_bytes: float  # the most of the interval, while a checkpoint or a partner's window is in memory
    shares: dict[str, float]  # of the training thread's time; none of bare loops
    cpu: CpuSeconds | None  # in cores
    newcomer_s: tuple[float, float] | None  # of the last peer: to its first step from its start, and from `started`
    checkpoint_s: float | None
    stall_s: float | None  # how much longer than usual the longest gap between step lines at a checkpoint is


@dataclass(frozen=True, slots=True)
class Case:
    size: str
    peers: int
    overrides: tuple[str, ...]
    args: argparse.Namespace

    @property
    def flags(self) -> list[str]:
        return [part for key in self.overrides for part in ("--set", key)]


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = _arguments()
    empty = {kind: measure(_case("0.5M", 1, args, TINY), kind, 3.0).resident_bytes for kind in ("bare", "peers")}
    rows = []
    print(_head(), flush=True)
    for size in args.sizes:
        for peers in args.swarms:
            case = _case(size, peers, args)
            turns = [{kind: measure(case, kind, args.seconds) for kind in empty} for _ in range(args.repetitions)]
            rows.append(summarised(case, turns, empty))
            print(_line(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"settings": _settings(args), "rows": rows}, indent=1) + "\n")
    print(_kernels(args.elements), flush=True)


# One interval


def measure(case: Case, kind: str, seconds: float) -> Measured:
    return (_bare_loops if kind == "bare" else _peers)(case, seconds)


def _bare_loops(case: Case, seconds: float) -> Measured:
    command = [sys.executable, "-m", "benchmarks.bare_loop", *case.flags, "--device", case.args.device]
    command += ["--seconds", f"{seconds}", "--wait"]
    with tempfile.TemporaryDirectory(prefix="sizes-") as folder, ExitStack() as stack:
        logs = [Path(folder) / f"{number}.log" for number in range(case.peers)]
        loops = [stack.enter_context(Child(command, log)) for log in logs]
        for loop in loops:
            loop.read("training", START_S)
        moment = time.time() + case.args.settle + HEAD_START_S
        for loop in loops:
            loop.write(str(moment))
        for loop in loops:
            loop.wait(case.args.settle + seconds + START_S)
        reports = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    resident = mean(report["resident_bytes"] for report in reports)
    return Measured(sum(report["tokens_per_s"] for report in reports), resident, resident, {}, None, None, None, None)


def _peers(case: Case, seconds: float) -> Measured:
    with _training_swarm(case) as swarm:
        time.sleep(case.args.settle)
        pids = [member.process.pid for member in swarm.members]
        begins, before = time.time(), [processes.cpu_of_peer(pid) for pid in pids]
        memory = []
        while time.time() < begins + seconds:
            time.sleep(min(MEMORY_S, max(0.0, begins + seconds - time.time())))
            memory.append(mean(processes.resident_bytes(pid) for pid in pids))
        ends, after = time.time(), [processes.cpu_of_peer(pid) for pid in pids]
        process_began = processes.started_at(pids[-1])
        journals = [list(read(folder / "journal.jsonl")) for folder in swarm.folders()]
    cpu = [processes.spent(*one) for one in zip(pids, before, after, strict=True)]
    steps = [[line for line in lines if line["event"] == "step"] for lines in journals]
    within = [[line for line in lines if begins <= line["t"] <= ends] for lines in steps]
    written = [(line["t"], lines) for lines in journals for line in lines if line["event"] == "checkpoint"]
    stalls = [stall_s(lines, at) for at, lines in written if begins <= at <= ends]
    spent = PeerTotals.of(line for lines in within for line in lines[1:]).work.spent  # a line has the time before it
    known = [
        line["seconds"] for lines in journals for line in lines if line["event"] == "checkpoint" and "seconds" in line
    ]
    return Measured(
        tokens_per_s=sum(map(rate, within)),
        resident_bytes=mean(memory),
        most_bytes=max(memory),
        shares=spent.shares(),
        cpu=_mean_cpu(cpu) / (ends - begins),
        newcomer_s=newcomer_s(journals[-1], process_began) if case.peers > 1 else None,
        checkpoint_s=max(known, default=None),
        stall_s=max(stalls, default=None),
    )


@contextmanager
def _training_swarm(case: Case) -> Iterator[LocalSwarm]:
    """A swarm of real peers that all take steps, after the evaluation of the first peer's initial weights."""
    flags = parse_local(["--peers", f"{case.peers}", "--device", case.args.device, "--stop-after", "1e6s", *case.flags])
    with tempfile.TemporaryDirectory(prefix="sizes-") as folder, training(LocalSwarm(flags, Path(folder))) as swarm:
        _wait(swarm.members[:1], swarm.began, EvalLine, EVALUATED_S)
        yield swarm


@contextmanager
def training(swarm: LocalSwarm, start_s: float = START_S) -> Iterator[LocalSwarm]:
    """Start a swarm, and give it once each peer has taken a step. At the end kill its peers.

    Raises SystemExit if they do not all train within `start_s`, and UserError if one does not start.
    """
    try:
        swarm.start(Console(file=sys.stderr, quiet=True))
        _wait(swarm.members, swarm.began, StepLine, start_s)
        yield swarm  # and no last checkpoints: they would take a large model's swarm a minute
    finally:
        swarm.kill()


def _wait(members: Sequence[LocalPeer], since: float, kind: type[StepLine | EvalLine], seconds: float) -> None:
    """Wait until each of these journals has an event of this class; raise SystemExit if that takes longer."""
    deadline = time.time() + seconds
    while not all(member.happened(kind, since) for member in members):
        if time.time() > deadline:
            raise SystemExit(f"not all of {len(members)} peers have a {kind.__name__} after {seconds:.0f} s")
        time.sleep(POLL_S)


def rate(steps: Sequence[Line]) -> float:
    """Tokens/s from the first to the last of a peer's step lines, whose tokens are those since the line before."""
    if len(steps) < 2:
        return 0.0
    return float(sum(line["tokens"] for line in steps[1:]) / (steps[-1]["t"] - steps[0]["t"]))


def stall_s(journal: Sequence[Line], at: float) -> float:
    """How much longer than the median the longest gap between step lines was, of those near the checkpoint at `at`."""
    moments = [line["t"] for line in journal if line["event"] == "step"]
    gaps = [(early, late) for early, late in pairwise(moments)]
    near = [late - early for early, late in gaps if early <= at and late >= at - CHECKPOINT_S]
    return float(max(near, default=0.0) - median(late - early for early, late in gaps))


def newcomer_s(journal: Sequence[Line], process_began: float) -> tuple[float, float]:
    """Seconds to the first step line of a peer, from the start of its process, and from its line `started`.

    The line comes at most a second after the first step, or with it if steps take longer.
    """
    first = next(line for line in journal if line["event"] == "step")["t"]
    started = next(line for line in journal if line["event"] == "started")["t"]
    return first - process_began, first - started


def _mean_cpu(peers: Sequence[CpuSeconds]) -> CpuSeconds:
    return CpuSeconds(*(mean(getattr(one, field.name) for one in peers) for field in fields(CpuSeconds)))


# The table


def summarised(case: Case, turns: Sequence[dict[str, Measured]], empty: dict[str, float]) -> dict[str, Any]:
    """One row of the table, with what each repetition measured."""
    run = config.load(None, case.overrides)
    parameters = sum(decoder.parameters(run.model))
    means = {kind: mean(turn[kind].tokens_per_s for turn in turns) for kind in empty}
    resident = {kind: mean(turn[kind].resident_bytes for turn in turns) for kind in empty}
    most = max(turn["peers"].most_bytes for turn in turns)
    ours = [turn["peers"] for turn in turns]
    ratios = [turn["peers"].tokens_per_s / turn["bare"].tokens_per_s for turn in turns]
    cpu = _mean_cpu([one.cpu for one in ours if one.cpu])
    return {
        "size": case.size,
        "parameters": parameters,
        "micro_batch": run.train.micro_batch,
        "context": run.model.context,
        "peers": case.peers,
        "tokens_per_s": means,
        "ratio": means["peers"] / means["bare"],
        "ratios": ratios,
        "shares": {name: mean(one.shares[name] for one in ours) for name in ours[0].shares},
        "cores_beside": asdict(cpu) | {"beside": cpu.beside},
        "bytes_per_parameter": {kind: (resident[kind] - empty[kind]) / parameters for kind in empty}
        | {"most": (most - empty["peers"]) / parameters},
        "newcomer_s": [one.newcomer_s for one in ours],
        "checkpoint_s": max((one.checkpoint_s for one in ours if one.checkpoint_s is not None), default=None),
        "stall_s": max((one.stall_s for one in ours if one.stall_s is not None), default=None),
        "flop_utilisation": _utilisation(run, means["peers"], case.args.device),
        "repetitions": [{kind: asdict(one) for kind, one in turn.items()} for turn in turns],
    }


def _utilisation(run: config.Config, tokens_per_s: float, device: str) -> float | None:
    return utilisation(run, tokens_per_s, torch.cuda.get_device_name()) if device.startswith("cuda") else None


COLUMNS = {  # heading: width
    **{"size": 5, "peers": 5, "bare/s": 9, "ours/s": 9, "ratio": 6, "least-most": 12, "training": 8, "gossip": 6},
    **{"rest": 6, "loop": 6, "others": 6, "daemon": 6, "bare B/p": 8, "ours B/p": 8, "most B/p": 8, "newcomer, s": 12},
    **{"checkpoint, s": 13, "stall, s": 8, "of peak": 7},
}


def _head() -> str:
    return _aligned(list(COLUMNS))


def _line(row: dict[str, Any]) -> str:
    shares, cores, memory, rates = row["shares"], row["cores_beside"], row["bytes_per_parameter"], row["tokens_per_s"]
    newcomers = [one for one in row["newcomer_s"] if one]
    newcomer = "{:.1f} ({:.1f})".format(*map(mean, zip(*newcomers, strict=True))) if newcomers else "-"
    cells = [row["size"], str(row["peers"]), f"{rates['bare']:,.0f}", f"{rates['peers']:,.0f}", f"{row['ratio']:.3f}"]
    cells.append(f"{min(row['ratios']):.3f}-{max(row['ratios']):.3f}")
    training, gossip = shares["training"], shares["gossip"]
    cells += [f"{share:.3f}" for share in (training, gossip, 1 - training - gossip)]
    cells += [f"{cores[name]:.3f}" for name in ("loop", "others", "daemon")]
    cells += [f"{memory[kind]:.0f}" for kind in ("bare", "peers", "most")]
    cells += [newcomer, *(_number(row[name]) for name in ("checkpoint_s", "stall_s", "flop_utilisation"))]
    return _aligned(cells)


def _aligned(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _kernels(elements: int) -> str:
    """The rates of the outer step's kernels and of the codecs, beside a copy of the same bytes."""
    lines = [f"kernels on {elements:,} elements:  M elements/s  time over a copy's"]
    for one in kernel_rates(elements):
        lines.append(f"{one.kernel:>28}  {one.elements_per_s / 1e6:>12,.0f}  {one.copies:.2f}")
    return "\n".join(lines)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if key != "json"} | {"torch": torch.__version__}


def _case(size: str, peers: int, args: argparse.Namespace, shape: Sequence[str] = ()) -> Case:
    evaluation = [] if args.evaluate else ONE_EVALUATION
    compiled = COMPILED if args.device.startswith("cuda") else []
    return Case(size, peers, (*(shape or SIZES[size]), *evaluation, *compiled, *args.set), args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: text.split(","), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--swarms", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each interval")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds before it, in which all train")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--evaluate", action="store_true", help="peers evaluate as often as the config says")
    parser.add_argument("--elements", type=int, default=1 << 24, help="of the kernels' vectors")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config, for both")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.swarms, args.seconds, args.settle, args.repetitions = ["0.5M"], [1, 2], 15.0, 4.0, 1
    args.sizes = args.sizes or list(ON_CUDA if args.device.startswith("cuda") else ON_CPU)
    if unknown := set(args.sizes) - set(SIZES):
        parser.error(f"--sizes expects some of {', '.join(SIZES)}; got {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    main()
