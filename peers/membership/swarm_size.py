"""Estimate the size of the swarm from DHT records, and derive which keys to read and write, and how often.

    records found under a key -> estimate of the swarm's size -> level -> DHT keys and intervals

`SwarmSize` is one peer's running estimate; `Look` reads the records once, before a peer joins or for a command.

**Keys.** Level l spreads the records over 2^l keys (shards), by the first l bits of the hash of each peer's id. All
peers of a small swarm are at level 0, whose one key holds all records. A peer moves to the next level when the shards
of its level hold SPLIT records or more, and back when they hold fewer than MERGE. Levels do not oscillate, and peers
seldom differ in their level, since SPLIT is four times MERGE and the estimate is a median.

**Finding peers of other levels.** A peer also publishes its record at the coarser (lower) levels, with a probability
that halves from level to level and is decided by a second hash of its id. So each key of a coarser level holds about as
many records as a shard, and a peer publishes about three records in a swarm of any size. Some lookups read such a key.

**Estimates.** Let u_k be the k-th smallest second hash, in (0, 1], under a key of level l. The swarm has about
2^l (k - 1) / u_k peers (k minimum values: Bar-Yossef et al., "Counting distinct elements in a data stream", 2002). This
holds if the key has all records of its shard, and also if it has a random sample. Each estimate reads another random
key, and each estimate changes the level by at most one, so records forged under a few keys have little effect.

**Intervals.** A peer exchanges with gossip partners once in a window. So in a large swarm it need not read and renew
records much more often. Each record states its renewal interval, so that peers with different estimates agree on the
record's lifetime.
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

SMALL = 64  # up to this many peers, each peer knows all others, and intervals are shortest
SPLIT = 64  # if a DHT key (shard) holds at least this many records, its peers split over twice as many keys
MERGE = 16  # if a DHT key (shard) holds fewer records than this, its peers go back to half as many keys
SAMPLE_TIMES = 1.5  # each coarser level's key gets a sample of the records, 1.5 times as many as a key of our level
SMALLEST = 32  # the swarm's size is estimated from the 32 smallest hashes of peer ids, with a standard error of 18%
ESTIMATES = 3
COARSER = 1 / 3  # a random lookup moves to the next coarser level with this probability, and again from there
MOST_SHARDS_READ = 16  # `Look` reads at most this many keys of a level, which hold records of about 1,000 peers
MOST_LEVEL = 12  # highest level: 4,096 shards, enough for 250,000 peers
WINDOWS = 2  # at most this many gossip windows pass between lookups; a dead partner costs one request in each window
RECORDS_PER_S = 25  # lookups are slowed until a peer reads at most this many records (15 kB) per second
MOST_RENEW_S = 600.0  # longest time between two renewals, equal to the longest gossip window


@dataclass(frozen=True, slots=True)
class SwarmTimes:
    """Intervals between renewals and lookups of records: fields for up to SMALL peers, methods for larger swarms."""

    renew_s: Seconds = 20.0  # a peer renews its record at this interval; its record expires after three intervals
    refresh_s: Seconds = 4.0  # at this interval each peer looks up records: 64 records take 10 kB/s
    max_age_s: Seconds = FRESH_SNAPSHOT_S  # snapshots older than both this and two gossip windows are not merged

    def renewals_s(self, peers: float, window_s: Callable[[], Seconds]) -> Seconds:
        """Return the seconds between two renewals of a record.

        Beyond SMALL peers, this time grows in proportion to the swarm's size, to at most WINDOWS gossip windows.
        """
        return self._slower(self.renew_s, peers / SMALL, window_s)

    def lookups_s(self, peers: float, window_s: Callable[[], Seconds], known: int) -> Seconds:
        """Return the seconds between two lookups of a peer that knows `known` others.

        Beyond SMALL peers, this time grows with the square of the swarm's size, to at most WINDOWS gossip windows: each
        lookup finds more records, most of them unchanged. The time is at least `known` / RECORDS_PER_S.
        """
        return max(self._slower(self.refresh_s, (peers / SMALL) ** 2, window_s), known / RECORDS_PER_S)

    def _slower(self, least_s: Seconds, times: float, window_s: Callable[[], Seconds]) -> Seconds:
        return least_s if times <= 1 else max(least_s, min(WINDOWS * window_s(), MOST_RENEW_S, times * least_s))


LEAST_TIMES = SwarmTimes()


@dataclass(frozen=True, slots=True)
class SwarmStart:
    """What a peer knows when its node starts: the swarm's size, and the intervals at which peers renew records."""

    peers: float = 1.0  # estimated number of peers in the swarm
    times: SwarmTimes = LEAST_TIMES


UNKNOWN = SwarmStart()


def key(run: RunId, level: int, shard: int) -> str:
    """Return the DHT key under which the records of a level's shard are stored."""
    return f"{run}/peers/{level}/{shard}" if level else f"{run}/peers"


def key_of(run: RunId, peer: PeerId, level: int = 0) -> str:
    """Return the DHT key of the shard to which a peer belongs at this level."""
    return key(run, level, _hashes(peer)[0] >> MOST_LEVEL - level)


def keys(run: RunId) -> list[str]:
    """Return the keys of all shards of all levels, under which a run's peers may have records."""
    return [key(run, level, shard) for level in range(MOST_LEVEL + 1) for shard in range(1 << level)]


def level_of(run: RunId, name: str) -> int | None:
    """Return the level of a key that `key` made for this run; None for any other key."""
    head, _, rest = name.partition("/peers")
    if head != run or (rest and not rest.startswith("/")):
        return None
    return int(rest.split("/")[1]) if rest else 0


