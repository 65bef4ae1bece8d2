"""How long a transfer takes whose sender begins slowly, as TCP's do, and what its duration says of the link's rate.

A sender may have INITIAL_BYTES under way at first (RFC 6928), and twice as many after each round trip, until as many
as the link carries in a round trip are under way (Cardwell, Savage & Anderson, "Modeling TCP latency", 2000, without
losses). After k round trips it has sent INITIAL_BYTES (2^k - 1), and what is left takes its bytes over the rate:

    duration = max over k of (k round trips + what is left then / rate)

So a short transfer over a long way takes its round trips, whatever the link could carry, and says little of it.
Durations are from the arrival of the first byte to that of the last.
"""

from collections.abc import Iterator
from functools import lru_cache

from decentral.core.units import Seconds

INITIAL_BYTES = 10 * 1448
SLOW_PART = 0.5  # at most so much of a duration is put down to slow start: a latency measured too long excuses no more
RESULTS_KEPT = 4096  # for each function: an uplink is judged by its last uploads before each message that is sent


@lru_cache(RESULTS_KEPT)
def transfer_s(size: int, rate: float, round_trip_s: Seconds) -> Seconds:
    """The duration of a transfer of `size` bytes over a link of `rate` bytes/s."""
    return max((waited_s + left / rate for left, waited_s in _rounds(size, round_trip_s)), default=0.0)


@lru_cache(RESULTS_KEPT)
def rate_of(size: int, seconds: Seconds, round_trip_s: Seconds) -> float:
    """The rate, in bytes/s, of a link that has carried `size` > 0 bytes in so many `seconds` > 0.

    It is exact where the sender was through with its slow start in the first SLOW_PART of the duration, else too low.
    """
    rounds = (one for one in _rounds(size, round_trip_s) if one[1] <= SLOW_PART * seconds)
    return max(left / (seconds - waited_s) for left, waited_s in rounds)


def _rounds(size: int, round_trip_s: Seconds) -> Iterator[tuple[int, Seconds]]:
    """At the beginning of each round trip in which something is left: how many bytes, and the time until then."""
    left, flight, waited_s = size, INITIAL_BYTES, 0.0
    while left > 0:
        yield left, waited_s
        left, flight, waited_s = left - flight, 2 * flight, waited_s + round_trip_s
