"""A NetworkFaultModel for faults: partitions, one-way links, lost packets, damaged, doubled and late messages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda

LOST_PACKET_S = 0.2  # what a lost packet costs at least
RESET = 0.02  # the share of the messages with a lost packet whose stream ends instead


@dataclass(slots=True)
class NetworkFaults:
    """No fault at first; sim/fault_injector.py changes it as faults begin and end."""

    agenda: Agenda
    chance: Random
    jitter: float = 0.1  # mean extra delay, in delays
    sides: dict[PeerId, int] = field(default_factory=dict)  # the sides of a partition
    parted_at: Seconds = 0.0
    one_way: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)  # blocked (from, to), since when
    rates: dict[str, float] = field(default_factory=dict)  # shares of messages: loss, corrupt, truncate, ...

    def part(self, side: Iterable[PeerId]) -> None:
        """Let nothing pass between these peers and the others."""
        self.sides, self.parted_at = dict.fromkeys(side, 1), self.agenda.now

    @property
    def cuts(self) -> bool:
        return bool(self.one_way or self.sides)

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Since when nothing from `source` reaches `target`; None if it does."""
        if self.one_way and (source, target) in self.one_way:
            return self.one_way[source, target]
        if self.sides and self.sides.get(source, -1) != self.sides.get(target, -1):
            return self.parted_at
        return None

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """How long a message takes on a link of this delay; infinite where its stream is reset."""
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
        """The bytes that arrive of a message; None where they are undamaged."""
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
        return 2 if self.rates and self._happens("duplicate") else 1

    def _happens(self, what: str) -> bool:
        rate = self.rates.get(what, 0.0)
        return rate > 0 and self.chance.random() < rate
