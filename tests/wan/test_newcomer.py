"""What the benchmark of a newcomer's download makes of the router's counters and of the journals."""

import numpy as np
import pytest

from benchmarks.wan import newcomer
from benchmarks.wan.description import Description
from benchmarks.wan.lab import Traffic
from benchmarks.wan.links import Count

MB = 1_000_000


def homes(up: float, down: float, peers: int = 4) -> Description:
    names, square = tuple(f"home-{n}" for n in range(peers)), (peers, peers)
    unlimited, delays = np.full(square, np.inf), np.full(square, 0.05)
    return Description(
        names, names, np.full(peers, up), np.full(peers, down), unlimited, delays, np.zeros(square), {}, 1500, 0
    )


def carried(*parts: tuple[int, int, int], seconds: float = 10.0) -> Traffic:
    """So many bytes from one peer to another."""
    counts = np.zeros((4, 4, len(Count)), np.int64)
    for source, target, count in parts:
        counts[source, target, Count.DELIVERED_BYTES] = count
    return Traffic(seconds, counts, {}, np.zeros(1, np.int64), 0.0)


def exchange(at: float, seconds: float, outcome: str = "done") -> dict[str, object]:
    return {"t": at, "event": "exchange", "outcome": outcome, "seconds": seconds}


@pytest.mark.parametrize(("down", "share"), [(100.0, 0.5), (4.0, 0.75)])
def test_a_download_can_have_no_more_than_its_downlink_and_the_donors_uplinks(down: float, share: float) -> None:
    traffic = carried((0, 3, 10 * MB), (1, 3, 20 * MB), (0, 1, 50 * MB))
    found = newcomer.of_download(homes(2.0 * MB, down * MB), traffic, seconds=10.0)
    assert found["bytes"] == 30 * MB
    assert found["share"] == pytest.approx(share)


def test_exchanges_count_in_the_time_in_which_they_end_and_the_newcomers_bytes_not_at_all() -> None:
    lines = [exchange(9.0, 1.0), exchange(11.0, 2.0), exchange(12.0, 4.0), exchange(12.5, 9.0, "failed")]
    found = newcomer.of_exchanges(carried((0, 1, 5 * MB), (0, 3, 70 * MB)), lines, (10.0, 13.0))
    assert (found["done"], found["failed"], found["seconds_median"]) == (2, 1, 3.0)
    assert found["bytes_per_s"] == pytest.approx(0.5 * MB)
