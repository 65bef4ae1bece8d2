"""Units, numbers as text for people, and amounts of training as a user types them: `15m`, `500steps`, `2Mtokens`."""

import argparse
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from decentral.core import quantities
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
    costs: KindCosts  # time and memory that one layer of each kind takes on the device


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of a peer's training: seconds since the peer joined, optimizer steps, or tokens."""

    value: float
    kind: Kind

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """Return the amount in a text such as `90s`, `15m`, `2h`, `500steps` or `2Mtokens`.

        Raises:
            UserError: If the text has another form, or the amount is not above 0.
        """
        found = re.fullmatch(r"(?P<number>.*?)(?P<kind>[smhdw]|steps|tokens)", text.strip())
        with suppress(argparse.ArgumentTypeError):
            if found and found["kind"] in ("steps", "tokens"):
                return cls(quantities.count(found["number"]), cast(Kind, found["kind"]))
            if found:
                return cls(quantities.duration_s(text), "s")
        raise UserError(
            f"--stop-after expects 90s, 15m, 2h, 1d, 500steps or 2Mtokens; got {text!r}{quantities.comma_hint(text)}"
        )

    def __str__(self) -> str:
        """Return the amount as a user types it, in the largest unit that leaves it whole: `90s`, `2h`, `3Mtokens`."""
        letters, factors = ("wdhm", quantities.SECONDS) if self.kind == "s" else ("tbm", quantities.THOUSANDS)
        letter = next((one for one in letters if self.value % factors[one] == 0), "")
        number = f"{self.value / factors[letter]:.15g}"
        return number + (letter or "s" if self.kind == "s" else letter.upper() + self.kind)


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
    """Return a number of tokens or parameters for people, with three digits and k, M, B or T: `1.5 M`, `10 B`."""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
