"""How much of a device's memory the fragments of a model take: which spans fit, and how many micro-batches beside them.

engine/memory.py has the bytes of a run's model. What follows from them is here, for those who know nothing of tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from decentral.core.fragments import Fragment
from decentral.core.jobs import MOST_UNDER_WAY

LEAST_IN_FLIGHT = 4  # micro-batches that a part of the model must have memory for; with fewer, links idle its device
IN_FLIGHT_PER_STAGE = 5  # micro-batches that a span should have memory for, for each stage from it to the model's end
MOST_REQUIRED = 32  # no span must have memory for more micro-batches than that, however long its routes are


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that each fragment takes, and that one micro-batch takes in it."""

    fragments: tuple[Fragment, ...]
    state: tuple[int, ...]  # for as long as the fragment is held
    scratch: tuple[int, ...]  # while a window is closed or merged, one fragment at a time
    activations: tuple[int, ...]  # for each micro-batch between its forward and its backward pass
    sums: tuple[int, ...] = ()  # for as long as the fragment is held by a peer that holds a part of the model
    whole_in_flight: int = LEAST_IN_FLIGHT  # micro-batches that a peer with the whole model must have memory for

    def span_bytes(self, begin: int, end: int, micro_batches: int | None = None) -> int:
        """Bytes of fragments [begin, end) with so many micro-batches in flight; None: with as many as are required."""
        part = slice(begin, end)
        sums = sum(self.sums[part]) if end - begin < len(self.fragments) else 0
        count = self.required_in_flight(end - begin) if micro_batches is None else micro_batches
        return sum(self.state[part]) + sums + max(self.scratch[part], default=0) + count * sum(self.activations[part])

    @property
    def state_of_parts(self) -> tuple[int, ...]:
        """Bytes that each fragment takes of a peer that holds a part of the model."""
        return tuple(map(sum, zip(self.state, self.sums, strict=True))) if self.sums else self.state

    def required_in_flight(self, width: int) -> int:
        """Micro-batches that a span of so many fragments must have memory for: the narrower spans are, the longer are
        routes, and the first of P stages holds P of them (PipeDream's 1F1B, arXiv 1806.03377, section 3.2)."""
        if width >= len(self.fragments):
            return self.whole_in_flight
        stages = -(-len(self.fragments) // max(1, width))
        return min(MOST_REQUIRED, max(LEAST_IN_FLIGHT, stages + 2))

    def wanted_in_flight(self, begin: int, end: int) -> int:
        """Micro-batches that fragments [begin, end) should have memory for, if the stages behind it are as wide.

        Where routes are many, gradients come back at random times, and it takes about five micro-batches at each
        device to keep it busy nine tenths of the time (a queue with random arrivals).
        """
        width = max(1, end - begin)
        if width >= len(self.fragments):
            return self.whole_in_flight
        if 2 * width >= len(self.fragments):
            return LEAST_IN_FLIGHT
        stages_left = -(-(len(self.fragments) - begin) // width)
        return min(MOST_UNDER_WAY, max(self.required_in_flight(width), IN_FLIGHT_PER_STAGE * stages_left))

    def capacity(self, begin: int, end: int, memory_bytes: int) -> int:
        """Return the number of routed micro-batches that fit beside the span.

        At least `min(LEAST_IN_FLIGHT, required_in_flight(end - begin))`, even where memory just holds the span, so that
        the peer still takes micro-batches of routes.
        """
        free_bytes = memory_bytes - self.span_bytes(begin, end, 0)
        fitting = free_bytes // max(1, sum(self.activations[begin:end]))
        least = min(LEAST_IN_FLIGHT, self.required_in_flight(end - begin))
        return max(least, min(MOST_UNDER_WAY, fitting))

    def reach(self, peers: int, memory_bytes: int) -> int:
        """How many fragments, from the first one on, so many peers with so much memory each can hold together."""
        count, reached = len(self.fragments), 0
        if self.span_bytes(0, count) <= memory_bytes:
            return count
        furthest = [
            max((end for end in range(begin + 1, count + 1) if self.span_bytes(begin, end) <= memory_bytes), default=0)
            for begin in range(count)
        ]
        for _ in range(min(peers, count)):
            reached = max(furthest[: reached + 1])
        return reached

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Fragments [begin, end) as layers [first, last)."""
        return self.fragments[begin].first, self.fragments[end - 1].last


@lru_cache(maxsize=4096)  # each peer of a large swarm may have memory of its own
def widest_span(needs: MemoryNeeds, memory_bytes: int) -> Callable[[int], int]:
    """Maps the first fragment of a span to the end of the widest one that fits; to itself, where nothing fits.

    That is the widest that fits with as many micro-batches as are wanted, or else the widest that fits with those that
    are required. A narrower span may need memory for more of them.
    """
    count = len(needs.fragments)

    def end_of(begin: int) -> int:
        ends = range(count, begin, -1)
        wanted = (e for e in ends if needs.span_bytes(begin, e, needs.wanted_in_flight(begin, e)) <= memory_bytes)
        required = (end for end in ends if needs.span_bytes(begin, end) <= memory_bytes)
        return next(wanted, next(required, begin))

    return tuple(map(end_of, range(count))).__getitem__
