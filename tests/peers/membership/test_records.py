"""A record's body comes back as it was; anything else is a ProtocolError and nothing else."""

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core.credit import MOST_WITNESSED, SeenWork
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import SUFFIX_CHARS
from decentral.core.journal.field_kinds import MOST_NUMBER
from decentral.core.layer_work import KindCost, KindCosts
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile, Standing

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
    ("phase", b"training"),
    ("profile", None),
    ("profile", {"device": "cpu"}),
    ("profile", {**dataclasses.asdict(RECORD.profile), "tokens_per_s": 1.01e12}),
    ("profile", {**dataclasses.asdict(RECORD.profile), "down": 9e17}),
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


COSTS = KindCosts(*[KindCost(1e4, 1e-12, (1 << 50) - 1, 0)] * 3)


def test_the_costs_of_layers_come_back_as_they_were_measured() -> None:
    some = KindCosts(None, KindCost(1.5e-6, 3e-6, 1000, 2000), COSTS.head)
    for costs in (COSTS, some, KindCosts()):
        record = dataclasses.replace(RECORD, profile=dataclasses.replace(RECORD.profile, costs=costs))
        assert records.unpack(records.pack(record)).profile.costs == costs


@pytest.mark.parametrize(
    "cost",
    [
        *([float("nan"), 1.0, 1, 1], [1.0, float("inf"), 1, 1], [-1.0, 1.0, 1, 1], [0.0, 1.0, 1, 1]),
        *([1e5, 1.0, 1, 1], [1e-13, 1.0, 1, 1], [1.0, 1.0, -1, 1], [1.0, 1.0, 1, 1 << 50], [1.0, 1.0, 1.5, 1]),
        *([1.0, 1.0, 1], [1.0, 1.0, 1, 1, 1], ["1", 1.0, 1, "1"], 5, "text"),
    ],
)
def test_costs_that_no_device_has_are_refused(cost: object) -> None:
    fields = dataclasses.asdict(RECORD)
    fields["profile"]["costs"] = [None, cost, None]
    with pytest.raises(ProtocolError):
        records.unpack(msgpack.packb(fields))


# What a stranger, and what our own user, may make large


@pytest.mark.parametrize("name", ["device", "region", "software", "name"])
def test_names_that_strangers_chose_are_plain_text(name: str) -> None:
    changes: dict[str, Any] = {name: "\x1b[2J[red]mine\u202e"}
    profile = dataclasses.replace(RECORD.profile, **changes)
    read = records.unpack(records.pack(dataclasses.replace(RECORD, profile=profile)))
    assert getattr(read.profile, name) == "?(2J(red)mine?"


@pytest.mark.parametrize(("name", "value"), [("run", "\x1b[2J"), ("addresses", ("/ip4/\x1b[2J",)), ("time", 1e12)])
def test_a_name_or_an_address_with_escapes_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError):
        records.unpack(records.pack(dataclasses.replace(RECORD, **{name: value})))


def largest() -> PeerRecord:
    label = "\U0001f600" * 128
    most_s = records.MOST_PER_S
    profile = Profile(label, (1 << 62) - 1, 1e17, most_s, most_s, most_s, 1e17, label, label, COSTS, 1e10, label[:32])
    kept = ((1 << 19, (1 << 62) - 1),) * records.MOST_KEPT
    addresses = ("/" * records.ADDRESS_CHARS,) * records.MOST_ADDRESSES
    most = (1 << 62) - 1
    links = (("~" * SUFFIX_CHARS, most, most),) * records.MOST_RECORDED_LINKS
    few = (1 << 32) - 1
    amount = MOST_NUMBER - 1
    row = SeenWork("~" * SUFFIX_CHARS, amount, amount, amount, few, amount, few, few)
    seen = (row,) * MOST_WITNESSED
    standing = Standing(-records.MOST_LOSS, records.MOST_LOSS, (1000,) * 16, (most,) * 3, most, most, links, seen)
    at = 7, 1 << 19, most, most, most, most
    return PeerRecord("r" * 64, 1e10, addresses, profile, *at, PeerPhase.TRAINING, 1e17, kept, standing)


def test_the_largest_record_fits_and_a_larger_body_is_refused_before_it_is_parsed() -> None:
    body = records.pack(largest())
    assert 0.8 * records.MAX_BODY_BYTES < len(body) <= records.MAX_BODY_BYTES
    assert records.unpack(body) == largest()
    with pytest.raises(ProtocolError, match="oversize"):
        records.unpack(b"\xc1" * (records.MAX_BODY_BYTES + 1))


