"""The memory of each rank of an island that divides a model, beside one process; and two islands as a swarm.

    python -m benchmarks.islands [--size 85M] [--ranks 1,2,4] [--split parts] [--set KEY=VALUE] [--json FILE]
    python -m benchmarks.islands --swarm 60 [--size 85M] [--ranks 2] ...

The first line measures the engine alone. For each number of ranks, fresh processes build the model, take steps, close
and merge a window of every fragment with three partners' windows, serve a newcomer, and write a checkpoint and resume.
A rank's memory is its peak of resident memory in that time, the process itself (torch, data) included. "of one" is the
largest rank's against one process's; "without files" the same without pages of files, such as torch's libraries;
"without process" the same without memory in use before the model is built, but after one step of a tiny layer and one
encoded vector, so that torch, FSDP2 and the codecs are loaded.

With --swarm, two islands of real peers join over loopback, and train and exchange windows for so many seconds. Their
peaks less those of `--size 0.5M`, which are the process itself, compare with those of --ranks 1.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.memory import resident
from benchmarks.shapes import SIZES
from benchmarks.sizes import rate
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.core.journal.file import read
from decentral.core.rank_place import Split
from decentral.data import corpora
from decentral.engine import heap, memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.island import Assignment, Island, follow
from decentral.engine.step import ALONE, Device

START_S = 600.0
POLL_S = 0.5
STEPS = 2  # between two jobs of gossip
MB = 1e6
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Measured:
    """Peaks of resident memory by rank, and what else was found."""

    ranks: int
    peaks: list[int]
    of_files: list[int]  # by rank: resident bytes of mapped files; most are torch's libraries, which processes share
    before: list[int]  # by rank: resident bytes before the model is built
    counted: int  # bytes that engine/memory.py counts for a rank
    peaks_0: dict[str, int]  # rank 0's peaks after each kind of work
    losses: list[float]
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="85M")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--split", type=Split, choices=[Split.PARTS, Split.TENSOR], default=Split.PARTS)
    parser.add_argument("--set", action="append", default=[], help="such as model.context=32, where cores are few")
    parser.add_argument("--swarm", type=float, metavar="SECONDS", help="two islands of real peers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    overrides = [*SIZES[args.size], *args.set]
    if args.swarm:
        for ranks in args.ranks:
            print(json.dumps(two_islands(overrides, ranks, args.split, args.swarm)), flush=True)
        return
    rows: list[Measured] = []
    heads = {
        "ranks": 5,
        "rank 0, MB": 11,
        "others, MB": 11,
        "of one": 7,
        "without files": 15,
        "without process": 17,
        "counted, MB": 12,
        "step, s": 8,
    }
    print(" ".join(head.rjust(width) for head, width in heads.items()))
    for ranks in args.ranks:
        rows.append(measure(overrides, ranks, args.split))
        print(_line(rows[-1], rows[0]), flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _line(row: Measured, first: Measured) -> str:
    own = [peak - files for peak, files in zip(row.peaks, row.of_files, strict=True)]
    alone = first.peaks[0] - first.of_files[0]
    built = first.peaks[0] - first.before[0]
    added = [peak - before for peak, before in zip(row.peaks, row.before, strict=True)]
    others = f"{max(row.peaks[1:]) / MB:.0f}" if row.ranks > 1 else "-"
    return (
        f"{row.ranks:>5} {row.peaks[0] / MB:>11.0f} {others:>11} {max(row.peaks) / first.peaks[0]:>7.2f} "
        f"{max(own) / alone:>15.2f} {max(added) / built:>17.2f} {row.counted / MB:>12.0f} {row.step_s:>8.2f}"
    )


# The engine alone


def measure(overrides: list[str], ranks: int, split: Split) -> Measured:
    run = config.load(None, overrides)
    needs = memory.needs(run)
    if ranks > 1:
        needs = memory.part_of(needs, run, ranks)
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Barrier(ranks)
        arguments = [(rank, ranks, split, store.port, overrides, Path(folder), done) for rank in range(ranks)]
        processes = [spawn.Process(target=_rank, args=one) for one in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes), "a rank failed"
        found = json.loads((Path(folder) / "found.json").read_text())
        ended = [json.loads((Path(folder) / f"rank-{rank}").read_text()) for rank in range(ranks)]
    peaks, of_files, before = ([one[place] for one in ended] for place in range(3))
    counted = needs.span_bytes(0, len(needs.fragments))
    return Measured(ranks=ranks, peaks=peaks, of_files=of_files, before=before, counted=counted, **found)


def _rank(rank: int, ranks: int, split: Split, port: int, overrides: list[str], folder: Path, done: Barrier) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    island = Island(CPU) if ranks > 1 else None
    if rank:
        assert island is not None
        assignment = island.assignment()
        assert assignment is not None
        heap.give_back_what_is_freed(ranks)
        before = _without_model()
        kernels, _ = best_kernels(CPU, blockwise)
        follow(island, assignment, Device(CPU, torch.float32, ranks=island), kernels)
    else:
        before = _lead(island, split, config.load(None, overrides), folder)
    (folder / f"rank-{rank}").write_text(json.dumps([resident("VmHWM"), resident("RssFile"), before]))
    done.wait()


def _without_model() -> int:
    """Return this process's resident bytes, after loading what training and gossip of any model load."""
    tiny, wanted = torch.nn.Linear(64, 64), torch.ones(8, dtype=torch.int64)
    torch.autograd.backward(torch.nn.functional.cross_entropy(tiny(torch.ones(8, 64)), wanted))
    blockwise.encode("int8", torch.ones(1 << 12))
    importlib.import_module("decentral.engine.sharded")
    return resident("VmRSS")


