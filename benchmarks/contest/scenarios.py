"""The worlds and the faults of the contest: who is where, over which links, how fast, and what goes wrong.

A scenario is a world and a fault, written `household/equal`. Times are seconds from the beginning of training, rates
are those of IP packets. Place 0 leads where an algorithm needs a leader, and like all of the first half is never
killed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.wan import description
from benchmarks.wan.description import Description
from decentral.core.errors import UserError
from decentral.scheduler.topology import topology

MBIT = 1e6 / 8
SCALE = 0.02  # of the published rates between cities: the contest's model is that much smaller than theirs, and more
HOUSEHOLD_UP = (10.0, 20.0, 35.0, 50.0)  # Mb/s
HOUSEHOLD_DOWN = 100.0
HOUSEHOLD_DELAY_MS = (
    5.0,
    5.0,
    15.0,
    25.0,
)  # from each home to the middle of the network, so 20 to 80 ms there and back
SPEEDS = (1.0, 2.0, 4.0, 10.0)  # how many times slower the devices are where they differ
EVERY_S = 20.0  # from one kill to the next
JOIN_S = 8.0  # that a newcomer needs before the end, to start its process and to take the others' state


@dataclass(frozen=True, slots=True)
class World:
    """A network. `note` says for the report what it is, and by what its rates are scaled."""

    name: str
    links: Description
    note: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What differs from equal and stable peers. `schedule`: in the words of benchmarks/wan/schedule.py."""

    name: str
    note: str
    throttles: tuple[float, ...] = (1.0,)  # of the peers in turn, from the first place on
    schedule: str = ""
    kill_every_s: float = 0.0  # 0: nobody is killed
    spans: bool = False  # each peer has memory for half of the model only, and holds a span of its layers


@dataclass(frozen=True, slots=True)
class Scenario:
    world: World
    fault: Fault

    @property
    def name(self) -> str:
        return f"{self.world.name}/{self.fault.name}"

    @property
    def peers(self) -> int:
        return len(self.world.links)

    @property
    def throttles(self) -> list[float]:
        """How many times slower than the fastest each place is; a fast one stands in place 0."""
        given = self.fault.throttles
        return [given[place * len(given) // self.peers] for place in range(self.peers)]

    def kills(self, seconds: float) -> list[tuple[float, int]]:
        """(time, place) of each kill; a newcomer starts in that place at once. The last one has time to join."""
        every, killed = self.fault.kill_every_s, range(self.peers // 2, self.peers)
        if not every:
            return []
        times = np.arange(every / 2, seconds - JOIN_S, every)
        return [(float(at), killed[number % len(killed)]) for number, at in enumerate(times)]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("equal", "equal devices, stable links"),
        Fault("unequal", "devices from 1 to 10 times slower than the fastest", throttles=SPEEDS),
        Fault("churn", f"a kill -9 and a join every {EVERY_S:.0f} s", kill_every_s=EVERY_S),
        Fault("degraded", "after 10 s a tenth of the last peer's rates is left", schedule="degrade {last} x0.1 at 10"),
        Fault("partition", "after 15 s half of the peers are cut off for 30 s", schedule="part {half} at 15 for 30"),
        Fault("spans", "no peer can hold the whole model", spans=True),
    )
}


def household() -> Description:
    """Four homes: uplinks of 10 to 50 Mb/s, round trips of 20 to 80 ms."""
    up, one_way_s = np.array(HOUSEHOLD_UP) * MBIT, np.array(HOUSEHOLD_DELAY_MS) / 1e3
    count = len(up)
    delay_s = one_way_s[:, None] + one_way_s[None, :]
    np.fill_diagonal(delay_s, 0.0)
    return Description(
        names=tuple(f"home {number}" for number in range(count)),
        regions=("home",) * count,
        up=up,
        down=np.full(count, HOUSEHOLD_DOWN * MBIT),
        path=np.full((count, count), np.inf),
        delay_s=delay_s,
        loss=np.zeros((count, count)),
    )


def _published(name: str) -> Description:
    """One machine in each region of a shipped topology, with its rates scaled."""
    found = topology.load(name)
    return description.from_topology(found, description.first_of_each_region(found, 1)).scaled(SCALE)


def world(name: str) -> World:
    """Raises UserError for a name that is none of WORLDS."""
    match name:
        case "household":
            up = f"{HOUSEHOLD_UP[0]:g} to {HOUSEHOLD_UP[-1]:g} Mb/s up, {HOUSEHOLD_DOWN:g} down"
            return World(name, household(), f"four homes: {up}, 20 to 80 ms there and back")
        case "eight-cities" | "four-regions":
            links = _published(name)
            of = "eight cities of the world" if name == "eight-cities" else "four regions of the United States"
            note = f"{of} (Yuan et al., NeurIPS 2022), a peer in each, delays as published, rates times {SCALE:g}"
            return World(name, links, note)
        case "far-homes":
            return World(name, description.from_topology(topology.load("four-homes")), "20/100 Mb/s, 100 ms")
    raise UserError(f"no world {name!r}; there are {', '.join(WORLDS)}")


WORLDS = ("household", "eight-cities", "four-regions", "far-homes")
QUICK = ("household/equal", "household/unequal", "household/churn")
FULL = (
    *(f"{one}/{fault}" for one in WORLDS[:3] for fault in FAULTS if fault != "spans"),
    "far-homes/spans",
)


def scenario(name: str) -> Scenario:
    """The scenario with this name, `WORLD/FAULT`. Raises UserError."""
    place, _, fault = name.partition("/")
    if fault not in FAULTS:
        raise UserError(f"no scenario {name!r}; expected WORLD/FAULT with a fault of {', '.join(FAULTS)}")
    return Scenario(world(place), FAULTS[fault])


def schedule_of(found: Scenario) -> str:
    """The changes of this scenario's network, with the places that they concern."""
    half = ",".join(str(place) for place in range(found.peers // 2, found.peers))
    return found.fault.schedule.format(last=found.peers - 1, half=half)


def chosen(names: Sequence[str], full: bool) -> list[Scenario]:
    """The named scenarios, or those of the setting."""
    return [scenario(name) for name in (names or (FULL if full else QUICK))]
