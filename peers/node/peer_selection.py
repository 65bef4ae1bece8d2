"""Peer selection: which peers each machine asks, how long it waits for them, and how often it exchanges.

The roster says who holds what and who trains, the meter what the links carry. Exchanges (core/algorithms.py,
GossipView), rounds (comm/rounds/round.py, RoundView), moves and newcomers see no more of the swarm than this. Routes
have their own view of it, peers/node/route_planner.py. Nothing is kept here: each answer is what is known now.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from decentral.comm.wire.meter import UNKNOWN_BANDWIDTH, Meter
from decentral.core.algorithms import algorithm
from decentral.core.fragments import share
from decentral.core.ids import PeerId
from decentral.core.jobs import Fragment
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.node.gossip_cost import GossipCost, Stretch
from decentral.peers.node.progress import TrainingProgress
from decentral.peers.node.setup import NodeSetup

NEVER = -1  # the step of a state that nobody has
LONGEST_WINDOW_S = 600.0  # whatever gossip costs: no measurement, ours or made by a partner, parts us from the swarm
EARLY_TIMES = 3  # gossip's share of the cores, in the swarm's first steps, over what it is later
ALONE_TIMES = 4  # our own need, at most, where one other peer alone tells us of its own
SILENT_TTLS = 2  # lifetimes of a record, the last one's included, after which a peer that trains knows its speed
FASTEST_DEVICE = 64.0  # times the usual speed in the swarm, or ours: a device that is faster still claims no more
NEED_ROUNDING = 0.01  # of a doubling, by which the swarm's windows may be shorter than what is needed
THIN_PARTNERS = 2  # as many pulls in a window, where all of them make a link stretch it (docs/CONVERGENCE.md)
WEIGHT_FLOOR = 0.1  # a slow link's share of pulls, against the fastest one's


@dataclass(slots=True)
class PeerSelection:
    setup: Callable[[], NodeSetup]  # the present one
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    chance: Random
    cost: GossipCost = field(default_factory=GossipCost)
    link_stretch: Stretch = field(default_factory=Stretch)
    thin_stretch: Stretch = field(default_factory=Stretch)  # how long the link would need windows with all partners
    dense_stretch: Stretch = field(default_factory=Stretch)  # the same, without sparse codes
    _others: tuple[int, list[Seconds]] = (-1, [])  # what the others need, by the roster after so many changes
    _speeds: tuple[int, list[float]] = (-1, [])  # tokens/s that others publish, likewise

    # GossipView

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """The peers to exchange with: drawn by the bandwidth of their links, so that each has a chance."""
        gossip = self.setup().config.gossip
        holders, count = self.holders(fragment), algorithm(gossip.algorithm).partners(gossip)
        return holders if count is None else self._draw(holders, min(self._pulls(count), len(holders)))

    def _pulls(self, partners: int) -> int:
        """Of so many pulls in a window, those that are made: fewer where the link is thin, for shorter windows."""
        return min(THIN_PARTNERS, partners) if self.thin_stretch.times > 1 else partners

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """The published speed is that through the whole model; with routes a peer may compute this fragment only.

        A peer that has been there for long and still publishes none is as fast as the slowest one.
        """
        entry, setup = self.roster.live.get(peer), self.setup()
        if entry is None:
            return 0.0
        cut = next(cut for cut in setup.cuts if cut.index == fragment)
        part = 1.0 if setup.routes is None else share(setup.cuts, cut.first, cut.last)
        speeds, own = self._published_speeds(), self.progress.tokens_per_s or setup.profile.tokens_per_s
        published = entry.record.profile.tokens_per_s
        known = [*speeds, own] if own else speeds
        if not known:
            return published / part
        if not published and entry.expires - entry.since > SILENT_TTLS * setup.config.swarm.record_ttl_s:
            published = min(known)
        return min(published, FASTEST_DEVICE * max(own, median_low(known))) / part

    def _published_speeds(self) -> list[float]:
        if self._speeds[0] != self.roster.changes:
            published = [entry.record.profile.tokens_per_s for entry in self.roster.live.values()]
            self._speeds = self.roster.changes, [speed for speed in published if speed]
        return self._speeds[1]

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return self.meter.deadline_s(peer, size)

    def is_thin(self, fragment: int, size: int) -> bool:
        """In the swarm's first steps no link is: what a sparse code costs there is more than shorter windows bring."""
        window_s = self.window_s()
        if self._early or not (pull_s := self._pull_s(fragment, size)):
            return False
        link = self.dense_stretch.fit(self._served * pull_s / (self.setup().config.gossip.link_share * window_s))
        return link > self._cores_windows(window_s) and link * window_s >= self._common_need_s(window_s)

    def window_s(self) -> Seconds:
        """The length of windows that nothing stretches."""
        gossip = self.setup().config.gossip
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
        core_share = self.setup().config.gossip.core_share * (EARLY_TIMES if self._early else 1.0)
        return self.cost.windows(window_s, len(self.setup().fragments), min(1.0, core_share))

    def _common_need_s(self, own_s: Seconds) -> Seconds:
        """The upper median of what we and those who hold layers of ours need; a liar moves it by one place.

        Where only one other peer tells, a liar would set it: it makes ours ALONE_TIMES as long at most.
        """
        if self._others[0] != self.roster.changes:
            first, last = self.setup().fragments[0].first, self.setup().fragments[-1].last
            records = [entry.record for entry in self.roster.live.values()]
            needs = [one.window_s for one in records if one.window_s and one.overlaps(first, last)]
            self._others = self.roster.changes, sorted(needs)
        others = self._others[1]
        if len(others) == 1:
            return min(max(own_s, others[0]), ALONE_TIMES * own_s)
        below, above = others[: (len(others) + 1) // 2][-1:], others[(len(others) + 1) // 2 :][:1]
        return sorted([own_s, *below, *above])[len(below)]

    @property
    def _early(self) -> bool:
        return self.progress.lr_step < self.setup().config.gossip.start_steps

    def _link_windows(self, fragment: int, size: int, window_s: Seconds) -> int:
        """So many that we send for no more than our share of the time. As many pull from us as we pull from, and no
        home's downlink is slower than its uplink. How slowly partners send is their need, and they tell it.
        """
        if not size:
            return self.link_stretch.times  # no window was closed yet
        share_s, pull_s = self.setup().config.gossip.link_share * window_s, self._pull_s(fragment, size)
        self.thin_stretch.fit(self._served * pull_s / share_s)
        return self.link_stretch.fit(self._pulls(self._served) * pull_s / share_s)

    def _pull_s(self, fragment: int, size: int) -> Seconds:
        """How long one partner's pulls of all our fragments take our uplink, where this one's snapshots have so many
        bytes."""
        parameters = {one.index: one.parameters for one in self.setup().fragments}
        of_this = parameters.get(fragment) or max(parameters.values())  # one that we have just given up has no entry
        return size / of_this * sum(parameters.values()) / (self.meter.best_up() or UNKNOWN_BANDWIDTH)

    @property
    def _served(self) -> int:
        """About as many pull from us in a window as we pull from."""
        return max(1, min(self.setup().config.gossip.partners, len(self.roster.live)))

    def _draw(self, peers: Sequence[PeerId], count: int) -> list[PeerId]:
        """`count` different peers, with probabilities by bandwidth (an unmeasured link counts as the fastest)."""
        known = {peer: self.meter.bandwidth(peer) for peer in peers}
        top = max((rate for rate in known.values() if rate), default=1.0)
        weights = {peer: max(WEIGHT_FLOOR, (rate or top) / top) for peer, rate in known.items()}
        drawn: list[PeerId] = []
        while len(drawn) < count:
            left = [peer for peer in peers if peer not in drawn]
            drawn += self.chance.choices(left, [weights[peer] for peer in left])
        return drawn

    # RoundView

    def member_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        return self.meter.first_deadline_s(peer, size)

    def knows(self, peer: PeerId) -> bool:
        return self.roster.knows(peer) or peer in self.setup().contacts

    def acquaintances(self) -> Sequence[PeerId]:
        return sorted({*self.roster.live, *self.setup().contacts})

    def trainers(self) -> list[PeerId]:
        return sorted(peer for peer, entry in self.roster.live.items() if entry.record.phase == "training")

    # For moves and newcomers

    def holders(self, fragment: int) -> list[PeerId]:
        """The other peers that hold the fragment and train."""
        cut = next(cut for cut in self.setup().cuts if cut.index == fragment)
        return [peer for peer in self.trainers() if self.roster.live[peer].record.covers(cut)]

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
        if entry is None:
            return self.setup().whole
        return entry.record.covers(fragment) and (self.setup().whole or entry.record.phase == "training")

    def donors(self) -> list[PeerId]:
        """The peers that a newcomer may ask: those that train, or all while nobody trains."""
        return self.trainers() or self.live()

    def swarm_step(self) -> int | None:
        """The upper median of the learning-rate steps of those that train; None where one of them alone may set it."""
        steps = sorted(self.roster.live[peer].record.lr_step for peer in self.trainers())
        return steps[len(steps) // 2] if len(steps) > 2 else None

    def live(self) -> list[PeerId]:
        return sorted(self.roster.live)


def _most(window_s: Seconds) -> int:
    """The largest power of two of windows that lasts no longer than LONGEST_WINDOW_S."""
    return int(1 << int(max(1.0, LONGEST_WINDOW_S / window_s)).bit_length() - 1)
