"""Peer selection: which peers each machine asks, how many, how often, and how long it waits for them.

The roster says who holds what and who trains, the meter what the links carry. Exchanges (comm/gossip/snapshots.py,
GossipView), rounds (comm/rounds/round.py, RoundView), moves and newcomers see no more of the swarm than PeerSelection.
Routes have their own view of it, peers/runtime/route_planner.py. What is kept here holds until the roster's next
change: each answer is what is known now.

WindowLengths says how often a peer exchanges, and in which code: as its own link and cores allow, and as half of the
swarm needs it. Windows are powers of two of the shortest one, so that those of all peers end together. The roster says
what the others need, the meter what our links carry, and the costs of the windows so far what gossip takes of the
cores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from decentral.comm.gossip.gossip_cost import GossipCost, Stretch
from decentral.comm.wire.meter import UNKNOWN_BANDWIDTH, Meter
from decentral.core.choices import ALGORITHMS
from decentral.core.fragments import Fragment, share
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup

NEVER = -1  # the step of a state that nobody has
SILENT_TTLS = 2  # lifetimes of a record, the last one's included, after which a peer that trains knows its speed
FASTEST_DEVICE = 64.0  # times the usual speed in the swarm, or ours: a device that is faster still claims no more
WEIGHT_FLOOR = 0.1  # a slow link's share of pulls, against the fastest one's

LONGEST_WINDOW_S = 600.0  # whatever gossip costs: no measurement, ours or made by a partner, parts us from the swarm
EARLY_TIMES = 3  # gossip's share of the cores, in the swarm's first steps, over what it is later
ALONE_TIMES = 4  # our own need, at most, where one other peer alone tells us of its own
NEED_ROUNDING = 0.01  # of a doubling, by which the swarm's windows may be shorter than what is needed
THIN_PARTNERS = 2  # as many pulls in a window, where all of them make a link stretch it (docs/CONVERGENCE.md)


@dataclass(slots=True)
class WindowLengths:
    setup: PresentSetup
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    cost: GossipCost = field(default_factory=GossipCost)
    link_stretch: Stretch = field(default_factory=Stretch)
    thin_stretch: Stretch = field(default_factory=Stretch)  # how long the link would need windows with all partners
    dense_stretch: Stretch = field(default_factory=Stretch)  # the same, without sparse codes
    _others: tuple[int, list[Seconds]] = (-1, [])  # what the others need, by the roster after so many changes

    def is_thin(self, fragment: int, size: int) -> bool:
        """In the swarm's first steps no link is: what a sparse code costs there is more than shorter windows bring."""
        window_s = self.window_s()
        if self._early or not (pull_s := self._pull_s(fragment, size)):
            return False
        link = self.dense_stretch.fit(self._served * pull_s / (self.setup.now.config.gossip.link_share * window_s))
        return link > self._cores_windows(window_s) and link * window_s >= self._common_need_s(window_s)

    def window_s(self) -> Seconds:
        """The length of windows that nothing stretches."""
        gossip = self.setup.now.config.gossip
        return min(gossip.window_s, gossip.start_window_s) if self._early else gossip.window_s

    def period_s(self, fragment: int, size: int) -> Seconds:
        return self.window_s() * self.windows(fragment, size)[0]

    def windows(self, fragment: int, size: int) -> tuple[int, str]:
        """How many of the shortest windows make one, where this fragment's snapshots have `size` bytes, and what
        stretches them: our link, our cores, or the swarm, of whose peers half need longer windows than we do. Only
        windows that end together make fresh partners, and pulls from them without slow weights.
        """
        own, bound = self._own_windows(fragment, size)
        common = self._common_need_s(own * self.window_s()) / self.window_s()
        times = 1 << math.ceil(math.log2(max(1.0, common)) - NEED_ROUNDING)
        return (own, bound) if own >= times else (min(times, _most(self.window_s())), "swarm")

    def needed_s(self, fragment: int, size: int) -> Seconds:
        """How long our own links and cores need windows to be."""
        return self.window_s() * self._own_windows(fragment, size)[0]

    def _own_windows(self, fragment: int, size: int) -> tuple[int, str]:
        """As many as all fragments take at our share of the link (P in Streaming DiLoCo, arXiv 2501.18512), or as many
        as keep the cost below our share of the cores, whatever is more; but no more than LONGEST_WINDOW_S.
        """
        window_s = self.window_s()
        cores, link = self._cores_windows(window_s), self._link_windows(fragment, size, window_s)
        windows = max(1, min(_most(window_s), max(cores, link)))
        return windows, "link" if link > cores else "cores" if cores > 1 else ""

    def _cores_windows(self, window_s: Seconds) -> int:
        core_share = self.setup.now.config.gossip.core_share * (EARLY_TIMES if self._early else 1.0)
        return self.cost.windows(window_s, len(self.setup.now.fragments), min(1.0, core_share))

    def _common_need_s(self, own_s: Seconds) -> Seconds:
        """The upper median of what we and those who hold layers of ours need; a liar moves it by one place.

        Where only one other peer tells, a liar would set it: it makes ours ALONE_TIMES as long at most.
        """
        if self._others[0] != self.roster.changes:
            first, last = self.setup.now.fragments[0].first, self.setup.now.fragments[-1].last
            live = self.roster.live.values()
            records = [entry.record for entry in live if entry.record.window_s]
            needs = [one.window_s for one in records if one.overlaps(first, last)]
            self._others = self.roster.changes, sorted(needs)
        others = self._others[1]
        if len(others) == 1:
            return min(max(own_s, others[0]), ALONE_TIMES * own_s)
        middle = (len(others) + 1) // 2
        below, above = others[max(0, middle - 1) : middle], others[middle : middle + 1]
        return sorted([own_s, *below, *above])[len(below)]

    @property
    def _early(self) -> bool:
        return self.progress.lr_step < self.setup.now.config.gossip.start_steps

    def _link_windows(self, fragment: int, size: int, window_s: Seconds) -> int:
        """So many that we send for no more than our share of the time. As many pull from us as we pull from, and no
        home's downlink is slower than its uplink. How slowly partners send is their need, and they tell it.
        """
        if not size:
            return self.link_stretch.times  # no window was closed yet
        share_s, pull_s = self.setup.now.config.gossip.link_share * window_s, self._pull_s(fragment, size)
        self.thin_stretch.fit(self._served * pull_s / share_s)
        return self.link_stretch.fit(self.pulls(self._served) * pull_s / share_s)

    def _pull_s(self, fragment: int, size: int) -> Seconds:
        """How long one partner's pulls of all our fragments take our uplink, where this one's snapshots have so many
        bytes."""
        held = [one.parameters for one in self.setup.now.fragments]
        of_this = next((one.parameters for one in self.setup.now.fragments if one.index == fragment), 0)
        whole = size / (of_this or max(held)) * sum(held)  # a fragment that we have just given up has no parameters
        return whole / (self.meter.best_up() or UNKNOWN_BANDWIDTH)

    @property
    def _served(self) -> int:
        """About as many pull from us in a window as we pull from."""
        return max(1, min(self.setup.now.config.gossip.partners, len(self.roster.live)))

    def pulls(self, partners: int) -> int:
        """Of so many pulls in a window, those that are made: fewer where the link is thin, for shorter windows."""
        return min(THIN_PARTNERS, partners) if self.thin_stretch.times > 1 else partners


