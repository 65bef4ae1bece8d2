"""What fragments of a model take of a device's memory, as numbers: which spans fit, and how many micro-batches beside them.

train/memory.py has the bytes of a run's model; here is what follows from them, for those who know nothing of tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from decentral.core.jobs import MOST_UNDER_WAY, Fragment

LEAST_UNDER_WAY = 4  # micro-batches that any span must have room for: with fewer its device waits for the links
AT_EACH = 5  # micro-batches that a span of a long route should have room for, for each stage from it to the end
LEAST_OF_LONG = 32  # more than that no span must have room for, however long its routes are


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of each fragment, and of one micro-batch in it."""

    fragments: tuple[Fragment, ...]
    state: tuple[int, ...]
    passing: tuple[int, ...]
    kept: tuple[int, ...]

    def of(self, begin: int, end: int, under_way: int | None = None) -> int:
        """Of fragments [begin, end) with so many micro-batches under way; with as many as they need at least."""
        part = slice(begin, end)
        many = self.least_under_way(end - begin) if under_way is None else under_way
        return sum(self.state[part]) + max(self.passing[part], default=0) + many * sum(self.kept[part])

    def least_under_way(self, width: int) -> int:
        """Micro-batches that a span of so many fragments must have room for: the narrower spans are, the longer are
        routes, and the first of P stages holds P of them (PipeDream's 1F1B, arXiv 1806.03377, section 3.2)."""
        stages = -(-len(self.fragments) // max(1, width))
        return min(LEAST_OF_LONG, max(LEAST_UNDER_WAY, stages + 2))

    def under_way(self, begin: int, end: int) -> int:
        """Micro-batches that fragments [begin, end) should have room for: those that are behind it, with spans like
        this one, and their own. Where routes are many, gradients come back as they happen to, and it takes about five
        at each device to keep it busy nine tenths of the time (a queue with random arrivals)."""
        width = max(1, end - begin)
        if 2 * width >= len(self.fragments):
            return LEAST_UNDER_WAY
        behind = -(-(len(self.fragments) - begin) // width)
        return min(MOST_UNDER_WAY, max(self.least_under_way(width), AT_EACH * behind))

    def capacity(self, begin: int, end: int, memory_bytes: int) -> int:
        """Micro-batches that fit beside the span."""
        room = memory_bytes - self.of(begin, end, 0)
        return max(LEAST_UNDER_WAY, min(MOST_UNDER_WAY, room // max(1, sum(self.kept[begin:end]))))

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Fragments [begin, end) as layers [first, last)."""
        return self.fragments[begin].first, self.fragments[end - 1].last


def reach(found: MemoryNeeds, memory_bytes: int) -> Callable[[int], int]:
    """From which fragment a span may go how far; itself, where nothing fits."""

    return _widest(found, memory_bytes).__getitem__


@lru_cache(maxsize=64)
def _widest(found: MemoryNeeds, memory_bytes: int) -> tuple[int, ...]:
    """Where the widest span ends that fits, from each fragment on: with the micro-batches that it should have room for,
    or else with those that it must. A narrower one may need room for more of them."""
    count = len(found.fragments)

    def end_of(begin: int) -> int:
        ends = range(count, begin, -1)
        well = (end for end in ends if found.of(begin, end, found.under_way(begin, end)) <= memory_bytes)
        badly = (end for end in ends if found.of(begin, end) <= memory_bytes)
        return next(well, next(badly, begin))

    return tuple(map(end_of, range(count)))
