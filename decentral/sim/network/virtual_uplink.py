"""What leaves a simulated peer next, and at which pace: the order of comm/net/uplink_queue.py on an agenda.

A message's transfer begins when its first piece leaves, and is through when the transfer is and the last piece as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.net.uplink_queue import TURN_BYTES, Kind, Turn, UplinkQueue, kind_of
from decentral.comm.wire.codec import Envelope
from decentral.sim.network.agenda import Agenda, Timer

MOST_PIECES = 64  # of a message; those of a large one are larger than real ones, so that it costs no more events


Begin = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class PacedMessage:
    """A message that leaves in pieces.

    `begin` is called when the first of them leaves, with what it has to call when the transfer is done; `through` is
    called in the end.
    """

    kind: Kind
    turn: Turn
    size: float  # bytes on the link
    begin: Begin
    through: Callable[[], None]
    waiting: int = field(init=False)  # pieces that have not left
    under_way: int = 2  # its transfer, and its pieces
    has_begun: bool = False
    given_up: bool = False

    def __post_init__(self) -> None:
        self.waiting = max(1, math.ceil(self.size / self.piece_bytes))

    @property
    def piece_bytes(self) -> int:
        return max(TURN_BYTES, round(self.size / MOST_PIECES))

    def leave(self) -> bool:
        """Send a piece. Return whether more of them wait."""
        if not self.has_begun:
            self.has_begun = True
            self.begin(self.arrived)
        self.waiting -= 1
        return self.waiting > 0

    def give_up(self) -> None:
        self.given_up = True

    def arrived(self) -> None:
        """Its transfer is done, or its last piece is through."""
        self.under_way -= 1
        if not self.under_way and not self.given_up:
            self.through()


class VirtualUplink:
    def __init__(self, agenda: Agenda, rate: Callable[[], float | None] = lambda: None) -> None:
        """`rate` gives the bytes/s at which messages leave; None: they do not wait for each other."""
        self.agenda = agenda
        self.queue = UplinkQueue[PacedMessage](lambda message: message.given_up, rate)
        self._timer: Timer | None = None

    def paces(self, envelope: Envelope) -> bool:
        """Whether this message has to wait for its turn."""
        return not self.queue.is_free(self.agenda.now) and self.queue.paces(envelope, self.agenda.now)

    def send(self, envelope: Envelope, size: float, begin: Begin, through: Callable[[], None]) -> PacedMessage:
        """A message of so many bytes on the link leaves in its turn."""
        turn = self.queue.turn(len(envelope.blob), self.agenda.now)
        message = PacedMessage(kind_of(envelope.message), turn, size, begin, through)
        self._add(message)
        if self._timer is None:
            self._release()
        return message

    def hold(self, begin: Callable[[], bool]) -> None:
        """Calls `begin` when what has left is through. If it returns True, nothing else leaves until `let_go`."""
        if self.queue.free_at > self.agenda.now:
            self.agenda.at(self.queue.free_at, lambda: self.hold(begin))
            return
        if begin():
            self.queue.hold(self.agenda.now)

    def let_go(self) -> None:
        self.queue.let_go()
        if self._timer is not None:
            self._timer.cancel()
        self._release()

    def _add(self, message: PacedMessage) -> None:
        self.queue.add(message.kind, message.turn, message.piece_bytes, message)

    def _release(self) -> None:
        """Lets the pieces go whose time has come, and wakes up for the next."""
        self._timer = None
        while (next_at := self.queue.next_at()) is not None:
            if next_at > self.agenda.now:
                self._timer = self.agenda.at(next_at, self._release)
                return
            message = self.queue.take(self.agenda.now)
            if message is not None:
                self._leave(message)

    def _leave(self, message: PacedMessage) -> None:
        if message.leave():
            self._add(message)
        else:
            self.agenda.at(max(self.agenda.now, self.queue.free_at), message.arrived)
