"""What leaves a simulated peer next, and at which pace: the order of comm/net/uplink_queue.py on an agenda.

A message's transfer begins when its first piece leaves, and is through when the transfer is and the last piece as well.
Nobody sees the pieces between. They leave as late as possible, each at its own time: before something changes, or with
the last one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.net.uplink_queue import TURN_BYTES, Kind, Turn, UplinkQueue, kind_of
from decentral.comm.wire.codec import Envelope
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda, Timer

MOST_PIECES = 64  # of a message; those of a large one are larger than real ones, so that it costs no more events


Begin = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class PacedMessage:
    """A message that leaves in pieces.

    `begin` is called when the first of them leaves, with what it has to call when the transfer is done; `through` is
    called in the end.
    """

    uplink: "VirtualUplink"
    kind: Kind
    turn: Turn
    size: float  # bytes on the link
    begin: Begin
    through: Callable[[], None]
    piece_bytes: int = field(init=False)
    waiting: int = field(init=False)  # pieces that have not left
    under_way: int = 2  # its transfer, and its pieces
    has_begun: bool = False
    given_up: bool = False

    def __post_init__(self) -> None:
        self.piece_bytes = max(TURN_BYTES, round(self.size / MOST_PIECES))
        self.waiting = max(1, math.ceil(self.size / self.piece_bytes))

    def leave(self) -> bool:
        """Send a piece. Return whether more of them wait."""
        if not self.has_begun:
            self.has_begun = True
            self.begin(self.arrived)
        self.waiting -= 1
        return self.waiting > 0

    def give_up(self) -> None:
        self.uplink.catch_up()
        self.given_up = True
        self.uplink.release()

    def arrived(self) -> None:
        """Its transfer is done, or its last piece is through."""
        self.under_way -= 1
        if not self.under_way and not self.given_up:
            self.through()


class MessageQueue(UplinkQueue[PacedMessage]):
    """Pieces are the messages that they belong to."""

    def is_given_up(self, item: PacedMessage) -> bool:
        return item.given_up


class VirtualUplink:
    def __init__(self, agenda: Agenda, rate: Callable[[], float | None] = lambda: None) -> None:
        """`rate` gives the bytes/s at which messages leave; None: they do not wait for each other."""
        self.agenda = agenda
        self.queue = MessageQueue(rate)
        self._timer: Timer | None = None
        self._rate: float | None = None  # by which the timer was set

    def paces(self, envelope: Envelope) -> bool:
        """Whether this message has to wait for its turn."""
        return not self.queue.is_free(self.agenda.now) and self.queue.paces(envelope, self.agenda.now)

    def send(self, envelope: Envelope, size: float, begin: Begin, through: Callable[[], None]) -> PacedMessage:
        """A message of so many bytes on the link leaves in its turn."""
        self.catch_up()
        turn = self.queue.turn(len(envelope.blob), self.agenda.now)
        message = PacedMessage(self, kind_of(envelope.message), turn, size, begin, through)
        self._add(message)
        self.release()
        return message

    def hold(self, begin: Callable[[], bool], yields: bool = False) -> None:
        """Calls `begin` when what has left is through. If it returns True, nothing else leaves until `let_go`.

        `yields`: a piece that is due at this moment leaves before, because it has waited for longer.
        """
        self.catch_up()
        if yields:
            self.release()
        if self.queue.free_at > self.agenda.now:
            waits = self._timer is not None
            self.agenda.at(self.queue.free_at, lambda: self.hold(begin, waits))
            return
        if begin():
            self.queue.hold(self.agenda.now)

    def let_go(self) -> None:
        self.catch_up()
        self.queue.let_go()
        self.release()

    def catch_up(self) -> None:
        """Let the pieces go that were due before now. To be called before the rate changes."""
        while (next_at := self.queue.next_at()) is not None and next_at < self.agenda.now:
            self._take(next_at)

    def follow_rate(self) -> None:
        """Let pieces leave at the present rate. To be called after it may have changed."""
        if self._timer is not None and self.queue.rate() != self._rate:
            self.release()

    def _add(self, message: PacedMessage) -> None:
        self.queue.add(message.kind, message.turn, message.piece_bytes, message)

    def release(self) -> None:
        """Lets the pieces go whose time has come, and wakes up for the next one that somebody sees."""
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
        """When the next piece leaves that begins or ends a message. The next one of all leaves at `next_at`."""
        self._rate, message = self.queue.rate(), self.queue.next_alone()
        if message is None or message.given_up or not message.has_begun:
            return next_at
        if not self._rate or next_at > self.queue.free_at:
            return next_at
        piece_s = message.piece_bytes / self._rate
        for _ in range(message.waiting - 1):
            next_at += piece_s
        return next_at
