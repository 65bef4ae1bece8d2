"""Units, numbers as text for people, and amounts of training as a user types them: `90s`, `500steps`, `2e6tokens`."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from decentral.core.errors import UserError
from decentral.core.layer_work import KindCosts

KiB = 1024
MiB = 1024 * KiB

Seconds = float

Kind = Literal["s", "steps", "tokens"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A device's memory and its measured speed."""

    device: str
    memory_bytes: int
    flops: float
    tokens_per_s: float  # training speed on the run's model, or 0 if it was not measured
    costs: KindCosts  # of a layer of each kind


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of a peer's training: seconds since the peer joined, optimizer steps, or tokens."""

    value: float
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """Return the amount in a text such as `90s`, `500steps` or `2e6tokens`.

        Raises:
            UserError: If the text has another form, or the amount is not above 0.
        """
        number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+]?[0-9]+)?"
        found = re.fullmatch(rf"(?P<value>{number})\s*(?P<kind>s|steps|tokens)", text.strip())
        if not found or float(found["value"]) <= 0:
            raise UserError(f"expected 90s, 500steps or 2e6tokens; got {text!r}")
        return cls(float(found["value"]), cast(Kind, found["kind"]))

    def __str__(self) -> str:
        """Return the amount as a user types it, such as `90s`."""
        return f"{self.value:.15g}{self.kind}"


def readable_bytes(count: float) -> str:
    """Return a number of bytes for people, such as `1.5 MB`; a MB is 1,000,000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plural(count: int, noun: str) -> str:
    """Return the count with its noun: `1 thread`, `2 threads`, `1,000 threads`, `2 micro-batches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def readable_number(value: float) -> str:
    """Return a number for people, with three digits and k, M or G: `1.5 M`, `20 k`."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
