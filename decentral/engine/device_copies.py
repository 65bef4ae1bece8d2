"""Copies between a device and host memory that the training thread need not wait for.

On a GPU the training thread only puts a copy within the device into its stream; the way to host memory and back is a
side stream's, from and to pinned memory, and the worker waits for it. On the CPU both are the same memory, and a copy
is a copy.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from decentral.engine.fragment import Live

Arrive = Callable[[], None]
"""Waits until the copy is in host memory; to be called beside training."""


def copy_out(live: Live, into: Tensor) -> Arrive:
    """At a step edge: takes theta as it is now. It is in `into` [n], fp32 in host memory, after `Arrive`."""
    if live.theta.device.type == "cpu":
        live.copy_theta(into)
        return lambda: None
    staged = torch.empty(into.shape, dtype=into.dtype, device=live.theta.device)
    live.copy_theta(staged)
    taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
    taken.record(torch.cuda.current_stream(staged.device))  # without it: the stream of the current device, GPU 0

    def arrive() -> None:
        side = _side_stream(staged.device)
        with torch.cuda.stream(side):
            side.wait_event(taken)
            into.copy_(staged, non_blocking=True)
        side.synchronize()  # so that the staged copy may be freed, and host memory read

    return arrive


def copy_in(vector: Tensor, device: torch.device) -> Tensor:
    """Beside training: a vector [n] in host memory, on the device; what follows in any stream finds it there.

    Its memory is the side stream's. Training's stream may be behind: it is not free for the next copy before that has
    done what it was given with the vector until the vector was let go of.
    """
    if device.type == "cpu":
        return vector
    side = _side_stream(device)
    with torch.cuda.stream(side):
        on_device = vector.to(device, non_blocking=True)
    on_device.record_stream(torch.cuda.current_stream(device))
    side.synchronize()
    return on_device


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
