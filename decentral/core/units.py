"""Units, and amounts of work as a user types them: `90s`, `500steps`, `2e6tokens`."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from decentral.core.errors import UserError

KiB = 1024
MiB = 1024 * KiB

Seconds = float

Kind = Literal["s", "steps", "tokens"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a device."""

    device: str  # its name
    memory_bytes: int
    flops: float  # a second, of a matrix product
    tokens_per_s: float  # on the run's model; 0: not measured


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of work: seconds since joining, inner steps of this peer, or tokens of this peer."""

    value: float
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """Reads `90s`, `500steps` or `2e6tokens`. Raises UserError for anything else."""
        number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+]?[0-9]+)?"
        found = re.fullmatch(rf"(?P<value>{number})\s*(?P<kind>s|steps|tokens)", text.strip())
        if not found or float(found["value"]) <= 0:
            raise UserError(f"expected 90s, 500steps or 2e6tokens; got {text!r}")
        return cls(float(found["value"]), cast(Kind, found["kind"]))

    def __str__(self) -> str:
        return f"{self.value:.15g}{self.kind}"


def readable_bytes(count: float) -> str:
    """`1.5 MB`, in powers of 1000 as links are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plural(count: int, noun: str) -> str:
    """Return `1 thread`, `2 threads`, `1,000 threads`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def readable_number(value: float) -> str:
    """`1.5 M`, `20 k`: three digits, and a unit of a thousand."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
