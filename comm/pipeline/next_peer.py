"""Which next peer gets a micro-batch: turns by speed and routing weight, offers where many could take it, and trust.

Turns (`PeerScheduler`). Each peer takes part in proportion to its routing weight and its measured speed; one that has
failed is left alone for a while.

Offers (`Offers`). Where many peers could take an execution, the best of a few that were drawn gets it:

    execution --Offer--> some holders of the next layer --Load--> the one that is through soonest, per layer it takes

No peer knows how much a thousand others have to do, and what it knew would be old; but of a few that are drawn by
chance the one with the least to do is nearly as good as the best of all (the power of two choices, Mitzenmacher 2001).
This costs a round trip before the activations are sent, and none are sent to a peer that has no memory for them.

Trust (`Reputations`). How far this peer trusts what others give back goes by its own audits, not by what anybody
says:

    wrong answers   each leaves a quarter of a peer's routes; SUSPENDED_AT of them none, for a while that doubles
    right answers   a peer is audited at half the rate after each; one wrong answer, and every answer is audited again
    time            half of what counts against a peer is forgotten in HALVED_S

An answer is that of all peers behind the one that gave it, so what is wrong with it counts against that one in part:
one of those behind it may be to blame, and it audits them itself.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from decentral.comm.wire.messages import Load
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

Choice = TypeVar("Choice", int, PeerId)

# Turns

MOST_NEXT_PEERS = 256  # next peers whose seconds are known
NEWEST_WEIGHT = 0.2  # weight of the newest in a running average
LEAST_WEIGHT = 0.02  # of the best peer's weight, for one that the routing weights leave out
MOST_TIMES_SLOWER = 16.0  # than the others, a peer can look by missed deadlines alone: it must be asked again some time
MISSED = 2.0  # a missed deadline makes a peer look so many times slower
FIRST_SUSPENDED_S = 4.0  # of a peer that has failed; twice as long each time that it does not say that it is there ...
MOST_SUSPENDED_S = 64.0  # ... up to this
TIMES_KEPT = 4.0  # times as long if it says that it is there, gets a micro-batch, and fails again ...
MOST_KEPT_S = 512.0  # ... up to this: where gradients are exact, nobody takes a step while a micro-batch is away
FORGIVEN_S = 1.0  # a shorter suspension is forgotten; each answer halves it
LOOK_SLACK = 2.0  # a peer is asked whether it still computes after so many times the expected time ...
LOOK_FLOOR_S = 1.0  # ... and not before: a step waits as long, and as long again, for a peer that is silent
STATUS_S = 2.0  # most for the answer: whoever is there answers at once, however much it computes
ROUTE_SLACK = 4.0  # a deadline is this many times the expected time ...
HOP_DEADLINE_FLOOR_S = 2.0  # ... and at least this
HOP_DEADLINE_TOP_S = 420.0  # of a single hop; a lost one is found out after so long at most
UNKNOWN_S = 15.0  # a deadline at least, where nothing is known

# Offers

CANDIDATES = 8
OFFER_S = 3.0  # deadline of an Offer; a peer that needs longer is not sent any activations
MOST_BUSY = 6  # peers that are asked without a pause; if so many are busy, nearly all are
FEW = 4  # with so few holders their measured times say enough, and no offers are made
COMPUTE_WEIGHT = 0.25  # an idle slow device goes before a fast one with a queue: with both at work more is done
OFFER_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0

# Trust

WRONG_WEIGHT = 0.25  # of a peer's routes are left after each wrong answer
SUSPENDED_AT = 2.0  # wrong answers, after which a peer gets no routes
NO_ROUTES_S = 600.0  # for the first time; twice as long after each further time
LONGEST_NO_ROUTES_S = 6 * 3600.0
HALVED_S = 600.0
_ROUNDING = 1e-3  # of a wrong answer, by which time has made less of the first one when the second is found
MOST_JUDGED = 1024  # peers with a reputation here; the one that was judged longest ago is forgotten
MOST_RIGHT = 30  # right answers that are told apart


@dataclass(slots=True)
class RoutingWeights:
    """Rates of flow, in any unit (scheduler/throughput/routing.py): how much of what enters this peer at a layer
    leaves it at which layer, and which peers take on what leaves at a layer, by their layers; equal ones share it by
    speed."""

    ends: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    nexts: Mapping[int, Mapping[tuple[int, int], float]] = field(default_factory=dict)  # by span, per token/s
    tokens_per_s: float = 0.0  # through the whole swarm
    size: int = 0  # variables of the linear programme
    spans: Collection[tuple[int, int]] = ()  # layers that some peer held when it was solved

    def rate(self, layer: int, span_and_speed: tuple[int, int, float]) -> float:
        """How much a peer with layers [first, last) and so many tokens/s takes on from this layer. One whose layers
        nobody held when the flow was solved takes as much as the others."""
        first, last, tokens_per_s = span_and_speed
        rates = self.nexts.get(layer, {})
        if (first, last) in rates or (first, last) in self.spans or not rates:
            return rates.get((first, last), 0.0) * tokens_per_s
        return sum(rates.values()) / len(rates) * tokens_per_s


@dataclass(slots=True)
class StrideScheduler(Generic[Choice]):
    """Stride scheduling (Waldspurger & Weihl 1995): each choice is taken in proportion to 1 / cost.

    Time here is virtual: in one unit each choice is taken 1 / cost times. A new choice starts at the present, and none
    owes more than one turn at its present cost: a cost that was high once is forgiven when it is not any more.
    """

    now: float = 0.0
    paid: dict[Choice, float] = field(default_factory=dict)

    def choose(self, costs: Mapping[Choice, float], count: int = 1) -> list[Choice]:
        """So many different choices, or all: each of them has its turn."""
        paid, now = self.paid, self.now
        self.paid = paid = {one: min(paid.get(one, now), now + cost) for one, cost in costs.items()}
        chosen = heapq.nsmallest(count, ((paid[one] + cost, one) for one, cost in costs.items()))
        for pays, one in chosen:
            paid[one] = pays
        self.now += len(chosen) / sum(1 / cost for cost in costs.values())
        return [one for _, one in chosen]


class Suspension(NamedTuple):
    """How long a peer that has failed gets nothing."""

    until: Seconds
    seconds: Seconds
    there: bool = False  # it has answered since; until it does it gets no micro-batch
    tried: bool = False  # it has got one micro-batch more, and gets none until that one is back


@dataclass(slots=True)
class PeerScheduler:
    """Which next peer gets a micro-batch, and how fast each of them is.

    Each choice costs a peer the seconds that a micro-batch takes through it, over its routing weight; the peer that has
    paid least is next (SWARM, arXiv 2301.11913, section 3.2, has the seconds alone). A peer from which nothing usable
    came is suspended, ever longer until it answers again, where another one can be asked: first whether it is there,
    then with one micro-batch, as a step may wait for each that is sent to a silent peer. A failure does not raise its
    expected seconds, or the next wait would be longer.
    """

    seconds: dict[PeerId, Seconds] = field(default_factory=dict)  # of a micro-batch, from that peer to the end and back
    suspended: dict[PeerId, Suspension] = field(default_factory=dict)  # that have failed, and not answered since
    _strides: dict[int, StrideScheduler[PeerId]] = field(default_factory=dict)  # by the layer that is next

    def choose(self, layer: int, rates: Mapping[PeerId, float], count: int = 1) -> list[PeerId]:
        """So many of these peers, or all. `rates`: routing weights; one without is asked at times, to measure it."""
        top, typical_s = max(rates.values(), default=0.0), self._typical_s()
        weights = {peer: max(LEAST_WEIGHT, rate / top) if top else 1.0 for peer, rate in rates.items()}
        costs = {peer: self.seconds.get(peer, typical_s) / weight for peer, weight in weights.items()}
        return self._strides.setdefault(layer, StrideScheduler()).choose(costs, count)

    def _typical_s(self, unknown_s: Seconds = 1.0) -> Seconds:
        return median(self.seconds.values()) if self.seconds else unknown_s

    def served(self, peer: PeerId, seconds: Seconds) -> None:
        known = self.seconds.get(peer)
        mean = seconds if known is None else (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * seconds
        keep_latest(self.seconds, peer, mean, MOST_NEXT_PEERS)
        before = self.suspended.pop(peer, None)
        if before and before.seconds > FORGIVEN_S:  # one answer does not make up for a failure
            self.suspended[peer] = Suspension(-math.inf, before.seconds / 2, there=True)

    def failed(self, peer: PeerId, now: Seconds) -> None:
        """Nothing usable came from it, nor will. What was under way there together tells of one failure."""
        before = self.suspended.get(peer)
        if before is None or before.tried or now >= before.until:
            seconds = FIRST_SUSPENDED_S if before is None else min(MOST_KEPT_S, TIMES_KEPT * before.seconds)
            self._suspend(peer, seconds, now)

    def asked(self, peer: PeerId, now: Seconds) -> None:
        """A micro-batch goes to this peer. One that has failed gets no second one before it has answered."""
        if before := self.suspended.get(peer):
            self.suspended[peer] = before._replace(until=now + before.seconds, tried=True)

    def absent(self, peers: Sequence[PeerId], wait_s: Seconds, now: Seconds) -> list[PeerId]:
        """Those of these peers that are to be asked whether they are there. None is asked again within `wait_s`."""
        due = [peer for peer in peers if (one := self.suspended.get(peer)) and not one.there and now >= one.until]
        for peer in due:
            self.suspended[peer] = self.suspended[peer]._replace(until=now + wait_s)
        return due

    def heard_from(self, peer: PeerId, there: bool, now: Seconds) -> None:
        """A peer has answered the question whether it is there, or not."""
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
        """Those of these peers that may get a micro-batch; all of them where none may."""
        barred = {peer for peer, one in self.suspended.items() if now < one.until or not one.there}
        return [peer for peer in peers if peer not in barred] or list(peers)

    def believable_wait_s(self, peer: PeerId, load: Load) -> Seconds:
        """How long a micro-batch waits there. What a peer says has to explain how long it has taken so far."""
        known_s, said_s = self.seconds.get(peer, 0.0), load.wait_s + load.seconds
        return load.wait_s if known_s <= ROUTE_SLACK * (said_s + self._typical_s()) else max(load.wait_s, known_s)

    def missed(self, peer: PeerId) -> None:
        """It still computes, for longer than was expected."""
        others = [seconds for other, seconds in self.seconds.items() if other != peer]
        most = MOST_TIMES_SLOWER * median(others) if others else HOP_DEADLINE_TOP_S
        expected_s = self.seconds.get(peer) or self._typical_s()
        self.seconds[peer] = min(MISSED * expected_s, max(most, expected_s))

    def usual_deadline_s(self) -> Seconds:
        """After how long an answer of most peers is late."""
        return max(HOP_DEADLINE_FLOOR_S, ROUTE_SLACK * self._typical_s())

    def deadline_s(self, peer: PeerId, guess_s: Seconds) -> Seconds:
        """After how long an answer is late. `guess_s`: what it would take if nothing waited, by the devices' speeds."""
        known_s = self.seconds.get(peer)
        expected_s = self._typical_s(guess_s) if known_s is None else known_s
        least_s = UNKNOWN_S if known_s is None else HOP_DEADLINE_FLOOR_S
        return min(HOP_DEADLINE_TOP_S, max(least_s, ROUTE_SLACK * expected_s))

    def look_s(self, peer: PeerId, guess_s: Seconds) -> Seconds:
        """After how long it is asked whether it still computes. That it does says nothing against it before the
        deadline. Of one that nothing is known of, its first micro-batch may take long: it is asked at the deadline."""
        return self._twice_usual_s(peer, self.deadline_s(peer, guess_s))

    def status_s(self, peer: PeerId) -> Seconds:
        """How long it may take to say that. In the time in which it brings micro-batches back it can answer this."""
        return self._twice_usual_s(peer, STATUS_S)

    def _twice_usual_s(self, peer: PeerId, most_s: Seconds) -> Seconds:
        """LOOK_SLACK times what a micro-batch takes through it; `most_s` at most, and where nothing is known."""
        known_s = self.seconds.get(peer)
        return most_s if known_s is None else min(most_s, max(LOOK_FLOOR_S, LOOK_SLACK * known_s))


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
