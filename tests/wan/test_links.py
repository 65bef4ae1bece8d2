"""Links of the lab on a clock of numbers: rates, queues, shared uplinks and downlinks, loss."""

import numpy as np
import pytest

from benchmarks.wan.links import DROPPED, QUEUE_NS, Count, Links, receive, send, unlimited

MS = 1_000_000
PER_BYTE = 800.0  # ns: 10 Mb/s
SIZE = 1250  # a millisecond at that rate


def limited(peers: int = 3, seed: int = 0, **members: float) -> Links:
    """Links with one value in all places of some members."""
    links = unlimited(peers, seed)
    for name, value in members.items():
        getattr(links, name)[:] = value
    return links


def test_an_unlimited_link_delivers_at_once() -> None:
    links = limited()
    assert send(links, 0, 1, 5, SIZE) == 5
    assert receive(links, 0, 1, 5, SIZE) == 5


def test_packets_leave_one_after_the_other_at_the_links_rate() -> None:
    links = limited(path_P=PER_BYTE, delay_P=10 * MS)
    assert [send(links, 0, 1, 0, SIZE) for _ in range(3)] == [11 * MS, 12 * MS, 13 * MS]


def test_an_idle_link_saves_nothing_up() -> None:
    links = limited(path_P=PER_BYTE)
    send(links, 0, 1, 0, SIZE)
    assert [send(links, 0, 1, 1000 * MS, SIZE) for _ in range(2)] == [1001 * MS, 1002 * MS]


def test_a_full_queue_drops_what_comes_last() -> None:
    links = limited(path_P=PER_BYTE)
    sent = [send(links, 0, 1, 0, SIZE) for _ in range(400)]
    kept = [due for due in sent if due != DROPPED]
    assert sent == kept + [DROPPED] * (400 - len(kept))
    assert kept[-1] == QUEUE_NS + MS
    assert links.counts_PC[1, Count.PATH_FULL] == 400 - len(kept)
    assert send(links, 0, 1, 2 * MS, SIZE) == QUEUE_NS + 2 * MS, "two packets have left meanwhile"


def test_an_uplink_is_shared_by_all_receivers() -> None:
    links = limited(up_N=PER_BYTE)
    assert [send(links, 0, target, 0, SIZE) for target in (1, 2, 1)] == [MS, 2 * MS, 3 * MS]
    assert send(links, 1, 2, 0, SIZE) == MS


def test_a_downlink_is_shared_by_all_senders() -> None:
    links = limited(down_N=PER_BYTE)
    assert [receive(links, source, 2, 0, SIZE) for source in (0, 1, 0)] == [MS, 2 * MS, 3 * MS]
    assert receive(links, 0, 1, 0, SIZE) == MS


def test_a_full_uplink_takes_nothing_from_the_path_behind_it() -> None:
    links = limited(up_N=PER_BYTE, path_P=PER_BYTE)
    sent = [send(links, 0, 1, 0, SIZE) for _ in range(400)]
    assert links.path_free_P[1] == sent[links.counts_PC[1, Count.OFFERED] - links.counts_PC[1, Count.UPLINK_FULL] - 1]
    assert links.counts_PC[1, Count.PATH_FULL] == 0


def test_the_share_that_was_asked_for_is_lost_and_the_seed_says_which() -> None:
    def lost(seed: int) -> list[int]:
        links = limited(seed=seed, loss_P=0.1)
        return [number for number in range(10_000) if send(links, 0, 1, number, SIZE) == DROPPED]

    assert lost(1) == lost(1)
    assert lost(1) != lost(2)
    assert len(lost(1)) == pytest.approx(1000, rel=0.1)


def test_pairs_lose_packets_independently() -> None:
    links = limited(loss_P=0.5)
    first, second = ([send(links, 0, target, 0, SIZE) for _ in range(64)] for target in (1, 2))
    assert first != second


def test_a_cut_pair_carries_nothing_and_the_way_back_stays_open() -> None:
    links = limited()
    links.open_P[0 * 3 + 1] = False
    assert send(links, 0, 1, 0, SIZE) == DROPPED
    assert send(links, 1, 0, 0, SIZE) == 0
    assert links.counts_PC[1].tolist()[: Count.CUT + 1] == [SIZE, 1, 0, 0, 1]


def test_the_longest_wait_is_kept() -> None:
    links = limited(path_P=PER_BYTE)
    for _ in range(5):
        send(links, 0, 1, 0, SIZE)
    assert links.counts_PC[1, Count.LONGEST_WAIT_NS] == 5 * MS
    assert np.count_nonzero(links.counts_PC[:, Count.LONGEST_WAIT_NS]) == 1
