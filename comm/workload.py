"""What the legs at this peer take of its memory and of its time.

Room is counted in what a leg's activations take, as parts of a leg through the whole span (Terms.room). Time is counted
in parts of a micro-batch through the whole model, and becomes seconds by the speed that was measured at work.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.leg import Leg, Stage, Terms
from decentral.comm.pace import NEWEST
from decentral.core.jobs import FORWARD_PART, MOST_UNDER_WAY, forward_part, share
from decentral.core.units import Seconds

MOST_HELD = 4  # times the micro-batches that the memory takes: legs, with those whose backward pass is done
KEPT_PART = 8  # of the room, one part is kept for legs that enter at later layers
ROUNDING = 1e-6  # of sums of parts of the memory


@dataclass(slots=True)
class Workload:
    terms: Terms
    speed: float = 0.0  # tokens/s of the whole model, if we computed without a pause; 0: not measured yet
    usual_speed: float = 0.0  # of the others, as they say; 0: nobody does
    tokens: int = 0  # of the latest micro-batch
    _worked: float = 0.0  # tokens through our share of the model, since the last step
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)  # of the model, by layers [first, last)
    _rooms: dict[tuple[int, int], float] = field(default_factory=dict)  # of the memory, by layers [first, last)

    def hold(self, terms: Terms) -> None:
        """This peer's place from now on."""
        self.terms = terms
        self._rooms.clear()

    # Time

    def backed(self, leg: Leg, tokens: int) -> None:
        """Its forward and its backward pass are done."""
        self.tokens = tokens
        self._worked += tokens * self.share(leg.id.first, leg.last)

    def stepped(self, seconds: Seconds) -> None:
        """How fast this device really is, by what it computed in so many seconds of computing.

        Times are averaged, not rates: so who becomes much slower knows it after a few steps.
        """
        if self._worked > 0 and seconds > 0:
            newest_s = seconds / self._worked
            self.speed = 1 / ((1 - NEWEST) / self.speed + NEWEST * newest_s if self.speed else newest_s)
        self._worked = 0.0

    def share(self, first: int, last: int) -> float:
        """The part of the model's parameters in layers [first, last)."""
        found = self._shares.get((first, last))
        if found is None:
            found = self._shares[first, last] = share(self.terms.cuts, first, last)
        return found

    def seconds(self, part: float) -> Seconds:
        """Of computing here: so much of a micro-batch through the whole model."""
        speed = self.speed or self.usual_speed
        return part * self.tokens / speed if speed else 0.0

    def span_s(self) -> Seconds:
        """Of computing: a leg through the whole span."""
        return self.seconds(self.share(self.terms.first, self.terms.last))

    def leg_s(self, first: int, last: int) -> Seconds:
        """Of computing, until a leg through these layers is passed on."""
        return self.seconds(self.share(first, last) * forward_part(last, self.terms.layers))

    def wait_s(self, legs: Iterable[Leg]) -> Seconds:
        """Of computing that is here to be done."""
        parts = 0.0
        for leg in legs:
            if leg.stage is Stage.FORWARD:
                parts += forward_part(leg.last, self.terms.layers) * self.share(leg.id.first, leg.last)
            elif leg.stage is Stage.BACKWARD:
                parts += (1 - FORWARD_PART) * self.share(leg.id.first, leg.last)
        return self.seconds(parts)

    def rest_s(self, tokens: int, layer: int) -> Seconds:
        """What the model from this layer on takes of the usual device, where nothing waits; 0: unknown."""
        rest = self.share(layer, self.terms.layers)
        return tokens * rest / self.usual_speed if self.usual_speed > 0 else 0.0

    # Memory

    def room_of(self, first: int, last: int) -> float:
        """That a leg through [first, last) takes."""
        found = self._rooms.get((first, last))
        if found is None:
            found = self._rooms[first, last] = self.terms.room(first, last)
        return found

    def has_room(self, first: int, legs: dict[int, Leg], window: int) -> bool:
        """For a leg that enters at this layer. `window`: how many of our own we would have under way.

        Legs that are only held have given their activations back: they take an answer each, and have more room. One
        place is kept for each layer behind this one at which legs may enter (buffer classes: Merlin and Schweitzer,
        1980). Else peers that hold the same layers could fill each other up with legs that wait for one another.
        """
        capacity, count, at_work, begun, own = self.terms.capacity, 0, 0.0, 0, 0.0
        for leg in legs.values():
            if leg.stage is not Stage.HELD:
                count, at_work = count + 1, at_work + leg.room
                if leg.own:
                    begun, own = begun + 1, own + leg.room
        more = self.room_of(first, self.terms.last)
        if count >= MOST_UNDER_WAY or len(legs) >= MOST_HELD * capacity or at_work + more > capacity + ROUNDING:
            return False
        kept = min(self.terms.behind(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.terms.first > 0:
            return at_work + more <= most
        if first == 0:
            return own + more <= most
        usual = own / begun if begun else 1.0
        wanted = min(window * usual, capacity - kept) - own  # nobody else can begin ours: others' can go on
        others = at_work - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING


__all__ = ["MOST_HELD", "Workload"]
