"""The border: every message goes through, nothing else does, and what is refused is a ProtocolError."""

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.wire import codec, messages
from decentral.comm.wire.messages import VERSION, Message
from decentral.core.config import MAX_CONFIG_BYTES
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Section

SNAPSHOT = messages.Snapshot(
    "gpt-3fa2c1",
    3,
    17,
    4096,
    1.7e9,
    (Section("phi", "int8", 100, 102), Section("pseudo_gradient", "q4", 100, 52)),
    b"d" * 16,
)
EXAMPLES: list[Message] = [
    messages.Hello(),
    messages.Welcome("gpt-3fa2c1", "name: é\n"),
    messages.MembershipProof(b"proof"),
    messages.Ping(0),
    messages.Pong((1 << 62) - 1),
    messages.Probe(messages.MAX_PROBE_BYTES),
    messages.Probed(5),
    messages.Pull("gpt-3fa2c1", 0, 16, 1.7e9, 2.5),
    messages.Pull("gpt-3fa2c1", 0, 16, 0.0, messages.MAX_PATIENCE_S, exact=True, sections=("pseudo_gradient",)),
    SNAPSHOT,
    dataclasses.replace(SNAPSHOT, layout=()),
    messages.RecordsQuery("gpt-3fa2c1", b"own", (b"8 bytes.",), 3, b"list", (b"8 bytes.",)),
    messages.PeerRecords("gpt-3fa2c1", (("QmA", b"record"),), b"list", (("QmA", b"plan"),)),
    messages.Done(),
    messages.StateRequest("gpt-3fa2c1", 0, 1 << 20, messages.MAX_CHUNK_BYTES),
    messages.StateChunk("gpt-3fa2c1", 0, 0, 400, 9, SNAPSHOT.layout),
    messages.ForwardRequest("gpt-3fa2c1", "QmA", 7, 2, 8, 3.0, 20.0, (Section("hidden", "bf16", 100, 200),)),
    messages.Offer("gpt-3fa2c1", 2, 8),
    messages.Load("gpt-3fa2c1", 0.5, 0.25, 4),
    messages.ForwardStatusQuery("gpt-3fa2c1", messages.ExecutionId("QmA", 7, 2)),
    messages.BackwardResponse(
        "gpt-3fa2c1", 5.5, 64, (messages.Hop("QmB", 2, 4),), (Section("hidden", "bf16", 100, 200),)
    ),
    messages.CommitDecision("gpt-3fa2c1", (messages.ExecutionId("QmA", 7, 2),), ()),
    messages.LeaseRequest("gpt-3fa2c1", 3),
    messages.CommitQuery("gpt-3fa2c1", (messages.ExecutionId("QmA", 7, 2),)),
    messages.RoundQuery("gpt-3fa2c1", 7, 0, 3, True),
    messages.RoundStatus("gpt-3fa2c1", 7, (messages.RoundMember("QmA", 0, 3), messages.RoundMember("QmB", 2, 5))),
    messages.CollectRequest("gpt-3fa2c1", 7, "QmA", None, 3.0, True),
    messages.RoundReport(
        "gpt-3fa2c1",
        7,
        messages.RoundMember("QmA", 0, 3),
        (messages.CompletedMicroBatch(12, 64, (0, 1), (2, 5)),),
        5.5,
        (messages.RoundMember("QmC", 3, 5),),
        (b"v" * 16, b"w" * 16),
    ),
    messages.Refused("busy", "64 streams are open"),
]
PULL = {"run": "gpt-3fa2c1", "fragment": 0, "after": 16, "since": 1.7e9, "patience_s": 2.5}
KINDS = [kind.__name__ for kind in Message.__args__]

Json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def header(kind: str, fields: object, blob_bytes: object = 0, version: object = VERSION) -> bytes:
    packed: bytes = msgpack.packb([version, kind, fields, blob_bytes])
    return packed


def refusal(data: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data)
    return caught.value.reason


def fields_of(message: Message) -> dict[str, Any]:
    return dataclasses.asdict(message)


def accepted_or_refused(data: bytes) -> None:
    """Anything but a ProtocolError fails; what is accepted is a message that can be sent on."""
    try:
        message, blob_bytes = codec.decode(data)
    except ProtocolError:
        return
    assert codec.decode(codec.encode(message, blob_bytes)) == (message, blob_bytes)


def test_there_is_an_example_of_every_message() -> None:
    kinds = {type(example).__name__ for example in EXAMPLES}
    assert kinds == set(KINDS), "add each to EXAMPLES of tests/comm/wire/test_codec.py"


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert codec.decode(codec.encode(message, 77)) == (message, 77)


def test_the_largest_config_fits_into_a_header() -> None:
    welcome = messages.Welcome("r" * 64, "c" * MAX_CONFIG_BYTES)
    assert codec.decode(codec.encode(welcome)) == (welcome, 0)


@pytest.mark.parametrize("version", [0, 1, 255, "1", None, [1], {"a": 1}])
def test_another_version_is_refused_as_such(version: object) -> None:
    assert refusal(header("Ping", {"nonce": 1}, version=version)) == "version"


def test_another_version_is_refused_as_such_whatever_else_it_says() -> None:
    assert refusal(header("Whisper", [1, 2], "none", version=VERSION + 1)) == "version"


