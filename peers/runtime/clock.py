"""The clock of one peer: unix time that never jumps, set once to the swarm's time. See `SwarmClock`.

Peers compare times: records expire, snapshots have an age, windows end together. So all peers need the same time, even
if it is not the right time. A peer reads its machine's clock once, and then adds the time that has passed, also while
suspended. Later jumps of the machine's clock are shown to the user and change nothing. Before a peer begins to join, it
compares its clock with the clocks of the peers that it has reached, and takes their time if it differs. A running peer
never adjusts its clock, since a jump would upset its deadlines.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median

from decentral.core.times import duration
from decentral.core.units import Seconds

MOST_AHEAD_S = 366 * 24 * 3600.0  # clocks that differ from ours by more than a year are ignored as wrong or malicious
CLOCKS_AGREE_S = 2.0  # clocks that differ by up to this time count as equal, since gossip tolerates such errors
MOST_FINDERS = 3  # besides peers in the roster, at most this many other connected peers are asked for their time


def steady_s() -> Seconds:
    """Return the seconds since some fixed moment, including suspended time if the system supports it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SwarmClock:
    """A clock that never jumps; calling it, or its method `now`, returns the swarm's unix time in seconds."""

    def __init__(self, wall: Callable[[], Seconds] = time.time, steady: Callable[[], Seconds] = steady_s) -> None:
        """Set the clock to the machine's time; tests replace the system's clocks by `wall` and `steady`."""
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()

    def __call__(self) -> Seconds:
        """Return the swarm's time."""
        return self._steady() + self._offset

    def now(self) -> Seconds:
        """Return the swarm's time."""
        return self()

    async def sleep(self, seconds: Seconds) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)

    def agree(self, ahead_s: Sequence[Seconds]) -> Seconds:
        """Set this clock to the swarm's time (see `agreed_s`); call it only before the peer begins to join.

        Args:
            ahead_s: For each other peer, the seconds by which its clock is ahead of this clock (negative: behind).

        Returns:
            Seconds by which this clock was moved forward (negative: back); 0.0 if the clocks agree.
        """
        set_s = agreed_s(ahead_s)
        self._offset += set_s
        return set_s

    def machine_ahead_s(self) -> Seconds:
        """Return by how many seconds the machine's clock is ahead of this clock now; negative if it is behind."""
        return self._wall() - self()


def agreed_s(ahead_s: Sequence[Seconds]) -> Seconds:
    """Return the seconds by which to move a peer's clock forward (negative: back) so that it shows the swarm's time.

    `ahead_s` has, for each other peer, the seconds by which its clock is ahead of this peer's clock.

    The result is the median of `ahead_s`. If the number of other peers is even, a 0 for this peer's own clock is added.
    So one wrong clock among three other peers changes nothing, but a peer that knows only one other peer adopts that
    peer's time. Differences above MOST_AHEAD_S are ignored. A median of at most CLOCKS_AGREE_S counts as 0.
    """
    ahead_s = [ahead for ahead in ahead_s if abs(ahead) <= MOST_AHEAD_S]
    if not ahead_s:
        return 0.0
    ahead = median(ahead_s if len(ahead_s) % 2 else [*ahead_s, 0.0])
    return ahead if abs(ahead) > CLOCKS_AGREE_S else 0.0


def difference(ahead_s: Seconds) -> str:
    """Return `ahead_s` as text: `2 h ahead of` for 7200, and `2 h behind` for -7200."""
    return f"{duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
