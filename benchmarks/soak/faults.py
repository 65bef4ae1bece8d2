"""Which fault comes when, to which peer, and for how long: drawn by seed, before anything runs.

    kill      kill -9, and the peer starts again with the same state folder
    replace   kill -9 for good; a newcomer with a folder and an identity of its own joins in its place
    leave     SIGTERM, so that it saves and says that it leaves; later it starts again
    freeze    SIGSTOP for the peer and its libp2p daemon, as a laptop that is shut
    full      its disk takes no more bytes
    cut       no packet passes between it and any other peer
    daemon    kill -9 for its libp2p daemon alone

A place is where one peer lives at a time. No more than MOST_AT_ONCE places have a fault, or recover from one, at any
time. How long recovering takes is only known when it happens: the drawing allows for RECOVERS_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from decentral.comm.net.keep_daemon import DAEMON_RESTARTS, DAEMON_RESTARTS_S
from decentral.core import rng

MOST_AT_ONCE = 2
RECOVERS_S = 14.0  # a peer that starts again imports torch, fetches a state, and trains
LASTS_S = {  # the shortest and the longest time until a fault is taken back
    "kill": (1.0, 10.0),
    "replace": (1.0, 10.0),
    "leave": (1.0, 10.0),
    "freeze": (5.0, 60.0),
    "full": (5.0, 40.0),
    "cut": (5.0, 40.0),
    "daemon": (0.0, 0.0),
}
KINDS = tuple(LASTS_S)
MOST_DAEMONS = DAEMON_RESTARTS - 1  # killed at one place within DAEMON_RESTARTS_S; with more the peer ends by itself


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Times are seconds since the first one could come."""

    at: float
    kind: str
    place: int
    lasts: float  # until it is taken back; recovering comes after that

    @property
    def over(self) -> float:
        """When the peer should be as before."""
        return self.at + self.lasts + RECOVERS_S


def draw(seed: int, seconds: float, every_s: float, places: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """The faults of so many seconds, one each `every_s`. All kinds take turns, in an order drawn anew each time."""
    chance, drawn, bag = rng.stream(seed, "soak"), list[Fault](), list[str]()
    for number in range(int(seconds // every_s)):
        at = number * every_s
        open_ones = [one for one in drawn if one.over > at]
        free = sorted(set(range(places)) - {one.place for one in open_ones})
        if len(open_ones) >= MOST_AT_ONCE or not free:
            continue  # this turn is left out; `_longest` makes it rare
        bag = bag or chance.sample(list(kinds), len(kinds))
        kind, place = bag.pop(), chance.choice(free)
        if kind == "daemon" and _daemons(drawn, place, at) >= MOST_DAEMONS:
            kind = "kill"
        drawn.append(Fault(at, kind, place, _duration(chance, kind, _longest(open_ones, at, every_s))))
    return drawn


def _longest(open_ones: Sequence[Fault], at: float, every_s: float) -> float:
    """How long a fault may last, so that the next turn finds less than MOST_AT_ONCE faults open."""
    later = sum(one.over > at + every_s for one in open_ones)
    return float("inf") if later < MOST_AT_ONCE - 1 else max(0.0, every_s - RECOVERS_S)


def _duration(chance: Random, kind: str, longest: float) -> float:
    shortest, most = LASTS_S[kind]
    return round(min(longest, chance.uniform(shortest, most)), 1)


def _daemons(drawn: Sequence[Fault], place: int, at: float) -> int:
    return sum(one.kind == "daemon" and one.place == place and one.at > at - DAEMON_RESTARTS_S for one in drawn)
