"""Store time series in bounded memory: the number of time buckets is limited, and buckets get wider as time passes.

All series share one grid of buckets, because a chart plots them over one axis. The value of a bucket is the mean of its
values, or the last value if the series is a total. When the grid is full, pairs of neighbouring buckets are merged.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.strict_json import JsonObject
from decentral.core.units import Seconds

BUCKETS = 360  # a chart has at most this many buckets, each about two pixels wide
FIRST_WIDTH_S = 1.0  # buckets of a new grid have this width, since a peer writes one line a second about its steps


@dataclass(slots=True)
class Series:
    """One series: the sum and the count of the values in each bucket."""

    total: bool  # True: the value of a bucket is the last value that was added to it; False: the mean
    sums: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("L"))

    def put(self, index: int, value: float) -> None:
        """Add a value to the bucket with this index."""
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
        """Merge each pair of neighbouring buckets into one."""
        for index in range((len(self.sums) + 1) // 2):
            pair = slice(2 * index, 2 * index + 2)
            if self.total:
                known = [value for value, count in zip(self.sums[pair], self.counts[pair], strict=True) if count]
                self.sums[index], self.counts[index] = (known[-1], 1) if known else (0.0, 0)
            else:
                self.sums[index], self.counts[index] = sum(self.sums[pair]), sum(self.counts[pair])
        del self.sums[(len(self.sums) + 1) // 2 :], self.counts[(len(self.counts) + 1) // 2 :]

    def values(self, first: int, last: int) -> list[float | None]:
        """Return the values of buckets [first, last); None for an empty bucket."""
        known = zip(self.sums[first:last], self.counts[first:last], strict=True)
        found = [float(f"{value / count:.6g}") if count else None for value, count in known]
        return found + [None] * (last - max(first, len(self.sums)))


@dataclass(slots=True)
class Timeline:
    """The store of all series, by name, and of the grid of buckets that they share."""

    begin: Seconds | None = None
    width_s: Seconds = FIRST_WIDTH_S
    length: int = 0
    series: dict[str, Series] = field(default_factory=dict)
    changed: int = 0  # index of the first bucket that changed since the last `settle`

    def put(self, name: str, t: Seconds, value: float, total: bool = False) -> None:
        """Add a value at time `t` to a series. A value from before the first bucket is added to the first bucket.

        Args:
            name: Name of the series, which is created if needed.
            t: Seconds, on the same clock for all series.
            value: The value.
            total: For a new series, whether a bucket's value is the last value that was added to it, not the mean.
        """
        index = self._bucket(t)
        self.changed = min(self.changed, index)
        series = self.series.get(name) or self.series.setdefault(name, Series(total))
        series.put(index, value)

    def drop(self, name: str) -> None:
        """Remove a series."""
        self.series.pop(name, None)

    def settle(self) -> None:
        """Mark all buckets as sent, except the last bucket, which may still change."""
        self.changed = max(0, self.length - 1)

    def since(self, first: int, names: Iterable[str]) -> JsonObject:
        """Return the buckets of these series from index `first` on as JSON; an unknown series has empty buckets."""
        empty = Series(False)
        found = {name: self.series.get(name, empty).values(first, self.length) for name in names}
        return {"begin": self.begin, "width_s": self.width_s, "first": first, "series": found}

    def _bucket(self, t: Seconds) -> int:
        """Return the index of the bucket of time `t`. Double the width of all buckets until the grid contains `t`."""
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
