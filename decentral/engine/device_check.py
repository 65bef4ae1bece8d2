"""Is the device there, does it compute, and if no GPU is used, why not? For `python -m decentral.doctor`."""

import re
from pathlib import Path

import torch

from decentral.core.errors import UserError
from decentral.engine import control_groups, measure

DRIVER = Path("/proc/driver/nvidia/version")  # of NVIDIA's kernel module, on Linux
NO_DRIVER = "install NVIDIA's driver (nvidia-smi has to list the GPU); in a container start it with --gpus all"
OLD_DRIVER = "update NVIDIA's driver, or install a torch built for it (https://pytorch.org/get-started/locally)"
NO_CUDA_BUILD = "install a torch that is built with CUDA: https://pytorch.org/get-started/locally"
HIDDEN = "let CUDA see the GPU: CUDA_VISIBLE_DEVICES hides it, or another program holds it (nvidia-smi)"


def described(wanted: str) -> str:
    """Name, memory and FLOP/s of the device that --device names, by a product of matrices.

    Raises UserError where it is not there, or cannot compute.
    """
    device = measure.choose(wanted, "auto", 1.0, 0.0)
    try:
        found = measure.without_speed(device)
    except RuntimeError as error:  # such as a GPU that torch has no kernels for
        raise UserError(f"--device {wanted}: {str(error).splitlines()[0]}") from None
    versions = f", CUDA {torch.version.cuda}, driver {driver()}" if device.device.type == "cuda" else ""
    limit = control_groups.limit_bytes() if device.device.type == "cpu" else None
    whole = f" left of this container's {limit / 1e9:.1f} GB" if limit else ""
    return f"{found.device}, {found.memory_bytes / 1e9:.1f} GB{whole}, {found.flops / 1e12:.3g} TFLOP/s{versions}"


def driver() -> str:
    """The version of NVIDIA's driver; "": none is loaded here, or it does not say so."""
    text = DRIVER.read_text() if DRIVER.exists() else ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else ""


def unused_gpu() -> str:
    """Why torch does not use a GPU whose driver is loaded; "": it does, or no driver is."""
    if torch.cuda.is_available() or not driver():
        return ""
    return f"NVIDIA's driver {driver()} is loaded, but torch {torch.__version__} sees no GPU: {_refusal()}"


def remedy() -> str:
    """What lets torch use CUDA here."""
    if torch.version.cuda is None:
        return f"{NO_CUDA_BUILD}; or --device cpu"
    if not driver():
        return f"{NO_DRIVER}; or --device cpu"
    return f"{OLD_DRIVER if 'too old' in _refusal() else HIDDEN}; or --device cpu"


def _refusal() -> str:
    """Why CUDA does not begin, in torch's words."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return f"{torch.cuda.device_count()} devices"
