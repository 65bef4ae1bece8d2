"""A record's body comes back as it was; anything else is a ProtocolError and nothing else."""

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core.errors import ProtocolError
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile

RECORD = PeerRecord("gpt-3fa2c1", 1.7e9, ("/ip4/1.2.3.4/tcp/1",), Profile("cpu", 1 << 34, 1e12, 1e4), 0, 4, 7, 8, 512)
WRONG: list[tuple[str, Any]] = [
    ("run", "r" * 65),
    ("time", float("nan")),
    ("time", float("inf")),
    ("addresses", ["x"] * 17),
    ("addresses", ["x" * 257]),
    ("first", -1),
    ("step", "7"),
    ("step", True),
    ("lr_step", 1 << 62),
    ("phase", "sleeping"),
    ("profile", None),
    ("profile", {"device": "cpu"}),
]
Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def accepted_or_refused(body: bytes) -> None:
    try:
        record = records.unpack(body)
    except ProtocolError:
        return
    assert records.unpack(records.pack(record)) == record


def test_a_record_comes_back_as_it_was() -> None:
    assert records.unpack(records.pack(RECORD)) == RECORD


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_field_out_of_bounds_is_refused(name: str, value: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        records.unpack(msgpack.packb({**dataclasses.asdict(RECORD), name: value}))
    assert caught.value.reason == "fields"


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error(body: bytes) -> None:
    accepted_or_refused(body)


@given(Json)
def test_any_other_value_is_a_protocol_error(value: object) -> None:
    accepted_or_refused(msgpack.packb(value))


@given(st.sampled_from([field.name for field in dataclasses.fields(PeerRecord)]), Json)
def test_any_field_of_any_value_is_taken_or_refused(name: str, value: object) -> None:
    accepted_or_refused(msgpack.packb({**dataclasses.asdict(RECORD), name: value}))


@given(st.integers(0, len(records.pack(RECORD)) - 1), st.integers(0, 255))
def test_a_changed_byte_is_taken_or_refused(at: int, byte: int) -> None:
    body = bytearray(records.pack(RECORD))
    body[at] = byte
    accepted_or_refused(bytes(body))
