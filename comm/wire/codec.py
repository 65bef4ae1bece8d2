"""Encode messages as headers, `[version, kind, fields, size of the blob]` in msgpack: `encode` and `decode`.

`decode` accepts bytes from any peer: it returns a valid message or raises ProtocolError. Nothing is unpickled,
extension types are refused, and no string or map can be larger than MAX_HEADER_BYTES, the limit of a header.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from decentral.comm.wire import messages
from decentral.comm.wire.messages import VERSION, Message
from decentral.comm.wire.unpacking import read_msgpack
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason

MAX_HEADER_BYTES = 128 * 1024  # a larger header is refused; a RoundReport, which has the largest headers, needs less
MAX_ITEMS = 4096  # a header in which an array has more items is refused; a RoundReport has up to 4096 versions

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
_FIELDS = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in _KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Message]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Envelope:
    """A message and the blob that is sent with it; most messages have an empty blob."""

    message: Message
    blob: bytes = b""


def encode(message: Message, blob_bytes: int = 0) -> bytes:
    """Return the header of a message that is followed by a blob of `blob_bytes` bytes."""
    header: bytes = msgpack.packb([VERSION, type(message).__name__, message, blob_bytes], default=_fields)
    assert len(header) <= MAX_HEADER_BYTES, f"{type(message).__name__} with a header of {len(header)} bytes"
    return header


def _fields(value: Any) -> dict[str, object]:
    """Return the fields of a message, or of a dataclass in a message, without copying their values."""
    return {name: getattr(value, name) for name in _names(value.__class__)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def decode(header: bytes) -> tuple[Message, int]:
    """Return the message in a header, and how many bytes of blob follow the header.

    Raises:
        ProtocolError: If the header is malformed, has another protocol version than VERSION, or exceeds a limit. No
            other error is raised, whatever the bytes are.
    """
    version, kind, fields, blob_bytes = _header(header)
    if version != VERSION:
        raise ProtocolError(Reason.VERSION, f"this peer speaks version {VERSION}; that one {version!r}"[:200])
    if kind not in _KINDS or not isinstance(fields, dict):
        raise ProtocolError(Reason.UNKNOWN, "expected a known kind of message, and its fields as a map")
    if set(fields) != _FIELDS[kind]:
        raise ProtocolError(Reason.FIELDS, f"a {kind} must have the fields of version {VERSION}, and no others")
    try:
        message = _ADAPTERS[kind].validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]["loc"][0]
        faults = f"{kind}.{first} is not valid; number of errors in this message: {error.error_count()}"
        raise ProtocolError(Reason.FIELDS, faults) from None
    if type(blob_bytes) is not int or not 0 <= blob_bytes <= messages.MAX_BLOB_BYTES:
        raise ProtocolError(
            Reason.OVERSIZE, f"a blob must have 0 to {messages.MAX_BLOB_BYTES} bytes; got {blob_bytes!r}"[:200]
        )
    return message, blob_bytes


def _header(header: bytes) -> tuple[object, str, object, object]:
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a header must have at most {MAX_HEADER_BYTES} bytes; got {len(header)}")
    try:
        parts = read_msgpack(header, max_array_len=MAX_ITEMS)
    except Exception as error:  # for malformed bytes, msgpack raises exceptions of many classes
        raise ProtocolError(Reason.GARBAGE, f"the header is not valid msgpack ({type(error).__name__})") from None
    if not isinstance(parts, tuple) or len(parts) != 4 or not isinstance(parts[1], str):
        raise ProtocolError(Reason.GARBAGE, "a header must have four parts: version, kind, fields and size of the blob")
    return parts
