"""Implement network faults: partitions, one-way links, lost packets, damaged, duplicated and late messages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda

LOST_PACKET_S = 0.2  # a packet that is lost and sent again delays its message by at least this time
RESET = 0.02  # probability that a lost packet resets the message's stream


@dataclass(slots=True)
class NetworkFaults:
    """The present faults of a network, none at first; sim/fault_injector.py changes them."""

    agenda: Agenda
    chance: Random
    jitter: float = 0.1  # the random extra delay of a message is at most this share of the link's delay
    sides: dict[PeerId, int] = field(default_factory=dict)  # the peers (keys) on one side of a network partition
    parted_at: Seconds = 0.0
    one_way: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)  # since when (from, to) is blocked
    rates: dict[str, float] = field(default_factory=dict)  # kind of fault -> share of messages that have it

    def part(self, side: Iterable[PeerId]) -> None:
        """Begin a partition between these peers and all others."""
        self.sides, self.parted_at = dict.fromkeys(side, 1), self.agenda.now

    @property
    def cuts(self) -> bool:
        """Whether a partition or a one-way link now blocks all packets from some peer to another peer."""
        return bool(self.one_way or self.sides)

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Return the virtual time since which packets from `source` do not reach `target`; None if they do."""
        if self.one_way and (source, target) in self.one_way:
            return self.one_way[source, target]
        if self.sides and self.sides.get(source, -1) != self.sides.get(target, -1):
            return self.parted_at
        return None

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """Return a message's total delay: `delay_s`, jitter and retransmissions; infinite if the stream is reset."""
        late = delay_s
        if self.jitter:
            late += delay_s * self.jitter * -(self.chance.random() ** 2) + delay_s * self.jitter
        if not self.rates:
            return late
        if self._happens("loss"):
            if self.chance.random() < RESET:
                return float("inf")
            late += max(LOST_PACKET_S, 2 * delay_s) * 2 ** self.chance.randrange(3)
        if self._happens("reorder"):
            late += self.chance.random()
        return late

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        """Return the damaged bytes that arrive in place of the bytes `wire()`; None if the message is undamaged."""
        if not self.rates:
            return None
        if self._happens("truncate"):
            whole = wire()
            return whole[: self.chance.randrange(len(whole))]
        if self._happens("corrupt"):
            data = bytearray(wire())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            return bytes(data)
        return None

    def copies(self, source: PeerId, target: PeerId) -> int:
        """Return how many copies of a request arrive: 1 or 2."""
        return 2 if self.rates and self._happens("duplicate") else 1

    def _happens(self, what: str) -> bool:
        rate = self.rates.get(what, 0.0)
        return rate > 0 and self.chance.random() < rate
