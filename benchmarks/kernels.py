"""Kernels of the outer step beside a copy of the same bytes: `python -m benchmarks.kernels [--elements N,N]`.

A kernel's bytes are those that it has to read and to write, each once; its copy reads half as many and writes them, on
one thread, between the kernel's own repetitions. Both times are the best of several. On the CPU they are the thread's
own time, which other processes do not add to, though they take their share of the memory's speed. Where torch sees a
GPU and cupy is there, the vectors are in pinned memory, and the copy is one to the GPU and back.

`--beside` measures how much a training loop is slowed by kernels in another thread of its process, and as a control by
the same kernels in another process: the difference is what the threads' common lock costs.
"""

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.comm.gossip.outer_kernels import OuterKernels, OuterVectors, Weighted

REPEATS = 7
LEAST_S = 0.01  # a repetition calls a kernel as often as it takes to last so long
COPY_BYTES = 1 << 28  # a copy of more is measured as one of so many, several times
FP32 = 4
PARTNERS = 2
BESIDE_S = 2.0
BESIDE_ROUNDS = 3
RHO = 0.5  # share of the correction that a merge takes


@dataclass(frozen=True, slots=True)
class KernelRate:
    kernel: str
    elements: int
    bytes: int  # read and written
    seconds: float
    copy_seconds: float  # of a copy that reads half of the bytes, and writes as many

    @property
    def elements_per_s(self) -> float:
        return self.elements / self.seconds

    @property
    def copies(self) -> float:
        """How many copies of the same bytes take as long."""
        return self.seconds / self.copy_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=lambda text: [int(one) for one in text.split(",")], default=[65_536, 20_000_000]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--beside", action="store_true", help="measure a training loop beside the kernels as well")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels, reason = best_kernels(device, blockwise)
    if not flags.json:
        print(f"kernels: {reason}")
        print("   elements  kernel                   ms   million/s    GB/s  copy ms  copies")
    for elements in flags.elements:
        for rate in kernel_rates(elements, kernels):
            print(as_json(rate) if flags.json else as_line(rate), flush=True)
        if flags.beside:
            steps_per_s = steps_beside(elements)
            text = ", ".join(f"{name} {rate:.0f}" for name, rate in steps_per_s.items())
            found = json.dumps({"elements": elements, "steps_per_s_beside": steps_per_s})
            print(found if flags.json else f"{elements:11,}  small training steps/s beside kernels: {text}")


def as_line(rate: KernelRate) -> str:
    return (
        f"{rate.elements:11,}  {rate.kernel:20s} {1e3 * rate.seconds:8.3f} {1e-6 * rate.elements_per_s:11.0f}"
        f" {1e-9 * rate.bytes / rate.seconds:7.2f} {1e3 * rate.copy_seconds:8.3f} {rate.copies:7.2f}"
    )


def as_json(rate: KernelRate) -> str:
    return json.dumps({**asdict(rate), "elements_per_s": rate.elements_per_s, "copies": rate.copies})


def kernel_rates(elements: int, kernels: OuterKernels | None = None) -> list[KernelRate]:
    """Each kernel on vectors of so many elements, and the codecs; about 28 bytes of memory for each element."""
    chosen = kernels or best_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"), blockwise)[0]
    copy = Copy()
    return [copy.beside(kernel, elements, size, call) for kernel, size, call in measured(chosen, elements)]


