"""How much to send, and to whom: a window of micro-batches under way, and turns among the next peers.

Window   as many as keep the slowest device of the routes busy and a little more (TCP Vegas, Brakmo & Peterson 1994):
         of W under way, W (1 - base / seconds) wait in some queue; that number is kept between LEAST and MOST_WAITING.
Turns    interleaved weighted round robin, as stride scheduling: each choice costs a peer the seconds that a micro-batch
         takes through it, and the peer that has paid least is next (SWARM, arXiv 2301.11913, section 3.2).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from decentral.core.ids import PeerId
from decentral.core.units import Seconds

LEAST_WAITING, MOST_WAITING = 1.0, 3.0
RECENT = 64  # micro-batches over which the base is the least
NEWEST = 0.2  # weight of the newest in a running average
MISSED = 2.0  # a missed deadline makes a peer look so many times slower
SLACK = 4.0  # a deadline is this many times the expected time ...
DEADLINE_FLOOR_S = 3.0  # ... and at least this
DEADLINE_TOP_S = 30.0
UNKNOWN_S = 15.0  # a deadline, where nothing is known


@dataclass(slots=True)
class Window:
    """Micro-batches that a starter has under way."""

    most: int  # by memory
    size: int = 2
    _recent: deque[Seconds] = field(default_factory=lambda: deque(maxlen=RECENT))
    _since: int = 0  # completions since the size was last changed

    def done(self, seconds: Seconds) -> None:
        """A micro-batch took so long, from its start to its end."""
        self._recent.append(seconds)
        self._since += 1
        if self._since < self.size:
            return
        self._since = 0
        waiting = self.size * (1 - min(self._recent) / max(1e-9, seconds))
        if waiting < LEAST_WAITING:
            self.size = min(self.most, self.size + 1)
        elif waiting > MOST_WAITING:
            self.size = max(2, self.size - 1)
        self.size = max(1, min(self.size, self.most))

    def typical_s(self) -> Seconds | None:
        return median(self._recent) if self._recent else None


@dataclass(slots=True)
class Turns:
    """Whose turn it is to carry on from our last layer."""

    seconds: dict[PeerId, Seconds] = field(default_factory=dict)  # of a micro-batch, from there to the end and back
    paid: dict[PeerId, float] = field(default_factory=dict)

    def choose(self, peers: Sequence[PeerId]) -> PeerId:
        """One of these. A peer that is new pays what the least of the others has paid, not nothing."""
        known = [self.paid[peer] for peer in peers if peer in self.paid]
        start = min(known, default=0.0)
        chosen = min(peers, key=lambda peer: (self.paid.get(peer, start), peer))
        self.paid = {peer: paid for peer, paid in self.paid.items() if peer in peers}
        self.paid[chosen] = max(start, self.paid.get(chosen, start)) + self.expected_s(chosen)
        return chosen

    def expected_s(self, peer: PeerId) -> Seconds:
        others = list(self.seconds.values())
        return self.seconds.get(peer, median(others) if others else 1.0)

    def served(self, peer: PeerId, seconds: Seconds) -> None:
        known = self.seconds.get(peer)
        self.seconds[peer] = seconds if known is None else (1 - NEWEST) * known + NEWEST * seconds

    def missed(self, peer: PeerId) -> None:
        self.seconds[peer] = min(MISSED * self.expected_s(peer), DEADLINE_TOP_S)

    def deadline_s(self, peer: PeerId) -> Seconds:
        known = self.seconds.get(peer)
        if known is None:
            return UNKNOWN_S
        return min(DEADLINE_TOP_S, max(DEADLINE_FLOOR_S, SLACK * known))


def budget_s(typical_s: Seconds | None) -> Seconds:
    """How long a starter tries to get one micro-batch through, retries included."""
    if typical_s is None or not math.isfinite(typical_s):
        return 2 * DEADLINE_TOP_S
    return min(2 * DEADLINE_TOP_S, max(2 * DEADLINE_FLOOR_S, 2 * SLACK * typical_s))
