"""The outer step's kernels: which are chosen; their speed from host memory, and on the device beside a copy."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale
from benchmarks.kernels import measured
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.cuda_source import SIGNS_ARGUMENT
from decentral.comm.gossip.kernel_choice import best_kernels

if TYPE_CHECKING:
    from decentral.comm.gossip.kernels_cuda import CudaKernels

OUTER = ("close", "merge", "length", "distance")  # of benchmarks/kernels.py; the codecs run on the host
CODECS = ("bf16", "int8", "q4")  # of activations
STEPS, TOWARDS = 3, 2  # pseudo-gradients and slow weights that the merge reads
FP32 = 4
WARP = 32


def measure(scale: Scale, notes: Notes) -> None:
    """Note which kernels a peer would get here, and the times of each."""
    began = time.perf_counter()
    kernels, reason = best_kernels(scale.computing.device, blockwise)
    notes.put("chosen", reason)
    notes.put("choosing, s", time.perf_counter() - began)
    if scale.on_gpu:
        notes.attempt("on the device", lambda: on_device(scale))
    for name, size, call in measured(kernels, scale.elements):
        if name.startswith(OUTER):
            seconds = scale.seconds(call)
            notes.put(f"from host memory, {name}", {"ms": 1e3 * seconds, "GB/s": size / seconds / 1e9})
    activation = torch.randn(scale.elements // 4, device=scale.computing.device)
    for codec in CODECS:
        seconds = scale.seconds(partial(blockwise.encode, codec, activation))
        notes.put(f"encoding an activation, {codec}", {"elements": len(activation), "ms": 1e3 * seconds})


def on_device(scale: Scale) -> dict[str, dict[str, float]]:
    """Return each CUDA kernel's speed on vectors that are all in the GPU's memory, beside a copy of as many bytes."""
    from decentral.comm.gossip.kernels_cuda import CudaKernels

    kernels = CudaKernels(scale.computing.device)
    with kernels._slots[0].entered():
        return {name: beside_copy(scale, size, call) for name, size, call in launches(scale.elements, kernels)}


def launches(n: int, kernels: "CudaKernels") -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield name, bytes read and written, and a call of each CUDA kernel on vectors of n elements.

    The calls go past the public methods, which copy results to the host, to the launch itself.
    """
    device, blocks, halves = kernels.device, -(-n // 128), -(-n // 256)  # blocks of q4, and of int8
    vectors = [torch.randn(n, device=device) for _ in range(3)]
    blob = torch.empty(blockwise.size("q4", n), dtype=torch.uint8, device=device)
    steps = encoded("q4", vectors[1]).repeat(STEPS)
    towards = encoded("int8", vectors[0]).repeat(TOWARDS)
    factors = torch.full((STEPS + TOWARDS + 4,), 0.25, device=device)
    squares, peaks = kernels._results(blocks)
    for code, signs in SIGNS_ARGUMENT.items():
        counts = np.int64(n), np.int64(0), np.int64(blocks), np.int32(signs)
        arguments: list[Tensor | np.integer] = [*vectors, *counts, blob, squares, peaks]
        yield f"close {code}", 4 * FP32 * n + len(blob), partial(kernels._launch, "close_q4", WARP * blocks, arguments)
    read = steps[: len(blob)], np.int64(n), np.int64(blocks), squares, peaks
    yield "length q4", len(blob), partial(kernels._launch, "length_q4", WARP * blocks, read)
    far = vectors[0], np.int64(n), np.int64(0), np.int64(halves), towards, squares, peaks
    size = FP32 * n + len(towards) // TOWARDS
    yield "distance int8", size, partial(kernels._launch, "distance_int8", WARP * halves, far)
    where, blobs = (
        (np.int64(n), np.int64(0), np.int64(n)),
        (steps, np.int32(STEPS), towards, np.int32(TOWARDS), factors),
    )
    merge: list[Tensor | np.integer] = [*vectors, *where, *blobs]
    size = 5 * FP32 * n + len(steps) + len(towards)
    yield f"merge of {STEPS} steps and {TOWARDS} pulls", size, partial(kernels._launch, "merge", n, merge)


def encoded(codec: str, vector: Tensor) -> Tensor:
    """Return the codec's bytes on the vector's device."""
    blob = np.frombuffer(blockwise.encode(codec, vector), np.uint8)
    return torch.from_numpy(blob.copy()).to(vector.device)


def beside_copy(scale: Scale, size: int, call: Callable[[], object]) -> dict[str, float]:
    """Return a kernel's time and bytes/s, and these over those of a copy on the device of as many bytes."""
    seconds = scale.device_seconds(call)
    source = torch.empty(size // 2, dtype=torch.uint8, device=scale.computing.device)
    goal = torch.empty_like(source)
    copy_s = scale.device_seconds(partial(goal.copy_, source))
    return {"ms": 1e3 * seconds, "GB/s": size / seconds / 1e9, "of a copy": copy_s / seconds}
