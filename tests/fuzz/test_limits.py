"""The table of containers in docs/SECURITY.md, walked: each is there, has its cap, and keeps it after a flood.

What grows in a flooded node and is not in the table fails as well, so that a new container cannot be forgotten.
"""

import importlib
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, get_type_hints

import pytest

from tests.fuzz.fuzzed_node import FuzzedNode, Kind
from tests.test_docs import section

ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| `([^`]+)` \| `([\w/]+)\.py` \|", re.MULTILINE)
KINDS: tuple[Kind, ...] = ("pull", "synchronous", "spans", "private")
STEPS = 400
MANY = 64  # entries: what has more has grown

Row = tuple[str, str, str, str]
"""Class, attribute, the cap as an expression of the module's constants, and the module."""


def rows() -> list[Row]:
    return ROW.findall(section("docs/SECURITY.md", "### Containers"))


def cap(row: Row) -> int:
    """The number that the row's expression stands for, with the constants of the module."""
    module = importlib.import_module("decentral." + row[3].removeprefix("decentral/").replace("/", "."))
    found = eval(row[2], vars(module))
    assert isinstance(found, int)
    return found


def owned(root: object) -> Iterator[tuple[str, Collection[Any]]]:
    """Every container that the object reaches, by the class and the attribute that it is."""
    seen, left = set[int](), [("", root)]
    while left:
        name, one = left.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | Enum | type | Random | range):
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque | tuple):
            if name and not isinstance(one, tuple):
                yield name, one
            left += [("", value) for value in (one.values() if isinstance(one, dict) else one)]
        elif type(one).__module__.startswith("decentral."):
            slots = [slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ())]
            for attribute in {*slots, *getattr(one, "__dict__", {})}:
                left.append((f"{type(one).__name__}.{attribute}", getattr(one, attribute, None)))


@pytest.fixture(scope="module")
def largest() -> Mapping[str, int]:
    """The most entries that each container has had, in nodes of all kinds among liars."""
    found = defaultdict[str, int](int)
    for kind in KINDS:
        fuzzed = FuzzedNode(kind, 1)
        for _ in range(STEPS):
            fuzzed.step()
        for name, one in owned(fuzzed.node):
            found[name] = max(found[name], len(one))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}.{row[1]}")
def test_a_container_of_the_table_is_there_and_keeps_its_cap(row: Row, largest: Mapping[str, int]) -> None:
    assert (Path(__file__).parent.parent.parent / f"{row[3]}.py").exists()
    module = importlib.import_module("decentral." + row[3].removeprefix("decentral/").replace("/", "."))
    assert row[1] in {*get_type_hints(getattr(module, row[0])), *getattr(getattr(module, row[0]), "__slots__", ())}
    assert largest.get(f"{row[0]}.{row[1]}", 0) <= cap(row)


def test_what_grows_in_a_flood_is_in_the_table(largest: Mapping[str, int]) -> None:
    named = {f"{owner}.{attribute}" for owner, attribute, _, _ in rows()}
    assert len(named) > 20
    assert sorted(name for name, size in largest.items() if size > MANY and name not in named) == []
