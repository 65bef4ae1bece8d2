"""What gossip costs this peer's cores, and how far windows are stretched so that it costs no more than its share.

A window costs the copy and the correction on the training thread, its kernels on the worker, and what the event loop
and the network daemon spend on its transfers. The host measures the last two together (CoresUsed), jobs report the
others. Both are averaged over the last windows. What gossip may cost is a share of the cores that train, and
IDLE_SHARE of those that nobody uses: it takes nothing from training there.
"""

import math
from dataclasses import dataclass, field

from decentral.core.units import Seconds

IDLE_SHARE = 0.1
FIXED_CORES = 0.005  # what the event loop and the network take without gossip
SLOWEST_BYTES_PER_S = 20e6  # what a core moves at least, of questions (peers/runtime/traffic.py) and their bytes
REMEMBERED_WINDOWS = 16  # whose mean the average is, or
REMEMBERED_S = 20.0  # what it follows where windows are longer: what the first ones cost must not last for minutes
MOST_TIMES = 2  # the average cost: what a new measurement counts at most
FEWER_CORES = 0.1  # what a measurement with fewer cores than before counts: a pause is no slower device
NEWEST_IDLE = 0.3  # what the latest measurement of idle cores counts
LONGER, SHORTER = 1.1, 0.8  # windows change when they are this far from what is needed: peers must not flap


@dataclass(frozen=True, slots=True)
class CoresUsed:
    """Processor time in an interval of so many seconds."""

    seconds: Seconds
    training_s: Seconds  # of the cores that train; on a GPU, of all cores that are there for it
    network_s: Seconds  # of the event loop and the network
    idle_s: Seconds = 0.0  # of cores that no process used; 0 where that is not known

    def since(self, earlier: "CoresUsed") -> "CoresUsed":
        """Return what was used after an earlier reading with the same beginning."""
        return CoresUsed(
            self.seconds - earlier.seconds,
            self.training_s - earlier.training_s,
            self.network_s - earlier.network_s,
            self.idle_s - earlier.idle_s,
        )


@dataclass(frozen=True, slots=True)
class GossipTraffic:
    """Gossip's part of the traffic that this peer saw in an interval, and its work: bytes, with some for a question."""

    part: float = 1.0
    work_bytes: float = math.inf


@dataclass(slots=True)
class Stretch:
    """Windows are so many times as long as the config has them: a power of two.

    Then the ends of a longer window are also ends of a shorter one, at whatever peer. Finer steps would fill a link
    better, but peers whose measurements differ a little came to windows that seldom end together
    (docs/results/wan.md).
    """

    times: int = 1

    def fit(self, needed: float) -> int:
        """Follows what is needed, but not to and fro with each measurement."""
        while needed > LONGER * self.times:
            self.times *= 2
        while self.times > 1 and needed < SHORTER * self.times / 2:
            self.times //= 2
        return self.times


ALL_GOSSIP = GossipTraffic()


@dataclass(slots=True)
class GossipCost:
    compute_s: Seconds = 0.0  # of one window of one fragment, on average: its jobs
    network_s: Seconds = 0.0  # likewise: its transfers
    cores: float = 0.0  # that train
    idle: float = 0.0  # cores that nobody uses
    stretch: Stretch = field(default_factory=Stretch)
    _share: float = 0.0  # of the cores, for which the windows were stretched
    _jobs_s: Seconds = 0.0  # since the averages were brought up to date
    _transfers_s: Seconds = 0.0  # likewise
    _windows: int = 0  # closed since then
    _since_s: Seconds = 0.0

    def did(self, cost_s: Seconds, closed: bool) -> None:
        """A job of gossip took so long; `closed`: it ended a window."""
        self._jobs_s += cost_s
        self._windows += closed

    @property
    def window_cost_s(self) -> Seconds:
        return self.compute_s + self.network_s

    def measured(self, used: CoresUsed, gossip_alone: bool, gossip: GossipTraffic = ALL_GOSSIP) -> None:
        """`gossip_alone`: the network had little else to do, such as the state of a newcomer to send.

        Gossip is charged its part of the traffic, and no more than its own work explains: what others make us do with
        questions that are refused unread would else be shared by ever fewer windows, as these grow longer for it.
        """
        cores = used.training_s / used.seconds
        self.cores = max(cores, self.cores + FEWER_CORES * (cores - self.cores))
        self.idle += NEWEST_IDLE * (used.idle_s / used.seconds - self.idle)
        self._since_s += used.seconds
        if gossip_alone:
            network_s = max(0.0, used.network_s - FIXED_CORES * used.seconds)
            self._transfers_s += min(gossip.part * network_s, gossip.work_bytes / SLOWEST_BYTES_PER_S)
        if self._windows:  # else the next measurement may have windows to share this one's cost
            self.compute_s = self._averaged(self.compute_s, self._jobs_s / self._windows)
            if gossip_alone:
                self.network_s = self._averaged(self.network_s, self._transfers_s / self._windows)
            self._jobs_s, self._transfers_s, self._windows, self._since_s = 0.0, 0.0, 0, 0.0

    def _averaged(self, known: Seconds, new: Seconds) -> Seconds:
        """One outlier (memory that is touched first, a machine that is busy) must not stretch windows for minutes."""
        if not known:
            return new
        counts = min(1.0, max(self._windows / REMEMBERED_WINDOWS, self._since_s / REMEMBERED_S))
        return known + counts * (min(new, MOST_TIMES * known) - known)

    def windows(self, window_s: Seconds, fragments: int, share: float) -> int:
        """How many windows of the config's length make one of ours, so that all fragments cost this share of the cores
        that train, and IDLE_SHARE of those that nobody uses.
        """
        if share != self._share:
            self._share, self.stretch = share, Stretch()  # what another share needed would hold these windows long
        if not self.window_cost_s or not self.cores:
            return self.stretch.times
        left = max(share / 2, share - FIXED_CORES)  # what stays for windows
        needed = self.window_cost_s * fragments / ((left * self.cores + IDLE_SHARE * self.idle) * window_s)
        return self.stretch.fit(needed)
