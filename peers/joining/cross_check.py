"""Compare samples of a donor's state with the same bytes of two other peers (witnesses), to detect a lying donor.

The replicas of honest peers differ only a little. If a donor's sample is far from the median of the three peers'
samples, the donor is not asked again, and every fragment with a piece from the donor is fetched again.

Two samples are checked for each fragment and donor: a random sample, and the sample with the largest number that the
donor sent. Both are chosen after the donor's pieces have arrived, so that the donor cannot predict them.

A sample needs two witnesses: with one witness, nobody could tell whether the donor or the witness is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.synthetic import Blob, SyntheticBlob
from decentral.core.units import KiB

SAMPLE_BYTES = 2 * KiB  # a check compares this many bytes of a piece, few enough to overtake pieces in the uplink queue
SAMPLE_DEADLINE_S = 10.0  # a request to a witness (another holder of the bytes) fails after this time
WITNESSES = 2  # two other holders check each sample: the median of three values withstands one liar
MOST_WITNESSES = 4  # at most this many peers are asked to check one sample, in case some do not answer
# A donor lies if the distance of its sample from the median exceeds both of these limits.
MOST_DISTANCE = 0.5  # this share of the median's norm; an honest donor's sample was at most 0.14 away
MOST_SPREADS = 4.0  # this multiple of the distance between the two witnesses' samples
ACCUSED_SHARE = 3  # at most a third of the peers is excluded as liars; if more differ, honest peers have drifted apart


@dataclass(slots=True)
class DonorSample:
    """A check of one sample of a fragment's state: the donor's bytes, and the bytes that witnesses sent for them."""

    donor: PeerId
    said: Blob
    version: tuple[int, bytes]  # (learning-rate step, version); in a synchronous run, only equal versions are compared
    left: list[PeerId]  # other holders of the fragment that can still be asked for the same bytes
    held: list[bytes] = field(default_factory=list)  # the bytes that each witness has sent
    under_way: int = 0  # number of requests to witnesses without an answer yet

    def ask(self) -> PeerId:
        """Remove the next witness from `self.left`, count it as asked, and return it."""
        self.under_way += 1
        return self.left.pop(0)

    def answered(self, held: bytes | None) -> None:
        """Record the bytes of a witness; `held` is None if the request failed or the bytes cannot be compared."""
        self.under_way -= 1
        if held is not None:
            self.held.append(held)

    @property
    def wanted(self) -> int:
        """Return how many further witnesses to ask now, so that WITNESSES of them answer."""
        return min(len(self.left), WITNESSES - len(self.held) - self.under_way)

    @property
    def over(self) -> bool:
        """Return whether WITNESSES witnesses have answered, or no further answer can come."""
        return len(self.held) >= WITNESSES or (not self.left and not self.under_way)


def largest(piece: Blob) -> tuple[float, int]:
    """Return the largest magnitude among a piece's fp32 numbers, and the offset of the sample that contains it.

    Returns:
        (magnitude, offset in bytes); (0.0, 0) if the piece is a simulated one without numbers, or if its length in
        bytes is not a multiple of 4.

    Raises:
        ProtocolError: If a number is not finite.
    """
    if isinstance(piece, SyntheticBlob) or len(piece) % 4:
        return 0.0, 0
    sizes = np.abs(_numbers(piece))
    at = int(sizes.argmax())
    if not np.isfinite(sizes[at]):  # argmax returns the position of NaN if there is one
        raise ProtocolError(Reason.NAN, "a donated state must have finite numbers only, but has NaN or infinity")
    return float(sizes[at]), 4 * at // SAMPLE_BYTES * SAMPLE_BYTES


def differs(sample: DonorSample, synchronous: bool) -> bool:
    """Return whether a donor's sample is too far from the bytes of two witnesses to be from an honest replica.

    Args:
        sample: The donor's and witnesses' bytes. With fewer than WITNESSES witnesses, or with a number that is not
            finite, the result is False.
        synchronous: Whether the run is synchronous, so that replicas are bit-identical. If so, the result is True if
            the witnesses agree with each other and not with the donor.
    """
    if len(sample.held) < WITNESSES or any(map(_not_comparable, (sample.said, *sample.held))):
        return False
    if synchronous:
        return sample.said not in sample.held and sample.held[0] == sample.held[1]
    rows = np.stack([_numbers(one).astype(np.float64) for one in (sample.said, *sample.held)])
    if not np.isfinite(rows).all():
        return False
    median = np.median(rows, axis=0)
    distance, spread = np.linalg.norm(rows[0] - median), np.linalg.norm(rows[1] - rows[2])
    return bool(distance > max(MOST_DISTANCE * np.linalg.norm(median), MOST_SPREADS * spread))


def most_accused(peers: Sequence[PeerId]) -> int:
    """Return how many of these peers may be excluded as liars: a third (ACCUSED_SHARE) of them, but at least 1."""
    return max(1, len(peers) // ACCUSED_SHARE)


def _not_comparable(piece: Blob) -> bool:
    return isinstance(piece, SyntheticBlob) or len(piece) % 4 != 0


def _numbers(piece: Blob) -> NDArray[np.float32]:
    return np.frombuffer(piece, np.float32)
