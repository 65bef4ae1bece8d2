"""What one slow peer costs the fast ones: this project against hivemind.Optimizer, side by side in one run.

    python benchmarks/straggler.py [--rounds 2] [--seconds 60] [--slow 20] [--json FILE]
    python benchmarks/straggler.py --sweep          # hivemind's settings against each other

The same model, data, batch and machine for all. A micro-batch takes 50 ms on a fast peer and `--slow` times that
on the slow one, mostly by sleeping, so that a few cores can carry all peers. The systems take turns, and each
round starts with another of them, so that a change of the machine's load meets all alike.

All systems are measured for the same time, after the same warm-up, which begins when all peers are present;
hivemind_peer.py says what counts as busy and as useful. Held-out losses after equal training time are printed, but are
no comparison: hivemind has a tuned setting but our learning rate, and our first peer trains some seconds before the
others have joined. Bytes are those that passed over the loopback interface in a system's whole life, per second of
training. For that figure nothing else may use it:

    unshare -rn sh -c 'ip link set lo up; python benchmarks/straggler.py'
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any, Self

from decentral.core.journal.file import read

HERE = Path(__file__).parent
MODEL = [  # 139,584 parameters; forward and backward take about 10 ms of one core, the rest of 50 ms is slept
    "model.depth=2",
    "model.width=64",
    "model.context=64",
    "train.micro_batch=4",
]
Line = dict[str, Any]  # a journal's line, as docs/PROTOCOL.md describes it
START_S = 180.0  # the longest that the peers of a system may take to start
END_S = 60.0  # from the end of a measurement until all processes of a system are gone
HEAD_START_S = 1.0
POLL_S = 0.05
LOG_TAIL = 2000  # characters of a failed child's log that are shown


def main() -> None:
    args = _arguments()
    systems: list[System] = _sweep() if args.sweep else [Ours(), *BEST]
    outcomes: list[Outcome] = []
    for number in range(args.rounds):
        for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
            with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
                outcomes.append(system.run(args, Path(folder)))
            print(f"# round {number + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
    means = [_mean([one for one in outcomes if one.system == system.name]) for system in systems]
    print(_table(means))
    print(_ratios(means))
    if args.json:
        args.json.write_text(json.dumps(_json(args, outcomes, means), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system's run, or the mean of several."""

    system: str
    fast_busy_min: float
    fast_busy_mean: float
    tokens_per_s: float
    useful_tokens_per_s: float
    loopback_bytes_per_s: float
    rounds_per_s: float  # hivemind: global steps; ours: exchanges done by a peer
    heldout_loss: float


@dataclass(frozen=True, slots=True)
class Ours:
    """decentral.local. All its tokens are useful: each micro-batch moves live weights, and each window is merged."""

    name: str = "ours"

    def run(self, args: argparse.Namespace, folder: Path) -> Outcome:
        state, summary, seconds = folder / "state", folder / "summary.json", args.warm_up + args.seconds
        throttles = ",".join(f"{throttle:g}" for throttle in _throttles(args))
        command = ["-m", "decentral.local", "--peers", str(args.peers), "--throttle", throttles, *_overrides(args)]
        command += ["--stop-after", f"{seconds:g}s", "--summary", str(summary), "--state-dir", str(state)]
        before = loopback_bytes()
        with Child([sys.executable, *command], folder / "log") as child:
            child.wait(START_S + seconds + END_S)
        moved = (loopback_bytes() - before) / seconds
        journals = [list(read(state / f"peer-{index}" / "journal.jsonl")) for index in range(args.peers)]
        return self._outcome(args, journals, moved, json.loads(summary.read_text())["swarm"]["heldout_loss"])

    def _outcome(
        self, args: argparse.Namespace, journals: Sequence[list[Line]], moved: float, heldout_loss: float
    ) -> Outcome:
        """The figures from the journals, because the summary's totals include the first peer's head start."""
        joined_at = max(line["t"] for lines in journals for line in lines if line["event"] == "joined")
        begins = joined_at + args.warm_up
        windows = [[line for line in lines if begins < line["t"] <= begins + args.seconds] for lines in journals]
        fast = [lines for lines, throttle in zip(windows, _throttles(args), strict=True) if throttle == 1]
        busy = [_rate(lines, "seconds") for lines in fast]
        tokens_per_s = sum(_rate(lines, "tokens") for lines in windows)
        exchanges = [sum(line.get("outcome") == "done" for line in lines) for lines in fast]
        return Outcome(
            system=self.name,
            fast_busy_min=min(busy),
            fast_busy_mean=mean(busy),
            tokens_per_s=tokens_per_s,
            useful_tokens_per_s=tokens_per_s,
            loopback_bytes_per_s=moved,
            rounds_per_s=mean(exchanges) / args.seconds,
            heldout_loss=heldout_loss,
        )


