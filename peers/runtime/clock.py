"""The clock of one peer: unix time that never jumps, and that is the swarm's.

Peers compare times: a record expires, a snapshot has an age, windows end together. So they need one clock, and it need
not be right. A peer reads its machine's clock once, and goes by the time that has passed since, suspension included:
what happens to the machine's clock later (an hour forward, an hour back) is shown to the user and changes nothing.
Before it begins it compares its clock with those of the peers that it has reached, and goes by theirs where they
differ. It does so once: a clock that jumped under a running peer would confuse each of its deadlines.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median

from decentral.core.units import Seconds

MOST_AHEAD_S = 366 * 24 * 3600.0  # no clock that others go by is further from ours; infinity ended the peer
CLOCKS_AGREE_S = 2.0  # clocks that differ by less are taken as they are: windows and ages have room for it
MOST_FINDERS = 3  # peers in no roster that are asked for their time at once


def steady_s() -> Seconds:
    """Seconds since some moment. They go on while the machine is suspended, where the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SwarmClock:
    """Call it for the time, or `now`."""

    def __init__(self, wall: Callable[[], Seconds] = time.time, steady: Callable[[], Seconds] = steady_s) -> None:
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()

    def __call__(self) -> Seconds:
        return self._steady() + self._offset

    def now(self) -> Seconds:
        return self()

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)

    def agree(self, ahead_s: Sequence[Seconds]) -> Seconds:
        """Takes the swarm's time, and gives the seconds by which the clock was set.

        `ahead_s` says how far other peers' clocks are ahead of this one. To be called before the peer begins only.
        """
        set_s = agreed_s(ahead_s)
        self._offset += set_s
        return set_s

    def machine_ahead_s(self) -> Seconds:
        """How far the machine's clock is ahead of this one at present."""
        return self._wall() - self()


def agreed_s(ahead_s: Sequence[Seconds]) -> Seconds:
    """The seconds by which a clock is to be set, where those of other peers are so far ahead of it.

    It is the median's time; the own clock counts as well where there is no middle one. So of three clocks one that
    lies, or is wrong, moves nobody; but a newcomer that knows one peer only believes it, up to a year. What is more, or
    no number, is left out.
    """
    ahead_s = [ahead for ahead in ahead_s if abs(ahead) <= MOST_AHEAD_S]
    if not ahead_s:
        return 0.0
    ahead = median(ahead_s if len(ahead_s) % 2 else [*ahead_s, 0.0])
    return ahead if abs(ahead) > CLOCKS_AGREE_S else 0.0


def difference(ahead_s: Seconds) -> str:
    """`3600 s ahead of` or `3600 s behind`."""
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
