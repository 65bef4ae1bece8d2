"""The names of devices that `--device` accepts. Whether this machine has a device is not checked: that takes torch."""

import re

from decentral.core.errors import UserError

ACCELERATORS = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}  # torch's device type -> the name that messages use
TYPES = ("cpu", *ACCELERATORS)
CHOICES = f"auto, {', '.join(TYPES[:-1])} or {TYPES[-1]}, or with a number: cuda:1"


def valid_device(text: str) -> str:
    """Return a text that is the name of a device, such as `auto` or `cuda:1`. Raise UserError for another text."""
    if re.fullmatch(rf"auto|({'|'.join(TYPES)})(:\d{{1,2}})?", text):
        return text
    raise UserError(f"--device expects {CHOICES}; got {text!r}")


def valid_devices(text: str) -> str:
    """Return a text of device names with commas between them. Raise UserError if one of the names is not valid."""
    return ",".join(map(valid_device, text.split(",")))
