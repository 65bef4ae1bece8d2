"""Processor time that gossip costs this peer, and the window length that keeps this cost within a limit.

Start at `GossipCost.windows`. A window's cost is the processor time of the copy and the correction on the training
thread, of the kernels on the worker thread, and of its transfers in the event loop and the network daemon. Gossip jobs
report the time on the two threads; the host measures the event loop and the daemon together (CoresUsed). All times are
averaged over recent windows. Gossip may use a share of the cores that train, plus IDLE_SHARE of the idle cores.
"""

import math
from dataclasses import dataclass, field

from decentral.core.units import Seconds

IDLE_SHARE = 0.1  # gossip may use this share of the idle cores; more could slow training
# Number of cores that event loop and network daemon use without gossip: 0.021 and 0.024 in two peers of 0.5 M
# parameters, 0.005 to 0.012 with 85 M, whose steps are rarer. Gossip is charged what they use beyond that.
FIXED_CORES = 0.02
# A core transfers this many bytes of gossip in a second, at least and at most. So gossip is charged at most its bytes
# divided by the first and, where event loop and daemon use less than FIXED_CORES, its bytes divided by the second.
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 20e6, 74e6
# Until a window's cost is measured, this many core-seconds are expected for each parameter. Measured in peers of 0.5 M,
# 10 M and 85 M parameters: 66e-9, 38e-9 and 30e-9.
EXPECTED_NUMBER_S = 35e-9
# Costs are averaged over REMEMBERED_WINDOWS windows or over REMEMBERED_S seconds, whichever is shorter. The limit in
# seconds makes the average forget the first windows soon, since they cost more than later windows. A window's cost is
# complete only after its merge. So the averages are updated after each fragment has closed a window, in an interval
# without gossip jobs. If gossip never pauses, they are updated after two windows of each fragment, and at least
# REMEMBERED_WINDOWS windows, of which few still wait for their merges.
REMEMBERED_WINDOWS = 16
REMEMBERED_S = 20.0
MOST_TIMES = 2  # a new measurement counts as at most this many times the average, so that one outlier changes little
FEWER_CORES = 0.1  # weight of a measurement that shows fewer training cores than estimated: training may have paused
NEWEST_IDLE = 0.3  # weight of the newest value in the running average of idle cores

# The window length doubles if the needed length exceeds LONGER times the present length. It halves if the needed length
# is below SHORTER times half the present length. The gap between these limits prevents flapping. It is narrow: first
# windows cost the most, first uploads are the slowest, and the length that follows from them must not stay. With
# SHORTER at 0.8, chance decided whether windows of 32 or 64 s stayed (docs/results/estimates.md).
LONGER, SHORTER = 1.1, 0.95


@dataclass(frozen=True, slots=True)
class CoresUsed:
    """The processor time that a peer used in an interval, in core-seconds: for training, for the network, and idle."""

    seconds: Seconds  # length of the interval
    training_s: Seconds  # core-seconds on the cores that train, or on all cores of the machine if a GPU trains
    network_s: Seconds  # core-seconds of the event loop and the network daemon
    idle_s: Seconds = 0.0  # core-seconds that no process used; 0 if unknown

    def since(self, earlier: "CoresUsed") -> "CoresUsed":
        """Return this reading minus an `earlier` reading whose interval began at the same instant."""
        return CoresUsed(
            self.seconds - earlier.seconds,
            self.training_s - earlier.training_s,
            self.network_s - earlier.network_s,
            self.idle_s - earlier.idle_s,
        )


@dataclass(frozen=True, slots=True)
class GossipTraffic:
    """How much of this peer's traffic in an interval belonged to gossip.

    A request counts as its own bytes plus a fixed number of bytes, which stands for the request's processor time.
    """

    part: float = 1.0  # gossip's share of the bytes of all traffic, 0 to 1
    work_bytes: float | None = None  # bytes of gossip, including the additional bytes for each request; None: unknown

    @property
    def least_s(self) -> Seconds:
        """Return a lower bound of the core-seconds that event loop and network daemon used for gossip."""
        return (self.work_bytes or 0.0) / FASTEST_BYTES_PER_S

    @property
    def most_s(self) -> Seconds:
        """Return an upper bound of the core-seconds that event loop and network daemon used for gossip."""
        return math.inf if self.work_bytes is None else self.work_bytes / SLOWEST_BYTES_PER_S


@dataclass(slots=True)
class Stretch:
    """The window length as a multiple of the configured length; the multiple is a power of two.

    With powers of two, every end of a longer window is also an end of a shorter window on any other peer. With
    finer steps, windows would use a link better, but peers with slightly different measurements would seldom end their
    windows together (docs/results/wan.md).
    """

    times: int = 1
    shorter: float = SHORTER  # the length halves if the needed length is below this share of its half

    def fit(self, needed: float) -> int:
        """Double or halve `self.times` until `needed` is within LONGER and `self.shorter`; return `self.times`."""
        while needed > LONGER * self.times:
            self.times *= 2
        while self.times > 1 and needed < self.shorter * self.times / 2:
            self.times //= 2
        return self.times


