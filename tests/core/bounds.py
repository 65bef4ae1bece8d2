"""Which fields of a type that strangers fill have no bound: they could be made as large as anybody likes."""

import dataclasses
from collections.abc import Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

LIMITS = ("ge", "gt", "le", "lt", "max_length")


def unbounded(annotation: Any, limits: Sequence[object] = ()) -> list[str]:
    """The paths of numbers without a lower and an upper bound, and of texts, bytes and rows without a longest length.

    `limits`: the constraints that stand around the annotation.
    """
    known = {name for limit in limits for name in _set_by(limit)}
    kind = get_origin(annotation)
    if kind is Annotated:
        inner, *more = get_args(annotation)
        return unbounded(inner, [*limits, *more])
    if isinstance(annotation, UnionType) or kind is Union:
        return [path for part in get_args(annotation) for path in unbounded(part, limits)]
    if kind is tuple:
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        rows = [] if Ellipsis not in get_args(annotation) or "max_length" in known else ["a row"]
        return rows + [path for part in parts for path in unbounded(part)]
    if isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or issubclass(annotation, BaseModel | tuple)
    ):
        fields = _fields(annotation).items()
        return [f"{name}.{path}" for name, (field, more) in fields for path in unbounded(field, more)]
    if annotation in (int, float):
        return [] if known & {"ge", "gt"} and known & {"le", "lt"} else ["a number"]
    if annotation in (str, bytes):
        return [] if "max_length" in known else ["a text"]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return []
    return [] if annotation in (bool, NoneType) or kind is Literal else [str(annotation)]


def _fields(kind: type) -> dict[str, tuple[Any, Sequence[object]]]:
    """The fields of a model, a dataclass or a named tuple, with the constraints around each."""
    if issubclass(kind, BaseModel):
        return {name: (field.annotation, field.metadata) for name, field in kind.model_fields.items()}
    hints = get_type_hints(kind, include_extras=True)
    return {name: (hint, ()) for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _set_by(limit: object) -> set[str]:
    """The bounds that a constraint sets, or the constraints within a Field."""
    if isinstance(limit, FieldInfo):
        return {name for one in limit.metadata for name in _set_by(one)}
    return {name for name in LIMITS if getattr(limit, name, None) is not None}
