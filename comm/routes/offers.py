"""Whom to send a micro-batch to where many could carry on: the best of a few.

    execution --Offer--> some holders of the next layer --Load--> the one that is through soonest, per layer that it takes

Nobody knows how much a thousand peers have to do, and what one knew would be old; but of a few that are drawn by chance
the one with least to do is nearly as good as the best of all (the power of two choices, Mitzenmacher 2001). It costs a
round trip before the activations are sent, and none of them is sent to a peer that has no room.
"""

from dataclasses import dataclass, field

from decentral.comm.wire.messages import Load
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

CANDIDATES = 8
OFFER_S = 3.0  # who needs longer for a word is not asked for more
MOST_BUSY = 6  # peers that are asked without a pause; then all are busy, more or less
FEW = 4  # of so few holders each asker knows enough by their turns
OWN = 0.25  # a slow device that idles goes before a fast one with a queue: with both at work more is done
OFFER_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0


@dataclass(slots=True)
class Offers:
    """Of one execution. `asked`: who has not answered yet."""

    asked: set[PeerId] = field(default_factory=set)
    best: PeerId | None = None
    _least: tuple[float, float] = (0.0, 0.0)

    def answered(self, peer: PeerId, load: Load | None, part: float) -> None:
        """`part` of the model is what it would carry; no load: it does not want the execution, or is gone."""
        self.asked.discard(peer)
        if load is None or part <= 0:
            return
        cost = (load.wait_s + OWN * load.seconds) / part
        if self.best is None or (cost, -part) < self._least:
            self.best, self._least = peer, (cost, -part)


def pause_s(refusals: int, execution_s: Seconds) -> Seconds:
    """After so many refusals in a row. A swarm in which all have enough to do must not spend its time on questions.

    `leg_s`: what an execution takes of a device.
    """
    return min(max(LONGEST_PAUSE_S, execution_s), OFFER_PAUSE_S * 2.0 ** min(10, refusals // MOST_BUSY))


__all__ = ["CANDIDATES", "FEW", "MOST_BUSY", "OFFER_S", "Offers", "pause_s"]
