"""Accelerators: which one this machine has, its name and memory, and how to wait for its queued work.

`cuda` means GPUs of NVIDIA, and with torch for ROCm those of AMD; `xpu` means GPUs of Intel, `mps` those of Apple. Only
NVIDIA's have been tried (docs/results/gpu.md). CUDA and XPU queue work in streams, so that copies between the device
and pinned host memory run at the same time as training. The host waits for each copy to or from an MPS device.
"""

from functools import cache
from types import ModuleType

import torch

from decentral.core.device_names import ACCELERATORS

STREAMED = ("cuda", "xpu")


def type_here() -> str:
    """Return the type of this machine's accelerator, as torch names it; "cpu" if there is none."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return here.type if here is not None and here.type in ACCELERATORS else "cpu"


def count(device: torch.device) -> int:
    """Return the number of devices of this type that torch can use; 0 if its build does not support the type."""
    return int(torch.get_device_module(device).device_count())


def has_streams(device: torch.device) -> bool:
    """Return whether the device queues work in streams, so that it can copy to and from pinned memory during work."""
    return device.type in STREAMED


def streams(device: torch.device) -> ModuleType:
    """Return the module of the device's streams and events, torch.cuda or torch.xpu, which have the same functions."""
    assert has_streams(device), f"devices of type {device.type} have no streams"
    module: ModuleType = torch.get_device_module(device)
    return module


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """Return the device's second stream, on which copies run at the same time as training on the first."""
    made: torch.Stream = streams(device).Stream(device)
    return made


def wait(device: torch.device) -> None:
    """Wait until the device has done all work that is queued on it. For a CPU, which queues no work, do nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_cache(device: torch.device) -> None:
    """Make torch free the device memory that it caches for later tensors, for example after an out-of-memory error."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def training_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device is an accelerator with units that multiply bfloat16 matrices, else float32.

    CUDA imitates bfloat16, slowly, on GPUs that lack the units (compute capability below 8).
    """
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    try:
        ones = torch.ones(2, 2, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            float((ones @ ones).sum())
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.bfloat16


@cache
def compile_failure(device: torch.device) -> str:
    """Return why torch.compile cannot be used for this device, as its last error says; "" if it can.

    torch.compile is used only for devices with streams. It needs Triton and a C compiler, which many containers lack.
    """
    if not has_streams(device):
        return f"it is used on {' and '.join(ACCELERATORS[kind] for kind in STREAMED)} only"
    try:
        torch.compile(torch.nn.Linear(8, 8, device=device))(torch.zeros(8, 8, device=device))
    except Exception as error:  # compilers raise errors of any class, and training can do without a compiler
        return (str(error).strip() or type(error).__name__).splitlines()[-1]
    return ""


def name(device: torch.device) -> str:
    """Return the accelerator's name, such as NVIDIA H100 80GB HBM3."""
    return "Apple GPU" if device.type == "mps" else str(streams(device).get_device_name(device))


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of the accelerator's memory that no other program uses.

    For an Apple GPU, return the most that the system recommends to use.
    """
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    module = streams(device)
    free_bytes, _ = module.mem_get_info(device)
    return int(free_bytes) + int(module.memory_reserved(device))