def _rate(lines: Sequence[Line], key: str) -> float:
    """A figure of the `step` lines per second: each line tells what happened since the one before."""
    steps = [line for line in lines if line["event"] == "step"]
    return float(sum(line[key] for line in steps[1:]) / (steps[-1]["t"] - steps[0]["t"]))


@dataclass(frozen=True, slots=True)
class Hivemind:
    """hivemind.Optimizer in one setting; `full_groups`: averaging begins as soon as all peers are there."""

    name: str
    mode: str
    target_batch: int
    matchmaking_s: float
    state_every: int = 1
    full_groups: bool = True
    float16: bool = False

    def run(self, args: argparse.Namespace, folder: Path) -> Outcome:
        before = loopback_bytes()
        results = [folder / f"{index}.json" for index in range(args.peers)]
        peers: list[Child] = []
        try:
            self._start(args, folder, peers, results)
            for peer in peers:
                peer.wait(args.warm_up + args.seconds + END_S)
        finally:
            for peer in peers:
                peer.end()
        reports = [json.loads(result.read_text()) for result in results]
        return self._outcome(args, reports, loopback_bytes() - before)

    def _start(self, args: argparse.Namespace, folder: Path, peers: "list[Child]", results: Sequence[Path]) -> None:
        """Starts peer 0, then the others, which join it; then all begin at one moment."""
        join: list[str] = []
        for index, (throttle, result) in enumerate(zip(_throttles(args), results, strict=True)):
            own = ["--index", str(index), "--throttle", f"{throttle:g}", "--result", str(result)]
            peers.append(Child(self._command(args) + own + join, folder / f"{index}.log"))
            if not join:
                join = ["--join", peers[0].read("address", START_S)]
        for peer in peers:
            peer.read("ready", START_S)
        _begin_together(peers)

    def _command(self, args: argparse.Namespace) -> list[str]:
        command = [sys.executable, str(HERE / "hivemind_peer.py"), *_overrides(args)]
        command += ["--mode", self.mode, "--target-batch", str(self.target_batch)]
        command += ["--matchmaking-s", str(self.matchmaking_s), "--state-every", str(self.state_every)]
        command += ["--full-groups"] * self.full_groups + ["--float16"] * self.float16
        return [*command, "--peers", str(args.peers), "--warm-up", f"{args.warm_up}", "--seconds", f"{args.seconds}"]

    def _outcome(self, args: argparse.Namespace, reports: Sequence[dict[str, Any]], sent: int) -> Outcome:
        fast = [report for report in reports if report["throttle"] == 1]
        busy = [report["busy_fraction"] for report in fast]
        return Outcome(
            system=self.name,
            fast_busy_min=min(busy),
            fast_busy_mean=mean(busy),
            tokens_per_s=sum(report["tokens"] for report in reports) / args.seconds,
            useful_tokens_per_s=sum(report["useful_tokens"] for report in reports) / args.seconds,
            loopback_bytes_per_s=sent / (args.warm_up + args.seconds),
            rounds_per_s=mean(report["epochs"] for report in fast) / args.seconds,
            heldout_loss=mean(report["heldout_loss"] for report in fast),
        )


System = Ours | Hivemind

# Four peers at full speed make 240 sequences a second: 128 are about our window of 0.5 s, averaging as often as we do.
# Matchmaking and how often states are averaged are tuned for that pace (`--sweep`) in both modes; the first has
# hivemind's default for the latter, every step. The next two take a global step every 4 s, which costs hivemind less
# and teaches less. With local updates each peer steps by itself, and weights are averaged once an epoch.
BEST = [
    Hivemind("hivemind, default states", "sync", 128, 1.5, state_every=1),
    Hivemind("hivemind, synchronous", "sync", 128, 1.5, state_every=5),
    Hivemind("hivemind, delayed", "delayed", 128, 1.5, state_every=5),
    Hivemind("hivemind, sync, 4 s", "sync", 1024, 3.0, state_every=5),
    Hivemind("hivemind, delayed, 4 s", "delayed", 1024, 1.5, state_every=5),
    Hivemind("hivemind, sync, fp16", "sync", 128, 1.5, state_every=5, float16=True),
    Hivemind("hivemind, delayed, fp16", "delayed", 128, 1.5, state_every=5, float16=True),
    Hivemind("hivemind, local updates", "local", 256, 1.5),
    Hivemind("hivemind, local, fp16", "local", 256, 1.5, float16=True),
]


def _sweep() -> list[System]:
    """Settings with global steps about as far apart as our windows, and eight times rarer."""
    settings = itertools.product(("sync", "delayed"), (128, 1024), (1.5, 3.0), (1, 5))
    return [Hivemind(" ".join(map(str, setting)), *setting) for setting in settings]


