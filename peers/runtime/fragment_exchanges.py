"""The exchanges of all fragments that we hold: one machine each, of the run's algorithm (core/choices.py).

They begin when training does, and come and go with the fragments of a move. In a run with exact gradients there are
none: its rounds (comm/rounds/round.py) take their place, and questions for exchanges are refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.wire.messages import MOST_FOLLOWED, Refused
from decentral.comm.wire.transport import Effect, Event
from decentral.core.choices import ALGORITHMS, Algorithm
from decentral.core.fragments import Fragment
from decentral.core.journal.peer_totals import ExchangeTotals
from decentral.core.machine import Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.runtime.peer_selection import PeerSelection
from decentral.peers.runtime.setup import PresentSetup


@dataclass(slots=True)
class FragmentExchanges:
    setup: PresentSetup
    selection: PeerSelection
    counts: ExchangeTotals = field(default_factory=ExchangeTotals)
    running: dict[int, PullExchange] = field(default_factory=dict)  # by fragment
    _dropped: set[int] = field(default_factory=set)  # fragments whose exchanges have been here before
    _wake: Seconds | None = None  # when the first machine wants to wake; infinite: none does; None: not known yet

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.setup.now.config.gossip.algorithm]

    @property
    def wake_at(self) -> Seconds | None:
        """When the first machine wants to wake. It is looked up once after each event, as there may be many."""
        if self._wake is None:
            self._wake = earliest(one.wake_at for one in self.running.values()) or math.inf
        return None if self._wake == math.inf else self._wake

    @property
    def round(self) -> int:
        """The round of the fragment that is furthest, where the algorithm blocks; else 0."""
        return max((one.seq for one in self.running.values()), default=0) if self.algorithm.blocking else 0

    @property
    def windows(self) -> tuple[int, str]:
        """How many of the shortest windows make one, and what stretches them."""
        if not self.running:
            return 1, ""
        index, size = self._first
        return self.selection.lengths.windows(index, size)

    @property
    def period_s(self) -> Seconds:
        """How long our windows are at present."""
        return self.selection.lengths.window_s() * self.windows[0]

    @property
    def needed_s(self) -> Seconds:
        """How long our own links and cores need windows to be; 0: not known, as no window was closed yet."""
        index, size = self._first if self.running else (0, 0)
        return self.selection.lengths.needed_s(index, size) if size else 0.0

    @property
    def _first(self) -> tuple[int, int]:
        """A fragment, and the bytes of its snapshots: by its size those of all fragments are known."""
        index = min(self.running)
        return index, self.running[index].size

    def begin(self, now: Seconds) -> None:
        """Begins the exchanges of those fragments of ours that have none yet."""
        self._wake = None
        for fragment in self.setup.now.fragments:
            if fragment.index not in self.running:
                self.running[fragment.index] = self._exchange(fragment, now)

    def drop(self, lost: Sequence[int]) -> None:
        self._wake = None
        for index in lost:
            if self.running.pop(index, None) is not None:
                self._dropped.add(index)

    def woke(self, event: Woke, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        if self._wake is None or now >= self._wake:
            for index, exchange in self.running.items():
                if (wake_at := exchange.wake_at) is not None and now >= wake_at:
                    effects += self.tell(index, event, now)
        return effects

    def replan(self, now: Seconds) -> None:
        """Brings forward the ends of windows that were planned when windows were longer than they are now."""
        self._wake = None
        for exchange in self.running.values():
            exchange.replan(now)

    def tell(self, index: int, event: Event, now: Seconds) -> list[Effect]:
        """Passes an event to the exchange of a fragment, which must be running."""
        self._wake = None
        return self.running[index].handle(event, now)

    def refusal(self, index: int) -> Refused | None:
        """Why a fragment's exchange answers no pull; None if it does."""
        if self.algorithm.exact:
            return Refused(Reason.ALGORITHM, f"this run gossips by {self.algorithm.name}")
        if index in self.running:
            return None
        return Refused(Reason.NOT_READY if index in self.setup.now.held else Reason.FRAGMENT)

    def _exchange(self, fragment: Fragment, now: Seconds) -> PullExchange:
        """Windows of the fragments are staggered, so that one at a time is on the wire."""
        setup, known = self.setup.now, self.algorithm
        assert not known.exact, f"{known.name} has no exchanges"
        others = self.selection.roster.live.values() if known.blocking else ()
        newest = max((one.record.round for one in others if one.record.round < MOST_FOLLOWED), default=0)
        is_back = setup.restored_step is not None or fragment.index in self._dropped  # a move that failed, or one back
        context = FragmentContext(
            run=setup.run,
            peer=setup.own.peer,
            fragment=fragment.index,
            phase=(fragment.index + 1) / len(setup.cuts),
            gossip=setup.config.gossip,
            view=self.selection,
            counts=self.counts,
            restored_at=now if is_back and not known.blocking else 0.0,
            fresh_s=setup.start.times.max_age_s,
        )
        close_at = context.next_close(now, 0)
        return PullExchange(context, close_at, blocking=known.blocking, light=known.light, seq=newest)
