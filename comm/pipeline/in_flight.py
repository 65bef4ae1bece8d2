"""Limit how many of its own micro-batches an origin peer has in flight, and how long it waits for them.

Start with `InFlightLimit`.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT, ROUTE_SLACK, UNKNOWN_S
from decentral.comm.wire.messages import MAX_ROUTE_S
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

FULL = (1.0, 2.0)  # queued micro-batches per device: the limit grows below the first value, shrinks above the second
LEAN = (0.125, 0.5)  # used instead of FULL if a step waits for all micro-batches in flight: a queue enlarges that step
LARGE_STEP = 4  # FULL is used all the same for steps of at least this many micro-batches: a queue hardly enlarges them
RECENT_ON_ROUTE = 32  # we remember the last RECENT_ON_ROUTE durations of each route
FADES = 0.002  # each new duration raises the stored shortest duration by this part of their difference
SLOWER = 2.0  # a route has become slower once all its recent durations exceed this many times its shortest duration
MOST_ROUTES = 64  # we store durations of at most this many routes; then the least recently used one is forgotten
AT_RANDOM = 3.0  # while most routes are new, executions arrive unevenly, so queues may be this many times as long
MANY_ROUTES = 8  # if we know more routes than this, a new route's first estimate is the shortest duration on any route
LEAST_BUDGET_S = 9.0  # a micro-batch's time limit is at least this, enough to notice a silent peer and try another one
MOST_DOUBLED = 6  # a micro-batch's time limit is doubled at most this many times


@dataclass(slots=True)
class RouteBase:
    """The base of a route: an estimate of the seconds that a micro-batch takes along it without waiting anywhere.

    `least` is the shortest duration seen, and rises slowly. If the last RECENT_ON_ROUTE durations all exceed SLOWER
    times `least`, the route has become slower, and the shortest of these durations becomes `least`.
    """

    least: Seconds
    recent: deque[Seconds] = field(default_factory=lambda: deque(maxlen=RECENT_ON_ROUTE))

    def saw(self, seconds: Seconds) -> None:
        """Update `least` with the seconds that one more micro-batch took along the route, waiting included."""
        self.recent.append(seconds)
        self.least = min(seconds, self.least + FADES * (seconds - self.least))
        if len(self.recent) == RECENT_ON_ROUTE and min(self.recent) > SLOWER * self.least:
            self.least = min(self.recent)


@dataclass(slots=True)
class InFlightLimit:
    """The limit on how many of its own micro-batches an origin peer has in flight.

    Source: the congestion window of TCP Vegas (Brakmo & Peterson 1994). If a micro-batch takes `seconds` on its
    route, and `base` without waiting, then size * (1 - base / seconds) micro-batches wait in queues. The limit
    keeps this number, per device of the route, between the two values of `waiting`, so that the slowest device
    stays busy. Each route has its own base, since a route through a slow device takes long even without queues. The
    size is at least the route's number of devices (1F1B), since a micro-batch that waits for another origin peer's
    step does not show that a queue is long.
    """

    waiting: tuple[float, float] = FULL
    size: int = 2
    starting: bool = True  # True during slow start: each completed micro-batch raises the limit until a queue forms
    bases: dict[tuple[PeerId, ...], RouteBase] = field(default_factory=dict)  # by route: the peers after this one
    typical_s: Seconds | None = None  # running average of a micro-batch's duration; None until one is completed
    late: int = 0  # how often micro-batches have run out of time since the last one was completed, up to MOST_DOUBLED
    _doubled_at: Seconds = -math.inf  # when `late` grew last
    _waiting: float = 0.0  # running average of the fraction of its duration that a micro-batch waits in queues
    _new: float = 0.0  # running average of the fraction of our micro-batches that take a route without known durations
    _fastest_s: Seconds = math.inf  # shortest duration on any route; each longer duration raises it slightly (FADES)
    _since: int = 0  # micro-batches completed since `size` was last reviewed

    def done(self, seconds: Seconds, route: tuple[PeerId, ...], max_size: int) -> None:
        """Record a completed micro-batch of ours, and raise or lower the limit by how long micro-batches have waited.

        Args:
            seconds: The micro-batch's duration, from its beginning to the end of its backward pass at this peer.
            route: The peers after this one on the micro-batch's route.
            max_size: The largest limit that memory allows, in micro-batches.
        """
        self.late = 0
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
            self.size -= 1
        self.size = min(max(2, len(route) + 1, self.size), max_size)

    def budget_s(self, guess_s: Seconds = 0.0) -> Seconds:
        """Return the seconds after which a micro-batch is given up; see the function `budget_s`."""
        return budget_s(self.typical_s, guess_s, self.late)

    def ran_out(self, started_at: Seconds, now: Seconds) -> None:
        """Record that a micro-batch which began at `started_at` ran out of time: later ones get twice as long.

        Micro-batches that began with the same limit count once.
        """
        if started_at >= self._doubled_at:
            self.late, self._doubled_at = min(MOST_DOUBLED, self.late + 1), now

    def _base_s(self, seconds: Seconds, route: tuple[PeerId, ...]) -> Seconds:
        """Record a micro-batch's duration on a route, and return the seconds that it would take without waiting.

        With more than MANY_ROUTES known routes, a new route's base is the shortest duration on any route. With its own
        duration as the base, the first micro-batch on each route would seem not to have waited.
        """
        fading = FADES * (seconds - self._fastest_s) if self._fastest_s < math.inf else 0.0
        self._fastest_s = min(seconds, self._fastest_s + fading)
        known = self.bases.get(route)
        self._new += NEWEST_WEIGHT * ((known is None) - self._new)
        base = known or RouteBase(seconds)
        base.saw(seconds)
        keep_latest(self.bases, route, base, MOST_ROUTES)
        return self._fastest_s if known is None and len(self.bases) > MANY_ROUTES else base.least


def budget_s(typical_s: Seconds | None, guess_s: Seconds = 0.0, late: int = 0) -> Seconds:
    """Return the seconds after which an origin peer gives up one of its micro-batches, retries included.

    Args:
        typical_s: Usual duration of our micro-batches; None until the first one has completed.
        guess_s: Expected duration without waiting, used while `typical_s` is None; 0 if unknown.
        late: How often in a row micro-batches ran out of time; each time doubles the result.

    Returns:
        At most MAX_ROUTE_S; MAX_ROUTE_S if neither duration is known.
    """
    if typical_s is None and guess_s <= 0:
        return MAX_ROUTE_S
    expected_s, least_s = (guess_s, UNKNOWN_S) if typical_s is None else (typical_s, LEAST_BUDGET_S)
    return min(MAX_ROUTE_S, 2.0**late * max(least_s, 2 * ROUTE_SLACK * expected_s))
