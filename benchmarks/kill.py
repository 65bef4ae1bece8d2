"""What `kill -9` costs: each of four peers is killed and restarted in turn, then all of them at once.

    python -m benchmarks.kill [--seconds 15] [--json FILE]

Real peers run on loopback, as `decentral.local` starts them, one throttled ten times. For each victim it prints the
busy fraction of the others and the longest gap between their `step` lines, `--seconds` before and after the kill; how
long the others took to drop it; whether it came back as the same peer, how long until it trained, and its first
held-out loss beside the others' latest. At the end all are killed and restarted, and held-out losses from before and
after are printed. A line of a journal that tells of an exception, or a traceback in an output, is printed and makes the
exit status 1.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.commands.local_peer import LocalPeer
from decentral.core.journal.events import EvalLine, JoinedLine, JournalEvent
from decentral.core.journal.file import read

Line = dict[str, Any]
EventT = TypeVar("EventT", bound=JournalEvent)
WARM_UP_S = 25.0
REJOIN_S = 60.0
POLL_S = 0.1


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        swarm = LocalSwarm(
            parse_local(["--peers", "4", "--throttle", "1,1,1,10", "--stop-after", "1e4s"]), Path(folder)
        )
        try:
            swarm.start(Console(file=sys.stderr, highlight=False))
            time.sleep(WARM_UP_S)
            rows = [kill_one(swarm, victim, args.seconds) for victim in range(4)]
            rows.append(kill_all(swarm, args.seconds))
            swarm.stop()
            found = trouble(swarm.members)
        finally:
            swarm.kill()
    print("\n".join(found) or "no exception in any output, no error in any journal")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if found:
        raise SystemExit(1)


def kill_one(swarm: LocalSwarm, victim: int, seconds: float) -> Line:
    others = [number for number in range(4) if number != victim]
    name = lines_of(swarm, victim, "started")[-1]["peer"]
    time.sleep(seconds)
    killed_at = time.time()
    kill_peer(swarm, victim)
    time.sleep(seconds)
    dropped = [_first(lines_of(swarm, number, "peer_left"), killed_at, peer=name) for number in others]
    restarted_at = time.time()
    joined = restart(swarm, [victim], restarted_at)[0]
    first_eval = _await(swarm, victim, EvalLine, restarted_at)
    row = {
        "victim": victim,
        "busy_before": [_busy(swarm, number, killed_at - seconds, killed_at) for number in others],
        "busy_after": [_busy(swarm, number, killed_at, killed_at + seconds) for number in others],
        "gap_before_s": max(_gap(swarm, number, killed_at - seconds, killed_at) for number in others),
        "gap_after_s": max(_gap(swarm, number, killed_at, killed_at + seconds) for number in others),
        "dropped_after_s": [round(line["t"] - killed_at, 1) if line else None for line in dropped],
        "same_identity": lines_of(swarm, victim, "started")[-1]["peer"] == name,
        "donors": len(joined.donors),
        "joined_in_s": joined.seconds,
        "first_eval": first_eval.loss,
        "others_eval": [lines_of(swarm, number, "eval")[-1]["loss"] for number in others],
    }
    print(json.dumps(row), flush=True)
    return row


def kill_all(swarm: LocalSwarm, seconds: float) -> Line:
    time.sleep(seconds)
    before = [lines_of(swarm, number, "eval")[-1]["loss"] for number in range(4)]
    killed_at = time.time()
    for number in range(4):
        kill_peer(swarm, number)
    restart(swarm, range(4), killed_at)
    after = [_await(swarm, number, EvalLine, killed_at).loss for number in range(4)]
    time.sleep(seconds)
    later = [lines_of(swarm, number, "eval")[-1]["loss"] for number in range(4)]
    row = {"victim": "all", "eval_before": before, "eval_first_after": after, "eval_later": later}
    print(json.dumps(row), flush=True)
    return row


def _member(swarm: LocalSwarm, number: int) -> LocalPeer:
    return [member for member in swarm.members if member.number == number][-1]


def kill_peer(swarm: LocalSwarm, number: int) -> None:
    process = _member(swarm, number).process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def restart(swarm: LocalSwarm, numbers: Sequence[int], since: float) -> list[JoinedLine]:
    for number in numbers:
        swarm.launch(number, None)
    return [_await(swarm, number, JoinedLine, since) for number in numbers]


def _await(swarm: LocalSwarm, number: int, kind: type[EventT], since: float) -> EventT:
    deadline = time.time() + REJOIN_S
    while time.time() < deadline:
        found = _member(swarm, number).happened(kind, since)
        if found is not None:
            return found
        time.sleep(POLL_S)
    raise SystemExit(f"peer {number} wrote no {kind.__name__} within {REJOIN_S:.0f} s")


def lines_of(swarm: LocalSwarm, number: int, event: str) -> list[Line]:
    return [line for line in read(swarm.folders()[number] / "journal.jsonl") if line["event"] == event]


def _first(lines: Sequence[Line], since: float, peer: str) -> Line | None:
    return next((line for line in lines if line["t"] >= since and line["peer"] == peer), None)


def _steps(swarm: LocalSwarm, number: int, begins: float, ends: float) -> list[Line]:
    return [line for line in lines_of(swarm, number, "step") if begins <= line["t"] <= ends]


def _busy(swarm: LocalSwarm, number: int, begins: float, ends: float) -> float:
    steps = _steps(swarm, number, begins, ends)
    return float(round(sum(line["seconds"] for line in steps[1:]) / (steps[-1]["t"] - steps[0]["t"]), 3))


def _gap(swarm: LocalSwarm, number: int, begins: float, ends: float) -> float:
    moments = [line["t"] for line in _steps(swarm, number, begins, ends)]
    return float(round(max(late - early for early, late in pairwise(moments)), 2))


def trouble(members: Sequence[LocalPeer]) -> list[str]:
    """A line for each journal line that tells of an exception, and for each output with a traceback."""
    found = []
    for member in members:
        errors = [line for line in read(member.folder / "journal.jsonl") if line["event"] == "error"]
        found += [f"peer {member.number}: {line['reason']}" for line in errors]
        output = (member.folder / "output.txt").read_text(errors="replace")
        found += [f"peer {member.number}: a traceback in its output"] * ("Traceback" in output)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="watched before and after each kill")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
