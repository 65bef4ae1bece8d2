"""Our node of the DHT stores so many bytes for others, of peers and of plans apart, and each key has its share."""

from decentral.comm.net.stored_records import MOST_STORED, PEERS_STORED_BYTES, PLANS_STORED_BYTES, StoredRecords
from decentral.core.units import KiB

PEERS, MORE_PEERS, PLANS = b"1", b"2", b"3"
KEYS = {PEERS: "run/peers/0", MORE_PEERS: "run/peers/1", PLANS: "run/plans"}


def fill(stored: StoredRecords, key: bytes, size: int, now: float = 0.0) -> int:
    """As many records as find room."""
    count = 0
    while count < 2 * MOST_STORED and stored.take((key, b"name%d" % count), now + 60.0, size, now):
        count += 1
    return count


def test_large_records_of_many_names_do_not_fill_our_memory() -> None:
    """16384 records of a plan's 96 KiB are 1.6 GB."""
    stored = StoredRecords(KEYS)
    assert fill(stored, PLANS, 96 * KiB) * 128 * KiB <= PLANS_STORED_BYTES / 2 + 128 * KiB
    assert stored.take((PEERS, b"peer"), 60.0, 4 * KiB, 0.0)


def test_one_key_leaves_room_for_another() -> None:
    stored = StoredRecords(KEYS)
    first = fill(stored, PEERS, 16 * KiB)
    assert first * 16 * KiB <= PEERS_STORED_BYTES / 2 + 16 * KiB
    assert fill(stored, MORE_PEERS, 16 * KiB) >= first // 3


def test_small_records_are_bounded_in_number() -> None:
    assert fill(StoredRecords(KEYS), PEERS, 100) == MOST_STORED


def test_a_record_is_replaced_by_its_next_one_where_nothing_else_finds_room_and_what_has_expired_goes() -> None:
    stored = StoredRecords(KEYS)
    count = fill(stored, PLANS, 96 * KiB)
    assert stored.take((PLANS, b"name0"), 120.0, 90 * KiB, 1.0)
    assert stored.take((PLANS, b"name0"), 120.0, 96 * KiB, 1.0)
    assert not stored.take((PLANS, b"new"), 120.0, 96 * KiB, 1.0)
    assert stored.take((PLANS, b"new"), 120.0, 96 * KiB, 61.0)
    assert len(stored.records) == 2
    assert stored.plans.used == 2 * 128 * KiB
    assert fill(stored, PLANS, 96 * KiB, now=200.0) == count
