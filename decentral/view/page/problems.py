"""Find the present problems of a swarm for the live page. Start reading at `RecentTroubles.problems`.

Lost peers are not among the problems: the page has a list of its own for them (`SwarmView`), until the user
acknowledges them.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.journal.events import BAD, WARNING
from decentral.core.reasons import known_reason
from decentral.core.units import Seconds
from decentral.view.page.peer_view import PageState, PeerView

TROUBLED_S = 120.0  # a serious event is shown as a problem for this time
EXCHANGES_SEEN = 300  # the share of failures is computed over this many recent exchanges
MOST_FAILED = 0.25  # the page reports a problem if at least this share of the recent exchanges failed
FEW_EXCHANGES = 20  # with fewer recent exchanges, their failures are no problem yet
PROBLEMS_SHOWN = 8
ALONE_S = 30.0  # a peer is a problem if it has no exchange for this time and for ALONE_WINDOWS gossip windows
ALONE_WINDOWS = 3
LEAST_TRAINING = 0.5  # a peer that trains less than this share of its time is a problem

Problem = tuple[str, int, str]  # level; the peer's number, or -1 for the whole swarm; text


@dataclass(frozen=True, slots=True)
class RunKind:
    """Properties of a run that decide whether peers wait for each other by design."""

    layers: int = 0  # number of layers of the whole model; 0: not known
    synchronous: bool = False


USUAL_RUN = RunKind()


@dataclass(slots=True)
class RecentTroubles:
    """Recent exchanges, serious events, and reports of layers that no peer holds; `problems` finds problems in them."""

    _exchanges: deque[tuple[Seconds, str, str]] = field(default_factory=lambda: deque(maxlen=EXCHANGES_SEEN))
    _told: deque[tuple[Seconds, Problem]] = field(default_factory=lambda: deque(maxlen=EXCHANGES_SEEN))
    _unheld: dict[int, tuple[range, str]] = field(default_factory=dict)  # peer -> layers that it reported, and the text

    def exchanged(self, t: Seconds, outcome: str, reason: str) -> None:
        """Record a gossip exchange that ended at Unix time `t`."""
        self._exchanges.append((t, outcome, known_reason(reason)))

    def told(self, t: Seconds, peer: int, level: str, words: str) -> None:
        """Record an event of the peer with this number, if the level is BAD or WARNING."""
        if level in (BAD, WARNING):
            self._told.append((t, (level, peer, words)))

    def unheld(self, peer: int, layers: range, words: str) -> None:
        """Record a peer's report that no peer holds these layers."""
        self._unheld[peer] = layers, words

    def held(self, peer: int) -> None:
        """Remove this peer's report of layers that no peer holds, if there is one."""
        self._unheld.pop(peer, None)

    def problems(self, peers: Iterable[PeerView], now: Seconds, run: RunKind = USUAL_RUN) -> list[Problem]:
        """Return at most PROBLEMS_SHOWN different problems that exist at Unix time `now`, the most serious first."""
        known = list(peers)
        serious = (problem for t, problem in reversed(self._told) if t > now - TROUBLED_S)
        found = [*self._without_holder(known), *serious, *self._failing(now)]
        found += [] if run.synchronous else _alone(known, now)
        found += _idle(known, run)
        return sorted(dict.fromkeys(found), key=lambda one: one[0] != BAD)[:PROBLEMS_SHOWN]

    def _without_holder(self, known: list[PeerView]) -> list[Problem]:
        """Return the reports of layers that no peer holds, except reports of layers that training peers now hold."""
        if not self._unheld:
            return []
        spans = {(peer.device.first, peer.device.last) for peer in known if peer.state is PageState.TRAINING}
        held = {layer for first, last in spans for layer in range(first, last)}
        return [(BAD, -1, words) for layers, words in self._unheld.values() if not held.issuperset(layers)]

    def _failing(self, now: Seconds) -> list[Problem]:
        """Return a problem if a quarter (MOST_FAILED) of at least FEW_EXCHANGES recent exchanges failed, else []."""
        recent = [(outcome, reason) for t, outcome, reason in self._exchanges if t > now - TROUBLED_S]
        failed = Counter(reason for outcome, reason in recent if outcome == "failed")
        count = sum(failed.values())
        if len(recent) < FEW_EXCHANGES or count < MOST_FAILED * len(recent):
            return []
        why = ", ".join(f"{reason} {times}" for reason, times in failed.most_common(3))
        return [(WARNING, -1, f"{count} of the last {len(recent)} exchanges failed: {why}")]


def _alone(peers: list[PeerView], now: Seconds) -> list[Problem]:
    """Return a problem for each peer that has trained for too long without an exchange, though other peers train."""
    training = [peer for peer in peers if peer.state is PageState.TRAINING]
    waited = [one for one in training if now > one.since + max(ALONE_S, ALONE_WINDOWS * one.network.window_s)]
    own = [peer for peer in waited if peer.own]
    beside = (peer for peer in own if any(_share_layers(peer, other) for other in training if other is not peer))
    alone = [peer for peer in beside if not peer.work.exchanges.outcomes["done"]]
    if len(alone) > PROBLEMS_SHOWN // 2:
        return [(WARNING, -1, f"{len(alone)} peers have not exchanged anything since they joined")]
    reasons = {peer.number: peer.work.exchanges.reasons.most_common(2) for peer in alone}
    why = {number: ", ".join(reason for reason, _ in known) or "no window yet" for number, known in reasons.items()}
    said = "has not exchanged anything since it joined"
    return [(WARNING, peer.number, f"{said} ({why[peer.number]})") for peer in alone]


def _share_layers(one: PeerView, other: PeerView) -> bool:
    """Return whether two peers may hold a common layer. A peer whose layers are not known may hold any layer."""
    unknown = not one.device.last or not other.device.last
    return unknown or (one.device.first < other.device.last and other.device.first < one.device.last)


def _waits_by_design(peer: PeerView, run: RunKind) -> bool:
    """Return whether a peer waits for others by design: for a synchronous round, or as one stage of a pipeline."""
    part = 0 < peer.device.last - peer.device.first < run.layers
    return run.synchronous or part


def _idle(peers: Iterable[PeerView], run: RunKind) -> list[Problem]:
    """Return a problem for each peer that trains less than LEAST_TRAINING of its time, not counting waits by design."""
    found = []
    for peer in peers:
        spent = peer.work.spent
        if peer.state is not PageState.TRAINING or spent.total <= ALONE_S:
            continue
        designed = {"waiting"} if _waits_by_design(peer, run) else set()
        shares = spent.shares()
        aside = {kind: share for kind, share in shares.items() if kind not in {"training", *designed}}
        training, worst = shares["training"], max(aside, key=aside.__getitem__)
        if training < LEAST_TRAINING * (training + sum(aside.values())):
            found.append((WARNING, peer.number, f"trains {training:.0%} of the time; {worst} takes most of the rest"))
    if len(found) > PROBLEMS_SHOWN // 2:
        return [(WARNING, -1, f"{len(found)} peers train less than half of the time")]
    return found
