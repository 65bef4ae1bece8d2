"""Training: the project's step against a bare torch loop of the same model, in one process.

The two rates of a ratio are measured one after the other, on one card and from the same weights. These are drawn only
once, on the host: for a billion parameters that takes 16 to 29 s.
"""

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks import bare_loop
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import WARM_CALLS, Scale
from benchmarks.shapes import utilisation
from decentral.comm.codecs import blockwise
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Device
from decentral.model import decoder

COMPILED = ("train.optimizer=adamw", "train.compile=true")
SMALL_RATE = 1e-4  # of the steps that only the optimizer takes


def measure(scale: Scale, notes: Notes, size: str, optimizer: str) -> None:
    """Note what a training step takes with this optimizer, ours and the bare loop's."""
    compare(scale, notes, optimizer, scale.run(size, f"train.optimizer={optimizer}"), size)


def measure_compiled(scale: Scale, notes: Notes, size: str, loops: str = "ours,bare") -> None:
    """Note the same with AdamW and compiled layers, of the loops that are named."""
    compare(scale, notes, "compiled", scale.run(size, *COMPILED), size, loops)


def compare(scale: Scale, notes: Notes, name: str, run: config.Config, size: str, loops: str = "ours,bare") -> None:
    """Note what the loops show of this run, and the memory that a peer would claim."""
    layers = drawn(scale, notes, size)
    notes.put(f"claimed bytes, {name}", whole_claim(run))
    known = {"ours": ours, "bare": bare}
    for which in loops.split(","):
        notes.attempt(f"{which}, {name}", partial(known[which], scale, run, layers))
        scale.forget()


def compile_ahead(scale: Scale, notes: Notes, size: str, which: str) -> None:
    """Take one step of a compiled loop, so that the compiler's cache on disk has what `measure_compiled` needs."""
    layers, run = drawn(scale, notes, size), scale.run(size, *COMPILED)
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        step = peer_step(scale, run, layers, Path(folder)).step if which == "ours" else bare_step(scale, run, layers)
        step()
        scale.wait()
    notes.put("compiling, s", perf_counter() - began)


def drawn(scale: Scale, notes: Notes, size: str) -> list[nn.Module]:
    """Return the model's layers with their initial weights, in the host's memory."""
    began, run = perf_counter(), scale.run(size)
    layers = decoder.build(run.model, run.seed)
    notes.put("parameters", sum(decoder.parameters(run.model)))
    notes.put("drawing, s", perf_counter() - began)
    return layers


def whole_claim(run: config.Config) -> int:
    """Return the bytes of memory that a peer with a GPU claims for the whole model, in bf16."""
    needs = memory.needs_on(run, Device(torch.device("cuda"), torch.bfloat16))
    return needs.span_bytes(0, len(needs.fragments))


def ours(scale: Scale, run: config.Config, layers: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the speed of a peer's training step, what its parts take, and the peak of the GPU's memory."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        compute = peer_step(scale, run, layers, Path(folder))
        found = speed(scale, run, lambda: sum(step.tokens for step in compute.step_ahead()))
        peaks = {"peak_bytes": scale.peak_bytes(), "reserved_bytes": scale.reserved_bytes()}
        return found | peaks | parts(scale, compute)


def bare(scale: Scale, run: config.Config, layers: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the speed of a plain torch loop, and the peak of the GPU's memory."""
    found = speed(scale, run, bare_step(scale, run, layers))
    return found | {"peak_bytes": scale.peak_bytes()}


def peer_step(scale: Scale, run: config.Config, layers: Sequence[nn.Module], folder: Path) -> Compute:
    """Return what a peer trains with, these weights in it. Nothing gossips, so no memory for gossip is taken."""
    corpus = corpora.load(run.data, run.model)
    compute = Compute(ComputeSetup(run, PeerId("A"), corpus, blockwise, scale.computing, folder, state_expected=True))
    for live in compute.span.inner.lives:
        live.set_weights(layers, 0)
    return compute


def bare_step(scale: Scale, run: config.Config, layers: Sequence[nn.Module]) -> Callable[[], int]:
    """Return a call that takes one step of the bare loop with a copy of these weights, and returns its tokens."""
    device = scale.computing
    model = nn.Sequential(*copy.deepcopy(layers)).to(device.device)
    forward = torch.compile(model) if run.train.compile and scale.on_gpu else model
    return bare_loop.steps(run, forward, model, device.device, device.dtype).__next__


def speed(scale: Scale, run: config.Config, step: Callable[[], int]) -> dict[str, Any]:
    """Return tokens/s, the time of a step and the model FLOPs utilisation, after some steps that are not counted."""
    for _ in range(WARM_CALLS):
        step()
    scale.wait()
    began, tokens, steps = perf_counter(), 0, 0
    while steps == 0 or perf_counter() - began < scale.loop_s:
        tokens += step()
        steps += 1
    scale.wait()
    took_s = perf_counter() - began
    used = utilisation(run, tokens / took_s, scale.name)
    return {"tokens_per_s": tokens / took_s, "step_ms": 1e3 * took_s / steps, "mfu": used}


def parts(scale: Scale, compute: Compute) -> dict[str, float]:
    """Return the milliseconds of the parts of a step, each by itself, with several in the device's queue."""
    inner, device, forward = compute.span.inner, compute.setup.device, compute.span.forward
    batch = compute.batch(0)

    def passes() -> None:
        inner.zero_grad()
        with device.autocast():
            loss = forward.loss(*device.sent(batch))
        loss.backward()  # type: ignore[no-untyped-call]

    calls: dict[str, Callable[[], object]] = {
        "passes_ms": passes,
        "clip_ms": inner.clip,
        "optimizer_ms": lambda: inner.step_all(SMALL_RATE, 1),
        "fetch_ms": lambda: compute.batch(0),
    }
    return {name: 1e3 * scale.seconds(call, queued=True) for name, call in calls.items()}
