"""Two islands that train one model over loopback: the memory of each rank, and tokens/s.

    python -m benchmarks.islands [--size 85M] [--ranks 1,2,4] [--seconds 60] [--json FILE]

For each number of ranks, two peers are started, with so little --memory that each rank has only a part of the model.
With one rank they are plain peers, beside which the memory of the others is compared. A rank's memory is its peak of
resident memory, the process itself included, after both peers have trained and exchanged windows for some seconds.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import SIZES
from benchmarks.sizes import rate
from decentral.core import config
from decentral.core.journal.file import read
from decentral.engine import memory

START_S = 300.0
POLL_S = 0.5
MB = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """Two peers of so many ranks: peaks of resident memory by rank, of both peers, and what they did."""

    ranks: int
    peaks: list[list[int]]
    tokens_per_s: float
    exchanges: int
    said: int  # bytes that engine/memory.py counts for a rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="85M")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    heads = {
        "ranks": 5,
        "rank 0, MB": 11,
        "others, MB": 11,
        "of one": 7,
        "counted, MB": 12,
        "tokens/s": 9,
        "exchanges": 9,
    }
    print(" ".join(head.rjust(width) for head, width in heads.items()))
    for ranks in args.ranks:
        rows.append(measure(SIZES[args.size], ranks, args.seconds))
        print(_line(rows[-1], rows[0]), flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _line(row: Measured, first: Measured) -> str:
    leads, others = [peaks[0] for peaks in row.peaks], [peak for peaks in row.peaks for peak in peaks[1:]]
    most = max(leads + others) / max(peak for peaks in first.peaks for peak in peaks)
    rest = f"{max(others) / MB:.0f}" if others else "-"
    return (
        f"{row.ranks:>5} {max(leads) / MB:>11.0f} {rest:>11} {most:>7.2f} {row.said / MB:>12.0f} "
        f"{row.tokens_per_s:>9.0f} {row.exchanges:>9}"
    )


def measure(overrides: list[str], ranks: int, seconds: float) -> Measured:
    run = config.load(None, overrides)
    needs = memory.needs(run)
    said = needs.span_bytes(0, len(needs.fragments))
    flags = [part for key in [*overrides, "train.eval_every_s=1e6"] for part in ("--set", key)]
    if ranks > 1:
        said = memory.part_of(needs, run, ranks).span_bytes(0, len(needs.fragments))
    device = ["--device", ",".join(["cpu"] * ranks), *(["--memory", f"{said}"] if ranks > 1 else [])]
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        first, second = Path(folder) / "a", Path(folder) / "b"
        with _peer(first, *flags, *device):
            _until("the first starts", lambda: bool(_lines(first, "started")))
            address = _lines(first, "started")[0]["addresses"][0]
            with _peer(second, "--join", address, *device):
                _until("both exchange", lambda: all(_exchanges(one) for one in (first, second)))
                began = time.time()
                time.sleep(seconds)
                steps = [[line for line in _lines(one, "step") if line["t"] >= began] for one in (first, second)]
                return Measured(
                    ranks=ranks,
                    peaks=[[_peak(pid) for pid in _pids(one)] for one in (first, second)],
                    tokens_per_s=sum(map(rate, steps)),
                    exchanges=sum(map(_exchanges, (first, second))),
                    said=said,
                )


@contextmanager
def _peer(folder: Path, *flags: str) -> Iterator[None]:
    """A running peer; in the end its processes are killed, since a last checkpoint would take long."""
    folder.mkdir()
    command = [sys.executable, "-m", "decentral.peer", "--plain", "--listen", "/ip4/127.0.0.1/tcp/0"]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen([*command, "--state-dir", str(folder), *flags], stdout=output, stderr=output)
        (folder / "pid").write_text(f"{process.pid}")
        try:
            yield
        finally:
            process.kill()
            for pid in _pids(folder):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def _pids(folder: Path) -> list[int]:
    """The processes of a peer's ranks, or the one process of a plain peer."""
    formed = _lines(folder, "island")
    return [one["pid"] for one in formed[-1]["ranks"]] if formed else [int((folder / "pid").read_text())]


def _lines(folder: Path, event: str) -> list[dict[str, Any]]:
    journal = folder / "journal.jsonl"
    return [line for line in read(journal) if line["event"] == event] if journal.exists() else []


def _exchanges(folder: Path) -> int:
    return sum(line["outcome"] == "done" for line in _lines(folder, "exchange"))


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _until(what: str, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {START_S:.0f} s")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
