"""Check for `python -m decentral.doctor` that the device exists and computes, and explain why no GPU is used."""

import re
from pathlib import Path

import torch

from decentral.core.errors import UserError
from decentral.engine import control_groups, measure

DRIVER = Path("/proc/driver/nvidia/version")
NO_DRIVER = "install NVIDIA's driver (nvidia-smi has to list the GPU), or start the container with --gpus all"
OLD_DRIVER = "update NVIDIA's driver, or install a torch built for it (https://pytorch.org/get-started/locally)"
NO_CUDA_BUILD = "install a torch that is built with CUDA: https://pytorch.org/get-started/locally"
HIDDEN = "let CUDA see the GPU: CUDA_VISIBLE_DEVICES hides it, or another program holds it (nvidia-smi)"


def described(wanted: str) -> str:
    """Measure a device with matrix products, and return a line with its name, memory in GB and TFLOP/s.

    Args:
        wanted: The value of --device.

    Raises:
        UserError: If the device does not exist, or cannot compute.
    """
    device = measure.choose(wanted)
    try:
        found = measure.without_speed(device)
    except RuntimeError as error:
        raise UserError(f"--device {wanted} cannot compute: {str(error).splitlines()[0]}") from None
    versions = ""
    if device.device.type == "cuda":
        built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        versions = f", {built_for}" + (f", driver {driver()}" if driver() else "")
    limit = control_groups.limit_bytes() if device.device.type == "cpu" else None
    whole = f" left of this container's {limit / 1e9:.1f} GB" if limit else ""
    return f"{found.device}, {found.memory_bytes / 1e9:.1f} GB{whole}, {found.flops / 1e12:.3g} TFLOP/s{versions}"


def driver() -> str:
    """Return the version of NVIDIA's driver; "" if no driver is loaded, or its file does not state a version."""
    text = DRIVER.read_text() if DRIVER.exists() else ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else ""


def unused_gpu() -> str:
    """Return why torch sees no GPU although NVIDIA's driver is loaded; "" if torch sees a GPU or there is no driver."""
    if torch.cuda.is_available() or not driver():
        return ""
    return f"NVIDIA's driver {driver()} is loaded, but torch {torch.__version__} sees no GPU: {_refusal()}"


def remedy() -> str:
    """Return what the user can do if torch does not use CUDA: what to install or change, or --device cpu."""
    if torch.version.cuda is None:
        return f"{NO_CUDA_BUILD}; or --device cpu"
    if not driver():
        return f"{NO_DRIVER}; or --device cpu"
    return f"{OLD_DRIVER if 'too old' in _refusal() else HIDDEN}; or --device cpu"


def _refusal() -> str:
    """Return the first line of torch's error if CUDA does not start, else the number of GPUs, such as "2 devices"."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return f"{torch.cuda.device_count()} devices"
