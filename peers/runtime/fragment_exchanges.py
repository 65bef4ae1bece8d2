"""Run the gossip exchanges of all fragments that this peer holds, one state machine per fragment.

Start at `FragmentExchanges`. Exchanges begin when training begins, or when the peer gets a new fragment. A synchronous
run has rounds (comm/rounds/round.py) instead of exchanges, and its peers refuse pulls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.snapshots import FragmentContext, SnapshotStore
from decentral.comm.wire.messages import MOST_FOLLOWED, Refused
from decentral.comm.wire.transport import Effect, Event
from decentral.core.choices import ALGORITHMS, Algorithm
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.journal.peer_totals import ExchangeTotals
from decentral.core.machine import Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.runtime.peer_selection import PeerSelection
from decentral.peers.runtime.setup import PresentSetup


class Exchange(Protocol):
    """The interface of a state machine that exchanges one fragment, such as `PullExchange`.

    The tags of its questions are `ExchangeTag`s (comm/gossip/exchange.py), by which the node finds it. A new one also
    gets a node of its own in `setup_of` of tests/fuzz/fuzzed_node.py.
    """

    context: FragmentContext
    seq: int  # number of the last closed window
    usual_answer_bytes: int
    lasted_s: Seconds  # time between the last two closes
    blocking: bool  # whether training waits for each merge
    published: SnapshotStore

    @property
    def pulled(self) -> dict[PeerId, tuple[Seconds, Seconds]]:
        """Return each pulled partner's (time of the close, seconds that the window lasted), as the partner says."""

    @property
    def wake_at(self) -> Seconds | None:
        """Return when the machine needs a timer event (Woke) next; None while it waits only for other events."""

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Return the effects of an event."""

    def replan(self, now: Seconds) -> None:
        """End the present window earlier, if a shorter window is now enough."""


@dataclass(slots=True)
class FragmentExchanges:
    """The state machines of a peer's exchanges, one per fragment; the node passes events to them."""

    setup: PresentSetup
    selection: PeerSelection
    counts: ExchangeTotals = field(default_factory=ExchangeTotals)
    running: dict[int, Exchange] = field(default_factory=dict)
    _dropped: set[int] = field(default_factory=set)
    _wake: Seconds | None = None

    @property
    def algorithm(self) -> Algorithm:
        """Return the run's gossip algorithm."""
        return ALGORITHMS[self.setup.now.config.gossip.algorithm]

    @property
    def wake_at(self) -> Seconds | None:
        """Return when an exchange next needs a timer event (Woke); None if no exchange needs one."""
        if self._wake is None:
            self._wake = earliest(one.wake_at for one in self.running.values()) or math.inf
        return None if self._wake == math.inf else self._wake

    @property
    def round(self) -> int:
        """Return the number of the last round that we began, if the gossip algorithm is blocking; else 0."""
        return max((one.seq for one in self.running.values()), default=0) if self.algorithm.blocking else 0

    @property
    def windows(self) -> tuple[int, str]:
        """Return our windows' length as a multiple of the shortest window, and its reason (`WindowLengths.windows`)."""
        if not self.running:
            return 1, ""
        index, size = self._first
        return self.selection.lengths.windows(index, size)

    @property
    def period_s(self) -> Seconds:
        """Return the present length of our windows in seconds."""
        return self.selection.lengths.window_s() * self.windows[0]

    @property
    def needed_s(self) -> Seconds:
        """Return the window length in seconds that our link and cores need; 0.0 until the first window has closed."""
        index, size = self._first if self.running else (0, 0)
        return self.selection.lengths.needed_s(index, size) if size else 0.0

    @property
    def _first(self) -> tuple[int, int]:
        """Return the index and the snapshot size in bytes of our first fragment, which decide the windows' length."""
        index = min(self.running)
        return index, self.running[index].usual_answer_bytes

    def begin(self, now: Seconds) -> None:
        """Begin an exchange for each of our fragments that has none; called when training begins or layers change."""
        self._wake = None
        for fragment in self.setup.now.fragments:
            if fragment.index not in self.running:
                self.running[fragment.index] = self._exchange(fragment, now)

    def drop(self, given_up: Sequence[int]) -> None:
        """End the exchanges of these fragments, because this peer gives the fragments up."""
        self._wake = None
        for index in given_up:
            if self.running.pop(index, None) is not None:
                self._dropped.add(index)

    def woke(self, event: Woke, now: Seconds) -> list[Effect]:
        """Pass a timer event to the exchanges whose `wake_at` has come, and return their effects."""
        effects: list[Effect] = []
        if self._wake is None or now >= self._wake:
            for index, exchange in self.running.items():
                if (wake_at := exchange.wake_at) is not None and now >= wake_at:
                    effects += self.tell(index, event, now)
        return effects

    def replan(self, now: Seconds) -> None:
        """Let each exchange end its present window earlier, if a shorter window is now enough."""
        self._wake = None
        for exchange in self.running.values():
            exchange.replan(now)

    def tell(self, index: int, event: Event, now: Seconds) -> list[Effect]:
        """Pass an event to a fragment's exchange, which must be running, and return the effects."""
        self._wake = None
        return self.running[index].handle(event, now)

    def refusal(self, index: int) -> Refused | None:
        """Return the refusal of another peer's pull of this fragment; None if our exchange can answer the pull."""
        if self.algorithm.synchronous:
            return Refused(Reason.ALGORITHM, f"this run gossips by {self.algorithm.name}")
        if index in self.running:
            return None
        return Refused(Reason.NOT_READY if index in self.setup.now.held else Reason.FRAGMENT)

    def _exchange(self, fragment: Fragment, now: Seconds) -> Exchange:
        """Return a new exchange of a fragment; windows of different fragments end at different times."""
        setup, known = self.setup.now, self.algorithm
        assert not known.synchronous, f"{known.name} has no exchanges"
        others = self.selection.roster.live.values() if known.blocking else ()
        newest = max((one.record.round for one in others if one.record.round < MOST_FOLLOWED), default=0)
        # Whether this peer held the fragment earlier, before a restart or before it dropped the fragment.
        is_back = setup.restored_step is not None or fragment.index in self._dropped
        context = FragmentContext(
            run=setup.run,
            peer=setup.own.peer,
            fragment=fragment.index,
            phase=(fragment.index + 1) / len(setup.cuts),
            gossip=setup.config.gossip,
            view=self.selection,
            lengths=self.selection.lengths,
            counts=self.counts,
            restored_at=now if is_back and not known.blocking else 0.0,
            fresh_s=setup.start.times.max_age_s,
        )
        close_at = context.next_close(now, 0)
        return PullExchange(context, close_at, blocking=known.blocking, seq=newest)
