"""One run: a contestant in a scenario, in the lab, for so many seconds; then what it came to.

    lab -> peers start -> all begin at one moment -> the schedule, kills and joins -> all are killed -> evaluation

The clock begins when training does: for the others when all peers are ready, for ours when the first of its peers
trains, while the others still start (its peers have no common beginning, and this way its start is at its own cost).
Bytes are those that the lab's router was given from the beginning to the end, whoever sent them, packets' headers
included.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.contest import contestants, ours, scenarios
from benchmarks.contest.contestants import Contestant
from benchmarks.contest.evaluate import Evaluation, saved_in
from benchmarks.contest.figures import Stretch, busy_until, longest_pause, stretches, tokens_until
from benchmarks.contest.scenarios import Scenario
from benchmarks.contest.trainee import Setup
from benchmarks.wan.lab import ROOT, Lab, Traffic
from benchmarks.wan.links import Count
from decentral.core.errors import UserError

START_S = 150.0  # the longest that the peers of a contestant may take until all are ready
GRID_S = 2.5  # between two points of a curve; a run's length should be a multiple
SMOOTHED = 4  # points whose weights the last figure averages
POLL_S = 0.1
LINGER_S = 2.0  # after the end, until journals have the line that tells of it
MODULES = {kind: f"benchmarks.contest.{kind}_peer" for kind in ("gloo", "hivemind", "torchft")}
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One cell of the table, once. `picked`: the rate and the options that tuning tries; None: as it chose."""

    contestant: Contestant
    scenario: Scenario
    repetition: int
    seconds: float
    picked: dict[str, Any] | None = None

    @property
    def throttles(self) -> list[float]:
        return self.scenario.throttles[: self.peers]

    @property
    def peers(self) -> int:
        return 1 if self.contestant.alone else self.scenario.peers

    def settings(self) -> tuple[list[str], dict[str, Any]]:
        return contestants.settings(self.contestant, self.repetition, self.picked)


@dataclass(slots=True)
class Peers:
    """The processes of a run, by name PLACE-LIFE, and what happened to them."""

    task: Task
    lab: Lab
    folder: Path
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    launched: float = 0.0  # when the first process was started (Unix time)
    began: float = 0.0

    def start(self) -> None:
        """Starts all peers; training begins at `began`. Raises UserError if they do not become ready."""
        if self.task.contestant.kind == "ours":
            ours.prepare(self.folder / "0-0")
        self.launched = time.time()
        for place in range(self.task.peers):
            self.launch(place)
            if place == 0 and self.task.contestant.stagger:
                self.await_word("0-0", "up")
            elif place == 0 and self.task.contestant.kind == "ours":
                time.sleep(ours.HEAD_START_S)
        if self.task.contestant.kind == "ours":
            self.began = ours.await_training(self.folder / "0-0", START_S)
            return
        for name in self.running:
            self.await_word(name, "ready")
        self.began = time.time() + 0.5
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.write(f"{self.began}\n".encode())
            process.stdin.flush()

    def launch(self, place: int) -> None:
        """Starts a peer in this place: the first, or a newcomer after one that was killed."""
        life = self.lives.get(place, -1) + 1
        self.lives[place] = life
        name = f"{place}-{life}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "wan0"}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = self.lab.popen(
                place,
                self._command(place, life),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, place: int, life: int) -> list[str]:
        overrides, options = self.task.settings()
        throttle = self.task.throttles[place]
        if self.task.contestant.kind == "ours":
            parts = self.task.scenario.fault.spans
            overrides += ours.OF_PARTS if parts else ()
            line = ours.command(self.folder, place, life, self.lab.address(0), overrides, throttle)
            return line + (ours.half_the_memory(overrides) if parts else [])
        setup = Setup(
            place=place,
            life=life,
            peers=self.task.peers,
            throttle=throttle,
            address=self.lab.address(place),
            leader=self.lab.address(0),
            folder=str(self.folder),
            overrides=overrides,
            options=options,
        )
        return [sys.executable, "-m", MODULES[self.task.contestant.kind], setup.to_json()]

    def await_word(self, name: str, word: str) -> None:
        """Waits for a line that begins so. Raises UserError with the end of its log if none comes."""
        deadline, log = time.monotonic() + START_S, self.folder / f"{name}.log"
        while time.monotonic() < deadline and self.running[name].poll() is None:
            if any(line.startswith(word) for line in log.read_text(errors="replace").splitlines()):
                return
            time.sleep(POLL_S)
        raise UserError(f"peer {name} of {self.task.contestant.name} did not say {word!r}: {_tail(log)}")

    def train(self) -> Traffic:
        """Until the end of the run: kills and joins as the scenario says, and keeps what ours have saved."""
        schedule = scenarios.schedule_of(self.task.scenario)
        if schedule and self.task.peers > 1:
            self.lab.change(schedule)
        kills = [] if self.task.contestant.alone else self.task.scenario.kills(self.task.seconds)
        before = self.lab.traffic()
        while (now := time.time()) < self.began + self.task.seconds:
            if kills and now >= self.began + kills[0][0]:
                place = kills.pop(0)[1]
                self.kill(place)
                self.launch(place)
            if self.task.contestant.kind == "ours":
                ours.keep(self.folder)
            time.sleep(POLL_S)
        traffic = self.lab.traffic() - before
        time.sleep(LINGER_S)
        return traffic

    def kill(self, place: int) -> None:
        name = f"{place}-{self.lives[place]}"
        self.running[name].kill()
        self.running[name].wait()
        self.killed[name] = time.time()

    def journals(self) -> dict[str, list[Stretch]]:
        """What each peer's lines say, also of some seconds after the end."""
        found = {}
        for name in [f"{place}-{life}" for place, last in self.lives.items() for life in range(last + 1)]:
            if self.task.contestant.kind == "ours":
                lines = ours.steps(self.folder / name)
            else:
                lines = list(_lines(self.folder / f"journal-{name}.jsonl"))
            found[name] = stretches([line for line in lines if "tokens" in line], self.began)
        return found


