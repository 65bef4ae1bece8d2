"""How many micro-batches are under way, how far each is taken, and which next peer gets it."""

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from decentral.comm.wire.messages import MAX_ROUTE_S, Load
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

Choice = TypeVar("Choice", int, PeerId)

FULL = (1.0, 2.0)  # own micro-batches that wait, at least and at most, for each device on the route: none idles
LEAN = (0.125, 0.5)  # where each step waits for all that is under way: more of them make a larger batch than was asked
LARGE_STEP = 4  # micro-batches in a step; where there are as many, a few that wait make it no larger
RECENT_ON_ROUTE = 32  # micro-batches along one route
FADES = 0.002  # part of the distance to the newest value by which a least value rises, for each micro-batch
SLOWER = 2.0
MOST_NEXT_PEERS = 256  # next peers whose seconds are known
MOST_ROUTES = 64  # routes whose bases are known; the longest unused is forgotten
AT_RANDOM = 3.0  # times as many wait where hardly a route comes twice: executions arrive at irregular times
MANY_ROUTES = 8  # from so many on a new route is measured by the fastest of all
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
LEAST_BUDGET_S = 9.0  # enough to find out that a peer is silent, and to ask another one
UNKNOWN_S = 15.0  # a deadline at least, where nothing is known


@dataclass(slots=True)
class RouteBase:
    """Seconds of a micro-batch along one route if nothing waits: the least that was seen, which rises slowly.

    If all recent ones took twice as long, the route itself has become slower.
    """

    least: Seconds
    recent: deque[Seconds] = field(default_factory=lambda: deque(maxlen=RECENT_ON_ROUTE))

    def saw(self, seconds: Seconds) -> None:
        self.recent.append(seconds)
        self.least = min(seconds, self.least + FADES * (seconds - self.least))
        if len(self.recent) == RECENT_ON_ROUTE and min(self.recent) > SLOWER * self.least:
            self.least = min(self.recent)


@dataclass(slots=True)
class MicroBatchWindow:
    """How many micro-batches an origin peer has under way (TCP Vegas, Brakmo & Peterson 1994).

    As many as keep the slowest device of the routes busy, and a little more: of W under way, W (1 - base / seconds)
    wait in some queue; that number is kept within bounds. Every route has a base of its own: one through a slow device
    is long without anything waiting.
    """

    waiting: tuple[float, float] = FULL
    size: int = 2  # at the start as many as the devices of a route, if they are like ours
    starting: bool = True  # until something waits, the size grows by one for each that comes back
    bases: dict[tuple[PeerId, ...], RouteBase] = field(default_factory=dict)  # by route
    typical_s: Seconds | None = None  # of a micro-batch, running average
    _waiting: float = 0.0  # part of its time that a micro-batch waits somewhere, running average
    _new: float = 0.0  # part of the routes that were not known, running average
    _fastest_s: Seconds = math.inf  # of any route; rises as a base does
    _since: int = 0  # completions since the size was last changed

    def done(self, seconds: Seconds, route: tuple[PeerId, ...], max_size: int) -> None:
        """A micro-batch took so long along this route, from its beginning to its end. `max_size`: by memory."""
        waited = 1 - self._base_s(seconds, route) / max(1e-9, seconds)
        self._waiting += NEWEST_WEIGHT * (waited - self._waiting)
        known = self.typical_s
        self.typical_s = seconds if known is None else (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * seconds
        self._since += 1
        by_chance = AT_RANDOM if self._new > 0.5 and len(self.bases) > MANY_ROUTES else 1.0
        least, most = (by_chance * (len(route) + 1) * many for many in self.waiting)
        self.starting = self.starting and self.size * max(waited, self._waiting) < least
        if self._since < self.size and not self.starting:
            return
        self._since = 0
        if self.size * self._waiting < least:
            self.size += 1
        elif self.size * self._waiting > most:
            self.size = max(2, self.size - 1)
        self.size = min(self.size, max_size)

    def _base_s(self, seconds: Seconds, route: tuple[PeerId, ...]) -> Seconds:
        """The seconds that it would have taken if nothing had waited.

        Where routes are many, a new one is measured by the fastest of all: else the first micro-batch of each would
        look as if it had never waited.
        """
        fading = FADES * (seconds - self._fastest_s) if self._fastest_s < math.inf else 0.0
        self._fastest_s = min(seconds, self._fastest_s + fading)
        known = self.bases.get(route)
        self._new += NEWEST_WEIGHT * ((known is None) - self._new)
        base = known or RouteBase(seconds)
        base.saw(seconds)
        keep_latest(self.bases, route, base, MOST_ROUTES)
        return self._fastest_s if known is None and len(self.bases) > MANY_ROUTES else base.least


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
    then with one micro-batch, as a step may wait for each that is sent to a silent peer. Its seconds stay as they are:
    with longer deadlines it would keep its next micro-batch the longer.
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


def budget_s(typical_s: Seconds | None, guess_s: Seconds = 0.0) -> Seconds:
    """How long an origin peer tries to get one micro-batch through, retries included.

    `guess_s`: what it would take if nothing waited, for as long as none has come back; 0: unknown.
    """
    if typical_s is None:
        return min(MAX_ROUTE_S, max(UNKNOWN_S, 2 * ROUTE_SLACK * guess_s)) if guess_s > 0 else MAX_ROUTE_S
    return min(MAX_ROUTE_S, max(LEAST_BUDGET_S, 2 * ROUTE_SLACK * typical_s))
