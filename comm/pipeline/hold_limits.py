"""How long gradients in doubt are held for an origin peer, whatever it asks for: by what decisions took us before.

A sum waits for every execution in it, so an origin peer that says "still under way" for an hour would stop our steps
for an hour. After a few times the usual wait its execution is aborted, and it rests. So do all origin peers together
that have not committed anything here yet, or not since they ran out of time: whoever has many names blocks us for a
tenth of the time, and those that commit are not concerned.
"""

from dataclasses import dataclass, field
from statistics import median_low

from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

USUAL_TIMES = 4.0  # what decisions usually take, or a micro-batch through the whole model
LEAST_LIMIT_S = 60.0  # a slow origin peer's own passes, and a link that is cut for a while
UNDECIDED_REST_TIMES = 9.0  # as long as the execution was held: a tenth of the time is lost at most
MOST_REST_S = 3600.0
REMEMBERED_TIMES = 2.0  # a rest's length after its end, in which the next one is twice as long
ORIGINS_KEPT = 1024  # origin peers, of either kind


@dataclass(slots=True)
class HoldLimits:
    _waits: dict[PeerId, Seconds] = field(default_factory=dict)  # of who commits: from our gradients to the decision
    _rests: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # until when, and how long
    _unproven_rest_until: Seconds = 0.0
    _blocked: tuple[Seconds, Seconds] = (0.0, 0.0)  # the last time in which executions that ran out were held

    def limit_s(self, route_s: Seconds) -> Seconds:
        """How long an execution may be held. `route_s`: of a micro-batch through the model, by our own figures."""
        usual_s = median_low(self._waits.values()) if self._waits else 0.0
        return max(LEAST_LIMIT_S, USUAL_TIMES * max(usual_s, route_s))

    def rests(self, origin: PeerId, now: Seconds) -> bool:
        """Whether nothing is computed for this origin peer now.

        While nobody has committed anything here, the others do not rest with it: there would be nobody left.
        """
        proven = origin in self._waits or not self._waits
        return now < self._rests.get(origin, (0.0, 0.0))[0] or (not proven and now < self._unproven_rest_until)

    def usual_s(self, origin: PeerId) -> Seconds | None:
        """How long this origin peer usually takes to decide; None: it has committed nothing here lately."""
        return self._waits.get(origin)

    def committed(self, origin: PeerId, waited_s: Seconds) -> None:
        before_s = self._waits.get(origin, waited_s)
        keep_latest(self._waits, origin, before_s + NEWEST_WEIGHT * (waited_s - before_s), ORIGINS_KEPT)

    def ran_out(self, origin: PeerId, held_s: Seconds, now: Seconds) -> None:
        """The origin peer has not decided in time."""
        self._waits.pop(origin, None)
        until, before_s = self._rests.get(origin, (0.0, 0.0))
        rest_s = UNDECIDED_REST_TIMES * held_s
        if now < until + REMEMBERED_TIMES * before_s:
            rest_s = max(rest_s, 2 * before_s)
        rest_s = min(MOST_REST_S, rest_s)
        keep_latest(self._rests, origin, (now + rest_s, rest_s), ORIGINS_KEPT)
        began, ended = self._blocked
        self._blocked = (began if now - held_s <= ended else now - held_s), now
        self._unproven_rest_until = now + min(MOST_REST_S, UNDECIDED_REST_TIMES * (now - self._blocked[0]))
