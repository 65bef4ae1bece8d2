"""A swarm's size as its peers find it out, and what follows: they find each other whatever each of them believes."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from random import Random
from statistics import median

import pytest

from decentral.core.ids import PeerId, RunId
from decentral.peers.membership import swarm_size
from decentral.peers.membership.records import RENEWALS
from decentral.peers.membership.roster import SAMPLED_NEW
from decentral.peers.membership.swarm_size import (
    ESTIMATES,
    LEAST_TIMES,
    MERGE,
    MOST_LEVEL,
    MOST_RENEW_S,
    SAMPLE_TIMES,
    SMALL,
    SPLIT,
    Look,
    SwarmSize,
    SwarmStart,
    estimate,
    key,
    key_of,
    level_for,
    level_of,
    published,
)

RUN = RunId("run-3fa2c1")


def peers(count: int, prefix: str = "peer") -> list[PeerId]:
    return [PeerId(f"{prefix}{number}") for number in range(count)]


class Swarm:
    """Peers without anything but their sizes, and a directory that forgets what is not renewed in the next round."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = Random(seed)
        self.sizes: dict[PeerId, SwarmSize] = {}
        self.known: dict[PeerId, dict[PeerId, int]] = {}  # and the last round in which each record was found
        self.round = 0
        self.directory: dict[str, set[PeerId]] = {}
        self.forged: dict[str, set[PeerId]] = {}
        self.sides: dict[PeerId, int] = {}

    def join(self, names: Iterable[PeerId]) -> None:
        """Newcomers measure the swarm first, all at once."""
        looks = {peer: Look(Side(self, peer), RUN, peer) for peer in names}
        for peer, look in looks.items():
            with suppress(StopIteration):  # it never has to wait
                look.measure().send(None)
            start = SwarmStart(max(1.0, look.peers))
            self.sizes[peer], self.known[peer] = SwarmSize(RUN, peer, self.chance, start), {}
        self.publish()

    def leave(self, names: Iterable[PeerId]) -> None:
        for peer in names:
            del self.sizes[peer], self.known[peer]

    def publish(self) -> None:
        self.directory = {name: set(forged) for name, forged in self.forged.items()}
        for peer, size in self.sizes.items():
            for name in published(RUN, peer, size.level):
                self.directory.setdefault(name, set()).add(peer)

    def found(self, reader: PeerId, name: str) -> set[PeerId]:
        """What a reader finds: nothing from the other side of a partition."""
        side = self.sides.get(reader, 0)
        return {peer for peer in self.directory.get(name, ()) if self.sides.get(peer, side) == side}

    def rounds(self, count: int) -> None:
        """Everybody renews its record and looks up, and forgets what it has not found for a record's lifetime."""
        for _ in range(count):
            self.round += 1
            self.publish()
            for peer, size in self.sizes.items():
                known = {one: at for one, at in self.known[peer].items() if at > self.round - RENEWALS}
                for name in size.lookups():
                    there = self.found(peer, name)
                    read = self.read(size, name, there, known)
                    known |= dict.fromkeys(read - {peer}, self.round)
                    size.found(name, read, len(read) / max(1, len(there)))
                self.known[peer] = known

    def read(self, size: SwarmSize, name: str, there: set[PeerId], known: Collection[PeerId]) -> set[PeerId]:
        """The records that a peer reads, as a roster does: a sample, if the key is not that of its own shard."""
        if not size.level or len(known) < MERGE or name == key_of(RUN, size.own, size.level):
            return there
        new = sorted(there - set(known))
        return there & set(known) | set(self.chance.sample(new, min(len(new), SAMPLED_NEW)))

    @property
    def levels(self) -> list[int]:
        return sorted(size.level for size in self.sizes.values())

    @property
    def estimates(self) -> list[float]:
        return sorted(size.peers for size in self.sizes.values())

    def honest_known(self) -> float:
        """How many others that are there a peer knows, at the median."""
        return median(len(known.keys() & self.sizes.keys()) for known in self.known.values())

    def reached(self, start: PeerId) -> set[PeerId]:
        """All peers to which there is a way from one who knows whom."""
        seen, new = {start}, [start]
        while new:
            new = [peer for peer in {one for at in new for one in self.known.get(at, ())} if peer not in seen]
            seen.update(new)
        return seen


