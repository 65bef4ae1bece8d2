"""What every search for spans needs to know of its problem: `SpanProblem`.

A span is the layers [first, last) of a peer. Arrays of spans are N x 2 integers; (0, 0) is a peer without layers.
Values and supplies are tokens/s.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchProgress

SHARPNESS = 12.0  # exponent of `soft_minimum`


@dataclass(frozen=True, slots=True, eq=False)
class SpanValue:
    """The throughput that spans reach, and hints for a search: which peers are idle, and which layers are scarce."""

    value: float  # tokens/s
    idle_N: Floats  # share of each peer's time without work, 0 to 1
    price_L: Floats  # how scarce each layer is, in any unit


class SpanProblem(Protocol):
    """Interface that tells which spans of L layers N peers may hold, and how many tokens/s the swarm then trains."""

    @property
    def reach_NL(self) -> Ints:
        """Return the end of each peer's longest span from each layer; the layer itself if the peer cannot hold it.

        All shorter spans from that layer are allowed, too.
        """

    @property
    def guide_s(self) -> float:
        """Return the seconds that a move and its `guide` take on a quiet core."""

    def supply(self, peer: int, first: int, last: int) -> float:
        """Return the tokens/s of a peer that always computes layers [first, last)."""

    def evaluate(self, spans_N2: Ints, progress: SearchProgress | None = None) -> SpanValue:
        """Return the throughput of spans, by a maximum flow; 0 if a search with a result lacks the time for it.

        The work counts in `progress`, the state of that search.
        """

    def guide(self, spans_N2: Ints, smooth: float) -> float:
        """Return an estimate of the throughput, in tokens/s, within microseconds; annealing maximises this estimate.

        Args:
            spans_N2: The spans.
            smooth: Weight, 0 to 1, of the `soft_minimum` of the layers' supplies. The rest, 1 - `smooth`, is the weight
                of a second estimate, which is not smooth.
        """

    def limit(self, spans_N2: Ints) -> float:
        """Return an upper bound, in tokens/s, on the throughput of these spans; it takes only microseconds.

        A search does not evaluate spans whose upper bound is too low.
        """

    def valid(self, spans_N2: Ints) -> bool:
        """Return whether the peers may hold these spans, and each layer has as many holders as it needs."""

    def repaired(self, spans_N2: Ints) -> Ints:
        """Return a copy of these spans that a simple rule has changed as little as it needs to make them valid.

        The rule may fail, so the result may not be valid.
        """

    def bound(self) -> float:
        """Return tokens/s that no spans exceed."""

    def starts(self, rng: np.random.Generator) -> list[Ints]:
        """Return spans from which a search may begin, the most promising first."""


def soft_minimum(supply_L: Floats) -> float:
    """Return a power mean of the layers' supplies, which nearly equals the smallest, and grows with every supply.

    A swarm trains no more tokens/s than its scarcest layer supplies. Most moves of one peer do not change that minimum,
    so a search that climbs the minimum stands still; the mean tells it which moves help later.

    Args:
        supply_L: (layers,) tokens/s, above 0.
    """
    least = float(supply_L.min())
    mean = float(np.add.reduce((least / supply_L) ** SHARPNESS)) / len(supply_L)
    return float(least * mean ** (-1 / SHARPNESS))
