"""Model TCP's congestion control in virtual time: slow start, lost packets, and windows that shrink when idle.

A sender may have a window of bytes in flight. When the window is used up, the sender waits until the first bytes of the
window are acknowledged, a round trip after they were sent. In slow start the window grows by the acknowledged bytes, so
that it doubles in each round trip. Above the ceiling the window grows by one packet in each round trip (RFC 5681):

    round trip  |-- window --|  waits  |---- twice the window ----|  waits  |----- acknowledgements come in time -----

An idle connection loses half of its window in each retransmission time-out (RFC 2861), as on Linux by default
(tcp_slow_start_after_idle), so that a transfer after a pause begins slowly again. The transfers on a connection share
its one window: a new one takes an equal part from the others, and one that ends leaves its part to them.

comm/wire/slow_start.py models a single transfer without other traffic. Sizes are in bytes of IP packets, rates in
bytes/s.
"""

from dataclasses import dataclass, field

from decentral.comm.wire.slow_start import INITIAL_BYTES, MOST_BYTES
from decentral.core.units import Seconds

PACKET_BYTES = 1500
WITH_HEADERS = PACKET_BYTES / 1448  # bytes on the wire per byte of payload: a packet of 1500 bytes has 52 of headers
FIRST_WINDOW = INITIAL_BYTES * WITH_HEADERS
SLOW_START_PATHS = 1.5  # slow start ends at this many bandwidth-delay products in flight (1 to 2 with HyStart)
AFTER_LOSS = 0.7  # a loss shrinks the congestion window to this share (CUBIC, RFC 9438)
LEAST_TIMEOUT_S = 0.2  # a retransmission time-out is a round trip plus this time (RFC 6298, with Linux's minimum)
AFTER_IDLE = 0.75  # after a pause, slow start goes on up to this share of the window before the pause (RFC 2861)
IN_TIME = float("inf")  # value of `Sender.sendable` while acknowledgements arrive fast enough to send without pause


@dataclass(slots=True)
class CongestionWindow:
    """The congestion window of one direction of a connection, and the transfers that share it."""

    size: float = FIRST_WINDOW  # bytes that may be in flight, between transfers
    ceiling: float = MOST_BYTES  # slow start ends when the window has this size
    used_at: Seconds = 0.0
    senders: "list[Sender]" = field(default_factory=list)  # without a bandwidth probe, during which the others pause

    @property
    def whole(self) -> float:
        """Return how many bytes may be in flight now, for all transfers together."""
        return sum(one.window for one in self.senders) or self.size

    def use(self, now: Seconds, round_trip_s: Seconds) -> None:
        """Record that the connection is used now; halve an idle connection's window for each time-out since then."""
        timeouts = 0 if self.senders else int((now - self.used_at) / (LEAST_TIMEOUT_S + round_trip_s))
        if timeouts > 0:
            self.ceiling = max(self.ceiling, AFTER_IDLE * self.size)
            self.size = max(FIRST_WINDOW, self.size / 2.0 ** min(timeouts, 64))
        self.used_at = max(self.used_at, now)

    def sender(self, size: float, path_rate: float, round_trip_s: Seconds, alone: bool = False) -> "Sender":
        """Return the sending side of a new transfer, which takes its part of the window from the other transfers.

        Args:
            size: Bytes of the transfer's IP packets.
            path_rate: Bytes/s of the slowest link on the path.
            round_trip_s: Round trip of a packet, without queues.
            alone: Whether the other transfers pause until the new one ends, so that it has the whole window.
        """
        sharing = 1 if alone else len(self.senders) + 1
        own = self.whole / sharing
        ceiling = min(self.ceiling, SLOW_START_PATHS * path_rate * round_trip_s, MOST_BYTES) / sharing
        sender = Sender(size, round_trip_s, own, max(own, ceiling))
        if not alone:
            self._resize((sharing - 1) / sharing)
            self.senders.append(sender)
        return sender

    def leave(self, sender: "Sender", now: Seconds) -> None:
        """Update the window when a transfer ends, and leave the transfer's part of it to the other transfers."""
        sender.acknowledge()
        if sender in self.senders:
            self.size = min(MOST_BYTES, self.whole)
            self.senders.remove(sender)
        else:  # it was alone
            self.size = min(MOST_BYTES, sender.window)
        self.used_at = now
        if sender.resent_at:
            self.ceiling = self.size
        if self.senders:
            self._resize(self.size / self.whole)

    def _resize(self, times: float) -> None:
        for one in self.senders:
            one.window, one.ceiling = times * one.window, times * one.ceiling


