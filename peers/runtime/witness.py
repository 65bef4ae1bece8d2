"""Measure other peers' work, as a witness of their contributions (core/credit.py). Start reading at `Witness`.

This peer's record publishes the measurements. The journal keeps its signed records, and the last ones of other peers,
so that contributions can be added up after the run, and a restarted peer continues with its measurements.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest

from decentral.comm.pipeline.router import Router
from decentral.comm.wire.transport import Answered
from decentral.core import rng
from decentral.core.credit import MOST_WITNESSED, NOTHING_SEEN, SeenWork, explained_tokens
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, suffix
from decentral.core.jobs import Merged, PartnerWork
from decentral.core.journal.events import AuditLine, StatementLine
from decentral.core.journal.field_kinds import MOST_NUMBER
from decentral.core.latest import keep_latest
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.membership import swarm_size
from decentral.peers.membership.roster import Roster
from decentral.peers.runtime.peer_selection import PeerSelection
from decentral.peers.runtime.setup import PresentSetup

MOST_TALLIES = 4096  # the work of at most this many peers is recorded; a roster has no more
# A pause between two merged windows of a peer is credited up to the longest of: PAUSE_S, PAUSE_TURNS times the expected
# time between two of our pulls from it, and twice its usual window.
PAUSE_S, PAUSE_TURNS = 10.0, 8.0
LONGER = 1.05  # each merge raises the estimate of how long a peer's windows last by at most this factor
OWN_EVERY_S = 60.0  # our own record is written to the journal at this interval; each line has about 3 kB
MOST_LAST = 64  # a leaving peer writes the last records of at most this many others to its journal
MOST_FEW = (1 << 32) - 1  # larger values of `met_s`, `passed` or `failed` would make our record invalid
MOST_AMOUNT = MOST_NUMBER - 1


@dataclass(frozen=True, slots=True)
class MergedWindow:
    """A partner's window of a fragment, as this peer has merged it."""

    fragment: int
    share: float  # the fragment's share of the model's parameters, 0 to 1
    closed_at: Seconds  # when the partner closed the window
    lasted_s: Seconds  # how long the window lasted, as the partner says; 0.0: not known
    own_s: Seconds  # how long our own window lasted
    pause_s: Seconds  # of the time since the partner's previous window, at most this or two usual windows are credited


@dataclass(slots=True)
class Tally:
    """The contribution record of one peer since this process started; SeenWork explains the fields."""

    claimed: float = 0.0
    own: float = 0.0  # number of tokens on which we have trained in the same time
    length: float = 0.0  # sum of the lengths (L2 norms) of the peer's windows
    own_length: float = 0.0  # sum of the lengths of our windows in the same merges
    met_s: Seconds = 0.0
    served_bytes: int = 0
    passed: int = 0
    failed: int = 0
    turn: int = 0  # our record has at most MOST_WITNESSED peers: those with the smallest `turn`
    before: SeenWork = NOTHING_SEEN  # what earlier processes of this peer have measured
    # Fragment -> when its last window was closed (None: not since the peer came), and about how long its windows last.
    _windows: dict[int, tuple[Seconds | None, Seconds]] = field(default_factory=dict)

    def served(self, received_bytes: int) -> None:
        """Count bytes that came from the peer."""
        self.served_bytes += received_bytes

    def judged(self, right: bool) -> None:
        """Count a check of the peer's work: passed if `right`, else failed."""
        self.passed, self.failed = self.passed + right, self.failed + (not right)

    def left(self) -> None:
        """Credit no time between the peer's last window and its next one: it was dropped from the roster, or left."""
        self._windows = {fragment: (None, usual_s) for fragment, (_, usual_s) in self._windows.items()}

    def met(self, window: MergedWindow, work: PartnerWork | None) -> None:
        """Credit the peer, at the speed of this window, for the time since its previous window of the fragment.

        The peer gets the work of this window as many times as the window fits into that time. The window is taken to
        last as long as the peer says, but at least as long as our own, and as the shortest recent time between two
        of the peer's windows that we merged. So a peer that understates how long its windows last gains little.

        Args:
            window: The window; the first one of a fragment since the peer joined brings no credit.
            work: The work behind the window; None if the merge has refused it: the time counts, but brings no tokens.
        """
        before, usual_s = self._windows.get(window.fragment, (None, math.inf))
        between_s = 0.0 if before is None else max(0.0, window.closed_at - before)
        usual_s = usual_s if before is None else min(between_s, LONGER * usual_s)
        self._windows[window.fragment] = window.closed_at, usual_s
        if not between_s:
            return
        since_s = min(between_s, max(window.pause_s, 2 * usual_s))
        self.met_s += window.share * since_s
        if work is not None:
            times = window.share * since_s / max(usual_s, window.lasted_s, window.own_s)
            self.claimed += times * work.claimed
            self.own += times * work.own
            self.length += times * work.length
            self.own_length += times * work.own_length

    def row(self, peer: str, carried: int) -> SeenWork:
        """Return the peer's work for our record; `carried` is the number of tokens that our router has counted."""
        old = self.before
        explained = explained_tokens(self.own, self.length / self.own_length) if self.own_length else 0.0
        return SeenWork(
            peer=peer,
            claimed=min(MOST_AMOUNT, old.claimed + round(self.claimed)),
            explained=min(MOST_AMOUNT, old.explained + round(explained)),
            carried=min(MOST_AMOUNT, old.carried + carried),
            met_s=min(MOST_FEW, old.met_s + round(self.met_s)),
            served_bytes=min(MOST_AMOUNT, old.served_bytes + self.served_bytes),
            passed=min(MOST_FEW, old.passed + self.passed),
            failed=min(MOST_FEW, old.failed + self.failed),
        )


