"""Messages to bytes and back: `[version, kind, fields, blob bytes]` in msgpack.

`decode` is the border: whatever the bytes, it returns one of our messages or raises ProtocolError. Nothing is
unpickled, extension types are refused, and no string or map can be larger than the header's bound.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from decentral.comm.wire import messages
from decentral.comm.wire.messages import VERSION, Message
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason

MAX_HEADER_BYTES = 128 * 1024  # a RoundReport may name 256 micro-batches and 4096 versions

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
_FIELDS = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in _KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Message]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and the blob that goes with it."""

    message: Message
    blob: bytes = b""


def encode(message: Message, blob_bytes: int = 0) -> bytes:
    """The header of a message that `blob_bytes` bytes of blob follow."""
    header: bytes = msgpack.packb([VERSION, type(message).__name__, message, blob_bytes], default=_fields)
    assert len(header) <= MAX_HEADER_BYTES, f"{type(message).__name__} of {len(header)} bytes"
    return header


def _fields(value: Any) -> dict[str, object]:
    """The fields of a message, or of a dataclass in one. dataclasses.asdict would copy all of them deeply."""
    return {name: getattr(value, name) for name in _names(value.__class__)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def decode(header: bytes) -> tuple[Message, int]:
    """The message and how many bytes of blob follow. Raises ProtocolError only."""
    version, kind, fields, blob_bytes = _header(header)
    if version != VERSION:
        raise ProtocolError(Reason.VERSION, f"this peer speaks version {VERSION}; that one {version!r}"[:200])
    if kind not in _KINDS or not isinstance(fields, dict):
        raise ProtocolError(Reason.UNKNOWN, "no such message")
    if set(fields) != _FIELDS[kind]:
        raise ProtocolError(Reason.FIELDS, f"{kind} has other fields than ours")
    try:
        message = _ADAPTERS[kind].validate_python(fields)
    except ValidationError as error:
        raise ProtocolError(Reason.FIELDS, f"{kind}: {error.error_count()} wrong") from None
    if type(blob_bytes) is not int or not 0 <= blob_bytes <= messages.MAX_BLOB_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a blob of {blob_bytes!r} bytes"[:200])
    return message, blob_bytes


def _header(header: bytes) -> tuple[object, str, object, object]:
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a header of {len(header)} bytes")
    try:
        parts = msgpack.unpackb(header, use_list=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen kinds of error for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if not isinstance(parts, tuple) or len(parts) != 4 or not isinstance(parts[1], str):
        raise ProtocolError(Reason.GARBAGE, "not a header")
    return parts
