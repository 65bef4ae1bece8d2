"""What is wrong in the swarm, as the page says it: of the last minutes only, and the most serious first."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.units import Seconds
from decentral.dashboard.events import BAD, WARNING
from decentral.dashboard.peer_view import PeerView, gone_words
from decentral.peers.node.traffic import known_reason

TROUBLED_S = 120.0  # after which what went wrong is history
EXCHANGES_SEEN = 300  # the last ones, by which failing ones are judged
MOST_FAILED = 0.25  # of them, before it is a problem
FEW_EXCHANGES = 20  # exchanges say nothing yet
PROBLEMS_SHOWN = 8
ALONE_S = 30.0  # a peer that trains beside others for so long has exchanged something
LEAST_TRAINING = 0.5  # of the time: a peer that trains less is held up by something

Problem = tuple[str, int, str]  # how serious, the peer's number or -1 for the swarm, words


@dataclass(slots=True)
class RecentTroubles:
    """The last exchanges, and the last serious events."""

    _exchanges: deque[tuple[Seconds, str, str]] = field(default_factory=lambda: deque(maxlen=EXCHANGES_SEEN))
    _told: deque[tuple[Seconds, Problem]] = field(default_factory=lambda: deque(maxlen=EXCHANGES_SEEN))

    def exchanged(self, t: Seconds, outcome: str, reason: str) -> None:
        self._exchanges.append((t, outcome, known_reason(reason)))

    def told(self, t: Seconds, peer: int, level: str, words: str) -> None:
        if level in (BAD, WARNING):
            self._told.append((t, (level, peer, words)))

    def problems(self, peers: Iterable[PeerView], now: Seconds) -> list[Problem]:
        """At most PROBLEMS_SHOWN, none twice."""
        known = list(peers)
        found = [*_silent(known, now), *self._serious(now), *self._failing(now), *_alone(known, now), *_idle(known)]
        return sorted(dict.fromkeys(found), key=lambda one: one[0] != BAD)[:PROBLEMS_SHOWN]

    def _serious(self, now: Seconds) -> list[Problem]:
        return [problem for t, problem in reversed(self._told) if t > now - TROUBLED_S]

    def _failing(self, now: Seconds) -> list[Problem]:
        recent = [(outcome, reason) for t, outcome, reason in self._exchanges if t > now - TROUBLED_S]
        failed = Counter(reason for outcome, reason in recent if outcome == "failed")
        count = sum(failed.values())
        if len(recent) < FEW_EXCHANGES or count < MOST_FAILED * len(recent):
            return []
        why = ", ".join(f"{reason} {times}" for reason, times in failed.most_common(3))
        return [(WARNING, -1, f"{count} of the last {len(recent)} exchanges failed: {why}")]


def _silent(peers: Iterable[PeerView], now: Seconds) -> list[Problem]:
    lost = [peer for peer in peers if peer.state in ("silent", "ended") and peer.since > now - TROUBLED_S]
    if len(lost) > PROBLEMS_SHOWN // 2:
        return [(BAD, -1, f"{len(lost)} peers have fallen silent or ended in the last two minutes")]
    return [(BAD, peer.number, gone_words(peer)) for peer in lost]


def _alone(peers: list[PeerView], now: Seconds) -> list[Problem]:
    training = [peer for peer in peers if peer.state == "training"]
    waited = (peer for peer in training if peer.own and peer.since < now - ALONE_S)
    alone = [peer for peer in waited if not peer.work.exchanges["done"]] if len(training) > 1 else []
    if len(alone) > PROBLEMS_SHOWN // 2:
        return [(WARNING, -1, f"{len(alone)} peers have not exchanged anything since they joined")]
    reasons = {peer.number: ", ".join(name for name, _ in peer.work.reasons.most_common(2)) for peer in alone}
    return [
        (
            WARNING,
            peer.number,
            f"has not exchanged anything since it joined ({reasons[peer.number] or 'no window yet'})",
        )
        for peer in alone
    ]


def _idle(peers: Iterable[PeerView]) -> list[Problem]:
    """Peers whose training thread does something else most of the time."""
    idle = [(peer, peer.work.shares) for peer in peers if peer.state == "training" and peer.work.spent.total > ALONE_S]
    slow = [(peer, shares) for peer, shares in idle if shares["training"] < LEAST_TRAINING]
    if len(slow) > PROBLEMS_SHOWN // 2:
        return [(WARNING, -1, f"{len(slow)} peers train less than half of the time")]
    worst = {
        peer.number: max((share, kind) for kind, share in shares.items() if kind != "training") for peer, shares in slow
    }
    return [
        (
            WARNING,
            peer.number,
            f"trains {shares['training']:.0%} of the time; {worst[peer.number][1]} takes most of the rest",
        )
        for peer, shares in slow
    ]
