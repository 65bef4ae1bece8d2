"""Whether two partners have sent the same window, or one has sent ours: the same progress counts once.

Windows of honest peers have a direction in common, and each has the noise of its own data, which averages out as far as
there are several. A copy brings none of its own: it makes that of one peer count twice, and takes it back to the peer
it is from, which then goes the same way again (docs/results/security.md, "Patient liars"). Which of two is the copy
nobody can tell, so both count half; and neither claims more tokens than the other or, if that is more, than is usual.

How alike honest windows are depends on their length and on how far training is: cosines of 0.05 to 0.7. So what counts
is how far the cosine of two is above what is usual among us and the partners of this merge, as a part of what is left
to 1. Of honest pairs 97 in 100 are below 0.05 where devices are equal, and below 0.3 where one is ten times as fast as
another; only in the first ten windows of all they can be anywhere.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

DIFFERENT = 0.3  # of the way from the usual cosine to 1, up to which two windows count as two
SAME = 0.5  # and from which they count as one


class CopiedParts(NamedTuple):
    """How far the windows of partners are copies, each from 0 to 1."""

    ours: list[float]  # of our own window
    others: list[list[float]]  # of each other's; 1 of its own

    def new(self) -> list[float]:
        """How much of each partner's progress is new to us."""
        return [(1.0 - copied) / sum(row) for copied, row in zip(self.ours, self.others, strict=True)]

    def claims(self, tokens: Sequence[float], usual: float) -> list[float]:
        """The tokens that each may claim: what its copies claim, or is usual; the more, the less they are copies."""
        return [
            min(claim, *(max(usual, other) / alike for alike, other in zip(row, tokens, strict=True) if alike))
            for claim, row in zip(tokens, self.others, strict=True)
        ]


def likeness(window: Tensor, partners: Sequence[Tensor]) -> CopiedParts:
    """`window`: ours. All are samples of the same numbers, fp32 [m].

    With one partner nobody can tell what is usual.
    """
    count = len(partners)
    if count < 2:
        return CopiedParts([0.0] * count, [[1.0]] * count)
    directions = torch.nn.functional.normalize(torch.stack([window, *partners]), dim=1)
    cosines: list[list[float]] = (directions @ directions.T).tolist()
    usual = median_low([cosines[one][other] for one in range(count + 1) for other in range(one)])
    return CopiedParts(
        [_copied(row[0], usual) for row in cosines[1:]],
        [
            [1.0 if one == other else _copied(row[other], usual) for other in range(1, count + 1)]
            for one, row in enumerate(cosines[1:], start=1)
        ],
    )


def _copied(cosine: float, usual: float) -> float:
    """From 0 to 1. Where all windows are the same there are no copies."""
    if usual >= 1.0:
        return 0.0
    above = (cosine - usual) / (1.0 - usual)
    return min(1.0, max(0.0, (above - DIFFERENT) / (SAME - DIFFERENT)))
