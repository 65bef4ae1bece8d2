"""How many peers the swarm has, as far as one peer can tell, and all that follows from it: no peer is told a number.

    records found under a key -> estimate of the swarm -> level -> keys read and written, and how often

**Keys.** Level l spreads the records over 2^l keys (shards), by the first l bits of the hash of each peer's id. All
peers of a small swarm are at level 0, whose one key holds all records. A peer leaves its level for the next one where
its shards are too full, and goes back where they are too empty. SPLIT and MERGE are a factor of four apart, and an
estimate is the median of the last ones, so that neighbours seldom differ and nobody flaps.

**Peers of different levels find each other.** Beside its own level a peer publishes at each coarser one with a
probability that halves from level to level: who is in the sample is decided by another hash of its id. So each key of
each coarser level has about as many records as a shard, and a peer publishes about three records, whatever the size of
the swarm. Readers look at a key of a coarser level every now and then.

**Estimates.** Of the records under a key of level l, k have the smallest hashes u in the sample's order: about
2^l (k - 1) / u_k peers are there (k minimum values: Bar-Yossef et al., "Counting distinct elements in a data stream",
2002), whether the key has all records of its part of the swarm, or a sample. Each estimate is of another key by chance:
who fills a few keys with forged names makes few estimates wrong, and a level changes by one at a time.

**Times.** A peer exchanges once in a window, so in a swarm that nobody knows whole it needs no news much more often.
Records say how often they are renewed, so that peers that see the swarm differently believe each other's for as long.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from statistics import median

from decentral.comm.gossip.snapshots import FRESH_SNAPSHOT_S
from decentral.comm.wire.transport import Directory
from decentral.core import rng
from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds

SMALL = 64  # peers; up to here all times are the least, as each peer knows all others
SPLIT = 64  # records of a shard, from which on its peers go to the next level
MERGE = 16  # records of a shard, below which its peers go back to the level before
SAMPLE_TIMES = 1.5  # times as many records of finer levels under a coarser key as under one of their own
SMALLEST = 32  # hashes by which a swarm is estimated: within 18% in two cases of three
ESTIMATES = 3  # the last ones, whose median counts
COARSER = 1 / 3  # of the lookups by chance: at the level before, and a third of those at the one before that ...
MOST_SHARDS_READ = 16  # shards that somebody reads who looks at a swarm: up to 1,000 peers
MOST_LEVEL = 12  # 4,096 shards: a quarter of a million peers
WINDOWS = 2  # between two renewals, or lookups, at most: a dead partner costs two questions
RECORDS_PER_S = 25  # that a peer reads at most: 15 kB/s
MOST_RENEW_S = 600.0  # as a record may say: the longest window (peers/runtime/peer_selection.py)


@dataclass(frozen=True, slots=True)
class SwarmTimes:
    """The times of a swarm that is small, or whose windows are short, and what they become in a larger one."""

    renew_s: Seconds = 20.0  # a crash is known to all within three of them
    refresh_s: Seconds = 4.0  # 64 records in 4 s are 10 kB/s
    max_age_s: Seconds = FRESH_SNAPSHOT_S  # of a snapshot that is merged, or two windows where that is more

    def renewals_s(self, peers: float, window_s: Callable[[], Seconds]) -> Seconds:
        """Return how often a peer stores its record: beyond SMALL peers more rarely, up to once in WINDOWS."""
        return self._slower(self.renew_s, peers / SMALL, window_s)

    def lookups_s(self, peers: float, window_s: Callable[[], Seconds], known: int) -> Seconds:
        """Return how often a peer that knows so many others looks records up: likewise, and RECORDS_PER_S at most.

        With the square of the swarm's size: each lookup finds more records, and most of them are not renewed yet.
        """
        return max(self._slower(self.refresh_s, (peers / SMALL) ** 2, window_s), known / RECORDS_PER_S)

    def _slower(self, least_s: Seconds, times: float, window_s: Callable[[], Seconds]) -> Seconds:
        return least_s if times <= 1 else max(least_s, min(WINDOWS * window_s(), MOST_RENEW_S, times * least_s))


LEAST_TIMES = SwarmTimes()


@dataclass(frozen=True, slots=True)
class SwarmStart:
    """What a peer knows of its swarm when its node begins."""

    peers: float = 1.0  # about how many there are, ourselves included: Look.measure
    times: SwarmTimes = LEAST_TIMES


UNKNOWN = SwarmStart()


# Keys


def key(run: RunId, level: int, shard: int) -> str:
    """The DHT's key of a shard."""
    return f"{run}/peers/{level}/{shard}" if level else f"{run}/peers"


def key_of(run: RunId, peer: PeerId, level: int = 0) -> str:
    """The DHT's key of this peer's shard of a level."""
    return key(run, level, _hashes(peer)[0] >> MOST_LEVEL - level)


def keys(run: RunId) -> list[str]:
    """All keys under which a run's peers may have records."""
    return [key(run, level, shard) for level in range(MOST_LEVEL + 1) for shard in range(1 << level)]


def level_of(run: RunId, name: str) -> int | None:
    """The level of a key of this run's records; None: it is another key."""
    head, _, rest = name.partition("/peers")
    if head != run or (rest and not rest.startswith("/")):
        return None
    return int(rest.split("/")[1]) if rest else 0


