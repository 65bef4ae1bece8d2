"""Compute which spans (consecutive fragments) fit a device's memory, and how many micro-batches fit with a span.

The bytes of each fragment come from engine/memory.py. Start reading at `MemoryNeeds.span_bytes`. No torch is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from decentral.core.fragments import Fragment
from decentral.core.jobs import MOST_UNDER_WAY

LEAST_IN_FLIGHT = 4  # a peer must have memory for this many micro-batches; with fewer, its device often waits for links
# A device stays busy with this many micro-batches in flight for its own stage and for each later stage of the route.
IN_FLIGHT_PER_STAGE = 5
MOST_REQUIRED = 32  # `required_in_flight` returns at most this, so that small devices can take part in long routes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The device memory, in bytes, that each fragment takes, and that one micro-batch takes in each fragment."""

    fragments: tuple[Fragment, ...]
    state: tuple[int, ...]  # bytes of each fragment's weights, moments and gossip state
    scratch: tuple[
        int, ...
    ]  # temporary bytes for encoding or merging a fragment; only one fragment at a time needs them
    activations: tuple[int, ...]  # bytes of a micro-batch in each fragment between its forward and backward pass
    sums: tuple[int, ...] = ()  # bytes of each fragment's gradient sums; peers with the whole model need no sums
    whole_in_flight: int = LEAST_IN_FLIGHT  # a peer with the whole model must have memory for this many micro-batches

    def span_bytes(self, begin: int, end: int, micro_batches: int | None = None) -> int:
        """Return the bytes of device memory that fragments [begin, end) take, including micro-batches in flight.

        Args:
            begin: First fragment.
            end: Fragment after the last one.
            micro_batches: Number of micro-batches in flight; None: `required_in_flight(end - begin)`.
        """
        part = slice(begin, end)
        sums = sum(self.sums[part]) if end - begin < len(self.fragments) else 0
        count = self.required_in_flight(end - begin) if micro_batches is None else micro_batches
        return sum(self.state[part]) + sums + max(self.scratch[part], default=0) + count * sum(self.activations[part])

    @property
    def state_of_parts(self) -> tuple[int, ...]:
        """Bytes of each fragment's state and gradient sums, on a peer that holds only a part of the model."""
        return tuple(map(sum, zip(self.state, self.sums, strict=True))) if self.sums else self.state

    def required_in_flight(self, width: int) -> int:
        """Return the number of micro-batches that a span of `width` fragments must have memory for.

        With narrower spans a route has more stages, and the first of P stages has P micro-batches in flight
        (PipeDream's 1F1B, arXiv 1806.03377, section 3.2). The number is between LEAST_IN_FLIGHT and MOST_REQUIRED; for
        the whole model it is `whole_in_flight`.
        """
        if width >= len(self.fragments):
            return self.whole_in_flight
        stages = -(-len(self.fragments) // max(1, width))
        return min(MOST_REQUIRED, max(LEAST_IN_FLIGHT, stages + 2))

    def wanted_in_flight(self, begin: int, end: int) -> int:
        """Return the number of micro-batches that keep the device of fragments [begin, end) busy.

        The later stages are assumed to be as wide as this stage. With many routes, gradients come back at random times,
        and about five micro-batches per stage keep a device busy 90% of the time (a queue with random arrivals).
        """
        width = max(1, end - begin)
        if width >= len(self.fragments):
            return self.whole_in_flight
        if 2 * width >= len(self.fragments):
            return LEAST_IN_FLIGHT
        stages_left = -(-(len(self.fragments) - begin) // width)
        return min(MOST_UNDER_WAY, max(self.required_in_flight(width), IN_FLIGHT_PER_STAGE * stages_left))

    def capacity(self, begin: int, end: int, memory_bytes: int) -> int:
        """Return the number of routed micro-batches that fit in `memory_bytes` beside fragments [begin, end).

        The number is at least `min(LEAST_IN_FLIGHT, required_in_flight(end - begin))`, even if no micro-batch fits, so
        that the peer still takes part in routes. The number is at most MOST_UNDER_WAY.
        """
        free_bytes = memory_bytes - self.span_bytes(begin, end, 0)
        fitting = free_bytes // max(1, sum(self.activations[begin:end]))
        least = min(LEAST_IN_FLIGHT, self.required_in_flight(end - begin))
        return max(least, min(MOST_UNDER_WAY, fitting))

    def reach(self, peers: int, memory_bytes: int) -> int:
        """Return how many of the model's first fragments `peers` peers can hold together, with `memory_bytes` each."""
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
        """Return the layers [first, last) of fragments [begin, end)."""
        return self.fragments[begin].first, self.fragments[end - 1].last


@lru_cache(maxsize=4096)  # one entry for each size of memory; the peers of a large swarm have fewer different sizes
def widest_span(needs: MemoryNeeds, memory_bytes: int) -> Callable[[int], int]:
    """Return a function that maps a span's first fragment to the end of the widest span that fits in `memory_bytes`.

    A span fits if memory is left for `wanted_in_flight` micro-batches. If no span fits, memory for `required_in_flight`
    micro-batches suffices. If still no span fits, the returned end is the first fragment, and the span is empty. The
    function tries all widths, because a narrower span may need memory for more micro-batches.
    """
    count = len(needs.fragments)

    def end_of(begin: int) -> int:
        ends = range(count, begin, -1)
        wanted = (e for e in ends if needs.span_bytes(begin, e, needs.wanted_in_flight(begin, e)) <= memory_bytes)
        required = (end for end in ends if needs.span_bytes(begin, end) <= memory_bytes)
        return next(wanted, next(required, begin))

    return tuple(map(end_of, range(count))).__getitem__