class Child:
    """One command, in a process group of its own: `end` kills that group and nothing else."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def read(self, word: str, timeout_s: float) -> str:
        """Waits for a line that begins with `word`; gives the rest of it. Raises RuntimeError if none comes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._ended():
            for line in self.log.read_text(errors="replace").splitlines(keepends=True):
                if line.startswith(word) and line.endswith("\n"):
                    return line.removeprefix(word).strip()
            time.sleep(POLL_S)
        raise self._failure(f"it did not say {word!r}")

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended well. Raises RuntimeError with the end of its log if it has not."""
        deadline = time.monotonic() + timeout_s
        while not self._ended():
            if time.monotonic() > deadline:
                raise self._failure(f"it still runs after {timeout_s:g} s")
            time.sleep(POLL_S)
        self.end()
        if self._process.returncode != 0:
            raise self._failure(f"it ended with status {self._process.returncode}")

    def end(self) -> None:
        """Kills what is left of the group, whose number is ours as long as its leader has not been reaped."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> bool:
        """Looks without reaping, so that `end` can still reach the leader's children by the group's number."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _failure(self, reason: str) -> RuntimeError:
        tail = self.log.read_text(errors="replace")[-LOG_TAIL:]
        return RuntimeError(f"{self._process.args!r}: {reason}\n{tail}")


def _begin_together(children: Sequence[Child]) -> None:
    """Tells all of them one Unix time at which to begin, far enough ahead for the line to reach all of them."""
    moment = time.time() + HEAD_START_S
    for child in children:
        child.write(str(moment))


def loopback_bytes() -> int:
    """Bytes received on the loopback interface since it came up, in the network namespace of this process."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise RuntimeError("this machine has no interface named lo")


def _throttles(args: argparse.Namespace) -> list[float]:
    return [1.0] * (args.peers - 1) + [args.slow]


def _overrides(args: argparse.Namespace) -> list[str]:
    keys = MODEL + [f"train.emulated_micro_batch_s={args.micro_batch_s}"] + args.set
    return [part for key in keys for part in ("--set", key)]


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of each figure, except that of the smallest busy fraction the smallest counts."""
    names = [field.name for field in fields(Outcome) if field.name not in ("system", "fast_busy_min")]
    figures = {name: mean(getattr(one, name) for one in outcomes) for name in names}
    return Outcome(outcomes[0].system, min(one.fast_busy_min for one in outcomes), **figures)


def _table(means: Sequence[Outcome]) -> str:
    lines = [
        f"{'':24} {'fast peers busy':>17} {'tokens/s':>9} {'useful/s':>9} {'kB/s':>8} {'rounds/s':>9} {'held out':>9}",
        f"{'':24} {'min':>8} {'mean':>8}",
    ]
    for one in means:
        lines.append(
            f"{one.system:24} {one.fast_busy_min:8.1%} {one.fast_busy_mean:8.1%} {one.tokens_per_s:9.0f}"
            f" {one.useful_tokens_per_s:9.0f} {one.loopback_bytes_per_s / 1e3:8.0f} {one.rounds_per_s:9.2f}"
            f" {one.heldout_loss:9.3f}"
        )
    return "\n".join(lines)


def _ratios(means: Sequence[Outcome]) -> str:
    return "\n".join(
        f"ours / {other}: useful tokens/s {ratio['useful_tokens_per_s']:.2f}, tokens/s {ratio['tokens_per_s']:.2f},"
        f" busy {ratio['fast_busy_mean']:.2f}, bytes/s {ratio['loopback_bytes_per_s']:.2f}"
        for other, ratio in _ratios_of(means).items()
    )


def _ratios_of(means: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Our figures over those of each other system; empty in a sweep, in which our system does not run."""
    names = ("fast_busy_mean", "tokens_per_s", "useful_tokens_per_s", "loopback_bytes_per_s")
    own = [one for one in means if one.system == Ours().name]
    return {
        other.system: {name: getattr(own[0], name) / max(getattr(other, name), 1e-9) for name in names}
        for other in means
        if own and other is not own[0]
    }


def _json(args: argparse.Namespace, outcomes: Sequence[Outcome], means: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "settings": {key: value for key, value in vars(args).items() if key != "json"} | {"model": MODEL},
        "runs": [asdict(one) for one in outcomes],
        "means": [asdict(one) for one in means],
        "ratios": _ratios_of(means),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=20.0, help="the last peer is this many times slower")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured in each run")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds before that")
    parser.add_argument("--micro-batch-s", type=float, default=0.05, help="what a fast peer's micro-batch takes")
    parser.add_argument("--set", action="append", default=[], help="key=value of the config, for all systems")
    parser.add_argument("--sweep", action="store_true", help="hivemind's settings against each other, no ours")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
