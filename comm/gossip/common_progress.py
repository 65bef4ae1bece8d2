"""Whether a partner's progress has anything in common with ours, over many windows.

In one window an honest partner's cosine with ours is 0.1 or so, and that of noise is 0 give or take 0.01: too near for
a verdict. Over twenty windows the mean tells them apart: honest partners of about our speed have 0.07 to 0.18, whoever
sends noise, or nothing, 0.00. Such a partner does not pull us anywhere, but takes the place of one that would help.

A device ten times slower or faster than ours has little in common with us as well, though it is honest: what counts is
how much is usual among our partners, and who has a fifth of that counts whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_high, median_low

from decentral.comm.gossip.deviations import MOST_KNOWN
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

KEPT = 0.95  # of what earlier windows weigh, with each one: the mean of about twenty
WINDOWS_NEEDED = 5.0  # weight of the windows before a partner is judged
WHOLE = 0.2  # of the usual mean cosine, from which a partner counts whole


@dataclass(slots=True)
class CommonProgress:
    """Of all partners in one fragment: the sums of their cosines with us, and how many windows those are."""

    sums: dict[PeerId, tuple[float, float]] = field(default_factory=dict)

    def useful(self, cosines: Sequence[tuple[PeerId, float]], chance: float) -> list[float]:
        """How much of each partner's progress counts by this, from 0 to 1.

        `chance`: what chance makes of a cosine. Where no more than that is usual, nobody is judged.
        """
        for peer, found in cosines:
            total, windows = self.sums.get(peer, (0.0, 0.0))
            known = KEPT * total + found, KEPT * windows + 1.0
            keep_latest(self.sums, peer, known, max(MOST_KNOWN, len(cosines)))
        means, usual = self._means(), self.usual()
        if usual is None or usual < chance:
            return [1.0] * len(cosines)
        return [min(1.0, max(0.0, means.get(peer, usual) / (WHOLE * usual))) for peer, _ in cosines]

    def usual(self) -> float | None:
        """The mean cosine with us of the median partner, if any can be judged; of two partners, of the lesser one."""
        means = self._means()
        return median_low(means.values()) if means else None

    def usual_at_most(self) -> float | None:
        """Likewise; of two partners, of the better one, as the other may be useless."""
        means = self._means()
        return median_high(means.values()) if means else None

    def _means(self) -> dict[PeerId, float]:
        return {peer: total / windows for peer, (total, windows) in self.sums.items() if windows >= WINDOWS_NEEDED}
