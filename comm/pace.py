"""How much to send, and to whom: a window of micro-batches under way, and turns among the next peers.

Prior    how far to carry, and who carries on, by the flow through all spans (peers/flows.py).
Window   as many as keep the slowest device of the routes busy and a little more (TCP Vegas, Brakmo & Peterson 1994):
         of W under way, W (1 - base / seconds) wait in some queue; that number is kept between LEAST and MOST_WAITING.
Turns    interleaved weighted round robin, as stride scheduling: each choice costs a peer the seconds that a micro-batch
         takes through it, over its part of the prior's flow; whoever has paid least is next (SWARM, arXiv 2301.11913,
         section 3.2, has the seconds alone).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from decentral.core.ids import PeerId
from decentral.core.units import Seconds

Choice = TypeVar("Choice", int, PeerId)

LEAST_WAITING, MOST_WAITING = 1.0, 3.0
RECENT = 64  # micro-batches over which the base is the least
NEWEST = 0.2  # weight of the newest in a running average
LEAST_PART = 0.02  # of the best one's turns, for a peer that the prior leaves out
MOST_TIMES_SLOWER = 16.0  # than the others, a peer can look by that alone: it must be asked again some time
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
            self.size += 1
        elif waiting > MOST_WAITING:
            self.size = max(2, self.size - 1)
        self.size = min(self.size, self.most)

    def typical_s(self) -> Seconds | None:
        return median(self._recent) if self._recent else None


@dataclass(slots=True)
class Prior:
    """Rates, in any unit: of what enters at a layer, how much ends where at this peer; who carries on from a layer."""

    ends: dict[int, dict[int, float]] = field(default_factory=dict)
    nexts: dict[int, dict[PeerId, float]] = field(default_factory=dict)
    tokens_per_s: float = 0.0  # through the whole swarm


@dataclass(slots=True)
class Stride(Generic[Choice]):
    """Takes turns among choices, each as often as its cost allows."""

    paid: dict[Choice, float] = field(default_factory=dict)

    def choose(self, costs: Mapping[Choice, float]) -> Choice:
        """One of these. A choice that is new has paid what the least of the others has paid, not nothing.

        Nor does anyone owe more than one turn at today's cost: what was dear once is forgiven when it is not.
        """
        start = min((self.paid[one] for one in costs if one in self.paid), default=0.0)
        self.paid = {one: min(self.paid.get(one, start), start + cost) for one, cost in costs.items()}
        chosen = min(costs, key=lambda one: (self.paid[one] + costs[one], one))
        self.paid[chosen] += costs[chosen]
        return chosen


@dataclass(slots=True)
class Turns:
    """Whose turn it is to carry on, and how fast everybody is."""

    seconds: dict[PeerId, Seconds] = field(default_factory=dict)  # of a micro-batch, from there to the end and back
    _strides: dict[int, Stride[PeerId]] = field(default_factory=dict)  # by the layer that is next

    def choose(self, layer: int, peers: Sequence[PeerId], rates: Mapping[PeerId, float]) -> PeerId:
        """One of these. `rates`: the prior's; a peer that is not in it is asked now and then, to know what it does."""
        top = max((rates.get(peer, 0.0) for peer in peers), default=0.0)
        part = {peer: max(LEAST_PART, rates.get(peer, 0.0) / top) if top else 1.0 for peer in peers}
        costs = {peer: self.expected_s(peer) / part[peer] for peer in peers}
        return self._strides.setdefault(layer, Stride()).choose(costs)

    def expected_s(self, peer: PeerId) -> Seconds:
        others = list(self.seconds.values())
        return self.seconds.get(peer, median(others) if others else 1.0)

    def served(self, peer: PeerId, seconds: Seconds) -> None:
        known = self.seconds.get(peer)
        self.seconds[peer] = seconds if known is None else (1 - NEWEST) * known + NEWEST * seconds

    def missed(self, peer: PeerId) -> None:
        others = [seconds for other, seconds in self.seconds.items() if other != peer]
        most = MOST_TIMES_SLOWER * median(others) if others else DEADLINE_TOP_S
        self.seconds[peer] = min(MISSED * self.expected_s(peer), max(most, self.expected_s(peer)))

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
