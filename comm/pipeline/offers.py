"""Which peer gets a micro-batch where many could take it: the best of a few.

    execution --Offer--> some holders of the next layer --Load--> the one that is through soonest, per layer it takes

No peer knows how much a thousand others have to do, and what it knew would be old; but of a few that are drawn by
chance the one with the least to do is nearly as good as the best of all (the power of two choices, Mitzenmacher 2001).
This costs a round trip before the activations are sent, and none are sent to a peer that has no memory for them.
"""

from dataclasses import dataclass, field

from decentral.comm.wire.messages import Load
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

CANDIDATES = 8
OFFER_S = 3.0  # deadline of an Offer; a peer that needs longer is not sent any activations
MOST_BUSY = 6  # peers that are asked without a pause; if so many are busy, nearly all are
FEW = 4  # with so few holders their measured times say enough, and no offers are made
COMPUTE_WEIGHT = 0.25  # an idle slow device goes before a fast one with a queue: with both at work more is done
OFFER_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0


@dataclass(slots=True)
class Offers:
    """The offers of one execution. `asked`: the peers that have not answered yet."""

    asked: set[PeerId] = field(default_factory=set)
    best: PeerId | None = None
    _least: tuple[float, float] = (0.0, 0.0)

    def answered(self, peer: PeerId, load: Load | None, part: float) -> None:
        """`part` of the model is what it would take; no load: it does not want the execution, or is gone."""
        self.asked.discard(peer)
        if load is None or part <= 0:
            return
        cost = (load.wait_s + COMPUTE_WEIGHT * load.seconds) / part
        if self.best is None or (cost, -part) < self._least:
            self.best, self._least = peer, (cost, -part)


def pause_s(refusals: int, execution_s: Seconds) -> Seconds:
    """How long to wait after so many refusals in a row: a swarm that is busy must not spend its time on questions. An
    execution occupies a device for about `execution_s`."""
    return min(max(LONGEST_PAUSE_S, execution_s), OFFER_PAUSE_S * 2.0 ** min(10, refusals // MOST_BUSY))
