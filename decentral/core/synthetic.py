"""Synthetic payloads for simulations: blobs with the lengths of real blobs, but only a few bytes of content.

The protocol's code, which checks, cuts, joins and digests blobs, runs on synthetic blobs unchanged. So one process can
simulate thousands of snapshots of a model with a billion parameters. A synthetic blob is a sequence of segments. Each
segment has a length and a short content; a slice has the contents of the segments whose first byte is in the slice.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

Segment = tuple[int, bytes]
Blob = bytes | bytearray
"""The bytes of a blob. The owner of a bytearray may still change it."""


class SyntheticBlob(bytes):
    """Bytes whose `len` is the sum of the segments' lengths, while the buffer holds only the segments' contents."""

    segments: tuple[Segment, ...]
    length: int

    def __new__(cls, segments: Iterable[Segment]) -> Self:
        """Make a blob of these segments."""
        row = tuple(segments)
        blob = super().__new__(cls, b"".join(content for _, content in row))
        blob.segments, blob.length = row, sum(length for length, _ in row)
        return blob

    def __len__(self) -> int:
        """Return the sum of the segments' lengths, in bytes."""
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """Return a slice as a synthetic blob. Single bytes and steps are not supported."""
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
        """Return whether `other` is a synthetic blob of the same segments."""
        return isinstance(other, SyntheticBlob) and self.segments == other.segments

    __ne__ = object.__ne__  # the opposite of `==`; `bytes.__ne__` would compare contents, which a synthetic blob lacks

    def __hash__(self) -> int:
        """Return a hash of the segments."""
        return hash(self.segments)


def gathered(parts: Sequence[Blob]) -> Blob:
    """Return the concatenated parts as a new bytearray, or as a synthetic blob if any part is synthetic."""
    return joined(parts) if any(isinstance(part, SyntheticBlob) for part in parts) else bytearray().join(parts)


def joined(parts: Iterable[Blob]) -> bytes:
    """Return the concatenated parts as bytes, or as a synthetic blob if any part is synthetic.

    In a synthetic result, a part without content only lengthens the segment before it.
    """
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