def published(run: RunId, peer: PeerId, level: int) -> list[str]:
    """The keys under which a peer of this level publishes its record: of its own level, and of those that sample it."""
    order = _hashes(peer)[1]
    coarser = [one for one in range(level) if order < SAMPLE_TIMES * 2.0 ** (one - level)]
    return [key_of(run, peer, one) for one in (*coarser, level)]


@lru_cache(maxsize=1 << 14)
def _hashes(peer: PeerId) -> tuple[int, float]:
    """Its shard of the finest level, and its place in the order of samples, in (0, 1]."""
    hashed = rng.seed_of(0, "shard", peer)
    return hashed >> 64 - MOST_LEVEL, ((hashed & 0xFFFFFFFF) + 1) * 2.0**-32


# The size of the swarm


def estimate(level: int, peers: Collection[PeerId]) -> float:
    """How many peers there are, by those under one key of this level."""
    smallest = sorted([_hashes(peer)[1] for peer in peers])[:SMALLEST]
    if not smallest:
        return 0.0
    sampled = (len(smallest) - 1) / smallest[-1]
    return float((len(peers) if sampled <= 2 * len(peers) else sampled) * 2**level)


def level_for(peers: float) -> int:
    """The level of a peer that begins in a swarm of so many peers."""
    return next(level for level in range(MOST_LEVEL + 1) if peers < SPLIT << level or level == MOST_LEVEL)


@dataclass(slots=True)
class Look:
    """What somebody reads who wants to see a swarm, or begins in it: `look` fills it in."""

    directory: Directory
    run: RunId
    reader: PeerId  # who reads the same shards each time
    peers: float = 0.0  # about how many there are
    values: dict[str, Mapping[str, bytes]] = field(default_factory=dict)  # by key: peers, and their sealed records

    @property
    def level(self) -> int:
        return level_for(self.peers)

    async def measure(self) -> None:
        """Find out about how many peers there are.

        What the first key tells is believed where a shard of that level has as many records as it should have: forged
        names under one key make no swarm large.
        """
        chance = rng.stream(0, "measure", self.reader)
        self.peers = estimate(0, [PeerId(one) for one in await self._read(key(self.run, 0, 0))])
        while (level := self.level) and len(
            await self._read(key(self.run, level, chance.randrange(1 << level)))
        ) < MERGE:
            self.peers = (SPLIT << level - 1) - 1.0

    async def read(self) -> None:
        """Read all records of a small swarm, and those of some shards of a large one.

        Peers may have just gone to the next level, or not yet, so shards of the level before are read as well.
        """
        await self.measure()
        chance = rng.stream(0, "shards", self.reader)
        for level, most in ((self.level, MOST_SHARDS_READ), (self.level - 1, MOST_SHARDS_READ // 2)):
            for shard in chance.sample(range(1 << level), min(most, 1 << level)) if level >= 0 else ():
                await self._read(key(self.run, level, shard))

    async def _read(self, name: str) -> Mapping[str, bytes]:
        if name not in self.values:
            self.values[name] = await self.directory.fetch(name)
        return self.values[name]


@dataclass(slots=True)
class SwarmSize:
    """One peer's estimate of its swarm, its level, and the times that follow."""

    run: RunId
    own: PeerId
    chance: Random
    start: SwarmStart = UNKNOWN
    window_s: Callable[[], Seconds] = lambda: 0.0  # how long our windows are at present
    peers: float = field(init=False)  # ourselves included
    level: int = field(init=False)
    _by_chance: str = ""  # the key of the last lookup whose shard was drawn by chance
    _estimates: deque[float] = field(default_factory=lambda: deque(maxlen=ESTIMATES))

    def __post_init__(self) -> None:
        self.peers, self.level = self.start.peers, level_for(self.start.peers)

    @property
    def renew_s(self) -> Seconds:
        """How often we store our record."""
        return self.start.times.renewals_s(self.peers, self.window_s)

    def refresh_s(self, known: int) -> Seconds:
        """Return how often we look records up, where we know so many other peers."""
        return self.start.times.lookups_s(self.peers, self.window_s, known) if known else self.start.times.refresh_s

    def lookups(self) -> list[str]:
        """The keys to read now: that of our shard, and one by chance, mostly of our level."""
        own = key_of(self.run, self.own, self.level)
        self._by_chance, level = own, self.level
        if level:
            while level and self.chance.random() < COARSER:
                level -= 1
            self._by_chance = key(self.run, level, self.chance.randrange(1 << level))
        return list(dict.fromkeys((own, self._by_chance)))

    def found(self, name: str, peers: Collection[PeerId]) -> bool:
        """Follow what was found under a key; return whether our level has changed."""
        level, before = level_of(self.run, name), self.level
        if level is None or name != self._by_chance:
            return False
        self._estimates.append(estimate(level, peers))
        self.peers = max(1.0, median(self._estimates))
        if self.peers >= SPLIT << self.level and self.level < MOST_LEVEL:
            self.level += 1
        elif self.level and self.peers < MERGE << self.level:
            self.level -= 1
        return self.level != before