def test_a_record_says_how_training_goes_in_a_fifth_of_a_kilobyte() -> None:
    links = tuple(("abcdefgh", 1_250_000 + number, 80) for number in range(records.MOST_RECORDED_LINKS))
    standing = Standing(1.734, 1.802, (978, 2, 0, 9, 0, 11), (16_200, 190, 12), 32_600_000_000, 23_400_000_000, links)
    record = dataclasses.replace(RECORD, standing=standing)
    assert records.unpack(records.pack(record)).standing == standing
    assert len(records.pack(record)) - len(records.pack(RECORD)) < 220


def test_a_record_that_does_not_say_how_training_goes_is_valid() -> None:
    fields = msgpack.unpackb(records.pack(RECORD))
    del fields["standing"]
    assert records.unpack(msgpack.packb(fields)) == RECORD


@pytest.mark.parametrize(
    "standing",
    [
        *([float("nan")], [1e7], [None, float("inf")], [1.0, 1.0, [1001]], [1.0, 1.0, [-1]], [1.0, 1.0, [1] * 17]),
        *([1.0, 1.0, [], [1, 2]], [1.0, 1.0, [], [1, 2, -3]], [1.0, 1.0, [], [1, 2, 3], -1], "text", 5, {"loss": "x"}),
        [None, None, [], [0, 0, 0], 0, 0, [["123456789", 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [["\x1b[2J", 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [["abcdefgh", 0, 0]] * 9],
        [None, None, [], [0, 0, 0], 0, 0, [], 1],
        [None, None, [], [0, 0, 0], 0, 0, [], [["abcdefgh", 0, 0, 0, 0, 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [], [["abcdefgh", -1, 0, 0, 0, 0, 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [], [["abcdefgh", 0, 0, 0, 1 << 32, 0, 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [], [["\x1b[2J", 0, 0, 0, 0, 0, 0, 0]]],
        [None, None, [], [0, 0, 0], 0, 0, [], [["abcdefgh", 0, 0, 0, 0, 0, 0, 0]] * (MOST_WITNESSED + 1)],
    ],
)
def test_a_record_that_says_it_out_of_bounds_is_refused(standing: object) -> None:
    fields = msgpack.unpackb(records.pack(RECORD)) | {"standing": standing}
    with pytest.raises(ProtocolError):
        records.unpack(msgpack.packb(fields))


def test_an_own_record_that_others_would_refuse_is_an_error_at_home() -> None:
    records.require_valid(largest())
    for changes, field in (
        ({"addresses": ("/ip4/1.2.3.4/tcp/1",) * 17}, "addresses"),
        ({"profile": dataclasses.replace(RECORD.profile, region="r" * 129)}, "profile.region"),
    ):
        with pytest.raises(UserError, match=f"^{field}: .*would refuse"):
            records.require_valid(dataclasses.replace(RECORD, **changes))


def test_of_many_addresses_the_first_that_fit_are_published() -> None:
    found = ["/" * 300, *(f"/ip4/10.0.0.{n}/tcp/1" for n in range(40))]
    kept = records.publishable(found)
    assert kept == tuple(found[1:17])
    records.require_valid(dataclasses.replace(RECORD, addresses=kept))


@pytest.mark.parametrize(
    ("now", "moved"),
    [
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"], False),
        (["/ip4/10.0.0.2/tcp/1", "/ip4/127.0.0.1/tcp/1"], True),
        (["/ip4/10.0.0.1/tcp/1", "/ip4/203.0.113.7/tcp/9/p2p/Qm/p2p-circuit", "/ip4/127.0.0.1/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], False),
        ([], False),
    ],
)
def test_a_peer_has_moved_when_others_would_reach_it_elsewhere(now: list[str], moved: bool) -> None:
    assert records.has_moved(["/ip4/10.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1"], now) == moved


# Names, which older versions lack


def test_a_record_of_a_peer_without_a_name_is_what_it_was_before_there_were_names() -> None:
    body = msgpack.unpackb(records.pack(RECORD))
    assert "name" not in body["profile"]
    assert records.unpack(msgpack.packb(body)).profile.name == ""


def test_a_name_comes_back_and_a_version_without_names_would_read_the_record() -> None:
    """A reader passes over what it does not know, as this one does with a field of a later version."""
    named = dataclasses.replace(RECORD, profile=dataclasses.replace(RECORD.profile, name="ann-laptop"))
    body = msgpack.unpackb(records.pack(named))
    assert body["profile"]["name"] == "ann-laptop"
    body["profile"]["later"] = 1
    assert records.unpack(msgpack.packb(body)) == named


@pytest.mark.parametrize("name", ["x" * 33, 5, None, ["ann"], b"ann"])
def test_a_name_that_is_too_long_or_no_text_is_refused(name: object) -> None:
    fields = dataclasses.asdict(RECORD)
    fields["profile"]["name"] = name
    with pytest.raises(ProtocolError):
        records.unpack(msgpack.packb(fields))
