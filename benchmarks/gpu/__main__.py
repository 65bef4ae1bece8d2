"""The check of a machine with one GPU: tests, kernels, training against a bare loop, gossip, real peers, generation.

    python -m benchmarks.gpu [--seconds 470] [--only STEP,...] [--out DIR]
    python -m benchmarks.gpu --rehearse                 # the same steps with tiny sizes, on a CPU

benchmarks/gpu/plan.py has the steps. They take eight minutes by estimate; no step begins when `--seconds` are over.
DIR gets `results.json`, `log.txt` and `table.txt`, which is printed as well. The exit status is 1 if anything failed.
benchmarks/gpu/offline.sh runs the check on a machine without a network.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import plan, report
from benchmarks.gpu.plan import Check, Process, Step
from benchmarks.straggler import Child
from decentral.commands import shared

SECONDS = 470.0
PATIENCE = 10.0  # times the limits and the seconds, in a rehearsal: its machine may be busy


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    if flags.step:
        take(flags.step, flags.figures, flags.rehearse)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the steps' processes end, as with Ctrl-C
    patience = PATIENCE if flags.rehearse else 1.0
    steps = [replace(step, limit_s=patience * step.limit_s) for step in plan.chosen(flags.only)]

    def launch(step: Step, figures: Path, log: Path) -> Process:
        arguments = ["--step", step.name, "--figures", str(figures), *(["--rehearse"] if flags.rehearse else [])]
        return Child([sys.executable, "-m", "benchmarks.gpu", *arguments], log)

    results = Check(flags.out, launch, time.monotonic, patience * flags.seconds).run(steps)
    text = "\n".join(report.table(results))
    (flags.out / "table.txt").write_text(text + "\n")
    print(text)
    if any(report.failures(results)):
        raise SystemExit(1)


def take(name: str, figures: Path, rehearse: bool) -> None:
    """Take one step in this process. Only here torch is loaded: the process that starts the steps does without."""
    from benchmarks.gpu.notes import Notes
    from benchmarks.gpu.scale import CARD, REHEARSAL

    (step,) = (one for one in plan.PLAN if one.name == name)
    module, function = step.function.split(".")
    scale = REHEARSAL if rehearse else CARD
    getattr(import_module(f"benchmarks.gpu.{module}"), function)(scale, Notes(figures), *step.arguments)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no step begins; default 470")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="STEP,...")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="DIR", help="default build/gpu")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes and without its limits")
    parser.add_argument("--step", choices=[step.name for step in plan.PLAN], help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