ALL_GOSSIP = GossipTraffic()


@dataclass(slots=True)
class GossipCost:
    """The average processor time that a window costs, and the window length that follows from this cost."""

    compute_s: Seconds = 0.0  # average core-seconds of the computing for one window of one fragment
    network_s: Seconds = 0.0  # average core-seconds of the transfers for one window of one fragment
    cores: float = 0.0  # estimated number of cores that training keeps busy
    idle: float = 0.0  # running average of the number of idle cores
    stretch: Stretch = field(default_factory=Stretch)
    _share: float = 0.0  # share of the training cores that gossip may use: an argument of the last call of `windows`
    _fragments: int = 1  # number of fragments: an argument of the last call of `windows`
    # Sums since the averages were last updated: core-seconds of jobs and of transfers, closed windows, measured seconds
    _jobs_s: Seconds = 0.0
    _transfers_s: Seconds = 0.0
    _windows: int = 0
    _since_s: Seconds = 0.0
    _alone: bool = True  # whether only gossip has used the network since then
    _busy: bool = False  # whether a gossip job has ended since the last measurement

    def did(self, cost_s: Seconds, closed: bool) -> None:
        """Record a gossip job of `cost_s` core-seconds; `closed` says whether it ended a window."""
        self._jobs_s += cost_s
        self._windows += closed
        self._busy = True

    @property
    def window_cost_s(self) -> Seconds:
        """Return the average cost of one fragment's window in core-seconds."""
        return self.compute_s + self.network_s

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Return the averages by which `windows` decides."""
        return self.compute_s, self.network_s, self.cores, self.idle

    def measured(self, used: CoresUsed, gossip_alone: bool, gossip: GossipTraffic = ALL_GOSSIP) -> None:
        """Record a measurement, and update the averages if the cost of the windows since the last update is known.

        Gossip is charged its part of the network's processor time, within bounds by its bytes. Without the upper bound,
        a flood of refused requests would make the windows ever longer.

        Args:
            used: Processor time in the interval.
            gossip_alone: False if a large transfer, such as a newcomer's state, also used the network. Gossip is then
                charged no network time.
            gossip: Gossip's part of the traffic in the interval.
        """
        cores = used.training_s / used.seconds
        self.cores = max(cores, self.cores + FEWER_CORES * (cores - self.cores))
        self.idle += NEWEST_IDLE * (used.idle_s / used.seconds - self.idle)
        self._since_s += used.seconds
        self._alone = self._alone and gossip_alone
        if gossip_alone:
            network_s = gossip.part * max(0.0, used.network_s - FIXED_CORES * used.seconds)
            self._transfers_s += min(max(network_s, gossip.least_s), gossip.most_s)
        needed = max(REMEMBERED_WINDOWS, 2 * self._fragments) if self._busy else self._fragments
        self._busy = False
        if self._windows >= needed:
            self.compute_s = self._averaged(self.compute_s, self._jobs_s / self._windows)
            if self._alone:
                self.network_s = self._averaged(self.network_s, self._transfers_s / self._windows)
            self._jobs_s, self._transfers_s, self._windows, self._since_s, self._alone = 0.0, 0.0, 0, 0.0, True

    def _averaged(self, known: Seconds, new: Seconds) -> Seconds:
        """Return the average `known`, updated with `new`, which counts as at most MOST_TIMES times the average."""
        if not known:
            return new
        counts = min(1.0, max(self._windows / REMEMBERED_WINDOWS, self._since_s / REMEMBERED_S))
        return known + counts * (min(new, MOST_TIMES * known) - known)

    def windows(self, window_s: Seconds, fragments: int, share: float, parameters: int = 0) -> int:
        """Return the window length, as a multiple of `window_s`, that keeps gossip's processor time within its limit.

        Args:
            window_s: The configured window length.
            fragments: Number of fragments that this peer gossips.
            share: Fraction of the training cores that gossip may use, 0 to 1.
            parameters: Parameters of all these fragments; the cost of windows is expected by them until it is measured.

        Returns:
            A power of two.
        """
        self._fragments = fragments
        if share != self._share:
            self._share, self.stretch = share, Stretch()
        cost_s = self.window_cost_s * fragments or EXPECTED_NUMBER_S * parameters
        if not cost_s or not self.cores:
            return self.stretch.times
        needed = cost_s / ((share * self.cores + IDLE_SHARE * self.idle) * window_s)
        return self.stretch.fit(needed)
