"""Read the table of cards' published speed and memory (configs/devices/published.yaml), for cards that are not here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from decentral.core import foreign_file, own_yaml
from decentral.core.errors import UserError
from decentral.core.near_names import nearest

MAX_TABLE_BYTES = 64 * 1024
OWN = ("cpu", "this")  # names of the present machine, whose speed is measured


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's memory and speed, as its manufacturer publishes them."""

    name: str
    memory_bytes: float
    flops: float  # dense FLOP/s of bf16 or fp16 products with sums in fp32
    bf16: bool  # whether the card has units for bf16, which peers then use


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gb: Annotated[float, Field(gt=0)]
    tflops: Annotated[float, Field(gt=0)]
    source: Literal["ada", "ampere", "rtx50", "sheet"]
    bf16: bool = True


class _Table(BaseModel):
    cards: dict[str, _Row]


@cache
def cards() -> Mapping[str, Card]:
    """Return all cards of the table, by their names as `_plain` writes them."""
    path = Path(str(files("decentral.configs") / "devices" / "published.yaml"))
    table = _Table.model_validate(own_yaml.tree(foreign_file.read_text(path, MAX_TABLE_BYTES), str(path)))
    rows = table.cards.items()
    return {_plain(name): Card(name, row.memory_gb * 1e9, row.tflops * 1e12, row.bf16) for name, row in rows}


def key(name: str) -> str:
    """Return the name under which a card stands in `cards`, or a normal form of the name if the table lacks the card.

    Maker, series, form factor and the unit of memory do not count, nor does memory that is the only one of that name in
    the table: `NVIDIA H100 80GB HBM3` has the key of `H100`, and `A100-SXM4-80GB` that of `A100 80GB`.
    """
    plain = _plain(name)
    for one in (plain, plain.replace("pcie", "")):
        for known, found in cards().items():
            if one in (known, f"{known}{found.memory_bytes / 1e9:g}"):
                return known
    return plain


def _plain(name: str) -> str:
    """Return a name in lower case without maker, series, form factor, unit of memory, spaces and dashes."""
    sized = re.sub(r"\b(\d+) ?gi?b?\b", r"\1", name.lower().replace("_", " "))
    return re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|hbm\d?e?|gb|[\s-]", "", sized)


def card(name: str) -> Card:
    """Return the card with this name, such as `4090`, `RTX 4090` or `A100-80GB`.

    Raises:
        UserError: If the table has no such card; the error names the nearest one.
    """
    found = cards().get(key(name))
    if found is None:
        near = nearest(key(name), cards())
        meant = f"; did you mean {cards()[near].name}?" if near else ""
        known = f"known are NVIDIA's cards in configs/devices/published.yaml, and cpu for this machine{meant}"
        raise UserError(f"--peers: unknown device {name!r}; {known}")
    return found