@dataclass(slots=True, eq=False)
class Sender:
    """State of a transfer's sending side at virtual time `at`."""

    left: float  # bytes that are not sent yet
    round_trip_s: Seconds
    window: float
    ceiling: float  # slow start ends when the window has this size
    at: Seconds = 0.0
    sendable: float = 0.0  # bytes that may be sent before the next acknowledgement; IN_TIME: the sender need not wait
    acknowledged_at: Seconds = 0.0
    resent_at: Seconds = 0.0  # when lost bytes have been sent again; 0 if no bytes were lost
    at_once: bool = True  # whether the whole window is sent in one burst: true for a transfer's first window

    @property
    def burst(self) -> float:
        """The largest number of bytes that the present window adds to the queue before the link."""
        return min(self.window, self.left) / (1 if self.at_once else 2)

    def begin_round(self, now: Seconds, queue_s: Seconds) -> None:
        """Begin to send a window at time `now`; a queue delays its acknowledgements by `queue_s`."""
        self.at, self.sendable = now, self.window
        self.acknowledged_at = now + self.round_trip_s + queue_s

    def take_share(self, rate: float) -> Seconds:
        """Return when all bytes are sent or the window is used up, at `rate` bytes/s (> 0) from time `self.at` on."""
        if self.sendable == IN_TIME and self.window < rate * self.round_trip_s:
            self.begin_round(self.at, 0.0)
        if self.left > self.sendable:
            empty_at = self.at + self.sendable / rate
            if empty_at < self.acknowledged_at:
                return empty_at
            self.sendable = IN_TIME
        return self.at + self.left / rate

    def send(self, rate: float, now: Seconds) -> None:
        """Count the bytes that were sent at this rate (bytes/s) from `self.at` until now."""
        sent = min(self.left, self.sendable, rate * (now - self.at))
        self.left, self.at = self.left - sent, now
        if self.sendable == IN_TIME:
            self._grow(sent)
        else:
            self.sendable -= sent

    def acknowledge(self) -> None:
        """Grow the window by the bytes acknowledged in this round, if more than half of the window was used."""
        used, self.at_once = self.window - self.sendable, False
        if 2 * used > self.window:
            self._grow(used)

    def lose(self, dropped: float, queue_s: Seconds, now: Seconds) -> None:
        """Shrink the window, and count `dropped` bytes as unsent; they are resent after a round trip plus `queue_s`."""
        self.at = now
        self.left += min(dropped, self.window)
        self.window = self.ceiling = max(FIRST_WINDOW, AFTER_LOSS * self.window)
        self.resent_at = self.at + queue_s + self.round_trip_s

    def queued(self, rate: float) -> float:
        """Return how many bytes in flight wait in the queue before the link, if the sender sends at this rate."""
        under_way = min(self.left, self.window)
        if self.sendable == IN_TIME:
            return max(0.0, under_way - rate * self.round_trip_s)
        return min(self.sendable, under_way) / (1 if self.at_once else 2)

    def _grow(self, acknowledged: float) -> None:
        if self.window < self.ceiling:
            self.window = min(self.ceiling, self.window + acknowledged)
        else:
            self.window = min(MOST_BYTES, self.window + PACKET_BYTES * acknowledged / self.window)
