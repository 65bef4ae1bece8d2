"""The choice of the next peer for a micro-batch: turns by speed and routing weight, offers, and trust.

Turns (`PeerScheduler`, start here). Each peer gets micro-batches in proportion to its routing weight and its measured
speed; a peer that has failed gets no micro-batches for a while.

Offers (`Offers`). Where many peers could take an execution, a few of them are asked, and the best answer wins:

    execution --Offer--> some holders of the next layer --Load--> the holder that needs the fewest seconds per layer

No peer knows the load of a thousand others, but the least loaded of a few random peers is nearly as good as the least
loaded of all (the power of two choices, Mitzenmacher 2001). Offers cost a round trip before the activations are sent,
and save sending them to a peer that has no memory for them.

Trust (`Reputations`). How far this peer trusts another peer's answers follows from its own audits alone:

    wrong answers   each multiplies a peer's share of routes by WRONG_WEIGHT; SUSPENDED_AT of them suspend the peer
    right answers   each halves the rate of audits; after a wrong answer, every answer of the peer is audited again
    time            every HALVED_S, a wrong answer loses half of its weight

An answer is the work of the peer that gave it and of all later peers on the route. So a wrong answer counts only in
part against the peer that gave it, since a later peer may be to blame. Each peer audits its own next peers.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Generic, NamedTuple, TypeVar

from decentral.comm.wire.messages import Load
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

Choice = TypeVar("Choice", int, PeerId)

# Constants of `PeerScheduler`, which chooses the next peer and notices failures

MOST_NEXT_PEERS = 256  # for at most this many next peers, we store how long micro-batches take there, and suspensions
NEWEST_WEIGHT = 0.2  # weight of the newest value in a running average
LEAST_WEIGHT = 0.02  # a peer without routing weight gets this part of the largest weight, so that its speed is measured
MOST_TIMES_SLOWER = 16.0  # missed deadlines raise a peer's duration to at most this many times the other peers' median
FAR_TIMES = 6.0  # a peer is behind a slow link if it takes this many times as long as others (`PeerScheduler.near`)
HEALED_TIMES = 2.0  # a peer's mean duration is lowered to at most this many times its newest duration
FAR_S = 5.0  # a peer behind a slow link is timed again after this time at first, then after twice as long each time
UNKNOWN_TIMES = 4.0  # we expect a peer that was not timed yet to take at most this many times as long as a typical peer
MISSED = 2.0  # each missed deadline multiplies the peer's expected duration by this
FIRST_SUSPENDED_S = 4.0  # the first suspension is this long; each unanswered Offer doubles it, up to MOST_SUSPENDED_S
MOST_SUSPENDED_S = 64.0  # a peer that does not answer Offers is suspended for at most this long
TIMES_KEPT = 4.0  # a peer that answers an Offer but then fails again is suspended for this many times as long as before
MOST_KEPT_S = 512.0  # a peer that fails again is suspended for at most this long: each failure can delay all steps
FORGIVEN_S = 1.0  # each returned gradient halves a peer's next suspension; a suspension as short as this is forgotten
LOOK_SLACK = 2.0  # once a peer has taken this many times its expected duration, we ask whether it still computes
LOOK_FLOOR_S = 1.0  # we wait at least this long before we ask a peer whether it still computes
STATUS_S = 2.0  # a peer must answer a ForwardStatusQuery within this time; even a busy peer answers at once
ROUTE_SLACK = 4.0  # the deadline of a gradient is this many times the peer's expected duration
HOP_DEADLINE_FLOOR_S = 2.0  # a gradient's deadline is at least this long, if the peer's usual duration is known
HOP_DEADLINE_TOP_S = 420.0  # a gradient's deadline is at most this long; after it, the micro-batch counts as lost
UNKNOWN_S = 15.0  # a gradient's deadline is at least this long, if the peer's usual duration is not known

# Constants of `Offers`, which ask several peers how soon they could compute an execution

CANDIDATES = 8  # at most this many peers at a time get an Offer for one execution
OFFER_S = 3.0  # a peer that answers an Offer later than this gets no activations
MOST_BUSY = 6  # after this many refusals as busy, an execution pauses: most other peers are probably busy, too
FEW = 4  # if at most this many peers hold the next layer, no Offers are sent at first: measured durations are enough
COMPUTE_WEIGHT = 0.25  # a second of computing counts as this many seconds of waiting, so that idle slow devices win
OFFER_PAUSE_S = 0.25  # an execution's first pause after MOST_BUSY refusals; each further MOST_BUSY refusals double it
LONGEST_PAUSE_S = 4.0  # a pause is at most this long, or at most as long as an execution takes if that is longer

# Constants of `Reputations`, which follow from audits

WRONG_WEIGHT = 0.25  # each wrong answer multiplies a peer's share of the routes by this
SUSPENDED_AT = 2.0  # a peer gets no routes (is suspended) once the weights of its wrong answers sum to this
NO_ROUTES_S = 600.0  # a peer's first suspension for wrong answers; each further suspension is twice as long
LONGEST_NO_ROUTES_S = 6 * 3600.0
HALVED_S = 600.0  # the weight of a wrong answer halves in this time
_ROUNDING = 1e-3  # a sum this much below SUSPENDED_AT suspends, too, since the weights of earlier wrong answers decay
MOST_JUDGED = 1024  # we store the reputations of this many peers; then the peer judged longest ago is forgotten
MOST_RIGHT = 30  # up to this many right answers in a row count; each of them halves the audit rate


@dataclass(slots=True)
class RoutingWeights:
    """The shares of micro-batches that next peers should get, computed from the maximum flow through the swarm.

    scheduler/throughput/routing.py computes them. A rate is a flow in any unit, since only ratios of rates are used.
    """

    # ends[first][last]: rate of this peer's executions that enter at layer `first` and leave before layer `last`
    ends: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    # nexts[layer][first, last]: rate of the executions that enter the peers with layers [first, last) at `layer`,
    # divided by the tokens/s that these peers publish
    nexts: Mapping[int, Mapping[tuple[int, int], float]] = field(default_factory=dict)
    tokens_per_s: float = 0.0  # tokens/s of the micro-batches that all peers together begin in this flow
    size: int = 0  # number of variables in the linear programme behind these weights
    spans: Collection[tuple[int, int]] = ()  # layers [first, last) of all peers when the weights were computed

    def rate(self, layer: int, span_and_speed: tuple[int, int, float]) -> float:
        """Return the rate at which micro-batches should be sent to a peer that executes them from `layer` on.

        Args:
            layer: The first layer of the peer's executions.
            span_and_speed: The peer's layers [first, last) and its tokens/s.

        Returns:
            A rate in any unit. If no peer had this span when the flow was solved, the mean of the other spans is used.
        """
        first, last, tokens_per_s = span_and_speed
        rates = self.nexts.get(layer, {})
        if (first, last) in rates or (first, last) in self.spans or not rates:
            return rates.get((first, last), 0.0) * tokens_per_s
        return sum(rates.values()) / len(rates) * tokens_per_s


@dataclass(slots=True)
class StrideScheduler(Generic[Choice]):
    """Stride scheduling: takes each choice in proportion to 1 / cost.

    A unit of virtual time lasts until each choice has had 1 / cost turns. A new choice starts at the present virtual
    time. No choice waits for longer than one turn at its present cost, so a cost that was high once is soon forgotten.

    Source: Waldspurger & Weihl 1995.
    """

    now: float = 0.0
    paid: dict[Choice, float] = field(default_factory=dict)  # virtual time at which each choice's last turn ends

    def choose(self, costs: Mapping[Choice, float], count: int = 1) -> list[Choice]:
        """Return the `count` different choices that come next, or all if there are fewer, and record their turns.

        Args:
            costs: All choices that are possible now, each with its cost > 0.
            count: How many to take.
        """
        paid, now = self.paid, self.now
        self.paid = paid = {one: min(paid.get(one, now), now + cost) for one, cost in costs.items()}
        chosen = heapq.nsmallest(count, ((paid[one] + cost, one) for one, cost in costs.items()))
        for pays, one in chosen:
            paid[one] = pays
        self.now += len(chosen) / sum(1 / cost for cost in costs.values())
        return [one for _, one in chosen]


class Suspension(NamedTuple):
    """The time during which a peer that has failed gets no micro-batch."""

    until: Seconds
    seconds: Seconds  # length of this suspension, from which the next one's length follows
    there: bool = False  # True: the peer has answered an Offer since it failed; before, it gets no micro-batch
    tried: bool = False  # True: the peer has got a micro-batch since it failed, and must wait until `until` for another


@dataclass(slots=True)
class PeerScheduler:
    """Chooses next peers by stride scheduling, and measures how long each peer takes to return a gradient.

    A turn of a peer costs the seconds until its gradient comes, divided by its routing weight (SWARM, arXiv 2301.11913,
    section 3.2, uses the seconds alone). A peer that has failed is suspended, unless all peers are. Afterwards it gets
    an Offer. If it answers, it gets a single micro-batch at first, because a step may wait for all micro-batches at a
    silent peer. A failure does not raise a peer's expected seconds, because the next wait for it would be longer.
    """

    seconds: dict[PeerId, Seconds] = field(default_factory=dict)  # mean time until a peer returns a gradient
    suspended: dict[PeerId, Suspension] = field(default_factory=dict)
    # For each peer behind a slow link: (when it is timed again, length of the wait until then).
    _far: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)
    # For each layer: the turns of the peers that hold it.
    _strides: dict[int, StrideScheduler[PeerId]] = field(default_factory=dict)

    def choose(
        self,
        layer: int,
        rates: Mapping[PeerId, float],
        links_s: Mapping[PeerId, Seconds],
        count: int = 1,
    ) -> list[PeerId]:
        """Return the `count` peers that come next at this layer, or all if there are fewer, and record their turns.

        Args:
            layer: First layer of the next peer's execution.
            rates: Routing weight of each peer, in any unit. A peer with 0 gets a few turns, to measure its speed.
            links_s: Seconds of the transfers to and from each peer. A peer whose gradients were not timed yet is
                expected to take as long, but between 1 and UNKNOWN_TIMES times as long as a typical peer.
            count: How many peers to take.
        """
        top, typical_s = max(rates.values(), default=0.0), self._typical_s()
        weights = {peer: max(LEAST_WEIGHT, rate / top) if top else 1.0 for peer, rate in rates.items()}
        guess_s = {peer: min(UNKNOWN_TIMES * typical_s, max(typical_s, links_s[peer])) for peer in rates}
        costs = {peer: self.seconds.get(peer, guess_s[peer]) / weight for peer, weight in weights.items()}
        return self._strides.setdefault(layer, StrideScheduler()).choose(costs, count)

    def near(self, speeds: Mapping[PeerId, float], now: Seconds) -> list[PeerId]:
        """Return the peers that are not behind slow links, or one peer behind a slow link whose next timing is due.

        A step may wait for the slowest micro-batch in flight. So peers behind slow links get no micro-batches, except
        one from time to time that measures the link. A peer's work is its measured duration times its speed. A peer
        counts as behind a slow link if its duration and its work both exceed FAR_TIMES the smallest of all peers, or if
        its work exceeds FAR_TIMES the lower median of the work of three or more peers.

        Speeds are only claims. A peer that claims to be slow must not make all other peers seem to have slow links. A
        peer that claims to be faster than it is seems to have a slow link itself. Two peers are not compared by work
        alone, since one of them may lie about its speed.

        Args:
            speeds: Each peer's tokens/s, as it claims; 0 if it is not known.
            now: Present time.
        """
        timed = {peer: self.seconds[peer] for peer in speeds if peer in self.seconds}
        usual = median_low([speed for speed in speeds.values() if speed] or [1.0])
        work = {peer: seconds * (speeds[peer] or usual) for peer, seconds in timed.items()}
        shortest_s, least = min(timed.values(), default=0.0), min(work.values(), default=0.0)
        most = median_low(work.values()) if len(work) > 2 else math.inf
        slow = {peer for peer in timed if timed[peer] > FAR_TIMES * shortest_s and work[peer] > FAR_TIMES * least}
        slow |= {peer for peer in timed if work[peer] > FAR_TIMES * most}
        far = {peer: self._far.get(peer, (now + FAR_S, FAR_S)) for peer in timed if peer in slow}
        due = next((peer for peer, (again_at, _) in far.items() if now >= again_at), None)
        if due is not None:
            far[due] = now + 2 * far[due][1], 2 * far[due][1]
        for peer, again in far.items():
            keep_latest(self._far, peer, again, MOST_NEXT_PEERS)
        return [peer for peer in speeds if peer not in far] if due is None else [due]

    def _typical_s(self, unknown_s: Seconds = 1.0) -> Seconds:
        return median(self.seconds.values()) if self.seconds else unknown_s

    def served(self, peer: PeerId, seconds: Seconds) -> None:
        """Record that a peer returned a gradient after `seconds`; end its suspension, and halve its next suspension."""
        known = self.seconds.get(peer)
        mean = seconds if known is None else (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * seconds
        mean = min(mean, HEALED_TIMES * seconds)  # so that a peer whose link was slow only once soon counts as near
        keep_latest(self.seconds, peer, mean, MOST_NEXT_PEERS)
        before = self.suspended.pop(peer, None)
        if before and before.seconds > FORGIVEN_S:
            self.suspended[peer] = Suspension(-math.inf, before.seconds / 2, there=True)

    def failed(self, peer: PeerId, now: Seconds) -> None:
        """Suspend a peer that returned no usable gradient; failures of several micro-batches in flight count once."""
        before = self.suspended.get(peer)
        if before is None or before.tried or now >= before.until:
            seconds = FIRST_SUSPENDED_S if before is None else min(MOST_KEPT_S, TIMES_KEPT * before.seconds)
            self._suspend(peer, seconds, now)

    def asked(self, peer: PeerId, now: Seconds) -> None:
        """Record that a micro-batch goes to a peer. If the peer has failed lately, it gets no more for a while."""
        if before := self.suspended.get(peer):
            self.suspended[peer] = before._replace(until=now + before.seconds, tried=True)

    def absent(self, peers: Sequence[PeerId], wait_s: Seconds, now: Seconds) -> list[PeerId]:
        """Return the peers that need an Offer now: they failed, waited, and have answered no Offer since the failure.

        The caller must send these Offers: the next Offer to each of these peers is due only after `wait_s` seconds.
        """
        due = [peer for peer in peers if (one := self.suspended.get(peer)) and not one.there and now >= one.until]
        for peer in due:
            self.suspended[peer] = self.suspended[peer]._replace(until=now + wait_s)
        return due

    def heard_from(self, peer: PeerId, there: bool, now: Seconds) -> None:
        """Record whether a suspended peer answered its Offer (`there`); if not, its suspension doubles."""
        before = self.suspended.get(peer)
        if before is None or before.there:
            return
        if there:
            self.suspended[peer] = before._replace(until=now, there=True)
        else:
            self._suspend(peer, max(before.seconds, min(MOST_SUSPENDED_S, 2 * before.seconds)), now)

    def _suspend(self, peer: PeerId, seconds: Seconds, now: Seconds) -> None:
        keep_latest(self.suspended, peer, Suspension(now + seconds, seconds), MOST_NEXT_PEERS)

    def askable(self, peers: Sequence[PeerId], now: Seconds) -> list[PeerId]:
        """Return the peers that are not suspended; if all are suspended, return all of `peers`."""
        barred = {peer for peer, one in self.suspended.items() if now < one.until or not one.there}
        return [peer for peer in peers if peer not in barred] or list(peers)

    def believable_wait_s(self, peer: PeerId, load: Load) -> Seconds:
        """Return how long a micro-batch would wait at a peer, in seconds: its claim, or more if that is not believable.

        Args:
            peer: The peer that has answered an Offer.
            load: Its answer.

        Returns:
            The claimed wait, if (claimed wait + claimed computing time + typical duration) times ROUTE_SLACK is not
            below the peer's measured duration. Otherwise, the larger of the claimed wait and the measured duration.
        """
        known_s, said_s = self.seconds.get(peer, 0.0), load.wait_s + load.seconds
        return load.wait_s if known_s <= ROUTE_SLACK * (said_s + self._typical_s()) else max(load.wait_s, known_s)

    def missed(self, peer: PeerId) -> None:
        """Multiply a peer's expected duration by MISSED (within limits), because it is late but still computes."""
        others = [seconds for other, seconds in self.seconds.items() if other != peer]
        most = MOST_TIMES_SLOWER * median(others) if others else HOP_DEADLINE_TOP_S
        expected_s = self.seconds.get(peer) or self._typical_s()
        self.seconds[peer] = min(MISSED * expected_s, max(most, expected_s))

    def usual_deadline_s(self) -> Seconds:
        """Return the seconds after which a typical peer's gradient is late."""
        return max(HOP_DEADLINE_FLOOR_S, ROUTE_SLACK * self._typical_s())

    def deadline_s(self, peer: PeerId, guess_s: Seconds) -> Seconds:
        """Return the seconds after which this peer's gradient is late.

        Args:
            peer: The peer that has the micro-batch.
            guess_s: Seconds expected from the speeds of devices and links, without queues. It counts only while
                the peer's usual duration is not known.
        """
        known_s = self.seconds.get(peer)
        expected_s = max(guess_s, self._typical_s(guess_s)) if known_s is None else known_s
        least_s = UNKNOWN_S if known_s is None else HOP_DEADLINE_FLOOR_S
        return min(HOP_DEADLINE_TOP_S, max(least_s, ROUTE_SLACK * expected_s))

    def look_s(self, peer: PeerId, guess_s: Seconds) -> Seconds:
        """Return the seconds after which this peer is asked whether it still computes: at the latest at its deadline.

        A peer whose duration is not known is asked at the deadline: its first micro-batch may take long.
        """
        return self._twice_usual_s(peer, self.deadline_s(peer, guess_s))

    def status_s(self, peer: PeerId) -> Seconds:
        """Return the seconds within which this peer must answer the question whether it still computes."""
        return self._twice_usual_s(peer, STATUS_S)

    def _twice_usual_s(self, peer: PeerId, most_s: Seconds) -> Seconds:
        """Return LOOK_SLACK times the peer's usual duration, at least LOOK_FLOOR_S and at most `most_s` seconds.

        Return `most_s` if the peer's duration is unknown.
        """
        known_s = self.seconds.get(peer)
        return most_s if known_s is None else min(most_s, max(LOOK_FLOOR_S, LOOK_SLACK * known_s))


