"""What partners may have trained of one fragment, by the speed that their records publish: a budget for each.

A budget grows with time, CLAIM_SLACK times as fast as the published speed, up to CLAIM_BURST_S of it: steps may be
longer than windows, and a partner is not asked in all of its windows. A claim takes from it. A peer that claims more
than it publishes is believed no more than that, over time; and who publishes more than it does is asked for more work.
"""

from dataclasses import dataclass, field

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

CLAIM_SLACK = 2.0  # times the published speed, which is a mean and follows a change late
CLAIM_BURST_S = 60.0  # of the published speed: what one claim may hold
MOST_BUDGETS = 1024  # partners; who is forgotten begins with a full budget, as a newcomer does


@dataclass(slots=True)
class TokenClaims:
    left: dict[PeerId, tuple[Seconds, float]] = field(default_factory=dict)  # tokens, and at which time

    def believed(self, peer: PeerId, tokens: int, tokens_per_s: float, now: Seconds) -> int:
        """What we believe of a claim. Of a peer that has published no speed yet all is believed."""
        if tokens_per_s <= 0:
            return tokens
        most = CLAIM_SLACK * CLAIM_BURST_S * tokens_per_s
        since, left = self.left.get(peer, (now, most))
        budget = min(most, left + CLAIM_SLACK * tokens_per_s * max(0.0, now - since))
        believed = min(tokens, int(budget))
        keep_latest(self.left, peer, (now, budget - believed), MOST_BUDGETS)
        return believed
