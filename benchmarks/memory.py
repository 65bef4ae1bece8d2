"""How much memory a peer's layers really take, against what it claims: `python -m benchmarks.memory [--case NAME]`.

Each case is a fresh process that builds its layers and does what a peer does with them. With a part of the model,
USUAL_IN_FLIGHT micro-batches go forward before the first comes back, a step is taken, every fragment closes a window,
merges three partners' snapshots, and is given to a newcomer. With the whole model, steps are taken, the windows of all
fragments wait at a time and partners get their slow weights, all are merged, and a checkpoint is written. The process's
peak of resident memory, less what it had before it built anything (torch, data, and one round with a tiny model), is
compared with engine/memory.py's bytes for the same layers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.shapes import SIZES
from decentral.comm.codecs import blockwise
from decentral.core import config, jobs, memory_needs
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Device

MB = 1e6
WHOLE = (0, -1)
CASES = {  # overrides, and the span in fragments
    "10 M, whole": (SIZES["10M"], WHOLE),
    "10 M, whole, AdamW": ([*SIZES["10M"], "train.optimizer=adamw"], WHOLE),
    "10 M, accumulated": ([*SIZES["10M"], "train.accumulate=4"], WHOLE),
    "10 M, recomputed": ([*SIZES["10M"], "train.recompute=true"], WHOLE),
    "85 M, whole": (SIZES["85M"], WHOLE),
    "85 M, whole, AdamW": ([*SIZES["85M"], "train.optimizer=adamw"], WHOLE),
    "narrow, front half": (["model.depth=6", "model.width=256", "model.context=128"], (0, 4)),
    "narrow, back half": (["model.depth=6", "model.width=256", "model.context=128"], (4, 8)),
    "wide, front half": (["model.depth=4", "model.width=768", "model.context=128"], (0, 3)),
    "wide, middle": (["model.depth=4", "model.width=768", "model.context=128"], (2, 4)),
    "wide, back half": (["model.depth=4", "model.width=768", "model.context=128"], (3, 6)),
    "long context": (["model.depth=4", "model.width=256", "model.context=1024"], (0, 3)),
    "large vocabulary": (["model.depth=2", "model.width=256", "model.context=128", "model.vocabulary=32000"], (2, 4)),
    "128,000 tokens": (
        ["model.depth=2", "model.width=64", "model.context=128", "model.vocabulary=128000", "train.micro_batch=4"],
        (2, 4),
    ),
    "wide, Muon": (["model.depth=4", "model.width=768", "train.optimizer=muon"], (2, 4)),
    "wide, bf16 weights": (["model.depth=4", "model.width=768", "train.weights=bfloat16"], (2, 4)),
    "long, recomputed": (["model.depth=4", "model.width=256", "model.context=1024", "train.recompute=true"], (0, 3)),
    "large micro-batch": (["model.depth=4", "model.width=256", "train.micro_batch=64"], (1, 3)),
}
OF_PARTS = ["train.micro_batch=8", "gossip.fragment_parameters=10000"]
TINY = ["model.depth=2", "model.width=64", "model.context=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="this process measures it, and prints one line of JSON")
    chosen = parser.parse_args().case
    if chosen:
        print(json.dumps(measured(*CASES[chosen])))
        return
    print(f"{'case':<22} {'parameters':>12} {'claimed, MB':>12} {'taken, MB':>10} {'claimed/taken':>14}")
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.memory", "--case", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        claimed, taken, parameters = json.loads(done.stdout)
        numbers = f"{parameters:>12,} {claimed / MB:>12.1f} {taken / MB:>10.1f} {claimed / taken:>14.2f}"
        print(f"{name:<22} {numbers}", flush=True)


def measured(overrides: list[str], span: tuple[int, int]) -> tuple[int, int, int]:
    """Return the bytes that a peer claims, the most bytes that the process took, and the number of parameters."""
    torch.set_num_threads(1)
    whole = span == WHOLE
    fixed, exercise = ([], exercise_whole) if whole else (OF_PARTS, exercise_part)
    tiny, run = (config.load(None, [*fixed, *more]) for more in (TINY, overrides))
    memory.choose_what_is_kept(run, whole)
    needs = memory.needs(run)
    begin, end = (0, len(needs.fragments)) if whole else span
    with tempfile.TemporaryDirectory() as folder:
        exercise(tiny, (0, len(memory.needs(tiny).fragments) if whole else 1), Path(folder) / "tiny")
        setup_of(run, (0, 1), Path(folder) / "data")  # the text is in memory now
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident
        before = resident("VmRSS")
        exercise(run, (begin, end), Path(folder) / "real")
        parameters = sum(one.parameters for one in needs.fragments[begin:end])
        claimed = needs.span_bytes(begin, end, None if whole else memory_needs.USUAL_IN_FLIGHT)
        return claimed, resident("VmHWM") - before, parameters


def resident(what: str) -> int:
    """Bytes on this line of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def setup_of(run: config.Config, span: tuple[int, int], folder: Path) -> ComputeSetup:
    folder.mkdir(exist_ok=True)
    device = Device(torch.device("cpu"), torch.float32)
    layers = memory.needs(run).span(*span)
    return ComputeSetup(run, PeerId("A"), corpora.load(run.data, run.model), blockwise, device, folder, layers)