def test_an_unknown_message_is_refused() -> None:
    assert refusal(header("Whisper", {})) == "unknown"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Ping", {}),
        ("Ping", {"nonce": -1}),
        ("Ping", {"nonce": 1 << 62}),
        ("Ping", {"nonce": "1"}),
        ("Ping", {"nonce": 1.0}),
        ("Ping", {"nonce": True}),
        ("Ping", {"nonce": None}),
        ("Ping", {"nonce": 1, "and": "more"}),
        ("Hello", {"run": "r" * 65}),
        ("Hello", {"run": b"run"}),
        ("Welcome", {"run": "r", "config": "c" * 65537}),
        ("Probe", {"download_bytes": messages.MAX_PROBE_BYTES + 1}),
        ("Pull", PULL | {"fragment": 1 << 20}),
        ("Pull", PULL | {"exact": 1}),
        ("Pull", PULL | {"patience_s": messages.MAX_PATIENCE_S + 1}),
        ("Pull", PULL | {"patience_s": math.nan}),
        ("Pull", PULL | {"since": -1.0}),
        ("Pull", PULL | {"sections": ["phi"] * 41}),
        ("Pull", PULL | {"sections": ["p" * 33]}),
        ("StateRequest", {"run": "r", "fragment": 0, "offset": 0, "length": 0}),
        ("StateRequest", {"run": "r", "fragment": 0, "offset": 0, "length": messages.MAX_CHUNK_BYTES + 1}),
        ("Refused", {"reason": ""}),
        ("Refused", {"reason": "r" * 33}),
        ("Refused", {"reason": "busy", "detail": "d" * 201}),
        ("CommitQuery", {"run": "r", "executions": [{"origin": "r"}]}),
        ("CommitQuery", {"run": "r", "executions": [None]}),
    ],
)
def test_a_field_out_of_its_bound_is_refused(kind: str, fields: dict[str, object]) -> None:
    assert refusal(header(kind, fields)) == "fields"


@pytest.mark.parametrize(
    "change",
    [
        {"digest": b"d" * 15},
        {"digest": b"d" * 17},
        {"digest": "d" * 16},
        {"time": -1.0},
        {"time": 1e11},
        {"time": math.nan},
        {"time": math.inf},
        {"tokens": -1},
        {"seq": 1 << 62},
        {"layout": [fields_of(SNAPSHOT)["layout"][0]] * 41},
        {"layout": [["phi", "int8", 100, 102]]},
        {"layout": 7},
    ],
    ids=str,
)
def test_a_snapshot_with_a_field_out_of_its_bound_is_refused(change: dict[str, object]) -> None:
    assert refusal(header("Snapshot", fields_of(SNAPSHOT) | change)) == "fields"


@pytest.mark.parametrize(
    "change",
    [
        {"elements": -1},
        {"size": -1},
        {"elements": "100"},
        {"elements": 100.0},
        {"elements": 1 << 62},
        {"size": 1 << 62},
        {"name": "n" * 1000},
        {"codec": "c" * 1000},
        {"name": b"phi"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_section_with_a_field_out_of_its_bound_is_refused(change: dict[str, object]) -> None:
    section = fields_of(SNAPSHOT)["layout"][0] | change
    assert refusal(header("Snapshot", fields_of(SNAPSHOT) | {"layout": [section]})) == "fields"


@pytest.mark.parametrize("blob_bytes", [-1, messages.MAX_BLOB_BYTES + 1, 1.0, True, None, "1", [1]])
def test_a_blob_size_out_of_its_bound_is_refused(blob_bytes: object) -> None:
    assert refusal(header("Ping", {"nonce": 1}, blob_bytes)) == "oversize"


def test_a_header_over_its_bound_is_refused_before_it_is_read() -> None:
    assert refusal(b"\xc1" * (codec.MAX_HEADER_BYTES + 1)) == "oversize"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([VERSION, "Done", {}]),
        msgpack.packb([VERSION, "Done", {}, 0, 0]),
        msgpack.packb([VERSION, b"Done", {}, 0]),
        msgpack.packb({"version": VERSION}),
        msgpack.packb([VERSION, "Done", {}, 0]) + b"\x00",
        msgpack.packb([VERSION, "Done", {1: 2}, 0]),
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\x94" + bytes([VERSION]) + b"\xa4Done\x80\xc7\x00\x05",
        b"\x94" + bytes([VERSION]) + b"\xa1\xff\x80\x00",
    ],
    ids=lambda data: data[:8].hex(),
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    assert refusal(data) in ("garbage", "oversize", "unknown")


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    refusal(data)


@given(Json)
def test_a_random_value_is_refused(value: object) -> None:
    refusal(msgpack.packb(value))


@given(kind=st.sampled_from(KINDS), fields=Json, blob_bytes=Json)
def test_a_known_message_with_random_parts_is_accepted_or_refused(
    kind: str, fields: object, blob_bytes: object
) -> None:
    accepted_or_refused(header(kind, fields, blob_bytes))


@given(example=st.sampled_from(EXAMPLES), value=Json, data=st.data())
def test_a_message_with_one_random_field_is_accepted_or_refused(
    example: Message, value: object, data: st.DataObject
) -> None:
    fields = fields_of(example)
    name = data.draw(st.sampled_from([*fields, "another"]))
    accepted_or_refused(header(type(example).__name__, fields | {name: value}))


@given(
    example=st.sampled_from(EXAMPLES),
    flips=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 3),
)
def test_a_damaged_header_is_accepted_or_refused(example: Message, flips: list[tuple[int, int]], cut: int) -> None:
    damaged = bytearray(codec.encode(example, 1000))
    for at, byte in flips:
        damaged[at % len(damaged)] = byte
    accepted_or_refused(bytes(damaged[: len(damaged) - cut]))
