"""What our node of the DHT reads of the values that others store or answer, and what it keeps of them."""

import math
import struct
import time

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import FOUND_DICTIONARY, FOUND_REGULAR, NOT_FOUND, FindResponse, FindResult
from hivemind.utils import MSGPackSerializer

from decentral.comm.net.dht_calls import keep_honest
from decentral.comm.net.dht_values import DICTIONARY, MOST_ANSWERED_BYTES, plain, require_records
from decentral.comm.net.libp2p_directory import LEAST_EXPIRIES, BoundedStorage, SignedRecords
from decentral.comm.net.stored_records import LEAST_ROOM

TUPLE = MSGPackSerializer._TUPLE_EXT_TYPE_CODE
KEY = "words-3fa2c1/peers"


def nested(code: int, depth: int) -> bytes:
    value = b"\x90"
    for _ in range(depth):
        value = struct.pack(">BIB", 0xC9, len(value), code) + value
    return value


def dictionary(*rows: object, size: object = None, latest: object = 1.0) -> bytes:
    inner = msgpack.packb([size, latest, rows])
    packed: bytes = msgpack.packb(msgpack.ExtType(DICTIONARY, inner))
    return packed


WRONG = {
    **{f"{depth} of {code}": nested(code, depth) for code in (TUPLE, DICTIONARY) for depth in (1, 200)},
    "nested in a row": dictionary(["peer", msgpack.ExtType(TUPLE, b"\x90"), 1.0]),
    "a list as a peer": dictionary([["peer"], b"x", 1.0]),
    "no time": dictionary(["peer", b"x", 1]),
    "two parts": dictionary(["peer", b"x"]),
    "a list": msgpack.packb(["bytes"]),
    "a map": msgpack.packb({"a": 1}),
    "claims": b"\xdd\x00\x00\x3f\xff" * 1000,
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_a_value_that_no_node_of_ours_stores_is_not_stored_and_not_read_in_an_answer(value: bytes) -> None:
    """Two hundred extension types, one in the other, were 1.2 kB and ended the process."""
    valid = SignedRecords([KEY], time.time)
    for subkey in (msgpack.packb("x"), value):
        assert not valid.validate(DHTRecord(DHTID.generate(source=KEY).to_bytes(), subkey, value, 1.0))
    for kind in (FOUND_REGULAR, FOUND_DICTIONARY, 4):
        assert kept(FindResult(type=kind, value=value, expiration_time=1.0)).type == NOT_FOUND


def kept(result: FindResult) -> FindResult:
    """Return what our node keeps of an answer with this result."""
    answer = FindResponse(results=[result])
    keep_honest(answer, PeerID(b"\x12\x20" + bytes(32)))
    return answer.results[0]


ROW = ["peer", b"x", 1.0]
OTHER = {
    "a text as a size": (dictionary(ROW, size="x"), 1.0),
    "a list as a size": (dictionary(ROW, size=[]), 1.0),
    "a size of one": (dictionary(ROW, size=1.0), 1.0),
    "no record": (dictionary(), 1.0),
    "no end of the answer": (dictionary(ROW), math.inf),
    "no end of the dictionary": (dictionary(ROW, latest=math.inf), 1.0),
    "no end at all": (dictionary(["peer", b"x", math.inf], latest=math.inf), math.inf),
    "no end of an earlier record": (dictionary(["other", b"x", -math.inf], ROW), 1.0),
    "no number": (dictionary(["peer", b"x", math.nan], latest=math.nan), math.nan),
    "later than its records": (dictionary(ROW, latest=2.0), 2.0),
    "earlier than a record": (dictionary(ROW, ["other", b"x", 2.0]), 1.0),
}


@pytest.mark.parametrize(("value", "expires"), OTHER.values(), ids=OTHER)
def test_an_answer_that_would_end_a_search_early_counts_as_nothing_found(value: bytes, expires: float) -> None:
    """hivemind compared a size with a text, or took an answer without an end as the last that it needs."""
    assert kept(FindResult(type=FOUND_DICTIONARY, value=dictionary(ROW), expiration_time=1.0)).type == FOUND_DICTIONARY
    assert kept(FindResult(type=FOUND_DICTIONARY, value=value, expiration_time=expires)).type == NOT_FOUND


def test_a_dictionary_of_records_is_read() -> None:
    storage, key = DHTLocalStorage(), DHTID.generate(source=KEY)
    end = time.time() + 600
    for peer, expires in (("peer", end), ("latest", end + 7.5), ("renewed", end - 9), ("renewed", end - 2)):
        storage.store_subkey(key, peer, b"record", expires)
    records, until = storage.get(key)
    found = FindResult(type=FOUND_DICTIONARY, value=MSGPackSerializer.dumps(records), expiration_time=until)
    assert kept(found).type == FOUND_DICTIONARY
    assert MSGPackSerializer.loads(found.value).data == records.data


def test_an_answer_has_no_more_records_than_a_node_of_ours_stores_under_a_key() -> None:
    """An answer of 4 MiB could have 6,700 valid records, whose signatures keep the event loop for 0.6 s."""
    most = MOST_ANSWERED_BYTES // LEAST_ROOM
    rows = [[f"peer{number}", b"record", 1.0] for number in range(most + 1)]
    require_records(dictionary(*rows[:most]), 1.0)
    with pytest.raises(ValueError, match="at most"):
        require_records(dictionary(*rows), 1.0)


@pytest.mark.parametrize("value", [b"record", "a peer's id", None])
def test_a_plain_value_comes_back_as_it_was(value: object) -> None:
    assert plain(MSGPackSerializer.dumps(value)) == value


def test_a_record_that_is_renewed_often_is_remembered_once() -> None:
    """Each renewal stayed in two lists until its expiry: 256 a second, for up to two hours."""
    storage = BoundedStorage(SignedRecords([KEY], time.time), DHTLocalStorage())
    key, expires = DHTID.generate(source=KEY), time.time() + 600
    for number in range(10 * LEAST_EXPIRIES):
        assert storage.store_subkey(key, "peer", b"record", expires + number)
    records = storage.data[key].value
    assert records.get("peer").expiration_time == expires + number
    for one in (storage, records):
        assert len(one.expiration_heap) <= LEAST_EXPIRIES + 2


def test_what_has_expired_goes_though_its_older_expiries_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now[0])
    storage = BoundedStorage(SignedRecords([KEY], lambda: now[0]), DHTLocalStorage())
    key = DHTID.generate(source=KEY)
    for number in range(2 * LEAST_EXPIRIES):
        storage.store_subkey(key, "renewed", b"record", now[0] + 500 + number)
    storage.store_subkey(key, "once", b"record", now[0] + 60)
    now[0] += 100
    assert [peer for peer in ("renewed", "once") if peer in storage.get(key).value] == ["renewed"]
    now[0] += 2000
    assert storage.get(key) is None
