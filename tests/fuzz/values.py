"""Any value that a type's bounds allow: of messages, of records, and of what is inside them.

Edges are as likely as all that lies between them: the least and the greatest number, the empty and the longest text.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

Make = Callable[[Random], Any]
PLAIN = "abcXYZ019._-"  # what a pattern of messages allows, and what a peer calls itself
ANY = PLAIN + " \n\x1b[]{}é中\x00\"'"
MOST_CHARS, MOST_ITEMS = 40, 4  # of most texts and rows; now and then one is as long as it may be
FAR_APART = 1 << 40  # a range of more than this is drawn on a logarithmic scale


@cache
def maker(annotation: Any) -> Make:
    """What makes values of this type. Raises KeyError for a type that no message has."""
    return _maker(annotation, {})


@cache
def fields(kind: type) -> dict[str, Any]:
    """The names and types of the fields of a dataclass or a named tuple, with the bounds around them."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _maker(annotation: Any, bounds: dict[str, Any]) -> Make:
    kind = get_origin(annotation)
    if kind is Annotated:
        inner, *more = get_args(annotation)
        return _maker(inner, bounds | _bounds(more))
    if isinstance(annotation, UnionType) or kind is Union:
        return _one_of([_maker(part, bounds) for part in get_args(annotation)])
    if kind is Literal:
        words = get_args(annotation)
        return lambda chance: chance.choice(words)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        members = tuple(annotation)
        return lambda chance: chance.choice(members)
    if kind is tuple:
        return _rows(get_args(annotation), bounds)
    if isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or issubclass(annotation, tuple)):
        parts = {name: maker(part) for name, part in fields(annotation).items()}
        return lambda chance: annotation(**{name: make(chance) for name, make in parts.items()})
    return _PLAIN[annotation](bounds)


def _one_of(makers: Sequence[Make]) -> Make:
    return lambda chance: chance.choice(makers)(chance)


def _rows(parts: tuple[Any, ...], bounds: dict[str, Any]) -> Make:
    if Ellipsis not in parts:
        row = [maker(part) for part in parts]
        return lambda chance: tuple(make(chance) for make in row)
    make, least, most = maker(parts[0]), bounds.get("min_length", 0), bounds["max_length"]
    return lambda chance: tuple(make(chance) for _ in range(_length(chance, least, min(most, MOST_ITEMS), most)))


def _integers(bounds: dict[str, Any]) -> Make:
    least = bounds.get("ge", bounds.get("gt", -1) + 1)
    most = bounds["le"] if "le" in bounds else bounds["lt"] - 1

    def make(chance: Random) -> int:
        drawn = chance.randint(least, most)
        if most - least > FAR_APART and chance.random() < 0.5:
            drawn = min(most, least + (drawn >> chance.randrange(62)))
        return chance.choice((least, min(most, least + 1), most, drawn, drawn))

    return make


def _floats(bounds: dict[str, Any]) -> Make:
    least, most = float(bounds.get("ge", bounds.get("gt", 0.0))), float(bounds.get("le", bounds.get("lt", 0.0)))
    top = most if "le" in bounds else math.nextafter(most, 0.0)
    return lambda chance: chance.choice((least, top, 5e-324, min(top, chance.random()), chance.random() * top))


def _texts(bounds: dict[str, Any]) -> Make:
    letters = PLAIN if "pattern" in bounds else ANY
    least, most = bounds.get("min_length", 0), bounds["max_length"]

    def make(chance: Random) -> str:
        size = _length(chance, least, min(most, MOST_CHARS), most)
        return "".join(chance.choices(letters, k=size)) if size <= MOST_CHARS else chance.choice(letters) * size

    return make


def _bytes(bounds: dict[str, Any]) -> Make:
    least, most = bounds.get("min_length", 0), bounds["max_length"]
    return lambda chance: chance.randbytes(_length(chance, least, most, most))


def _length(chance: Random, least: int, usual: int, most: int) -> int:
    return most if chance.random() < 0.005 else chance.randint(least, max(least, usual))


_PLAIN: dict[Any, Callable[[dict[str, Any]], Make]] = {
    int: _integers,
    float: _floats,
    str: _texts,
    bytes: _bytes,
    bool: lambda bounds: lambda chance: chance.random() < 0.5,
    NoneType: lambda bounds: lambda chance: None,
}


def _bounds(limits: Sequence[Any]) -> dict[str, Any]:
    """The bounds that constraints set, alone or within a Field."""
    found: dict[str, Any] = {}
    for limit in limits:
        if isinstance(limit, FieldInfo):
            found |= _bounds(limit.metadata)
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
            if getattr(limit, name, None) is not None:
                found[name] = getattr(limit, name)
    return found