def _lead(island: Island | None, split: Split, run: config.Config, folder: Path) -> int:
    """Train and gossip as rank 0. Returns its resident bytes before it builds the model."""
    sequences = run.train.micro_batch
    assert isinstance(sequences, int)
    if island is not None:
        island.decide(split)
        island.assign(Assignment(run, PeerId("A"), sequences, split))
    heap.give_back_what_is_freed(island.size if island else 1)
    device = Device(CPU, torch.float32, ranks=island or ALONE)
    corpus = corpora.load(run.data, run.model)
    kernels, _ = best_kernels(CPU, blockwise)
    before = _without_model()
    compute = Compute(ComputeSetup(run, PeerId("A"), corpus, blockwise, device, folder, kernels=kernels))
    began = time.perf_counter()
    losses = [compute.step().loss for _ in range(STEPS)]
    step_s, peaks = (time.perf_counter() - began) / STEPS, {"steps": resident("VmHWM")}
    for fragment in compute.fragments:
        closed = compute.do(jobs.CloseWindow(fragment.index, 1))
        assert isinstance(closed, jobs.WindowClosed), closed
        names = tuple(section.name for section in closed.on_request)
        slow = compute.do(jobs.EncodeSections(fragment.index, 1, names))
        assert isinstance(slow, jobs.SectionsEncoded), slow
        layout, blob = (*closed.layout, *slow.layout), closed.blob + slow.blob
        partners = [jobs.Contribution(PeerId(name), 1, layout, blob) for name in "BCD"]
        merged = compute.do(jobs.Merge(fragment.index, 1, tuple(partners)))
        assert isinstance(merged, jobs.Merged), merged
        compute.do(jobs.ExportState(fragment.index))
    peaks["gossip"] = resident("VmHWM")
    saved = compute.do(jobs.Save())
    assert isinstance(saved, jobs.Saved), saved
    peaks["checkpoint"] = resident("VmHWM")
    assert compute.resume()
    peaks["resume"] = resident("VmHWM")
    losses += [compute.step().loss for _ in range(STEPS)]
    (folder / "found.json").write_text(json.dumps({"peaks_0": peaks, "losses": losses, "step_s": step_s}))
    if island is not None:
        island.close()
    return before


# A swarm


def two_islands(overrides: list[str], ranks: int, split: Split, seconds: float) -> dict[str, Any]:
    """Two islands of real peers that join over loopback: memory by rank, tokens/s, and exchanged windows."""
    flags = [part for key in [*overrides, "train.eval_every_s=1e6"] for part in ("--set", key)]
    device = ["--device", ",".join(["cpu"] * ranks), *(["--split", split] if ranks > 1 else [])]
    with tempfile.TemporaryDirectory(prefix="islands-") as folder:
        first, second = Path(folder) / "a", Path(folder) / "b"
        with _peer(first, *flags, *device):
            _until("the first trains", lambda: bool(_lines(first, "step")))
            address = _lines(first, "started")[0]["addresses"][0]
            with _peer(second, "--join", address, *device):
                _until("both exchange", lambda: all(_exchanges(one) for one in (first, second)))
                began = time.time()
                time.sleep(seconds)
                steps = [[line for line in _lines(one, "step") if line["t"] >= began] for one in (first, second)]
                return {
                    "ranks": ranks,
                    "peaks": [[_peak(pid) for pid in _pids(one)] for one in (first, second)],
                    "tokens_per_s": [rate(lines) for lines in steps],
                    "loss": [lines[-1]["loss"] for lines in steps if lines],
                    "exchanges": [_exchanges(one) for one in (first, second)],
                }


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
