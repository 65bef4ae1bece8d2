"""Decide how long one peer's gossip windows are, and whether it sends snapshots in shorter codecs. See `WindowLengths`.

Windows are as long as the peer's own link and cores need, or longer if at least half of the peers need longer windows.
Each is a power of two times the shortest length, so that windows of different lengths end together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.comm.gossip.gossip_cost import GossipCost, Stretch
from decentral.comm.wire.meter import UNKNOWN_BANDWIDTH, Meter
from decentral.core.units import Seconds
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup

LONGEST_WINDOW_S = 600.0  # a gossip window is never longer than this, whatever partners claim to need
EARLY_TIMES = 2  # in the swarm's first steps, gossip may use this many times its share of cores, for shorter windows
ALONE_TIMES = 4  # with only one other peer, our windows are at most this many times what we need, as that peer may lie
NEED_ROUNDING = 0.01  # a needed length this little above a power of two (in log2) is rounded down to that power
# A thin link, on which long codecs would stretch windows, stays thin until these need less than this share of it. With
# 0.95, peers that share an uplink changed codecs, and bytes by a factor of 3, every few minutes; with 0.5 within hours.
THIN_UNTIL = 0.4
THIN_PARTNERS = 2  # on a slow link, a peer pulls from only this many partners per window (docs/GOSSIP.md)


@dataclass(slots=True)
class WindowLengths:
    """The rule for the lengths of one peer's gossip windows, from its link, its cores and the swarm's need."""

    setup: PresentSetup
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    cost: GossipCost = field(default_factory=GossipCost)
    # Window lengths for which our uplink suffices, in units of the shortest window:
    link_stretch: Stretch = field(default_factory=Stretch)  # the length if we pull from as many partners as now
    thin_stretch: Stretch = field(default_factory=Stretch)  # the length if we pull from all partners
    # The length if we pull from all, without shorter codecs.
    dense_stretch: Stretch = field(default_factory=lambda: Stretch(shorter=THIN_UNTIL))
    _others: tuple[int, list[Seconds]] = (-1, [])  # cache: (`roster.changes`, sorted window lengths that others need)
    _windows: tuple[object, tuple[int, str]] = (None, (1, ""))  # cache of `windows`: (all that decides it, result)

    def is_thin(self, fragment: int, size: int) -> bool:
        """Return whether our uplink decides how long a fragment's windows are, so that shorter codecs shorten them.

        In the swarm's first steps the result is False, because shorter codecs then cost more than shorter windows gain.
        `size` is the number of bytes of the fragment's snapshots.
        """
        window_s = self.window_s()
        if self._early or not (pull_s := self._pull_s(fragment, size)):
            return False
        link = self.dense_stretch.fit(self._served * pull_s / (self._link_share * window_s))
        return link > self._cores_windows(window_s) and link * window_s >= self._common_need_s(window_s)

    def window_s(self) -> Seconds:
        """Return the shortest window length in seconds; it applies if link, cores and other peers are fast enough."""
        gossip = self.setup.now.config.gossip
        return min(gossip.window_s, gossip.start_window_s) if self._early else gossip.window_s

    def period_s(self, fragment: int, size: int) -> Seconds:
        """Return the length in seconds of a fragment's windows if its snapshots have `size` bytes."""
        return self.window_s() * self.windows(fragment, size)[0]

    def windows(self, fragment: int, size: int) -> tuple[int, str]:
        """Return our window length as a multiple of the shortest window length, and what determines it.

        Args:
            fragment: Index of the fragment.
            size: Bytes of the fragment's snapshots; 0 if there are none yet.

        Returns:
            The multiple, a power of two, and why it is above 1: "link" or "cores" if our own are slow; "swarm" if at
            least half of the peers need longer windows than we do, so that all windows end together; "" if it is 1.
        """
        up = self.meter.typical_up()
        decides = fragment, size, self.window_s(), self.setup.now, self.roster.changes, up, self.cost.rates
        if self._windows[0] != decides:
            self._windows = decides, self._needed_windows(fragment, size)
        return self._windows[1]

    def _needed_windows(self, fragment: int, size: int) -> tuple[int, str]:
        own, bound = self._own_windows(fragment, size)
        common = self._common_need_s(own * self.window_s()) / self.window_s()
        times = 1 << math.ceil(math.log2(max(1.0, common)) - NEED_ROUNDING)
        return (own, bound) if own >= times else (min(times, most_windows(self.window_s())), "swarm")

    def needed_s(self, fragment: int, size: int) -> Seconds:
        """Return the window length in seconds that our own link and cores need."""
        return self.window_s() * self._own_windows(fragment, size)[0]

    def _own_windows(self, fragment: int, size: int) -> tuple[int, str]:
        """Return how many shortest windows long our windows must be, and for which reason: "link", "cores" or "".

        The transfers of all fragments must fit into a window at gossip's share of the link (P in Streaming DiLoCo,
        arXiv 2501.18512), and gossip's processor time must stay below its share of the cores.
        """
        window_s = self.window_s()
        cores, link = self._cores_windows(window_s), self._link_windows(fragment, size, window_s)
        windows = max(1, min(most_windows(window_s), max(cores, link)))
        return windows, "link" if link > cores else "cores" if cores > 1 else ""

    def _cores_windows(self, window_s: Seconds) -> int:
        core_share = self.setup.now.config.gossip.core_share * (EARLY_TIMES if self._early else 1.0)
        held = self.setup.now.fragments
        return self.cost.windows(window_s, len(held), min(1.0, core_share), sum(one.parameters for one in held))

    def _common_need_s(self, own_s: Seconds) -> Seconds:
        """Return the upper median of the window lengths that we (`own_s`) and peers with some of our layers need."""
        if self._others[0] != self.roster.changes:
            first, last = self.setup.now.fragments[0].first, self.setup.now.fragments[-1].last
            live = [one.record for one in self.roster.live.values() if one.record.window_s]
            self._others = self.roster.changes, sorted(one.window_s for one in live if one.overlaps(first, last))
        return common_need_s(own_s, self._others[1])

    @property
    def _early(self) -> bool:
        return self.progress.lr_step < self.setup.now.config.gossip.start_steps

    def _link_windows(self, fragment: int, size: int, window_s: Seconds) -> int:
        """Return the window length, in units of the shortest window, that fits gossip into its share of our uplink.

        As many peers are assumed to pull from us as we pull from. Downlinks are ignored: they are seldom
        slower than uplinks, and slow partners publish the length that they need.
        """
        if not size:
            return self.link_stretch.times  # the size is unknown until the first window closes
        share_s, pull_s = self._link_share * window_s, self._pull_s(fragment, size)
        self.thin_stretch.fit(self._served * pull_s / share_s)
        return self.link_stretch.fit(self.pulls(self._served) * pull_s / share_s)

    def _pull_s(self, fragment: int, size: int) -> Seconds:
        """Estimate how long our uplink takes to send one partner all our fragments; `size` is one snapshot's bytes."""
        held = [one.parameters for one in self.setup.now.fragments]
        of_this = next((one.parameters for one in self.setup.now.fragments if one.index == fragment), 0)
        whole = size / (of_this or max(held)) * sum(held)  # if we have dropped `fragment`, assume our largest one
        return whole / (self.meter.typical_up() or UNKNOWN_BANDWIDTH)

    @property
    def _link_share(self) -> float:
        """Return the share of our uplink that gossip may use."""
        present = self.setup.now
        return present.config.gossip.link_share if present.whole else present.config.gossip.share_beside_tokens

    @property
    def _served(self) -> int:
        """Return an estimate of how many peers pull from us in a window: as many as we pull from."""
        return max(1, min(self.setup.now.config.gossip.partners, len(self.roster.live)))

    def pulls(self, partners: int) -> int:
        """Return from how many partners to pull in a window; if our uplink is slow, at most THIN_PARTNERS."""
        return min(THIN_PARTNERS, partners) if self.thin_stretch.times > 1 else partners


def common_need_s(own_s: Seconds, others_s: Sequence[Seconds]) -> Seconds:
    """Return the upper median of the window lengths that a peer and the others with some of its layers need.

    A peer that lies can move the median only to a neighbouring value. ALONE_TIMES limits the influence of a single
    other peer.

    Args:
        own_s: The window length that the peer needs, seconds.
        others_s: The window lengths that the others need, seconds, sorted.
    """
    if len(others_s) == 1:
        return min(max(own_s, others_s[0]), ALONE_TIMES * own_s)
    middle = (len(others_s) + 1) // 2
    below, above = others_s[max(0, middle - 1) : middle], others_s[middle : middle + 1]
    return sorted([own_s, *below, *above])[len(below)]


def most_windows(window_s: Seconds) -> int:
    """Return how many windows of `window_s` fit into LONGEST_WINDOW_S, rounded down to a power of two; at least 1."""
    return int(1 << int(max(1.0, LONGEST_WINDOW_S / window_s)).bit_length() - 1)
