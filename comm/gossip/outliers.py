"""Whether a partner's weights are among those of the others: whose are not move us nowhere.

Honest replicas differ by a part of a window's progress, or, where devices are unequal, by how far the slow ones are
behind. A liar's weights are where it wants ours to be. From our own place the two cannot be told once we have been
moved: then all honest ones are as far. So each partner's last known difference from us is kept, and judged by its
distance from the median of all of them and us in each coordinate (Yin et al., arXiv 1803.01498). While most are honest,
that is among them, wherever we are.

Training moves all alike. What moves us alone, towards partners, moves all of them as we see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

MOST_KNOWN = 16  # partners whose differences are kept, or all of a merge, if they are more
COMPARED_NUMBERS = 8192  # of a vector that are kept, at most
HONEST_PART = 0.75  # of a peer and its partners, who are taken to be honest: the farthest of them is usual
EARLY_MERGES = 5  # the first ones with partners' weights: a fast device leaves others behind that have hardly moved


class Tolerance(NamedTuple):
    """Up to how far from the median a partner's weights count whole; from twice that on they count for nothing."""

    times: float  # the usual distance, or the steps below where they are more
    steps: float  # of the partner: its progress in a window


EARLY, LATER = Tolerance(3.0, 1.0), Tolerance(2.0, 0.5)
FAR = 3.3  # times what counts whole: as far from the others no honest device falls behind, or gets ahead


@dataclass(slots=True)
class Outliers:
    """Of all partners in one fragment. Vectors are samples of what they differ from us by, fp32 [m]."""

    apart: dict[PeerId, Tensor] = field(default_factory=dict)
    found: dict[PeerId, float] = field(default_factory=dict)  # each partner's last distance, by what counts whole
    merges: int = 0  # with weights of partners, so far

    def trust(self, partners: Sequence[tuple[PeerId, Tensor]], steps: Sequence[float]) -> list[float]:
        """How much the weights of each of these partners count, from 0 to 1. `steps`: how long its windows are.

        With one partner nobody can tell which of the two is outside, nor where most are equal to the bit.
        """
        if not partners:
            return []
        most = max(MOST_KNOWN, len(partners))
        for peer, vector in partners:
            keep_latest(self.apart, peer, _thinned(vector).clone(), most)
        self.merges += 1
        tolerance = EARLY if self.merges <= EARLY_MERGES else LATER
        distances = self._distances()
        usual = sorted(distances.values())[int(HONEST_PART * (len(distances) - 1))] if len(distances) > 2 else 0.0
        for (peer, _), step in zip(partners, steps, strict=True):
            whole = tolerance.times * max(usual, tolerance.steps * step)
            keep_latest(self.found, peer, distances[peer] / whole if usual else 0.0, most)
        return [min(1.0, max(0.0, 2.0 - self.found[peer])) for peer, _ in partners]

    def forget(self) -> None:
        """Forget where partners are, because our own weights have been replaced."""
        self.apart, self.found, self.merges = {}, {}, 0

    def _distances(self) -> dict[PeerId | None, float]:
        """How far each partner is from the median of all; None: we."""
        places = torch.stack([torch.zeros_like(next(iter(self.apart.values()))), *self.apart.values()])
        apart = places - places.double().quantile(0.5, dim=0)
        return dict(zip([None, *self.apart], torch.linalg.vector_norm(apart, dim=1).tolist(), strict=True))

    def is_far(self, peer: PeerId) -> bool:
        """Whether its weights, when they were last seen, were nowhere near anybody's: what it sends is of no use."""
        return self.found.get(peer, 0.0) > FAR

    def moved(self, way: Tensor) -> None:
        """Partners have moved us by this."""
        way = _thinned(way)
        for vector in self.apart.values():
            vector -= way


def _thinned(vector: Tensor) -> Tensor:
    """Every so many-th number: the first ones may all be of one layer, whose weights are small beside the others'."""
    return vector[:: -(-len(vector) // COMPARED_NUMBERS)]
