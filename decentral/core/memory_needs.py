"""Compute which spans (consecutive fragments) fit a device's memory, and how many micro-batches fit with a span.

The bytes of each fragment come from engine/memory.py. Start reading at `MemoryNeeds.span_bytes`. No torch is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from decentral.core.fragments import Fragment
from decentral.core.jobs import MOST_UNDER_WAY

# A peer with a part of the model must have memory for this many micro-batches: it computes one while the other is at
# other peers. Plans count on the same number (scheduler/throughput/layer_costs.py).
LEAST_IN_FLIGHT = 2
USUAL_IN_FLIGHT = 4  # peers prefer layers beside which this many fit: with fewer, a device often waits for links
# A device stays busy with this many micro-batches in flight for its own stage and for each later stage of the route.
IN_FLIGHT_PER_STAGE = 5
MOST_PREFERRED = 32  # `preferred_in_flight` returns at most this


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The device memory, in bytes, that each fragment takes, and that one micro-batch takes in each fragment."""

    fragments: tuple[Fragment, ...]
    state: tuple[int, ...]  # bytes of each fragment's weights, moments and gossip state
    scratch: tuple[
        int, ...
    ]  # temporary bytes for encoding or merging a fragment; only one fragment at a time needs them
    activations: tuple[int, ...]  # bytes of a micro-batch in each fragment between its forward and backward pass
    sums: tuple[int, ...] = ()  # bytes of each fragment's gradient sums, on a peer with a part of the model
    # Bytes of the gradient sums of a peer that trains the whole model and also computes micro-batches of other peers.
    sums_for_others: int = 0
    kept: int = 0  # bytes of freed tensors that a process with the whole model keeps for the next ones
    # Bytes of each fragment's gradients if a step of the whole model allocates them only where it has freed
    # activations; (): gradients and activations are in memory together.
    late_gradients: tuple[int, ...] = ()
    # A peer with the whole model must have memory for this many micro-batches. It finishes each before the next, so one
    # suffices; simulations ask for more, so that small models are divided.
    whole_in_flight: int = 1

    def span_bytes(self, begin: int, end: int, micro_batches: int | None = None) -> int:
        """Return the bytes of device memory that fragments [begin, end) take, including micro-batches in flight.

        Args:
            begin: First fragment.
            end: Fragment after the last one.
            micro_batches: Number of micro-batches in flight; None: `least_in_flight(end - begin)`.
        """
        part = slice(begin, end)
        more = sum(self.sums[part]) if end - begin < len(self.fragments) else self.kept
        count = self.least_in_flight(end - begin) if micro_batches is None else micro_batches
        activations = count * sum(self.activations[part])
        if count == 1 and end - begin >= len(self.fragments):
            activations -= min(activations, sum(self.late_gradients))
        return sum(self.state[part]) + more + max(self.scratch[part], default=0) + activations

    @property
    def state_of_parts(self) -> tuple[int, ...]:
        """Bytes of each fragment's state and gradient sums, on a peer that holds only a part of the model."""
        return tuple(map(sum, zip(self.state, self.sums, strict=True))) if self.sums else self.state

    def least_in_flight(self, width: int) -> int:
        """Return the number of micro-batches that a span of `width` fragments must have memory for."""
        return self.whole_in_flight if width >= len(self.fragments) else LEAST_IN_FLIGHT

    def preferred_in_flight(self, width: int) -> int:
        """Return the number of micro-batches for which a peer chooses narrower layers rather than go without.

        With narrower spans a route has more stages, and the first of P stages has P micro-batches in flight
        (PipeDream's 1F1B, arXiv 1806.03377, section 3.2). The number is between USUAL_IN_FLIGHT and MOST_PREFERRED; for
        the whole model it is `whole_in_flight`.
        """
        if width >= len(self.fragments):
            return self.whole_in_flight
        stages = -(-len(self.fragments) // max(1, width))
        return min(MOST_PREFERRED, max(USUAL_IN_FLIGHT, stages + 2))

    def wanted_in_flight(self, begin: int, end: int) -> int:
        """Return the number of micro-batches that keep the device of fragments [begin, end) busy.

        The later stages are assumed to be as wide as this stage. With many routes, gradients come back at random times,
        and about five micro-batches per stage keep a device busy 90% of the time (a queue with random arrivals).
        """
        width = max(1, end - begin)
        if width >= len(self.fragments):
            return self.whole_in_flight
        if 2 * width >= len(self.fragments):
            return USUAL_IN_FLIGHT
        stages_left = -(-(len(self.fragments) - begin) // width)
        return min(MOST_UNDER_WAY, max(self.preferred_in_flight(width), IN_FLIGHT_PER_STAGE * stages_left))

    def capacity(self, begin: int, end: int, memory_bytes: int) -> int:
        """Return the number of routed micro-batches that fit in `memory_bytes` beside fragments [begin, end).

        The number is at most MOST_UNDER_WAY, and at least LEAST_IN_FLIGHT, or 1 for the whole model. It is 0 if a peer
        that trains the whole model alone has no memory for micro-batches of others.
        """
        free_bytes, each_bytes = memory_bytes - self.span_bytes(begin, end, 0), sum(self.activations[begin:end])
        if end - begin < len(self.fragments):
            return fitting(free_bytes, each_bytes, LEAST_IN_FLIGHT)
        if not self.sums_for_others:  # all micro-batches are routed
            return fitting(free_bytes, each_bytes, 1)
        return fitting(free_bytes - self.sums_for_others - each_bytes, each_bytes, 0)

    def end_of(self, begin: int, ends: Sequence[int], memory_bytes: int, tight: bool = False) -> int:
        """Return the first of `ends` at which a span from `begin` fits beside `preferred_in_flight` micro-batches.

        If none does, or if `tight`, memory for `least_in_flight` suffices. The result is `begin` if no span fits.
        """
        for count in (self.least_in_flight,) if tight else (self.preferred_in_flight, self.least_in_flight):
            for end in ends:
                if self.span_bytes(begin, end, count(end - begin)) <= memory_bytes:
                    return end
        return begin

    def reach(self, peers: int, memory_bytes: int) -> int:
        """Return how many of the model's first fragments `peers` peers can hold together, with `memory_bytes` each."""
        count, reached = len(self.fragments), 0
        if self.span_bytes(0, count) <= memory_bytes:
            return count
        furthest = [self.end_of(begin, range(count, begin, -1), memory_bytes, tight=True) for begin in range(count)]
        for _ in range(min(peers, count)):
            reached = max(furthest[: reached + 1])
        return reached

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the layers [first, last) of fragments [begin, end)."""
        return self.fragments[begin].first, self.fragments[end - 1].last


def fitting(free_bytes: float, each_bytes: float, least: int) -> int:
    """Return how many micro-batches of `each_bytes` fit in `free_bytes`, between `least` and MOST_UNDER_WAY."""
    return max(least, min(MOST_UNDER_WAY, int(free_bytes // max(1.0, each_bytes))))


@lru_cache(maxsize=4096)  # one entry for each size of memory; the peers of a large swarm have fewer different sizes
def widest_span(needs: MemoryNeeds, memory_bytes: int) -> Callable[[int], int]:
    """Return a function that maps a span's first fragment to the end of the widest span that fits in `memory_bytes`.

    A span fits if memory is left for `wanted_in_flight` micro-batches. If no span fits, memory for
    `preferred_in_flight` suffices, and if still none fits, memory for `least_in_flight`. If no span fits even then, the
    returned end is the first fragment, and the span is empty. The function tries all widths, because a narrower span
    may need memory for more micro-batches.
    """
    count = len(needs.fragments)

    def end_of(begin: int) -> int:
        ends = range(count, begin, -1)
        wanted = (
            end for end in ends if needs.span_bytes(begin, end, needs.wanted_in_flight(begin, end)) <= memory_bytes
        )
        return next(wanted, needs.end_of(begin, ends, memory_bytes))

    return tuple(map(end_of, range(count))).__getitem__
