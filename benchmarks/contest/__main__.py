"""The head-to-head: this project against others, over an emulated WAN, in turn. Needs root on Linux.

    python -m benchmarks.contest [--full] [--repetitions 3] [--seconds S] [--runs FILE] [--docs DIR]
    python -m benchmarks.contest --only "ours;gloo DiLoCo" --scenarios household/equal
    python -m benchmarks.contest --tune [--only ...]      # rates and options, on the world with equal devices
    python -m benchmarks.contest --report                 # tables and plots from the runs so far

Each finished run is a line of --runs; what stands there is not run again, so that an interrupted contest goes on where
it stopped. Exit status 0: all runs are there and the report is written; 2: one line says what is missing.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.contest import contestants, report, runner, scenarios, tuning
from benchmarks.contest.runner import Line, Task
from benchmarks.wan import namespaces
from decentral.commands import shared
from decentral.core.errors import UserError

SECONDS = 40.0
FULL_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    names = flags.only
    if flags.report:
        report.write(asked_for(list(tasks(flags, names)), read_runs(flags.runs)), flags.docs)
        return
    namespaces.require_root()
    if flags.tune:
        tuning.tune(contestants.chosen(names, flags.full), flags.seconds, flags.runs.with_name("tuning.jsonl"))
        return
    wanted = list(tasks(flags, names))
    for number, task in enumerate(wanted):
        if finished(task, read_runs(flags.runs)):
            continue
        keep = flags.keep / f"{number}" if flags.keep else None
        result = runner.run(task, keep)
        append(flags.runs, result)
        print(f"{number + 1}/{len(wanted)}  {said(result)}", flush=True)
    report.write(asked_for(wanted, read_runs(flags.runs)), flags.docs)


def tasks(flags: argparse.Namespace, names: Sequence[str]) -> Iterator[Task]:
    """All runs, the contestants taking turns, so that a change of the machine's load meets all alike."""
    places = [scenarios.scenario(name) for name in flags.scenarios] or scenarios.chosen([], flags.full)
    for repetition in range(flags.repetitions):
        for place in places:
            for one in contestants.chosen(names, flags.full):
                if one.takes_part(place):
                    yield Task(one, place, repetition, flags.seconds)


def finished(task: Task, runs: Sequence[Line]) -> bool:
    """Whether this run is there: of the same length, with the rate and the options that it has now."""
    overrides, options = task.settings()
    own = (task.contestant.name, task.scenario.name, task.repetition, task.seconds, overrides, options)
    names = ("contestant", "scenario", "repetition", "seconds", "overrides", "options")
    return any(tuple(run[name] for name in names) == own for run in runs)


def asked_for(wanted: Sequence[Task], runs: Sequence[Line]) -> list[Line]:
    """The runs of these tasks: others in the file are of other lengths, rates or options."""
    return [run for run in runs if any(finished(task, [run]) for task in wanted)]


def read_runs(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, result: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def said(result: Line) -> str:
    head = f"{result['scenario']}  {result['contestant']}  #{result['repetition']}"
    if "error" in result:
        return f"{head}  could not begin: {result['error']}"
    loss = f"{result['curve'][-1]['loss']:.3f}" if result["curve"] else "-"
    return (
        f"{head}  loss {loss}  {result['tokens'] / result['seconds']:.0f} tokens/s  "
        f"training {result['training_share']:.2f}  {result['bytes'] / 1e6:.1f} MB  load {result['load'][1]:.1f}"
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";") if name.strip()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(
        prog="python -m benchmarks.contest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all contestants in all scenarios; takes about a day")
    parser.add_argument("--only", type=_names, default=[], metavar="NAME;...", help="these contestants")
    parser.add_argument("--scenarios", type=_names, default=[], metavar="WORLD/FAULT;...")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, help=f"of a run; default {SECONDS:g}, with --full {FULL_SECONDS:g}")
    parser.add_argument("--runs", type=Path, default=Path("build/contest/runs.jsonl"), metavar="FILE")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR", help="where the report goes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the peers' files here")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--report", action="store_true", help="from the runs that are there")
    flags = parser.parse_args(argv)
    flags.seconds = flags.seconds or (FULL_SECONDS if flags.full else SECONDS)
    if flags.seconds < 10 or flags.repetitions < 1:
        raise UserError("--seconds expects 10 or more, --repetitions 1 or more")
    return flags


if __name__ == "__main__":
    sys.exit(main())
