"""Read and write JSON by its standard: numbers that are not finite become null, which every reader accepts."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""Any JSON value. Code that reads a value checks its type."""
JsonObject = dict[str, Any]
JsonFields = Mapping[str, Any]


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text, in one line unless `indent` is given.

    A dataclass becomes an object of its fields. A number that is not finite becomes null. A value of any other type
    that JSON lacks becomes its `str`.
    """
    separators = (",", ":") if indent is None else None
    encoder = json.JSONEncoder(indent=indent, separators=separators, default=_plain, allow_nan=False)
    try:
        return encoder.encode(value)
    except ValueError:  # JSON has no NaN or infinity, so replace them; a search before encoding would cost more
        return encoder.encode(_finite(value))


def loads(text: str | bytes) -> Any:
    """Return the value in a JSON text; NaN and Infinity, which older versions wrote, become None.

    Raises:
        ValueError: If the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


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