def run(task: Task, keep: Path | None = None) -> Line:
    """Plays a task. The result has an `error` where the contestant could not begin. `keep`: where its files stay."""
    with tempfile.TemporaryDirectory(prefix="contest-") as temporary, _lab(task) as lab:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        peers, load = Peers(task, lab, folder), os.getloadavg()[0]
        try:
            peers.start()
        except UserError as error:
            return {**_head(task), "error": str(error)}
        traffic = peers.train()
        lab.close()
        return {**_head(task), **_result(peers, traffic), "load": [load, os.getloadavg()[0]]}


@contextmanager
def _lab(task: Task) -> Iterator[Lab]:
    with Lab(task.scenario.world.links, START_S + task.seconds + 60) as lab:
        yield lab


def _head(task: Task) -> Line:
    overrides, options = task.settings()
    return {
        "contestant": task.contestant.name,
        "scenario": task.scenario.name,
        "repetition": task.repetition,
        "seconds": task.seconds,
        "overrides": overrides,
        "options": options,
    }


def _result(peers: Peers, traffic: Traffic) -> Line:
    task, journals = peers.task, peers.journals()
    moments = [peers.began + step * GRID_S for step in range(1, int(task.seconds / GRID_S) + 1)]
    saved, evaluation = saved_in(peers.folder), Evaluation(task.settings()[0])
    losses = evaluation.losses(saved, moments, peers.killed)
    peers_work = list(journals.values())
    tokens = [tokens_until(peers_work, at) for at in moments]
    end = peers.began + task.seconds
    curve = [
        {"seconds": at - peers.began, "tokens": count, "mean": one.mean, "first": one.first, "loss": one.kept}
        for at, count, one in zip(moments, tokens, losses, strict=True)
        if one is not None
    ]
    return {
        "curve": curve,
        "smoothed": evaluation.smoothed(saved, moments[-SMOOTHED:], peers.killed),
        "start_s": peers.began - peers.launched,
        "tokens": tokens_until(peers_work, end),
        "training_share": busy_until(peers_work, end) / (task.seconds * task.peers),
        "bytes": traffic.of(Count.OFFERED_BYTES),
        "all_train_s": _all_train_s(peers, journals),
        "survival": _survival(peers, journals),
        "complaints": traffic.complaints(2 * 0.01),
        "ended": {name: tail for name, tail in _ended(peers).items() if name not in peers.killed},
    }


def _all_train_s(peers: Peers, journals: dict[str, list[Stretch]]) -> float | None:
    """Seconds until each of the peers that were there from the beginning trained. None: one never did."""
    first = [own for name, own in journals.items() if name.endswith("-0")]
    return max(own[0].begin for own in first) - peers.began if all(first) else None


def _survival(peers: Peers, journals: dict[str, list[Stretch]]) -> Line:
    """How many were killed, how many newcomers trained, and the longest time without training, the survivors' mean."""
    end = peers.began + peers.task.seconds
    survivors = [own for name, own in journals.items() if name.endswith("-0") and name not in peers.killed]
    late = [own for name, own in journals.items() if not name.endswith("-0")]
    return {
        "killed": len(peers.killed),
        "newcomers_trained": sum(bool(own and own[0].begin < end) for own in late),
        "longest_gap_s": mean(longest_pause(own, peers.began, end) for own in survivors),
    }


def _ended(peers: Peers) -> dict[str, str]:
    """The peers that had ended by themselves before the run was over, with the last lines that they said."""
    return {
        name: _tail(peers.folder / f"{name}.log")
        for name, process in peers.running.items()
        if process.returncode not in (None, -9)
    }


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]


def _lines(path: Path) -> Iterator[Line]:
    """Skips a line that was cut when its peer was killed."""
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:
            continue
