"""How large and how long the steps of the check are: on a GPU, and in the rehearsal on a CPU."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.shapes import SIZES
from decentral.core import config
from decentral.engine import measure
from decentral.engine.step import Device

TINY = ("model.depth=2", "model.width=32", "model.context=32", "train.micro_batch=2")
MICRO_BATCH = {"125M": ("train.micro_batch=16",), "10M": ("train.micro_batch=16",)}  # overrides benchmarks.shapes.SIZES
WARM_CALLS = 3
MOST_QUEUED = 20  # calls between two events


@dataclass(frozen=True)
class Scale:
    """Sizes and durations of one kind of run, and the clock of its device."""

    device: str
    tiny: bool  # whatever size is asked for
    loop_s: float  # of a training loop, for each rate
    call_s: float  # of a short call, for each time
    elements: int  # of the kernels' vectors
    gossip_s: float  # of each phase of the gossip step
    swarm_s: float  # in which real peers are measured
    start_s: float  # the longest until a real peer trains
    generated: int  # tokens

    def run(self, size: str, *overrides: str) -> config.Config:
        """Return the config of a byte-level model of this size."""
        return config.load(None, [*self.settings(size), *overrides])

    def settings(self, size: str) -> list[str]:
        """Return what the config of this size sets; it evaluates nothing while something is measured."""
        shape = TINY if self.tiny else (*SIZES[size], *MICRO_BATCH.get(size, ()))
        return [*shape, "train.eval_every_s=1e6"]

    @cached_property
    def computing(self) -> Device:
        """The device, in the dtype that a peer chooses for it."""
        return measure.choose(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.computing.device.type == "cuda"

    @property
    def name(self) -> str:
        """The device's name."""
        return measure.device_name(self.computing.device)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.computing.device)

    def forget(self) -> None:
        """Give back what finished measurements have left on the device, and count its memory's peak from here."""
        if self.on_gpu:
            gc.collect()  # a peer's objects refer to each other, so they would keep its memory
            torch.compiler.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the most memory of the GPU that tensors had since `forget`; None on a CPU, where nobody counts it."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else None

    def reserved_bytes(self) -> int | None:
        """Return the most memory that torch's allocator took for these tensors since `forget`; None on a CPU."""
        return torch.cuda.max_memory_reserved() if self.on_gpu else None

    def seconds(self, call: Callable[[], object], queued: bool = False) -> float:
        """Return the seconds of one call, the device's work included: the mean over `call_s`, after one call.

        `queued`: wait for the device only after the last call, as a training loop does.
        """
        call()
        self.wait()
        began, times = time.perf_counter(), 0
        while times == 0 or time.perf_counter() - began < self.call_s:
            call()
            times += 1
            if not queued:
                self.wait()
        self.wait()
        return (time.perf_counter() - began) / times

    def device_seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that one call takes the device, by events in its present stream: many are queued at once.

        On a CPU these are `seconds`.
        """
        if not self.on_gpu:
            return self.seconds(call)
        for _ in range(WARM_CALLS):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(MOST_QUEUED):
            call()
        end.record()
        self.wait()
        return float(begin.elapsed_time(end)) / 1e3 / MOST_QUEUED


CARD = Scale(
    device="cuda",
    tiny=False,
    loop_s=2.5,
    call_s=0.3,
    elements=64_000_000,
    gossip_s=6.0,
    swarm_s=14.0,
    start_s=90.0,
    generated=128,
)
REHEARSAL = Scale(
    device="cpu",
    tiny=True,
    loop_s=0.05,
    call_s=0.005,
    elements=4_096,
    gossip_s=0.1,
    swarm_s=5.0,
    start_s=180.0,
    generated=4,
)
