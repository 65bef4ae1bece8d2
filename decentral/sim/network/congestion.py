"""What TCP lets a sender have under way, in virtual time: slow start, lost packets, and windows that idle away.

A sender may have a window of bytes under way. When the window is used up it waits until the first bytes of it are
acknowledged, a round trip after they were sent. In slow start the window grows by what was acknowledged, so that it is
twice as large in the next round trip; from its ceiling on it grows by a packet in each (RFC 5681):

    round trip  |-- window --|  waits  |---- twice the window ----|  waits  |----- acknowledgements come in time -----

A connection that is not used loses half of its window in each retransmission time-out (RFC 2861), as Linux does it by
default (tcp_slow_start_after_idle), so that a transfer after a pause begins slowly again. comm/wire/slow_start.py has
the same for one transfer alone, for the meter. Sizes are those of IP packets, rates bytes/s.
"""

from dataclasses import dataclass

from decentral.comm.wire.slow_start import INITIAL_BYTES
from decentral.core.units import MiB, Seconds

PACKET_BYTES = 1500
WITH_HEADERS = PACKET_BYTES / 1448  # bytes on the link, for each byte of a message
FIRST_WINDOW = INITIAL_BYTES * WITH_HEADERS
MOST_BYTES = 4.0 * MiB  # under way: the buffers of a stock Linux (tcp_wmem)
SLOW_START_PATHS = 1.5  # HyStart ends slow start where one to two times what the path holds is under way
AFTER_LOSS = 0.7  # of the window is left (CUBIC, RFC 9438)
LEAST_TIMEOUT_S = 0.2  # a retransmission time-out is so much longer than the round trip (RFC 6298, as Linux has it)
IN_TIME = float("inf")


@dataclass(slots=True)
class CongestionWindow:
    """One direction of a connection: what its last transfer has left behind."""

    size: float = FIRST_WINDOW
    ceiling: float = MOST_BYTES
    used_at: Seconds = 0.0

    def use(self, now: Seconds, round_trip_s: Seconds) -> None:
        """The connection is used: it loses half of its window for each time-out in which it was not."""
        timeouts = int((now - self.used_at) / (LEAST_TIMEOUT_S + round_trip_s))
        if timeouts > 0:
            self.size = max(FIRST_WINDOW, self.size / 2.0 ** min(timeouts, 64))
        self.used_at = max(self.used_at, now)

    def sender(self, size: float, path_rate: float, round_trip_s: Seconds, sharing: int) -> "Sender":
        """A transfer of `size` bytes, which shares the connection with others, `sharing` with itself."""
        own = self.size / sharing
        ceiling = min(self.ceiling / sharing, SLOW_START_PATHS * path_rate * round_trip_s, MOST_BYTES)
        return Sender(size, round_trip_s, own, max(own, ceiling))

    def leave(self, sender: "Sender", now: Seconds, sharing: int) -> None:
        """The transfer is over, and what it has sent is acknowledged."""
        sender.acknowledge()
        self.size, self.used_at = min(MOST_BYTES, sender.window * sharing), now
        if sender.resent_at:
            self.ceiling = max(sender.ceiling, sender.window) * sharing


@dataclass(slots=True)
class Sender:
    """A transfer under way, as of the time `at`."""

    left: float  # bytes
    round_trip_s: Seconds
    window: float
    ceiling: float  # of slow start
    at: Seconds = 0.0
    sendable: float = 0.0  # bytes of the window that were not sent yet; IN_TIME: acknowledgements come before it ends
    acknowledged_at: Seconds = 0.0  # when the first bytes of this window are
    resent_at: Seconds = 0.0  # when what was lost has been sent again; 0: nothing was lost
    at_once: bool = True  # the window goes out at once; later ones bit by bit, as acknowledgements come

    @property
    def burst(self) -> float:
        """Bytes by which this round makes the link's queue longer."""
        return min(self.window, self.left) / (1 if self.at_once else 2)

    def begin_round(self, now: Seconds, queue_s: Seconds) -> None:
        """It may send its window from now on; acknowledgements wait in a queue for so long."""
        self.at, self.sendable = now, self.window
        self.acknowledged_at = now + self.round_trip_s + queue_s

    def take_share(self, rate: float) -> Seconds:
        """From `at` on it sends at this rate > 0. When it will have sent all, or all that it may."""
        if self.sendable == IN_TIME and self.window < rate * self.round_trip_s:
            self.begin_round(self.at, 0.0)
        if self.left > self.sendable:
            empty_at = self.at + self.sendable / rate
            if empty_at < self.acknowledged_at:
                return empty_at
            self.sendable = IN_TIME
        return self.at + self.left / rate

    def send(self, rate: float, now: Seconds) -> None:
        """Has sent at this rate until now."""
        sent = min(self.left, self.sendable, rate * (now - self.at))
        self.left, self.at = self.left - sent, now
        if self.sendable == IN_TIME:
            self._grow(sent)
        else:
            self.sendable -= sent

    def acknowledge(self) -> None:
        """What was sent of the window is acknowledged. A window that was not half used does not grow."""
        used, self.at_once = self.window - self.sendable, False
        if 2 * used > self.window:
            self._grow(used)

    def lose(self, dropped: float, queue_s: Seconds, now: Seconds) -> None:
        """Lose bytes now: they are sent again when later ones, which have waited in the queue, are acknowledged."""
        self.at = now
        self.left += min(dropped, self.window)
        self.window = self.ceiling = max(FIRST_WINDOW, AFTER_LOSS * self.window)
        self.resent_at = self.at + queue_s + self.round_trip_s

    def queued(self, rate: float) -> float:
        """Bytes that wait for the link: what is under way, beyond what is on the path."""
        under_way = min(self.left, self.window)
        if self.sendable == IN_TIME:
            return max(0.0, under_way - rate * self.round_trip_s)
        return min(self.sendable, under_way) / (1 if self.at_once else 2)

    def _grow(self, acknowledged: float) -> None:
        if self.window < self.ceiling:
            self.window = min(self.ceiling, self.window + acknowledged)
        else:
            self.window = min(MOST_BYTES, self.window + PACKET_BYTES * acknowledged / self.window)
