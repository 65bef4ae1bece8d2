"""The steps of the check, in the order of their worth, and how they are run: each in a process, with a limit of time.

A step that fails or is cut off stops no other one, and keeps what it has measured. First come the steps that need no
GPU for themselves; beside them layers are compiled, which takes minutes. Then each step has the GPU to itself.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.gpu import notes
from decentral.core.errors import UserError

LEAST_S = 10.0  # with less time left no step begins
MOST_LOGGED = 60_000  # last characters of each step's log
WAIT_FOR_COMPILER_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A function of one of the modules here, with what it gets besides the scale and the notes."""

    name: str
    function: str  # module.function
    arguments: tuple[str, ...]
    limit_s: float
    shares: bool = False  # the GPU with others: nothing is timed
    compiles_for: str = ""  # the step that it runs ahead of, in the background


PLAN = (
    Step("compile-ours-125M", "training.compile_ahead", ("125M", "ours"), 200, True, "compiled-125M"),
    Step("compile-bare-125M", "training.compile_ahead", ("125M", "bare"), 200, True, "compiled-125M"),
    Step("tests", "suite.measure", (), 120, shares=True),
    Step("machine", "machine.measure", (), 60, shares=True),
    Step("ceilings", "ceilings.measure", (), 30),
    Step("kernels", "kernels.measure", (), 60),
    Step("train-125M", "training.measure", ("125M", "adamw"), 40),
    Step("train-1B", "training.measure", ("1B", "adamw"), 70),
    Step("compiled-1B", "training.measure_compiled", ("1B", "ours"), 90),
    Step("generate-125M", "generation.measure", ("125M",), 30),
    Step("gossip-125M", "gossip.measure", ("125M",), 60),
    Step("swarm-pair", "swarm.measure", ("pair", "125M"), 75),
    Step("swarm-mixed", "swarm.measure", ("mixed", "10M"), 75),
    Step("compiled-125M", "training.measure_compiled", ("125M",), 120),
    Step("muon-125M", "training.measure", ("125M", "muon"), 40),
    Step("swarm-silent", "swarm.measure", ("silent", "125M"), 75),
    Step("muon-1B", "training.measure", ("1B", "muon"), 80),
    Step("generate-1B", "generation.measure", ("1B",), 60),
    Step("train-350M", "training.measure", ("350M", "adamw"), 80),
)
NAMES = tuple(step.name for step in PLAN if not step.compiles_for)


class Process(Protocol):
    """A step that runs."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """End it, if it still runs."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended. Raise RuntimeError if it ends badly, or runs longer than that."""


def chosen(names: Sequence[str]) -> list[Step]:
    """Return the steps with these names, or all, and what compiles for them; in the plan's order.

    Raises:
        UserError: If a name is no step's.
    """
    if unknown := sorted(set(names) - set(NAMES)):
        raise UserError(f"--only expects some of {', '.join(NAMES)}; got {', '.join(unknown)}")
    return [step for step in PLAN if not names or {step.name, step.compiles_for} & set(names)]


class Check:
    """Runs steps and gathers what they find, in `results.json` and `log.txt` of its folder."""

    def __init__(
        self, folder: Path, launch: Callable[[Step, Path, Path], Process], now: Callable[[], float], seconds: float
    ) -> None:
        """`launch` starts a step, which writes its figures and its log to these paths. `now` is a clock in seconds."""
        self.folder, self.launch, self.now = folder, launch, now
        self.ends = now() + seconds
        self.results: dict[str, dict[str, Any]] = {}
        (folder / "steps").mkdir(parents=True, exist_ok=True)
        for left in (folder / "steps").iterdir():  # of an earlier run
            left.unlink()

    def run(self, steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
        """Run these steps. Return, by name, the figures of each, the seconds it took, and why it failed.

        Of a step that there was no time for, `left_out` is true.
        """
        with ExitStack() as stack:
            began = self.now()
            behind = [(step, stack.enter_context(self._started(step))) for step in steps if step.compiles_for]
            for step in steps:
                if not step.compiles_for and step.shares:
                    self._run_one(step)
            for step, process in behind:
                self._finish(step, process, min(began + step.limit_s - self.now(), WAIT_FOR_COMPILER_S), began)
        for step in steps:
            if not step.shares:
                self._run_one(step)
        return self.results

    def _run_one(self, step: Step) -> None:
        left_s = self.ends - self.now()
        if left_s < LEAST_S:
            self._keep(step, {"left_out": True})
            return
        began = self.now()
        with self._started(step) as process:
            self._finish(step, process, min(step.limit_s, left_s), began)

    def _finish(self, step: Step, process: Process, limit_s: float, began: float) -> None:
        failed: dict[str, str] = {}
        try:
            process.wait(max(0.0, limit_s))
        except RuntimeError as error:
            failed = {"failed": str(error)}
        self._keep(step, {"seconds": round(self.now() - began, 1), **failed})

    def _keep(self, step: Step, found: dict[str, Any]) -> None:
        """Write all that is known: whatever ends this process, the files have what was measured before."""
        self.results[step.name] = {**found, "figures": notes.read(self._figures(step))}
        (self.folder / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        logs = sorted((self.folder / "steps").glob("*.log"))
        parts = (f"===== {log.stem}\n{log.read_text(errors='replace')[-MOST_LOGGED:]}\n" for log in logs)
        (self.folder / "log.txt").write_text("".join(parts))

    def _started(self, step: Step) -> Process:
        return self.launch(step, self._figures(step), self.folder / "steps" / f"{step.name}.log")

    def _figures(self, step: Step) -> Path:
        return self.folder / "steps" / f"{step.name}.jsonl"
