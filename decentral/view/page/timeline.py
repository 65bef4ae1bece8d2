"""Series over time on one grid, bounded: the longer they get, the coarser the grid.

All series share the grid, because a chart draws them over one axis. A bucket holds the mean of what fell into it, or,
of a total, the last value. When the grid is full, two neighbouring buckets become one that is twice as wide.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.strict_json import JsonObject
from decentral.core.units import Seconds

BUCKETS = 360  # of the grid; a chart on a screen has few more pixels than twice as many
FIRST_WIDTH_S = 1.0  # peers write about their steps once a second


@dataclass(slots=True)
class Series:
    """One value in each bucket: the sum of what fell into it, and of how much it is the sum."""

    total: bool  # whether the last value of a bucket counts, and not the mean
    sums: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("L"))

    def put(self, index: int, value: float) -> None:
        missing = index + 1 - len(self.sums)
        if missing > 0:
            self.sums.extend([0.0] * missing)
            self.counts.extend([0] * missing)
        if self.total:
            self.sums[index], self.counts[index] = value, 1
        else:
            self.sums[index] += value
            self.counts[index] += 1

    def halve(self) -> None:
        for index in range((len(self.sums) + 1) // 2):
            pair = slice(2 * index, 2 * index + 2)
            if self.total:
                known = [value for value, count in zip(self.sums[pair], self.counts[pair], strict=True) if count]
                self.sums[index], self.counts[index] = (known[-1], 1) if known else (0.0, 0)
            else:
                self.sums[index], self.counts[index] = sum(self.sums[pair]), sum(self.counts[pair])
        del self.sums[(len(self.sums) + 1) // 2 :], self.counts[(len(self.counts) + 1) // 2 :]

    def values(self, first: int, last: int) -> list[float | None]:
        """The values of buckets [first, last); None where there is none."""
        known = zip(self.sums[first:last], self.counts[first:last], strict=True)
        found = [float(f"{value / count:.6g}") if count else None for value, count in known]
        return found + [None] * (last - max(first, len(self.sums)))


@dataclass(slots=True)
class Timeline:
    """The series by name. `changed` is the first bucket that has changed since `settle`."""

    begin: Seconds | None = None
    width_s: Seconds = FIRST_WIDTH_S
    length: int = 0  # buckets that have begun
    series: dict[str, Series] = field(default_factory=dict)
    changed: int = 0

    def put(self, name: str, t: Seconds, value: float, total: bool = False) -> None:
        """Adds a value at time `t`. One from before the first bucket counts in the first."""
        index = self._bucket(t)
        self.changed = min(self.changed, index)
        series = self.series.get(name) or self.series.setdefault(name, Series(total))
        series.put(index, value)

    def drop(self, name: str) -> None:
        self.series.pop(name, None)

    def settle(self) -> None:
        """What was put so far is known to those who look; the last bucket may go on."""
        self.changed = max(0, self.length - 1)

    def since(self, first: int, names: Iterable[str]) -> JsonObject:
        """The buckets from `first` on, fit for JSON. A name without a series has only empty buckets."""
        empty = Series(False)
        found = {name: self.series.get(name, empty).values(first, self.length) for name in names}
        return {"begin": self.begin, "width_s": self.width_s, "first": first, "series": found}

    def _bucket(self, t: Seconds) -> int:
        if self.begin is None:
            self.begin = t
        while t - self.begin >= BUCKETS * self.width_s:
            self.width_s *= 2
            self.length, self.changed = (self.length + 1) // 2, 0
            for series in self.series.values():
                series.halve()
        index = max(0, int((t - self.begin) / self.width_s))
        self.length = max(self.length, index + 1)
        return index
