"""What is unpacked of msgpack from other peers, and that its limit leaves room for all that peers send."""

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from pydantic import TypeAdapter

from decentral.comm.wire import codec
from decentral.comm.wire.codec import _ADAPTERS
from decentral.comm.wire.unpacking import read_msgpack
from decentral.peers.membership import records
from decentral.peers.membership.records import _PEER
from decentral.scheduler.placement.evaluate import _PLAN


def test_an_array_that_claims_more_items_than_it_may_have_is_refused_before_it_is_allocated() -> None:
    """A thousand such headers, one in the other, kept the event loop for 0.15 s."""
    claims = b"\xdd\x00\x00\x3f\xff"  # an array of 16,383 items
    with pytest.raises(ValueError, match="16383 exceeds max_array_len"):
        read_msgpack(claims * 1000, max_array_len=4096)


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"x"), [msgpack.Timestamp(1)], {1: 2}])
def test_extension_types_and_maps_without_names_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_ext_len|strict_map_key"):
        read_msgpack(msgpack.packb(value), max_array_len=5)


def longest_arrays(schema: Any) -> Iterator[int]:
    """The limit of each array within a JSON schema; a tuple's is its length."""
    if isinstance(schema, dict):
        yield schema.get("maxItems", 0)
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from longest_arrays(one)


def longest_array(*adapters: TypeAdapter[Any]) -> int:
    return max(size for one in adapters for size in longest_arrays(one.json_schema()))


def test_the_longest_arrays_of_messages_and_records_are_read() -> None:
    assert longest_array(*_ADAPTERS.values()) == codec.MAX_ITEMS
    assert longest_array(_PEER, _PLAN) == records.MOST_ITEMS