@dataclass(slots=True)
class PeerSelection:
    setup: PresentSetup
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    chance: Random
    lengths: WindowLengths = field(init=False)
    _changes: int = -1  # of the roster, after which the lists below were found; None: not yet
    _speeds: list[float] | None = None  # tokens/s that others publish
    _live: Sequence[PeerId] | None = None
    _trainers: Sequence[PeerId] | None = None
    _holders: dict[int, Sequence[PeerId]] = field(default_factory=dict)  # of each fragment

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
        self._forget_an_old_roster()
        if self._speeds is None:
            live = self.roster.live.values()
            self._speeds = [speed for entry in live if (speed := entry.record.profile.tokens_per_s)]
        return self._speeds

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

    def trainers(self) -> Sequence[PeerId]:
        self._forget_an_old_roster()
        if self._trainers is None:
            live = self.roster.live.items()
            self._trainers = sorted(peer for peer, entry in live if entry.record.phase == "training")
        return self._trainers

    # For moves and newcomers

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """The other peers that hold the fragment and train."""
        self._forget_an_old_roster()
        if fragment not in self._holders:
            cut = next(cut for cut in self.setup.now.cuts if cut.index == fragment)
            self._holders[fragment] = [peer for peer in self.trainers() if self.roster.live[peer].record.covers(cut)]
        return self._holders[fragment]

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

    def donors(self) -> Sequence[PeerId]:
        """The peers that a newcomer may ask: those that train, or all while nobody trains."""
        return self.trainers() or self.live()

    def swarm_step(self) -> int | None:
        """The upper median of the learning-rate steps of those that train; None where one of them alone may set it."""
        steps = sorted(self.roster.live[peer].record.lr_step for peer in self.trainers())
        return steps[len(steps) // 2] if len(steps) > 2 else None

    def live(self) -> Sequence[PeerId]:
        self._forget_an_old_roster()
        if self._live is None:
            self._live = sorted(self.roster.live)
        return self._live

    def _forget_an_old_roster(self) -> None:
        if self._changes != self.roster.changes:
            self._changes, self._speeds, self._live, self._trainers = self.roster.changes, None, None, None
            self._holders.clear()


def _most(window_s: Seconds) -> int:
    """The largest power of two of windows that lasts no longer than LONGEST_WINDOW_S."""
    return int(1 << int(max(1.0, LONGEST_WINDOW_S / window_s)).bit_length() - 1)
