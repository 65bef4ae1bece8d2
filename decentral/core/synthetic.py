"""Synthetic payloads: a simulated blob has a real one's length and only a few bytes of content.

So the protocol's code, which checks, cuts, joins and digests blobs, runs unchanged on the snapshots of a model with a
billion parameters, by the thousand, in one process. A synthetic blob is a row of segments, each with a length and a
content; a slice has the contents of the segments that begin inside it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

Segment = tuple[int, bytes]  # length, content
Blob = bytes | bytearray
"""Bytes, or bytes in memory that whoever holds them may change."""


class SyntheticBlob(bytes):
    """Its length is that of its segments; as a buffer it is only their contents."""

    segments: tuple[Segment, ...]
    length: int

    def __new__(cls, segments: Iterable[Segment]) -> Self:
        row = tuple(segments)
        blob = super().__new__(cls, b"".join(content for _, content in row))
        blob.segments, blob.length = row, sum(length for length, _ in row)
        return blob

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """A slice, as bytes give it. A synthetic blob has no single bytes."""
        start, stop, step = at.indices(self.length)
        assert step == 1, "a slice of a synthetic blob has no steps"
        begins, parts = 0, []
        for length, content in self.segments:
            first, last = max(start, begins), min(stop, begins + length)
            if first < last:
                parts.append((last - first, content if first == begins else b""))
            begins += length
        return SyntheticBlob(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyntheticBlob) and self.segments == other.segments

    def __ne__(self, other: object) -> bool:  # else that of bytes would be used
        return not self == other

    def __hash__(self) -> int:
        return hash(self.segments)


def gathered(parts: Sequence[Blob]) -> Blob:
    """`joined(parts)` in memory of its own that can be written, unless it is synthetic."""
    return joined(parts) if any(isinstance(part, SyntheticBlob) for part in parts) else bytearray().join(parts)


def joined(parts: Iterable[Blob]) -> bytes:
    """`b"".join(parts)`, also for synthetic blobs. A part without content continues the segment before it."""
    row = list(parts)
    if not any(isinstance(part, SyntheticBlob) for part in row):
        return b"".join(row)
    segments: list[Segment] = []
    for part in row:
        for length, content in part.segments if isinstance(part, SyntheticBlob) else [(len(part), bytes(part))]:
            if segments and not content:
                segments[-1] = (segments[-1][0] + length, segments[-1][1])
            else:
                segments.append((length, content))
    return SyntheticBlob(segments)
