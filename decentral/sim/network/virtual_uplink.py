"""Order and pace the messages that leave a simulated peer: the queue of comm/net/uplink_queue.py in virtual time.

Start reading at `VirtualUplink`. A message's transfer begins when the message's first piece leaves. The message has
been sent when the transfer has ended and the last piece has left. The pieces between the first and the last need no
events of their own: `catch_up` counts them later, before the queue or its rate changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.net.uplink_queue import TURN_BYTES, UNPACED_BYTES, Kind, Turn, UplinkQueue, traffic_kind
from decentral.comm.wire.codec import Envelope
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda, Timer

MOST_PIECES = 64  # a large message has at most this many pieces; real pieces are smaller, but each piece costs an event


Begin = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class PacedMessage:
    """A message that leaves a `VirtualUplink` piece by piece, so that other messages can leave between pieces."""

    uplink: "VirtualUplink"
    kind: Kind
    turn: Turn
    size: float  # bytes of the whole message
    begin: Begin  # called when the first piece leaves; its argument is a function to call when the transfer ends
    through: Callable[[], None]  # called when the transfer has ended and the last piece has left
    piece_bytes: int = field(init=False)
    waiting: int = field(init=False)  # number of pieces that have not left
    under_way: int = 2  # counts down when the transfer ends and when the last piece leaves; at 0, `through` is called
    has_begun: bool = False
    given_up: bool = False

    def __post_init__(self) -> None:
        """Divide the message into pieces."""
        self.piece_bytes = max(TURN_BYTES, round(self.size / MOST_PIECES))
        self.waiting = max(1, math.ceil(self.size / self.piece_bytes))

    def leave(self) -> bool:
        """Send the next piece; return whether more pieces wait."""
        if not self.has_begun:
            self.has_begun = True
            self.begin(self.arrived)
        self.waiting -= 1
        return self.waiting > 0

    def give_up(self) -> None:
        """Drop the pieces that have not left; `through` is then never called."""
        self.uplink.catch_up()
        self.given_up = True
        self.uplink.release()

    def arrived(self) -> None:
        """Record that the transfer has ended or the last piece has left; call `through` after both."""
        self.under_way -= 1
        if not self.under_way and not self.given_up:
            self.through()


class MessageQueue(UplinkQueue[PacedMessage]):
    """The queue of messages at a `VirtualUplink`; a message is queued again for each of its pieces."""

    def is_given_up(self, item: PacedMessage) -> bool:
        """Return whether the message was given up."""
        return item.given_up


class VirtualUplink:
    """The uplink of a simulated peer, and the messages that wait for it."""

    def __init__(self, agenda: Agenda, rate: Callable[[], float | None] = lambda: None) -> None:
        """Begin with an empty queue; `rate` returns the bytes/s at which messages leave, or None for no pacing."""
        self.agenda = agenda
        self.queue = MessageQueue(rate)
        self._timer: Timer | None = None
        self._rate: float | None = None

    def paces(self, envelope: Envelope) -> bool:
        """Return whether this message must be queued with `send`."""
        if len(envelope.blob) < UNPACED_BYTES:  # most messages
            return False
        return not self.queue.is_free(self.agenda.now) and self.queue.paces(envelope, self.agenda.now)

    def send(self, envelope: Envelope, size: float, begin: Begin, through: Callable[[], None]) -> PacedMessage:
        """Queue a message of `size` bytes; call `begin` when its first piece leaves, and `through` when all is sent."""
        self.catch_up()
        turn = self.queue.turn(len(envelope.blob), self.agenda.now)
        message = PacedMessage(self, traffic_kind(envelope.message), turn, size, begin, through)
        self._add(message)
        self.release()
        return message

    def pause(self, begin: Callable[[], bool]) -> None:
        """Call `begin` once the pieces that have left are sent; if it returns True, stop the uplink until `resume`."""
        self.catch_up()
        if self.queue.free_at > self.agenda.now:
            waits = self._timer is not None
            self.agenda.at(self.queue.free_at, lambda: self._pause(begin, waits))
        else:
            self._pause(begin, False)

    def _pause(self, begin: Callable[[], bool], yields: bool) -> None:
        """Stop the uplink now. `yields`: first send a piece that is due now, because it has waited longer."""
        self.catch_up()
        if yields:
            self.release()
        if begin():
            self.queue.pause(self.agenda.now)

    def resume(self) -> None:
        """End the stop that `pause` has begun, so that queued messages leave again."""
        self.catch_up()
        self.queue.resume()
        self.release()

    def catch_up(self) -> None:
        """Send the pieces that were due before now; call this before the queue or its rate changes."""
        while (next_at := self.queue.next_at()) is not None and next_at < self.agenda.now:
            self._take(next_at)

    def follow_rate(self) -> None:
        """Reschedule the next piece if the rate has changed."""
        if self._timer is not None and self.queue.rate() != self._rate:
            self.release()

    def _add(self, message: PacedMessage) -> None:
        self.queue.add(message.kind, message.turn, message.piece_bytes, message)

    def release(self) -> None:
        """Send the pieces that are due now, and set the timer for the next first or last piece of a message."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (next_at := self.queue.next_at()) is not None:
            if next_at > self.agenda.now:
                self._timer = self.agenda.at(self._seen_at(next_at), self._wake)
                return
            self._take(self.agenda.now)

    def _wake(self) -> None:
        self.catch_up()
        self.release()

    def _take(self, at: Seconds) -> None:
        message = self.queue.take(at)
        if message is None:
            return
        if message.leave():
            self._add(message)
        else:
            self.agenda.at(max(at, self.queue.free_at), message.arrived)

    def _seen_at(self, next_at: Seconds) -> Seconds:
        """Return when the next first or last piece of a message leaves. `next_at`: when the next piece leaves."""
        self._rate, message = self.queue.rate(), self.queue.next_alone()
        if message is None or message.given_up or not message.has_begun:
            return next_at
        if not self._rate or next_at > self.queue.free_at:
            return next_at
        piece_s = message.piece_bytes / self._rate
        for _ in range(message.waiting - 1):
            next_at += piece_s
        return next_at
