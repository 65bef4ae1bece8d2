"""Bytes that weigh more than they hold: a simulated blob has a real one's length and a few numbers of content.

So the protocol's code, which checks, cuts, joins and digests blobs, runs unchanged on the snapshots of a model with a
billion parameters, by the thousand, in one process. A hollow blob is a row of segments, each of a length and with a
content; a cut takes along the contents of the segments that begin inside it.
"""

from collections.abc import Iterable
from typing import Any, Self

Segment = tuple[int, bytes]  # length, content


class SyntheticBlob(bytes):
    """As a buffer it is its contents; its length is that of its segments."""

    segments: tuple[Segment, ...]
    length: int

    def __new__(cls, segments: Iterable[Segment]) -> Self:
        held = tuple(segments)
        made = super().__new__(cls, b"".join(content for _, content in held))
        made.segments, made.length = held, sum(length for length, _ in held)
        return made

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """A slice, as of bytes. Single bytes of a hollow blob are not to be had."""
        start, stop, step = at.indices(self.length)
        assert step == 1, "a hollow blob is cut into runs"
        begins, parts = 0, []
        for length, content in self.segments:
            first, last = max(start, begins), min(stop, begins + length)
            if first < last:
                parts.append((last - first, content if first == begins else b""))
            begins += length
        return SyntheticBlob(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyntheticBlob) and self.segments == other.segments

    def __ne__(self, other: object) -> bool:  # bytes brings its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self.segments)


def joined(parts: Iterable[bytes]) -> bytes:
    """`b"".join(parts)`, also of hollow ones. A piece without content goes on with the segment before it."""
    held = list(parts)
    if not any(isinstance(part, SyntheticBlob) for part in held):
        return b"".join(held)
    segments: list[Segment] = []
    for part in held:
        for length, content in part.segments if isinstance(part, SyntheticBlob) else [(len(part), part)]:
            if segments and not content:
                segments[-1] = (segments[-1][0] + length, segments[-1][1])
            else:
                segments.append((length, content))
    return SyntheticBlob(segments)