def exercise_whole(run: config.Config, span: tuple[int, int], folder: Path) -> None:
    """Do what a peer with the whole model does: steps, windows that all wait, merges, and a checkpoint."""
    compute = Compute(setup_of(run, span, folder))
    compute.do(jobs.Start(newcomer=False))
    compute.step()
    for seq in (1, 2):  # the second windows also have what the first have not published
        closed = []
        for fragment in compute.fragments:
            window = compute.do(jobs.CloseWindow(fragment.index, seq))
            assert isinstance(window, jobs.WindowClosed)
            names = tuple(section.name for section in window.on_request)
            closed.append((window, compute.do(jobs.EncodeSections(fragment.index, seq, names))))
        compute.step()
        compute.step()  # so that AdamW does not take all of the correction
        for window, encoded in closed:
            assert isinstance(encoded, jobs.SectionsEncoded)
            merge(compute, window, seq)
        compute.step()
    assert isinstance(compute.do(jobs.Save()), jobs.Saved)
    compute.step()


def merge(compute: Compute, window: jobs.WindowClosed, seq: int = 1) -> None:
    """Merge the window with three partners' windows, which are copies of it."""
    partners = [jobs.Contribution(PeerId(n), 1, window.layout, window.blob) for n in "BCD"]
    merged = compute.do(jobs.Merge(window.fragment, seq, tuple(partners)))
    assert isinstance(merged, jobs.Merged), merged


def exercise_part(run: config.Config, span: tuple[int, int], folder: Path) -> None:
    """Do what a peer with these fragments does: micro-batches, a step, windows, merges, and an export."""
    compute = Compute(setup_of(run, span, folder))
    first, last = compute.fragments[0].first, compute.fragments[-1].last
    for number in range(2 * memory_needs.USUAL_IN_FLIGHT):
        forward(compute, run, number, first, last)
        if number >= memory_needs.USUAL_IN_FLIGHT - 1:
            backward(compute, run, number - memory_needs.USUAL_IN_FLIGHT + 1, last)
    executions = compute.do(jobs.Seal())
    assert isinstance(executions, jobs.Sealed)
    compute.do(jobs.Apply(1, 1, 0.0))
    for fragment in compute.fragments:
        closed = compute.do(jobs.CloseWindow(fragment.index, 1))
        assert isinstance(closed, jobs.WindowClosed)
        merge(compute, closed)
        compute.do(jobs.ExportState(fragment.index))


def forward(compute: Compute, run: config.Config, number: int, first: int, last: int) -> None:
    if first == 0:
        done = compute.do(jobs.Draw(number, last))
    else:
        sequences = run.train.micro_batch
        assert isinstance(sequences, int)
        expected = compute.span.forms(first, sequences).entering[0]
        hidden = blockwise.encode(expected[0].codec, 0.1 * torch.randn(expected[0].elements))
        blob = hidden + bytes(expected[1].size)
        done = compute.do(jobs.Forward(number, first, last, sequences, expected, blob))
    assert isinstance(done, jobs.ForwardDone | jobs.BackwardDone), done


def backward(compute: Compute, run: config.Config, number: int, last: int) -> None:
    """The last peer's backward pass is done with its forward pass."""
    if last == compute.span.model_layers:
        return
    sequences = run.train.micro_batch
    assert isinstance(sequences, int)
    ((section,),) = compute.span.forms(last, sequences).gradients
    blob = blockwise.encode(section.codec, 1e-3 * torch.randn(section.elements))
    done = compute.do(jobs.Backward(number, (section,), blob))
    assert isinstance(done, jobs.BackwardDone), done


if __name__ == "__main__":
    main()
