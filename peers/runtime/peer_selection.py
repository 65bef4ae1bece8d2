"""Peer selection: which peers each machine asks, and how long it waits for them.

The roster says who holds what and who trains, the meter what the links carry. Exchanges (comm/gossip/snapshots.py,
GossipView), rounds (comm/rounds/round.py, RoundView), moves and newcomers see no more of the swarm than this. Routes
have their own view of it, peers/runtime/route_planner.py. How often it exchanges is a matter of its own,
peers/runtime/window_lengths.py. What is kept here holds until the roster's next change: each answer is what is known
now.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from decentral.comm.wire.meter import Meter
from decentral.core.choices import ALGORITHMS
from decentral.core.fragments import Fragment, share
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup
from decentral.peers.runtime.window_lengths import WindowLengths

NEVER = -1  # the step of a state that nobody has
SILENT_TTLS = 2  # lifetimes of a record, the last one's included, after which a peer that trains knows its speed
FASTEST_DEVICE = 64.0  # times the usual speed in the swarm, or ours: a device that is faster still claims no more
WEIGHT_FLOOR = 0.1  # a slow link's share of pulls, against the fastest one's


@dataclass(slots=True)
class PeerSelection:
    setup: PresentSetup
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    chance: Random
    lengths: WindowLengths = field(init=False)
    _speeds: tuple[int, list[float]] = (-1, [])  # tokens/s that others publish, by the roster after so many changes
    _live: tuple[int, list[PeerId]] = (-1, [])  # likewise
    _trainers: tuple[int, list[PeerId]] = (-1, [])  # likewise
    _holders: dict[int, tuple[int, list[PeerId]]] = field(default_factory=dict)  # likewise, of each fragment

    def __post_init__(self) -> None:
        self.lengths = WindowLengths(self.setup, self.roster, self.meter, self.progress)

    # GossipView

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """The peers to exchange with: drawn by the bandwidth of their links, so that each has a chance."""
        gossip, holders = self.setup.now.config.gossip, self.holders(fragment)
        if ALGORITHMS[gossip.algorithm].blocking:
            return holders
        return self._draw(holders, min(self.lengths.pulls(gossip.partners), len(holders)))

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """The published speed is that through the whole model; with routes a peer may compute this fragment only.

        A peer that has been there for long and still publishes none is as fast as the slowest one.
        """
        entry, setup = self.roster.live.get(peer), self.setup.now
        if entry is None:
            return 0.0
        cut = next(cut for cut in setup.cuts if cut.index == fragment)
        part = 1.0 if setup.routes is None else share(setup.cuts, cut.first, cut.last)
        speeds, own = self._published_speeds(), self.progress.tokens_per_s or setup.profile.tokens_per_s
        published = entry.record.profile.tokens_per_s
        known = [*speeds, own] if own else speeds
        if not known:
            return published / part
        if not published and entry.expires - entry.since > SILENT_TTLS * entry.record.lifetime_s:
            published = min(known)
        return min(published, FASTEST_DEVICE * max(own, median_low(known))) / part

    def _published_speeds(self) -> list[float]:
        if self._speeds[0] != self.roster.changes:
            published = [entry.record.profile.tokens_per_s for entry in self.roster.live.values()]
            self._speeds = self.roster.changes, [speed for speed in published if speed]
        return self._speeds[1]

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return self.meter.deadline_s(peer, size)

    def window_s(self) -> Seconds:
        return self.lengths.window_s()

    def period_s(self, fragment: int, size: int) -> Seconds:
        return self.lengths.period_s(fragment, size)

    def is_thin(self, fragment: int, size: int) -> bool:
        return self.lengths.is_thin(fragment, size)

    def _draw(self, peers: Sequence[PeerId], count: int) -> list[PeerId]:
        """`count` different peers, with probabilities by bandwidth (an unmeasured link counts as the fastest)."""
        left, links = list(peers), self.meter.links
        measured = {peer: rate for peer in peers if peer in links and (rate := links[peer].down.known)}
        top = max(measured.values(), default=1.0)
        weights = [max(WEIGHT_FLOOR, measured[peer] / top) if peer in measured else 1.0 for peer in left]
        drawn: list[PeerId] = []
        while len(drawn) < count:
            (place,) = self.chance.choices(range(len(left)), weights)
            drawn.append(left.pop(place))
            del weights[place]
        return drawn

    # RoundView

    def member_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return self.meter.first_deadline_s(peer, size)

    def knows(self, peer: PeerId) -> bool:
        return self.roster.knows(peer) or peer in self.setup.now.contacts

    def acquaintances(self) -> Sequence[PeerId]:
        return sorted({*self.roster.live, *self.setup.now.contacts})

    def trainers(self) -> list[PeerId]:
        if self._trainers[0] != self.roster.changes:
            training = [peer for peer, entry in self.roster.live.items() if entry.record.phase == "training"]
            self._trainers = self.roster.changes, sorted(training)
        return self._trainers[1]

    # For moves and newcomers

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """The other peers that hold the fragment and train."""
        changes, found = self._holders.get(fragment, (-1, []))
        if changes != self.roster.changes:
            cut = next(cut for cut in self.setup.now.cuts if cut.index == fragment)
            found = [peer for peer in self.trainers() if self.roster.live[peer].record.covers(cut)]
            self._holders[fragment] = self.roster.changes, found
        return found

    def newest_retained(self, fragment: int) -> tuple[int, list[PeerId]]:
        """The learning-rate step of the newest state that others retain, or NEVER, and the peers that retain it."""
        found = {peer: dict(entry.record.kept).get(fragment, NEVER) for peer, entry in sorted(self.roster.live.items())}
        newest = max(found.values(), default=NEVER)
        return newest, [peer for peer, step in found.items() if step == newest > NEVER]

    def donates(self, peer: PeerId, fragment: Fragment) -> bool:
        """Whether a newcomer may ask this peer for the fragment, by its record.

        Where all peers hold everything, any may be asked: it refuses if it is not ready.
        """
        entry = self.roster.live.get(peer)
        if entry is None or entry.record.phase != "training":
            return self.setup.now.whole and (entry is None or entry.record.covers(fragment))
        return entry.record.covers(fragment)

    def donors(self) -> list[PeerId]:
        """The peers that a newcomer may ask: those that train, or all while nobody trains."""
        return self.trainers() or self.live()

    def swarm_step(self) -> int | None:
        """The upper median of the learning-rate steps of those that train; None where one of them alone may set it."""
        steps = sorted(self.roster.live[peer].record.lr_step for peer in self.trainers())
        return steps[len(steps) // 2] if len(steps) > 2 else None

    def live(self) -> list[PeerId]:
        if self._live[0] != self.roster.changes:
            self._live = self.roster.changes, sorted(self.roster.live)
        return self._live[1]
