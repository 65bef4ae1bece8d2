"""The ceilings of a GPU, below which all other figures are: copies on the device and over the bus, matrix products."""

import time
from functools import partial

import torch

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale

COPIED_BYTES = 1 << 28
ORDERS = (4096, 8192)  # of square matrices
SMALL_BYTES, SMALL_ORDERS = 1 << 16, (64,)  # in a rehearsal


def measure(scale: Scale, notes: Notes) -> None:
    """Note bytes/s and FLOP/s, in units of 1e9 and 1e12."""
    device, size = scale.computing.device, SMALL_BYTES if scale.tiny else COPIED_BYTES
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    notes.put("copy on the device, GB/s", 2 * size / scale.device_seconds(partial(there.copy_, here)) / 1e9)
    for order in SMALL_ORDERS if scale.tiny else ORDERS:
        matrix = torch.randn(order, order, device=device, dtype=torch.bfloat16)
        seconds = scale.device_seconds(partial(torch.matmul, matrix, matrix))
        notes.put(f"bf16 product of order {order}, TFLOP/s", 2 * order**3 / seconds / 1e12)
    if scale.on_gpu:
        bus(scale, notes, here, there)


def bus(scale: Scale, notes: Notes, here: torch.Tensor, there: torch.Tensor) -> None:
    """Note the speed of copies between the host and the device."""
    size, began = len(here), time.perf_counter()
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    notes.put("pinning, s/GB", (time.perf_counter() - began) / (size / 1e9))
    pinned_too = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    for name, host in (("pinned", pinned), ("pageable", torch.zeros(size, dtype=torch.uint8))):
        for way, goal, source in (("to the device", here, host), ("to the host", host, here)):
            seconds = scale.device_seconds(partial(goal.copy_, source, non_blocking=True))
            notes.put(f"{way}, {name}, GB/s", size / seconds / 1e9)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        here.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(side):
            pinned_too.copy_(there, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    notes.put("both ways at once, pinned, GB/s", 2 * size / scale.device_seconds(both_ways) / 1e9)