def published(run: RunId, peer: PeerId, level: int) -> list[str]:
    """Return the keys under which a peer of this level publishes its record.

    These are the key of its shard, and the keys of those coarser levels that its second hash selects.
    """
    order = _hashes(peer)[1]
    coarser = [one for one in range(level) if order < SAMPLE_TIMES * 2.0 ** (one - level)]
    return [key_of(run, peer, one) for one in (*coarser, level)]


@lru_cache(maxsize=1 << 14)
def _hashes(peer: PeerId) -> tuple[int, float]:
    """Return a peer's shard at MOST_LEVEL, and a second hash in (0, 1] that selects its coarser levels."""
    hashed = rng.seed_of(0, "shard", peer)
    return hashed >> 64 - MOST_LEVEL, ((hashed & 0xFFFFFFFF) + 1) * 2.0**-32


def estimate(level: int, peers: Collection[PeerId]) -> float:
    """Return an estimate of the number of peers in the swarm, from the peers found under one key of this level."""
    smallest = sorted([_hashes(peer)[1] for peer in peers])[:SMALLEST]
    if not smallest:
        return 0.0
    sampled = (len(smallest) - 1) / smallest[-1]
    return float((len(peers) if sampled <= 2 * len(peers) else sampled) * 2**level)


def level_for(peers: float) -> int:
    """Return the level of a swarm of `peers` peers: the lowest level with fewer than SPLIT records per shard."""
    return next(level for level in range(MOST_LEVEL + 1) if peers < SPLIT << level or level == MOST_LEVEL)


@dataclass(slots=True)
class Look:
    """One reading of a swarm's records in the DHT: `measure` estimates `peers`, and `read` also fills `values`."""

    directory: Directory
    run: RunId
    reader: PeerId  # the peer that reads; its id seeds the choice of shards, so that it always reads the same ones
    peers: float = 0.0
    values: dict[str, Mapping[str, bytes]] = field(default_factory=dict)  # DHT key -> {peer: its sealed record}

    @property
    def level(self) -> int:
        """Return the level of the DHT keys (2^level shards) that fits the estimated number of peers."""
        return level_for(self.peers)

    async def measure(self) -> None:
        """Set `self.peers` to an estimate of the number of peers.

        The records under the key of level 0 give a first estimate. This estimate is accepted if a random shard of its
        level has at least MERGE records. Otherwise the next lower level is checked in the same way, so that records
        forged under one key do not make the swarm look large.
        """
        chance = rng.stream(0, "measure", self.reader)
        self.peers = estimate(0, [PeerId(one) for one in await self._read(key(self.run, 0, 0))])
        while (level := self.level) and len(
            await self._read(key(self.run, level, chance.randrange(1 << level)))
        ) < MERGE:
            self.peers = (SPLIT << level - 1) - 1.0

    async def read(self) -> None:
        """Read all records of a small swarm, or some shards' records of a large swarm, into `self.values`.

        Some shards of the next lower level are read as well, since some peers may still publish there.
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
    """One peer's running estimate of the swarm's size, with the level and intervals that follow from the estimate."""

    run: RunId
    own: PeerId
    chance: Random
    start: SwarmStart = UNKNOWN
    window_s: Callable[[], Seconds] = lambda: 0.0
    peers: float = field(init=False)
    level: int = field(init=False)
    _by_chance: str = ""  # the key last drawn at random, whose records give the next estimate
    _estimates: deque[float] = field(default_factory=lambda: deque(maxlen=ESTIMATES))

    def __post_init__(self) -> None:
        """Begin with the size and level that the peer estimated before its node started."""
        self.peers, self.level = self.start.peers, level_for(self.start.peers)

    @property
    def renew_s(self) -> Seconds:
        """Return the seconds between two renewals of our record, which grow with the estimated size of the swarm."""
        return self.start.times.renewals_s(self.peers, self.window_s)

    def refresh_s(self, known: int) -> Seconds:
        """Return the seconds between two lookups if we know `known` other peers; for 0 peers, the shortest interval."""
        return self.start.times.lookups_s(self.peers, self.window_s, known) if known else self.start.times.refresh_s

    def lookups(self) -> list[str]:
        """Return the DHT keys to read now: the key of our shard, and a random key for the next estimate (`found`).

        The random key is of our level or, with probability COARSER, of a coarser level.
        """
        own = key_of(self.run, self.own, self.level)
        self._by_chance, level = own, self.level
        if level:
            while level and self.chance.random() < COARSER:
                level -= 1
            self._by_chance = key(self.run, level, self.chance.randrange(1 << level))
        return list(dict.fromkeys((own, self._by_chance)))

    def found(self, name: str, peers: Collection[PeerId], share: float = 1.0) -> bool:
        """Update the estimate from the peers found under a key, and return whether our level has changed.

        Only the key that the last `lookups` chose at random changes the estimate. The level changes by at most one.

        Args:
            name: The DHT key.
            peers: The peers with a valid record, among those whose records we read.
            share: The share of the key's records that we read, chosen at random.
        """
        level, before = level_of(self.run, name), self.level
        if level is None or name != self._by_chance:
            return False
        self._estimates.append(estimate(level, peers) / (share or 1.0))
        self.peers = max(1.0, median(self._estimates))
        if self.peers >= SPLIT << self.level and self.level < MOST_LEVEL:
            self.level += 1
        elif self.level and self.peers < MERGE << self.level:
            self.level -= 1
        return self.level != before
