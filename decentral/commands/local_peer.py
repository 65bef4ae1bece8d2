"""One peer process of `decentral.local`, and what its journal and its output say (`LocalPeer`)."""

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from decentral.core.errors import ExitCode
from decentral.core.journal.events import ErrorLine, JournalEvent, StepLine, StoppedLine, UnheldLine
from decentral.core.journal.file import Tail, read
from decentral.core.journal.lines import recorded
from decentral.core.units import Amount, Seconds
from decentral.view import summary

LAST_OUTPUT_BYTES = 8192
OUTPUT = "output.txt"  # the file in a peer's folder with all that its processes print
ERROR = "error: "  # prefix of the line with which a command ends after a UserError
TRACEBACK = "Traceback (most recent call last):"  # the line before the trace of an unexpected error
INTERRUPTED_REASON = "interrupted"  # of the `stopped` line of a peer that a signal has ended

EventT = TypeVar("EventT", bound=JournalEvent)


@dataclass(slots=True)
class LocalPeer:
    """One peer process, with the steps and errors that have been read from its journal so far.

    `output_from` is the length of the output of earlier processes in the same file, in bytes.
    """

    number: int
    folder: Path
    process: "subprocess.Popen[bytes]"
    output_from: int = 0
    steps: list[tuple[Seconds, StepLine]] = field(default_factory=list)  # (Unix time, content) of `step` lines
    troubles: dict[str, Seconds] = field(default_factory=dict)  # error -> Unix time of its latest occurrence
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        """Make the reader of the journal's new lines."""
        self._tail = Tail(self.folder / "journal.jsonl")

    def death(self) -> str:
        """Return the signal or exit code of a process that died, as text; "" if it runs or left in an orderly way."""
        status = self.process.poll() or 0
        if status in (-signal.SIGINT, ExitCode.INTERRUPTED):  # no death: Ctrl-C ended the process while it started
            return ""
        return f"killed by signal {-status}" if status < 0 else f"exit code {status}" if status else ""

    def was_stopped(self, since: Seconds) -> bool:
        """Return whether the process leaves or has ended because it was told to, after `since` (Unix time)."""
        stopped = self.happened(StoppedLine, since)
        if stopped is not None:
            return stopped.reason == INTERRUPTED_REASON
        return self.process.poll() is not None and not self.death()

    def happened(self, kind: type[EventT], since: Seconds) -> EventT | None:
        """Return the journal's first event of class `kind` at Unix time `since` or later; None if there is none."""
        lines = recorded(read(self.folder / "journal.jsonl"))
        return next((line.event for line in lines if isinstance(line.event, kind) and line.t >= since), None)

    def follow(self) -> None:
        """Read the journal's new lines into `steps` and `troubles`."""
        for line in recorded(self._tail.new()):
            match line.event:
                case StepLine():
                    self.steps.append((line.t, line.event))
                case ErrorLine(reason=reason) | UnheldLine(reason=reason):
                    self.troubles[reason] = line.t

    def has_done(self, goal: Amount, since: float) -> bool:
        """Return whether the peer reached `goal` after `since` (Unix time); False if the goal is in seconds."""
        if goal.kind == "s":
            return False
        self.follow()
        steps = [line for t, line in self.steps if t >= since]
        if goal.kind == "steps":
            return bool(steps) and steps[-1].step - steps[0].step >= goal.value
        return sum(line.tokens for line in steps) >= goal.value

    def progress(self, since: float) -> str:
        """Return loss and number of the latest step after `since` (Unix time), or "-"; a dead peer has loss "dead"."""
        self.follow()
        last = self.steps[-1][1] if self.steps and self.steps[-1][0] >= since else None
        loss = "dead" if self.death() else summary.readable(last.loss) if last else "-"
        return f"{loss} at own step {last.step}" if last else loss

    def last_output(self) -> str:
        """Return the last line that the process has printed; "" if it has printed nothing."""
        return next(iter(self._last_lines()[-1:]), "")

    def failure(self) -> str:
        """Return why the process has ended: its last error, or its signal or exit code if it has printed no error."""
        lines = self._last_lines()
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if not errors and TRACEBACK in lines:
            errors = lines
        return errors[-1] if errors else f"{self.death()}; its output is in {self.folder / OUTPUT}"

    def _last_lines(self) -> list[str]:
        with (self.folder / OUTPUT).open("rb") as output:
            output.seek(max(self.output_from, output.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
            return output.read().decode(errors="replace").strip().splitlines()
