"""How far this peer trusts what others give back along routes: by its own audits, not by what anybody says.

    wrong answers   each leaves a quarter of a peer's routes; SUSPENDED_AT of them none, for a while that doubles
    right answers   a peer is audited at half the rate after each; one wrong answer, and every answer is audited again
    time            half of what counts against a peer is forgotten in HALVED_S

An answer is that of all peers behind the one that gave it, so what is wrong with it counts against that one in part:
one of those behind it may be to blame, and it audits them itself.
"""

from dataclasses import dataclass, field

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

WRONG_WEIGHT = 0.25  # of a peer's routes are left after each wrong answer
SUSPENDED_AT = 2.0  # wrong answers, after which a peer gets no routes
NO_ROUTES_S = 600.0  # for the first time; twice as long after each further time
LONGEST_NO_ROUTES_S = 6 * 3600.0
HALVED_S = 600.0
_ROUNDING = 1e-3  # of a wrong answer, by which time has made less of the first one when the second is found
MOST_JUDGED = 1024  # peers with a reputation here; the one that was judged longest ago is forgotten
MOST_RIGHT = 30  # right answers that are told apart


@dataclass(slots=True)
class PeerReputation:
    right: int = 0  # audits in a row in which its answer was the usual one
    wrong: float = 0.0  # answers, as of `at`
    at: Seconds = 0.0
    suspended_until: Seconds = 0.0
    suspensions: int = 0

    def wrong_at(self, now: Seconds) -> float:
        """How much counts against it now."""
        return float(self.wrong * 0.5 ** (max(0.0, now - self.at) / HALVED_S))


@dataclass(slots=True)
class Reputations:
    """Those of all peers that were audited. A peer that was not has a clean one."""

    by_peer: dict[PeerId, PeerReputation] = field(default_factory=dict)

    def weight(self, peer: PeerId, now: Seconds) -> float:
        """The part of its routes that a peer gets; 0: none."""
        known = self.by_peer.get(peer)
        if known is None:
            return 1.0
        return 0.0 if now < known.suspended_until else float(WRONG_WEIGHT ** known.wrong_at(now))

    def interval(self, peer: PeerId) -> float:
        """Of so many answers of this peer one should be audited, whatever that costs."""
        known = self.by_peer.get(peer)
        return float(1 << known.right) if known else 1.0

    def was_right(self, peer: PeerId) -> None:
        known = self._judged(peer)
        known.right = min(MOST_RIGHT, known.right + 1)

    def was_wrong(self, peer: PeerId, share: float, now: Seconds) -> None:
        """`share`: the part of a wrong answer that counts against this peer."""
        known = self._judged(peer)
        known.wrong, known.at, known.right = known.wrong_at(now) + share, now, 0
        if known.wrong > SUSPENDED_AT - _ROUNDING and now >= known.suspended_until:
            lasts_s = min(LONGEST_NO_ROUTES_S, NO_ROUTES_S * 2.0 ** min(known.suspensions, 16))
            known.suspended_until, known.suspensions = now + lasts_s, known.suspensions + 1

    def _judged(self, peer: PeerId) -> PeerReputation:
        known = self.by_peer.get(peer) or PeerReputation()
        keep_latest(self.by_peer, peer, known, MOST_JUDGED)
        return known
