"""Whether `python -m decentral.plan --seconds S` ends in time: at most GRACE_S after S seconds, by the clock.

    python -m benchmarks.planner_deadline [--seconds 5] [TOPOLOGY ...]

Each topology is planned in a process of its own, for both objectives; without TOPOLOGY, all shipped ones, those of the
planner's tests, and 1,000 volunteers (planner_volunteers.py) with 80 blocks. A line of JSON has the seconds by the
clock and of CPU, and `late`, whether the command took longer than S + GRACE_S. The clock counts only on a machine that
is otherwise idle. The first command ever also compiles; run another one before.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from benchmarks import planner_volunteers

GRACE_S = 10.0
SHIPPED = Path(str(files("decentral.configs") / "topologies"))
TESTED = Path("tests/scheduler/topologies")
MODELS = (TESTED / "m125-model.yaml", TESTED / "m1b3-model.yaml")
DEEP = "model: {depth: 80, width: 2048, vocabulary: 32000, context: 1024}\n"  # 4 billion parameters


def planned(where: Path, model: Path | None, seconds: float) -> dict[str, str | float | bool]:
    """Return the figures of one command; without a model, for the synchronous objective."""
    objective = ["--objective", "sync"] if model is None else ["--model", str(model)]
    command = [sys.executable, "-m", "decentral.plan", str(where), *objective, "--seconds", str(seconds), "--json"]
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "topology": where.stem, "model": "sync" if model is None else model.stem, "exit": done.returncode,
        "clock_s": round(took, 2), "cpu_s": round(cpu, 2), "late": took > seconds + GRACE_S,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan all topologies, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("topologies", nargs="*", metavar="TOPOLOGY", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        volunteers, deep = Path(folder) / "1000-volunteers.json", Path(folder) / "80-blocks.yaml"
        volunteers.write_text(json.dumps(planner_volunteers.volunteers(1000, 0)))
        deep.write_text(DEEP)
        tested = [path for path in sorted(TESTED.glob("*.yaml")) if not path.stem.endswith("-model")]
        for where in options.topologies or [*sorted(SHIPPED.glob("*.yaml")), *tested, volunteers]:
            for model in (None, deep) if where == volunteers else (None, *MODELS):
                print(json.dumps(planned(where, model, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