class Side:
    """A Directory: one peer's view of the swarm's."""

    def __init__(self, swarm: Swarm, peer: PeerId) -> None:
        self.swarm, self.peer = swarm, peer

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        raise AssertionError("who looks stores nothing")

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        return dict.fromkeys(self.swarm.found(self.peer, key), b"")


def small_hashes(count: int) -> Collection[PeerId]:
    """Names that come first in the order of samples, as a liar finds them who tries many."""
    return sorted(peers(200 * count, "liar"), key=lambda peer: swarm_size._hashes(peer)[1])[:count]


# Keys


def test_the_key_of_a_small_swarm_is_the_one_that_it_always_was() -> None:
    assert key(RUN, 0, 0) == key_of(RUN, PeerId("any")) == f"{RUN}/peers"


def test_a_shard_is_half_of_one_of_the_level_before() -> None:
    for peer in peers(50):
        shards = [int(key_of(RUN, peer, level).rsplit("/")[-1]) for level in range(1, MOST_LEVEL + 1)]
        assert shards == [shards[-1] >> MOST_LEVEL - level for level in range(1, MOST_LEVEL + 1)]


def test_a_key_says_its_level_and_other_keys_say_none() -> None:
    assert [level_of(RUN, key(RUN, level, 0)) for level in (0, 1, 12)] == [0, 1, 12]
    assert {level_of(RUN, name) for name in (f"{RUN}/plans", f"{RUN}/peersons", "other/peers", "")} == {None}


def test_a_peer_publishes_few_records_and_each_key_has_about_as_many_whatever_its_level() -> None:
    level, names = 4, peers(16 * 64)
    keys = [published(RUN, peer, level) for peer in names]
    assert sum(map(len, keys)) < (1 + SAMPLE_TIMES) * 1.1 * len(names)
    for one in range(level):
        held = sum(key_of(RUN, peer, one) in shown for peer, shown in zip(names, keys, strict=True))
        assert 0.7 * SAMPLE_TIMES * 64 < held / 2**one < 1.3 * SAMPLE_TIMES * 64


# Estimates


@pytest.mark.parametrize("count", [1, 2, 5, 30, 60])
def test_a_small_swarm_is_counted(count: int) -> None:
    assert estimate(0, peers(count)) == count


@pytest.mark.parametrize("count", [300, 3000])
def test_a_swarm_is_estimated_by_a_sample_of_it(count: int) -> None:
    level = level_for(count)
    sample = [peer for peer in peers(count) if key(RUN, 0, 0) in published(RUN, peer, level)]
    assert len(sample) < 2 * SPLIT
    assert estimate(0, sample) == pytest.approx(count, rel=0.35)


# Times


def test_a_swarm_of_64_renews_and_looks_up_as_a_swarm_of_two_does() -> None:
    for count in (2, SMALL):
        assert LEAST_TIMES.renewals_s(count, lambda: 120.0) == LEAST_TIMES.renew_s
        assert LEAST_TIMES.lookups_s(count, lambda: 120.0, count - 1) == LEAST_TIMES.refresh_s


def test_a_large_swarm_is_looked_up_once_in_a_window_and_renewed_no_more_rarely() -> None:
    assert LEAST_TIMES.renewals_s(10_000, lambda: 120.0) == LEAST_TIMES.lookups_s(10_000, lambda: 120.0, 300) == 240.0
    assert LEAST_TIMES.renewals_s(10_000, lambda: 0.5) == LEAST_TIMES.renew_s
    assert LEAST_TIMES.renewals_s(10_000, lambda: 1e9) == MOST_RENEW_S


# Swarms


def test_a_sample_of_a_keys_records_gives_the_estimate_of_all_of_them() -> None:
    size, all_there = SwarmSize(RUN, PeerId("own"), Random(0), SwarmStart(500.0)), peers(60, "other")
    while size.lookups()[-1] != key(RUN, size.level, 5):
        pass
    size.found(key(RUN, size.level, 5), all_there[:15], share=0.25)
    assert size.peers == 60 * 2**3


