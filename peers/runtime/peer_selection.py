"""Choose partners and list possible donors for one peer, from the roster and the measured links.

`PeerSelection` shows the swarm to gossip (GossipView), to synchronous rounds (RoundView), to a joining peer (JoinView)
and to changes of a peer's layers; routes use peers/runtime/route_planner.py instead. All results follow from the
present roster; lists are cached until the roster changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from decentral.comm.wire.meter import Meter
from decentral.core.choices import ALGORITHMS
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup
from decentral.peers.runtime.window_lengths import WindowLengths

NEVER = -1  # stands for the step of a state if a peer has no such state on its disk
SILENT_TTLS = 2  # after this many record lifetimes without a published speed, a peer counts as the slowest
FASTEST_DEVICE = 64.0  # published speeds are capped at this many times the median or our own speed, as they may be lies
WEIGHT_FLOOR = 0.1  # a slow partner is chosen with at least this share of the fastest partner's probability


@dataclass(slots=True)
class PeerSelection:
    """One peer's view of the swarm: which layers and states other peers hold, their speeds, and which peers to ask."""

    setup: PresentSetup
    roster: Roster
    meter: Meter
    progress: TrainingProgress
    chance: Random
    lengths: WindowLengths = field(init=False)
    _changes: int = -1
    _speeds: list[float] | None = None
    _live: Sequence[PeerId] | None = None
    _trainers: Sequence[PeerId] | None = None
    _holders: dict[int, Sequence[PeerId]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make `lengths`, the rule for window lengths."""
        self.lengths = WindowLengths(self.setup, self.roster, self.meter, self.progress)

    # The next methods implement GossipView, the interface through which gossip sees the swarm.

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """Return the peers to exchange a fragment with in this window.

        Blocking algorithms get all other holders of the fragment. Other algorithms get a random sample of the holders,
        weighted by our measured downlink from each holder.
        """
        gossip, holders = self.setup.now.config.gossip, self.holders(fragment)
        if ALGORITHMS[gossip.algorithm].blocking:
            return holders
        return self._draw(holders, min(self.lengths.pulls(gossip.partners), len(holders)))

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """Return the speed at which a peer trains one fragment, from the peer's published speed.

        Peers publish their speed through the whole model. With routes a peer may compute only this fragment, so the
        speed is divided by the fragment's share of the parameters. A published speed may be a lie, so it is capped at
        FASTEST_DEVICE times the median of all speeds or our own speed, whichever is higher. A peer that publishes no
        speed within SILENT_TTLS record lifetimes counts as the slowest peer.

        Args:
            peer: Any peer.
            fragment: Index of the fragment.

        Returns:
            Tokens/s; 0.0 if the peer is not in the roster, or has not published its speed yet.
        """
        entry, setup = self.roster.live.get(peer), self.setup.now
        if entry is None:
            return 0.0
        cut = next(cut for cut in setup.cuts if cut.index == fragment)
        part = 1.0 if setup.routes is None else cut.parameters / sum(one.parameters for one in setup.cuts)
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
            self._speeds = sorted([speed for entry in live if (speed := entry.record.profile.tokens_per_s)])
        return self._speeds

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the deadline in seconds for a transfer of `size` bytes from a peer, by the measured link."""
        return self.meter.deadline_s(peer, size)

    def _draw(self, peers: Sequence[PeerId], count: int) -> list[PeerId]:
        """Return a random sample of `count` peers, weighted by downlink; an unmeasured link counts as the fastest."""
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

    # The next methods implement RoundView, the interface through which synchronous rounds see the swarm.

    def member_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the seconds to wait for `size` bytes from a member of a round.

        Late answers to earlier requests do not make the result longer.
        """
        return self.meter.first_deadline_s(peer, size)

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer has a valid record, or answered us while this peer was starting."""
        return self.roster.knows(peer) or peer in self.setup.now.contacts

    def acquaintances(self) -> Sequence[PeerId]:
        """Return all peers in the roster, and all peers that answered us while this peer was starting, sorted by id."""
        return sorted({*self.roster.live, *self.setup.now.contacts})

    def trainers(self) -> Sequence[PeerId]:
        """Return the other peers that train, by their records, sorted by id."""
        self._forget_an_old_roster()
        if self._trainers is None:
            live = self.roster.live.items()
            self._trainers = sorted(peer for peer, entry in live if entry.record.phase == PeerPhase.TRAINING)
        return self._trainers

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """Return the other peers that train and hold the whole fragment, sorted by id."""
        self._forget_an_old_roster()
        if fragment not in self._holders:
            cut = next(cut for cut in self.setup.now.cuts if cut.index == fragment)
            self._holders[fragment] = [peer for peer in self.trainers() if self.roster.live[peer].record.covers(cut)]
        return self._holders[fragment]

    def newest_retained(self, fragment: int) -> tuple[int, list[PeerId]]:
        """Return the step of the newest state of a fragment on other peers' disks, and the peers that have it.

        Returns:
            (learning-rate step, peers); (NEVER, []) if no peer retains a state of the fragment.
        """
        found = {peer: dict(entry.record.kept).get(fragment, NEVER) for peer, entry in sorted(self.roster.live.items())}
        newest = max(found.values(), default=NEVER)
        return newest, [peer for peer, step in found.items() if step == newest > NEVER]

    def donates(self, peer: PeerId, fragment: Fragment) -> bool:
        """Return whether we, as a newcomer, may ask this peer for the fragment, judged by the peer's record.

        A newcomer that will hold the whole model may also ask peers that do not train yet, or that have no record:
        such peers can refuse.
        """
        entry = self.roster.live.get(peer)
        if entry is None or entry.record.phase != PeerPhase.TRAINING:
            return self.setup.now.whole and (entry is None or entry.record.covers(fragment))
        return entry.record.covers(fragment)

    def donors(self) -> Sequence[PeerId]:
        """Return the peers that a newcomer may ask for a state: peers that train, else all reachable peers."""
        return self.trainers() or self.live()

    def swarm_step(self) -> int | None:
        """Return the swarm's learning-rate step: the upper median over the peers that train.

        Returns:
            The step; None if fewer than three peers train, since a single peer could then choose the median.
        """
        steps = sorted(self.roster.live[peer].record.lr_step for peer in self.trainers())
        return steps[len(steps) // 2] if len(steps) > 2 else None

    def live(self) -> Sequence[PeerId]:
        """Return the reachable peers, sorted by id."""
        self._forget_an_old_roster()
        if self._live is None:
            self._live = sorted(self.roster.live)
        return self._live

    def _forget_an_old_roster(self) -> None:
        if self._changes != self.roster.changes:
            self._changes, self._speeds, self._live, self._trainers = self.roster.changes, None, None, None
            self._holders.clear()