@dataclass(slots=True)
class Witness:
    """This peer's measurements of other peers' work, updated by events, and shown in this peer's record and journal."""

    setup: PresentSetup
    roster: Roster
    selection: PeerSelection
    routes: Router | None
    tallies: dict[str, Tally] = field(default_factory=dict)  # last characters of a peer's id -> the peer's work
    _own_at: Seconds = 0.0

    def __post_init__(self) -> None:
        """Continue with the measurements that earlier processes of this peer have published."""
        self.tallies = {row.peer: Tally(turn=self._turn(row.peer), before=row) for row in self.setup.now.seen}

    def of(self, peer: PeerId) -> Tally:
        """Return the record of a peer's work, to be changed by the caller; at first its fields are 0."""
        end = suffix(peer)
        found = self.tallies.get(end) or Tally(turn=self._turn(end))
        keep_latest(self.tallies, end, found, MOST_TALLIES)
        return found

    def _turn(self, end: str) -> int:
        return rng.seed_of(0, "witness", self.setup.now.own.peer, end)

    def answered(self, event: Answered) -> None:
        """Count the bytes of a peer's answer."""
        self.of(event.peer).served(event.received_bytes)

    def merged(self, merged: Merged, own_s: Seconds, pulled: Mapping[PeerId, tuple[Seconds, Seconds]]) -> None:
        """Credit the partners of a merge for their windows; those that the merge has refused count as failed checks.

        Args:
            merged: The merge.
            own_s: How long our own window lasted; 0.0: not known.
            pulled: For each partner, when it closed its window and how long the window lasted, as the partner says.
        """
        held = next((one for one in self.setup.now.fragments if one.index == merged.fragment), None)
        if held is None or not own_s:
            return
        turns = len(self.selection.holders(merged.fragment)) / max(1, len(pulled))
        share = held.parameters / sum(cut.parameters for cut in self.setup.now.cuts)
        pause_s = max(PAUSE_S, PAUSE_TURNS * turns * own_s)
        work = {one.peer: one for one in merged.work}
        for peer, (at, lasted_s) in pulled.items():
            self.of(peer).met(MergedWindow(merged.fragment, share, at, lasted_s, own_s, pause_s), work.get(peer))
        for peer in merged.used:
            self.of(peer).judged(True)
        for peer, _ in merged.rejected:
            self.of(peer).judged(False)

    def left(self, peer: PeerId) -> None:
        """Note that a peer has left the roster, so that the time until it is back is not credited."""
        if tally := self.tallies.get(suffix(peer)):
            tally.left()

    def audited(self, line: AuditLine) -> None:
        """Count the verdict of an audit for the peer whose answer was audited, or for the one found wrong."""
        if line.verdict == "agreed":
            self.of(line.peers[0]).judged(True)
        elif line.wrong is not None:
            self.of(line.wrong).judged(False)

    def rows(self) -> tuple[SeenWork, ...]:
        """Return the work of at most MOST_WITNESSED peers, for our record.

        If there are more peers, a hash of both peers' ids chooses, so that all peers get about as many witnesses.
        """
        computed = self.routes.commits.computed if self.routes else {}
        carried = {suffix(peer): count // self.setup.now.layers for peer, count in computed.items()}
        for peer in computed:
            self.of(peer)
        ends = nsmallest(MOST_WITNESSED, self.tallies, key=lambda end: self.tallies[end].turn)
        return tuple(self.tallies[end].row(end, carried.get(end, 0)) for end in sorted(ends))

    def lines(self, now: Seconds) -> list[Log]:
        """Return the journal line with our own signed record, if it is due."""
        if now < self._own_at:
            return []
        first, self._own_at = not self._own_at, now + OWN_EVERY_S
        return [] if first else self.signed([self.setup.now.own.peer])  # the first record has no measurements yet

    def last_lines(self) -> list[Log]:
        """Return journal lines with the last signed records: those of at most MOST_LAST other peers, and our own.

        Ours is last, since the next process of this peer reads only the end of the journal.
        """
        return self.signed([*sorted(self.roster.live)[:MOST_LAST], self.setup.now.own.peer])

    def signed(self, peers: Sequence[PeerId]) -> list[Log]:
        """Return a journal line for each of these peers that has a signed record, with the newest one.

        In a large swarm, whose records are under many DHT keys, only our own record gets a line.
        """
        setup, level = self.setup.now, self.roster.size.level
        found = []
        for peer in peers:
            if level and peer != setup.own.peer:
                continue
            key = swarm_size.key_of(setup.run, peer, level)
            try:
                signed_for, record = setup.own.bare(key, peer, self.roster.sealed(peer))
            except ProtocolError:
                continue
            if record:
                text = base64.b64encode(record).decode()
                found.append(Log(StatementLine(peer=peer, key=signed_for, record=text)))
        return found
