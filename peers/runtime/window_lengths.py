"""How long windows are, and in which code: as one's own link and cores allow, and as half of the swarm needs them.

Windows are powers of two of the shortest one, so that those of all peers end together. The roster says what the others
need, the meter what our links carry, and the costs of the windows so far what gossip takes of the cores.
"""

import math
from dataclasses import dataclass, field

from decentral.comm.gossip.gossip_cost import GossipCost, Stretch
from decentral.comm.wire.meter import UNKNOWN_BANDWIDTH, Meter
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup

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


def _most(window_s: Seconds) -> int:
    """The largest power of two of windows that lasts no longer than LONGEST_WINDOW_S."""
    return int(1 << int(max(1.0, LONGEST_WINDOW_S / window_s)).bit_length() - 1)
