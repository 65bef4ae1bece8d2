"""Real peers as processes, for tests: started, read by their journals, and ended by the test that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentral.core.journal import file as journal
from tests.patient_time import LIMIT_S

TINY = [
    *("--set", "model.depth=1"),
    *("--set", "model.width=32"),
    *("--set", "model.context=32"),
    *("--set", "gossip.window_s=0.25"),
    *("--set", "train.emulated_micro_batch_s=0.01"),  # it rests, so that tests that wait leave the cores to others
]


class Peers:
    """Processes that this test started, by name; only those are ever killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str) -> None:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "decentral.peer", "--plain", "--listen", "/ip4/127.0.0.1/tcp/0"]
        with (path / "output.txt").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*command, "--throttle=4", "--state-dir", str(path), *flags],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def lines(self, name: str, event: str) -> list[dict[str, Any]]:
        return [line for line in journal.read(self.folder / name / "journal.jsonl") if line["event"] == event]

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:.0f} s"
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def exchanged(peers: Peers, name: str, since: float = 0.0) -> bool:
    return any(line["outcome"] == "done" and line["t"] >= since for line in peers.lines(name, "exchange"))