def measured(kernels: OuterKernels, n: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes that it reads and writes, and a call of each kernel."""
    q4, int8 = blockwise.size("q4", n), blockwise.size("int8", n)
    phi, baseline, other, values = (vector(n, seed) for seed in range(4))
    blob, near = blockwise.encode("q4", values), blockwise.encode("int8", phi)
    yield "close", 4 * FP32 * n + q4, partial(kernels.close, phi, baseline, other)
    for code in blockwise.SHORTER_CODECS:
        shorter = blockwise.encode(code, values)
        wide, size = blockwise.widened(code, shorter, n), len(shorter) + q4
        yield f"close {code}", 4 * FP32 * n + q4, partial(kernels.close, phi, baseline, other, code)
        yield f"widen {code}", size, partial(kernels.widen, code, shorter, n)
        yield f"narrow {code}", size, partial(kernels.narrow, code, wide, n)
    yield "length", q4, partial(kernels.length, blob, n)
    yield "distance", FP32 * n + int8, partial(kernels.distance, phi, near)
    own, partners = [Weighted(1 / 3, blob)], [Weighted(1 / 3, near)] * PARTNERS
    alone = OuterVectors(phi, baseline, other)
    yield "merge alone", 5 * FP32 * n + q4, partial(kernels.merge, alone, own, [], RHO)
    together = 5 * FP32 * n + (1 + PARTNERS) * q4 + PARTNERS * int8
    yield f"merge {PARTNERS} partners", together, partial(kernels.merge, alone, own * 3, partners, RHO)
    for codec in blockwise.CODECS:
        size = blockwise.size(codec, n)
        blob = blockwise.encode(codec, phi)
        yield f"encode {codec}", FP32 * n + size, partial(blockwise.encode, codec, phi)
        yield f"decode {codec}", FP32 * n + size, partial(blockwise.decode, codec, blob, n)


def vector(n: int, seed: int) -> Tensor:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return values.pin_memory() if torch.cuda.is_available() else values


class Copy:
    """Copies as many bytes as a kernel reads and writes: within host memory, or to the GPU and back."""

    def __init__(self) -> None:
        self.source = torch.ones(COPY_BYTES, dtype=torch.uint8)
        self.goal = torch.zeros(COPY_BYTES, dtype=torch.uint8)
        if torch.cuda.is_available():
            self.source, self.goal = self.source.pin_memory(), self.goal.cuda()

    def beside(self, kernel: str, elements: int, size: int, call: Callable[[], object]) -> KernelRate:
        """The kernel's best time and the copy's, taken in turn."""
        copied = min(size // 2, COPY_BYTES)
        copy = partial(self._copy, copied)
        calls, copies = often(call), often(copy)
        times = [(timed(call, calls), timed(copy, copies)) for _ in range(REPEATS)]
        seconds, copy_seconds = (min(one[k] for one in times) for k in range(2))
        return KernelRate(kernel, elements, size, seconds, copy_seconds * (size / 2) / copied)

    def _copy(self, size: int) -> None:
        if self.goal.is_cuda:
            self.goal[: size // 2].copy_(self.source[: size // 2], non_blocking=True)
            self.source[size // 2 : size].copy_(self.goal[size // 2 : size], non_blocking=True)
            torch.cuda.synchronize()
        else:
            self.goal[:size].copy_(self.source[:size])


def often(call: Callable[[], object]) -> int:
    call()  # memory that is touched for the first time is slow
    return max(1, round(LEAST_S / timed(call, 1)))


def timed(call: Callable[[], object], times: int) -> float:
    """Seconds of one call: of this thread on the CPU, of everything where a GPU does the work."""
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    began = clock()
    for _ in range(times):
        call()
    return (clock() - began) / times


def steps_beside(elements: int) -> dict[str, float]:
    """Training steps per second of a small model alone, beside a thread, and beside a process that runs kernels."""
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {"alone": [], "thread": [], "process": []}
    for _ in range(BESIDE_ROUNDS):
        found["alone"].append(steps(BESIDE_S))
        for name, make, event in (
            ("thread", threading.Thread, threading.Event()),
            ("process", spawn.Process, spawn.Event()),
        ):
            ready = threading.Event() if name == "thread" else spawn.Event()
            worker = make(target=gossip, args=(elements, ready, event))
            worker.start()
            ready.wait()
            found[name].append(steps(BESIDE_S))
            event.set()
            worker.join()
    return {name: max(rates) for name, rates in found.items()}


def gossip(elements: int, ready: Any, stop: Any) -> None:
    """Closes and merges until it is stopped."""
    torch.set_num_threads(1)
    kernels, _ = best_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"), blockwise)
    work = [call for name, _, call in measured(kernels, elements) if name in ("close", f"merge {PARTNERS} partners")]
    ready.set()
    while not stop.is_set():
        for call in work:
            call()


def steps(seconds: float) -> float:
    """Steps per second of a model so small that Python, and with it the GIL, takes most of the time."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(32, 64)
    began, taken = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
    return taken / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
