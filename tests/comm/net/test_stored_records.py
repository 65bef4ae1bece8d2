"""Our node of the DHT stores so many bytes for others under each key, each name or invitation has its share, and what
is stored under a key can be read in one answer."""

from itertools import count
from typing import Any

from decentral.comm.net import stored_records
from decentral.comm.net.stored_records import LEAST_ROOM, MOST_STORED, StoredRecords
from decentral.core.units import KiB, MiB
from tests.comm.net.invited import INVITED

PEERS, MORE_PEERS, PLANS, REVOKED = b"1", b"2", b"3", b"4"
KEYS = {PEERS: "run/peers/0", MORE_PEERS: "run/peers/1", PLANS: "run/plan", REVOKED: "run/revoked"}
ANSWER_BYTES = 4 * MiB  # the largest message of hivemind's calls


def fill(stored: StoredRecords, key: bytes, size: int, now: float = 0.0, prefix: str = "name") -> int:
    """As many records as find room."""
    return next(n for n in count() if not stored.take((key, f"{prefix}{n}"), now + 60.0, size, now))


def test_what_is_stored_under_the_keys_of_one_shard_fits_into_one_message() -> None:
    """Forty-six records of plans were more than 4 MiB: no peer got an answer any more, and askers dropped the node."""
    for size in (100, LEAST_ROOM, 1500, 16 * KiB, 96 * KiB):
        stored = StoredRecords(KEYS)
        taken = sum(fill(stored, key, size) * (size + 100) for key in (PEERS, PLANS, REVOKED))
        assert taken < ANSWER_BYTES + 128 * KiB


def test_one_key_leaves_room_for_another() -> None:
    stored = StoredRecords(KEYS)
    first = fill(stored, PEERS, 16 * KiB)
    assert fill(stored, MORE_PEERS, 16 * KiB) == first > 100
    assert fill(stored, PLANS, 96 * KiB) >= 8


def test_small_records_are_bounded_in_number() -> None:
    shards = {bytes([number]): f"run/peers/{number}" for number in range(16)}
    stored = StoredRecords(shards)
    assert sum(fill(stored, key, 100) for key in shards) == MOST_STORED


def test_all_keys_together_have_a_limit() -> None:
    shards = {bytes([number]): f"run/peers/{number}" for number in range(100)}
    stored = StoredRecords(shards)
    for key in shards:
        fill(stored, key, 16 * KiB)
    assert stored.used <= stored_records.STORED_BYTES


def test_one_invitation_has_half_of_a_key_whatever_names_its_holder_takes() -> None:
    stored = StoredRecords(KEYS, INVITED)
    assert fill(stored, PEERS, 16 * KiB, prefix="bad") == 80
    assert fill(stored, PEERS, 16 * KiB, prefix="ann") == 40
    assert stored.take((PEERS, "bob"), 60.0, 16 * KiB, 0.0)


def test_a_record_is_replaced_by_its_next_one_where_nothing_else_finds_room_and_what_has_expired_goes() -> None:
    stored = StoredRecords(KEYS)
    first = fill(stored, PLANS, 96 * KiB)
    assert stored.take((PLANS, "name0"), 120.0, 90 * KiB, 1.0)
    assert stored.take((PLANS, "name0"), 121.0, 96 * KiB, 1.0)
    assert not stored.take((PLANS, "new"), 120.0, 96 * KiB, 1.0)
    assert stored.take((PLANS, "new"), 120.0, 96 * KiB, 61.0)
    assert len(stored.records) == 2
    assert stored.used == stored.shares[PLANS].used == 2 * 128 * KiB
    assert fill(stored, PLANS, 96 * KiB, now=200.0) == first


def test_an_older_record_does_not_make_room_that_the_newer_one_still_takes() -> None:
    stored = StoredRecords(KEYS)
    assert stored.take((PLANS, "peer"), 60.0, 96 * KiB, 0.0)
    assert not stored.take((PLANS, "peer"), 59.0, 100, 0.0)
    assert stored.used == 128 * KiB


class CountedRecords(dict[stored_records.Name, stored_records.RecordRoom]):
    """Stored records, and how often all of them were searched."""

    searches = 0

    def items(self) -> Any:
        self.searches += 1
        return super().items()


def test_a_flood_of_refused_records_has_all_records_searched_once_a_second() -> None:
    """Each refused record had all others searched for 2.3 ms: half of the event loop at 256 records a second."""
    stored = StoredRecords(KEYS, records=CountedRecords())
    fill(stored, PLANS, 96 * KiB)
    for number in range(200):
        assert not stored.take((PLANS, f"new{number}"), 120.0, 96 * KiB, 10.0 + number / 100)
    assert isinstance(stored.records, CountedRecords)
    assert stored.records.searches == 3
    assert stored.take((PLANS, "later"), 120.0, 96 * KiB, 70.0)