@dataclass(slots=True)
class Offers:
    """The open offers of one execution, and the best answer so far."""

    asked: set[PeerId] = field(default_factory=set)
    best: PeerId | None = None
    _least: tuple[float, float] = (0.0, 0.0)  # rank of `best`: (cost in seconds / part of the model, -part)

    def answered(self, peer: PeerId, load: Load | None, part: float, link_s: Seconds) -> None:
        """Record a peer's answer, and keep the peer as `best` if it needs the fewest seconds per part of the model.

        Args:
            peer: The peer that got the Offer.
            load: Its answer; None if it refused or did not answer.
            part: Part of the model's parameters that it would compute.
            link_s: Seconds of the transfers to and from it.
        """
        self.asked.discard(peer)
        if load is None or part <= 0:
            return
        cost = (link_s + load.wait_s + COMPUTE_WEIGHT * load.seconds) / part
        if self.best is None or (cost, -part) < self._least:
            self.best, self._least = peer, (cost, -part)


def pause_s(refusals: int, execution_s: Seconds) -> Seconds:
    """Return how many seconds to pause after refusals in a row, so that a busy swarm does not spend its time on offers.

    Args:
        refusals: How many peers in a row refused.
        execution_s: Seconds that an execution occupies a device.

    Returns:
        OFFER_PAUSE_S, doubled after each MOST_BUSY refusals, up to the larger of `execution_s` and LONGEST_PAUSE_S.
    """
    return min(max(LONGEST_PAUSE_S, execution_s), OFFER_PAUSE_S * 2.0 ** min(10, refusals // MOST_BUSY))


@dataclass(slots=True)
class PeerReputation:
    """What this peer's audits have found about the answers of one other peer."""

    right: int = 0  # number of audits in a row that found its answer right
    wrong: float = 0.0  # sum of the weights of its wrong answers, as of time `at`
    at: Seconds = 0.0
    suspended_until: Seconds = 0.0
    suspensions: int = 0

    def wrong_at(self, now: Seconds) -> float:
        """Return how many wrong answers count against the peer now; each loses half of its weight every HALVED_S."""
        return float(self.wrong * 0.5 ** (max(0.0, now - self.at) / HALVED_S))


@dataclass(slots=True)
class Reputations:
    """The reputations of all audited peers. A peer that was never audited is trusted."""

    by_peer: dict[PeerId, PeerReputation] = field(default_factory=dict)

    def weight(self, peer: PeerId, now: Seconds) -> float:
        """Return the factor on a peer's share of routes: 1.0 for a trusted peer, 0.0 for a suspended peer."""
        known = self.by_peer.get(peer)
        if known is None:
            return 1.0
        return 0.0 if now < known.suspended_until else float(WRONG_WEIGHT ** known.wrong_at(now))

    def interval(self, peer: PeerId) -> float:
        """Return n if one in n of this peer's answers should be audited; every right answer in a row doubles n."""
        known = self.by_peer.get(peer)
        return float(1 << known.right) if known else 1.0

    def was_right(self, peer: PeerId) -> None:
        """Record an audit in which the peer's answer was right, so that its answers are audited half as often."""
        known = self._judged(peer)
        known.right = min(MOST_RIGHT, known.right + 1)

    def was_wrong(self, peer: PeerId, share: float, now: Seconds) -> None:
        """Record a wrong answer, and suspend the peer once its wrong answers add up to SUSPENDED_AT.

        The peer's `interval` is 1 again, until right answers raise it.

        Args:
            peer: The peer that gave the answer.
            share: The peer's part of the blame, 0 to 1; peers behind it on the route get the rest.
            now: Present time.
        """
        known = self._judged(peer)
        known.wrong, known.at, known.right = known.wrong_at(now) + share, now, 0
        if known.wrong > SUSPENDED_AT - _ROUNDING and now >= known.suspended_until:
            lasts_s = min(LONGEST_NO_ROUTES_S, NO_ROUTES_S * 2.0 ** min(known.suspensions, 16))
            known.suspended_until, known.suspensions = now + lasts_s, known.suspensions + 1

    def _judged(self, peer: PeerId) -> PeerReputation:
        known = self.by_peer.get(peer) or PeerReputation()
        keep_latest(self.by_peer, peer, known, MOST_JUDGED)
        return known