def test_a_swarm_that_grows_and_shrinks_back_knows_its_size() -> None:
    swarm, everybody = Swarm(), peers(1200)
    swarm.join(everybody[:2])
    for count in (50, 300, 1200):
        swarm.join(everybody[len(swarm.sizes) : count])
        swarm.rounds(5)
    assert swarm.levels[0] >= 3
    assert swarm.levels[-1] <= 5
    assert median(swarm.estimates) == pytest.approx(1200, rel=0.4)
    assert swarm.honest_known() > SMALL
    assert max(map(len, swarm.directory.values())) < 4 * SPLIT
    swarm.leave(everybody[30:])
    swarm.rounds(20)
    assert set(swarm.levels) == {0}
    assert swarm.honest_known() == 29


def test_peers_that_believe_in_different_sizes_find_each_other() -> None:
    swarm = Swarm()
    swarm.join(peers(300))
    for number, size in enumerate(swarm.sizes.values()):
        size.level, size.peers = number % 5, float(SPLIT << number % 5)
    swarm.rounds(3)
    assert swarm.reached(PeerId("peer0")) == set(swarm.sizes)
    swarm.rounds(12)
    assert swarm.levels[-1] - swarm.levels[0] <= 1
    assert swarm.honest_known() > SMALL


def test_two_parts_of_a_swarm_have_sizes_of_their_own_and_are_one_again() -> None:
    swarm = Swarm()
    swarm.join(peers(400))
    swarm.rounds(4)
    swarm.sides = {peer: int(number < 25) for number, peer in enumerate(swarm.sizes)}
    swarm.rounds(10)
    few = [size for peer, size in swarm.sizes.items() if swarm.sides[peer]]
    assert max(size.level for size in few) == 0
    swarm.sides = {}
    swarm.rounds(10)
    assert swarm.levels[-1] - swarm.levels[0] <= 1
    assert median(swarm.estimates) == pytest.approx(400, rel=0.5)
    assert swarm.reached(PeerId("peer0")) == set(swarm.sizes)


def test_forged_names_under_the_first_key_take_nobody_apart() -> None:
    """A hundred of them say that there are more than 10,000 peers."""
    swarm = Swarm()
    swarm.forged = {key(RUN, 0, 0): set(small_hashes(100))}
    assert estimate(0, swarm.forged[key(RUN, 0, 0)]) > 10_000
    swarm.join(peers(100))
    for _ in range(5):
        swarm.rounds(4)
        assert swarm.levels[95] <= 4
        assert swarm.honest_known() > 50
        assert swarm.reached(PeerId("peer0")) >= set(swarm.sizes)
    newcomers = peers(5, "newcomer")
    swarm.join(newcomers)
    swarm.rounds(4)
    assert median(len(swarm.known[peer].keys() & swarm.sizes.keys()) for peer in newcomers) > 30


def test_a_thousand_forged_names_in_one_shard_hide_nobody_of_the_others() -> None:
    swarm = Swarm()
    swarm.join(peers(500))
    swarm.rounds(5)
    level = swarm.levels[0]
    swarm.forged = {key(RUN, level, 0): set(peers(1000, "liar"))}
    swarm.rounds(6)
    assert swarm.levels[450] <= level + 1
    assert swarm.reached(PeerId("peer1")) >= set(swarm.sizes)


def test_a_newcomer_that_knows_nothing_begins_at_the_level_of_the_others() -> None:
    swarm = Swarm()
    swarm.join(peers(500))
    swarm.rounds(4)
    (newcomer,) = peers(1, "newcomer")
    swarm.join([newcomer])
    assert swarm.levels[0] <= swarm.sizes[newcomer].level <= swarm.levels[-1] + 1
    swarm.rounds(1)
    assert len(swarm.known[newcomer]) > MERGE


def test_one_estimate_alone_moves_no_level_by_more_than_one() -> None:
    size = SwarmSize(RUN, PeerId("any"), Random(0))
    for _ in range(ESTIMATES):
        size.lookups()
    size.found(key(RUN, 0, 0), small_hashes(50))
    assert size.level == 1
