"""JSON as its standard has it: numbers that are not finite become null, which every reader understands."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""Any value, as it was read; who reads it checks its kind."""
JsonObject = dict[str, Any]  # as it was read or will be written; who reads a value checks its kind
JsonFields = Mapping[str, Any]  # the same, where it is only read


def dumps(value: Any, indent: int | None = None) -> str:
    """The value in one line, or indented: a dataclass as its fields, what JSON does not know as Python's `str` does."""
    separators = (",", ":") if indent is None else None
    encoder = json.JSONEncoder(indent=indent, separators=separators, default=_plain, allow_nan=False)
    try:
        return encoder.encode(value)
    except ValueError:  # few lines have such a number, and to look for one takes longer than to write a line
        return encoder.encode(_finite(value))


def loads(text: str | bytes) -> Any:
    """The value in a text. An older writer's NaN and Infinity are None. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _plain(value: Any) -> Any:
    return {one.name: getattr(value, one.name) for one in fields(value)} if is_dataclass(value) else str(value)


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        value = _plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_finite(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
