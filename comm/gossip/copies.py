"""Whether two partners have sent the same window, or one has sent ours: the same progress counts once.

Windows of honest peers have a direction in common, and each has the noise of its own data, which averages out as far as
there are several. A copy brings none of its own: it makes that of one peer count twice, and takes it back to the peer
it is from, which then goes the same way again (docs/results/security.md, "Patient liars"). Which of two is the copy
nobody can tell, so both count half; and neither claims more tokens than the other or, if that is more, than is usual.
Of a window that has counted in one of the last merges it is plain: a copy that comes after it counts for nothing.

How alike honest windows are depends on their length and on how far training is: cosines of 0.05 to 0.7. So what counts
is how far the cosine of two is above what is usual, as a part of what is left to 1. Usual is what is so among us and
the partners of a merge, or with us over many windows (comm/gossip/common_progress.py) if that is more: one partner that
sends noise must not make copies of all others. Of honest pairs 97 in 100 are below 0.05 where devices are equal, and
below 0.3 where one is ten times as fast as another; only in the first ten windows of all they can be anywhere. In a
model of few numbers chance alone makes any cosine, so what it makes counts as usual.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from decentral.comm.gossip.deviations import COMPARED_NUMBERS, chance_of
from decentral.core.ids import PeerId

DIFFERENT = 0.3  # of the way from the usual cosine to 1, up to which two windows count as two
SAME = 0.5  # and from which they count as one
BY_CHANCE = 3.0  # times what chance makes of the cosine of two unrelated windows
MERGES_KEPT = 8  # whose windows are known again; who waits longer sends what has become useless


class CopiedParts(NamedTuple):
    """How far the windows of partners are copies, each from 0 to 1."""

    counted: list[float]  # of our own window, or of one that has counted before
    others: list[list[float]]  # of each other's; 1 of its own

    def new(self) -> list[float]:
        """How much of each partner's progress is new to us."""
        return [(1.0 - copied) / sum(row) for copied, row in zip(self.counted, self.others, strict=True)]

    def claims(self, tokens: Sequence[float], usual: float) -> list[float]:
        """The tokens that each may claim: what its copies claim, or is usual; the more, the less they are copies."""
        return [
            min(claim, *(max(usual, other) / alike for alike, other in zip(row, tokens, strict=True) if alike))
            for claim, row in zip(tokens, self.others, strict=True)
        ]


@dataclass(slots=True)
class CountedWindows:
    """What one fragment's last merges were made of: whose windows, ours first, and their directions.

    Of samples the first COMPARED_NUMBERS are compared, or all if they are fewer: fp32 [windows, numbers].
    """

    merges: deque[tuple[list[PeerId | None], Tensor]] = field(default_factory=lambda: deque(maxlen=MERGES_KEPT))

    def copied_parts(
        self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]], known: float | None
    ) -> CopiedParts:
        """As the function below, for one merge more: what of it is new has counted from now on."""
        peers, vectors = [peer for peer, _ in partners], [vector for _, vector in partners]
        merge = normalize(torch.stack([vector[:COMPARED_NUMBERS] for vector in (window, *vectors)]), dim=1)
        found = copied_parts(window, vectors, known, self._most_alike(peers, merge[1:]))
        fresh = [0, *(at for at, new in enumerate(found.new(), start=1) if new)]
        self.merges.append(([[None, *peers][at] for at in fresh], merge[fresh]))
        return found

    def _most_alike(self, peers: Sequence[PeerId], directions: Tensor) -> list[float]:
        """The largest cosine of each partner's window with one that has counted: ours, or another partner's."""
        most = [-1.0] * len(peers)
        for whose, counted in self.merges:
            for other, row in zip(whose, (counted @ directions.T).tolist(), strict=True):
                most = [
                    found if other == peer else max(found, cosine)
                    for peer, found, cosine in zip(peers, most, row, strict=True)
                ]
        return most


def copied_parts(
    window: Tensor, partners: Sequence[Tensor], known: float | None, before: Sequence[float] | None = None
) -> CopiedParts:
    """`window`: ours. All are samples of the same numbers, fp32 [m]. `known`: partners' usual cosine with us; without
    that, or with one partner, nobody can tell what is usual here. `before`: the most alike of those that have counted.
    """
    count, chance = len(partners), BY_CHANCE * chance_of(window)
    directions = normalize(torch.stack([window, *partners]), dim=1)
    cosines: list[list[float]] = (directions @ directions.T).tolist()
    usual = 1.0
    if known is not None and count > 1:
        among = median_low([cosines[one][other] for one in range(count + 1) for other in range(one)])
        usual = max(known, among) + chance
    ours = [row[0] for row in cosines[1:]]
    counted = ours if before is None else map(max, ours, before)
    return CopiedParts(
        [_copied(cosine, usual) for cosine in counted],
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
