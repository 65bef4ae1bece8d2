"""Model TCP slow start: compute a transfer's duration from the link's rate, and the rate from a duration.

A sender may have INITIAL_BYTES in flight at first (RFC 6928), and twice as many after each round trip, until the link
is full (Cardwell, Savage & Anderson, "Modeling TCP latency", 2000, without losses). After k round trips the sender has
sent INITIAL_BYTES (2^k - 1) bytes; sending the remaining bytes then takes at least (remaining bytes / rate) seconds:

    duration = max over k of (k round trips + remaining bytes / rate)

So even on a fast link a short transfer to a distant peer takes several round trips, and does not show the link's rate.
All durations are from the arrival of the first byte to the arrival of the last byte.
"""

from collections.abc import Iterator
from functools import lru_cache

from decentral.core.units import MiB, Seconds

INITIAL_BYTES = 10 * 1448  # the initial congestion window of TCP: 10 segments of 1,448 bytes
MOST_BYTES = 4.0 * MiB  # a connection has at most this many bytes in flight: Linux's default send buffer (tcp_wmem)
SLOW_PART = 0.5  # `rate_of` attributes at most this fraction of a transfer's duration to TCP slow start
RESULTS_KEPT = 4096  # `transfer_s` and `rate_of` each cache this many results, because each message needs both


@lru_cache(RESULTS_KEPT)
def transfer_s(size: int, rate: float, round_trip_s: Seconds, first_bytes: int = INITIAL_BYTES) -> Seconds:
    """Return the seconds that a transfer of `size` bytes takes over a link of `rate` bytes/s, slow start included.

    `first_bytes` may be in flight at first; after other transfers over the connection, this is more than INITIAL_BYTES.
    """
    return max((waited_s + left / rate for left, waited_s in _rounds(size, round_trip_s, first_bytes)), default=0.0)


@lru_cache(RESULTS_KEPT)
def rate_of(size: int, seconds: Seconds, round_trip_s: Seconds, first_bytes: int = INITIAL_BYTES) -> float:
    """Return the rate (bytes/s) of a link on which a transfer of `size` > 0 bytes took `seconds` > 0 seconds.

    The result is too low if slow start took more than the first SLOW_PART of the duration, and too high if more than
    `first_bytes` were in flight at first.
    """
    rounds = (one for one in _rounds(size, round_trip_s, first_bytes) if one[1] <= SLOW_PART * seconds)
    return max(left / (seconds - waited_s) for left, waited_s in rounds)


def _rounds(size: int, round_trip_s: Seconds, first_bytes: int) -> Iterator[tuple[int, Seconds]]:
    """Yield (bytes still to be sent, seconds since the transfer's start) at the start of each round trip."""
    left, flight, waited_s = size, first_bytes, 0.0
    while left > 0:
        yield left, waited_s
        left, flight, waited_s = left - flight, 2 * flight, waited_s + round_trip_s
