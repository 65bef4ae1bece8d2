"""Compares samples of what a donor sent with what two other peers hold there, so that no donor is believed alone.

A fast donor gives most of a newcomer's pieces. Replicas of honest peers differ by little, so where a sample is far from
the median of three peers' numbers, its donor is left out and all that it sent is fetched again. Samples are drawn after
the pieces have come, and a donor cannot tell which they will be: for each fragment and donor one at random, and the one
around the largest number that it sent, so that what was not sampled is no larger than what was.

With fewer than three peers nobody can tell who is right, and nothing is compared.
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

SAMPLE_BYTES = 2 * KiB  # smaller than what is paced (comm/net/uplink_queue.py): it waits behind no piece
SAMPLE_DEADLINE_S = 10.0
WITNESSES = 2  # peers that each sample is compared with: one liar of three does not move the median far
MOST_WITNESSES = 4  # witnesses asked for one sample until two have answered
MOST_DISTANCE = 0.5  # of a sample from the median, over the median's length; honest replicas differed by 0.14
MOST_SPREADS = 4.0  # and in distances of the two others from each other, where that is more
ACCUSED_SHARE = 3  # of so many peers one may be left out for this: where most differ, replicas do


@dataclass(slots=True)
class DonorSample:
    """What a donor said of one place, and what others hold there."""

    donor: PeerId
    said: Blob
    version: tuple[int, bytes]  # step and version of the fragment
    left: list[PeerId]  # peers that may be asked yet
    held: list[bytes] = field(default_factory=list)  # by the witnesses that have answered
    under_way: int = 0

    def ask(self) -> PeerId:
        """Return the witness that is asked now."""
        self.under_way += 1
        return self.left.pop(0)

    def answered(self, held: bytes | None) -> None:
        """Take what a witness holds there; None: nothing that can be compared."""
        self.under_way -= 1
        if held is not None:
            self.held.append(held)

    @property
    def wanted(self) -> int:
        """How many more witnesses are to be asked now."""
        return min(len(self.left), WITNESSES - len(self.held) - self.under_way)

    @property
    def over(self) -> bool:
        """Whether two have answered, or none is left that could."""
        return len(self.held) >= WITNESSES or (not self.left and not self.under_way)


def largest(piece: Blob) -> tuple[float, int]:
    """The largest magnitude of the numbers in a piece, and the byte at which the sample around it begins.

    States travel as fp32. Raises ProtocolError for a number that is not finite.
    """
    if isinstance(piece, SyntheticBlob) or len(piece) % 4:
        return 0.0, 0
    sizes = np.abs(_numbers(piece))
    at = int(sizes.argmax())
    if not np.isfinite(sizes[at]):  # argmax finds what is no number first
        raise ProtocolError(Reason.NAN, "a state with a number that is not finite")
    return float(sizes[at]), 4 * at // SAMPLE_BYTES * SAMPLE_BYTES


def differs(sample: DonorSample, exact: bool) -> bool:
    """Whether the donor's numbers are none that an honest replica holds; `exact`: replicas are equal."""
    if len(sample.held) < WITNESSES or any(map(_not_comparable, (sample.said, *sample.held))):
        return False
    if exact:
        return sample.said not in sample.held and sample.held[0] == sample.held[1]
    rows = np.stack([_numbers(one).astype(np.float64) for one in (sample.said, *sample.held)])
    if not np.isfinite(rows).all():
        return False
    median = np.median(rows, axis=0)
    distance, spread = np.linalg.norm(rows[0] - median), np.linalg.norm(rows[1] - rows[2])
    return bool(distance > max(MOST_DISTANCE * np.linalg.norm(median), MOST_SPREADS * spread))


def most_accused(peers: Sequence[PeerId]) -> int:
    return max(1, len(peers) // ACCUSED_SHARE)


def _not_comparable(piece: Blob) -> bool:
    return isinstance(piece, SyntheticBlob) or len(piece) % 4 != 0


def _numbers(piece: Blob) -> NDArray[np.float32]:
    return np.frombuffer(piece, np.float32)
