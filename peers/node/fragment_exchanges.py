"""The exchanges of all fragments that we hold: one machine each, of the run's algorithm (comm/gossip/pull.py, swap, push).

They begin when training does, and come and go with the fragments of a move. In a synchronous run there are none: its
rounds (comm/rounds/round.py) take their place, and questions for them are refused.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from decentral.comm.gossip.pull import PullExchange
from decentral.comm.gossip.push import PushExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.gossip.swap import SwapExchange
from decentral.comm.wire.messages import Message, Pull, Push, Refused, Swap, SwapCommit
from decentral.core.jobs import Fragment
from decentral.core.machine import Effect, Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.node.peer_selection import PeerSelection
from decentral.peers.node.setup import NodeSetup

QUESTIONS: dict[str, tuple[type[Message], ...]] = {
    "pull": (Pull,),
    "allreduce": (Pull,),
    "symmetric": (Swap, SwapCommit),
    "push_sum": (Push,),
    "synchronous": (),
}

Gossip = PullExchange | SwapExchange | PushExchange


@dataclass(slots=True)
class FragmentExchanges:
    setup: Callable[[], NodeSetup]  # as it is now
    selection: PeerSelection
    chance: Random
    running: dict[int, Gossip] = field(default_factory=dict)  # by fragment
    _wake: Seconds | None = None  # the first one's wish; infinite: none; None: to be looked for

    @property
    def wake_at(self) -> Seconds | None:
        """Looked for once after each event: it takes a look at every exchange."""
        if self._wake is None:
            self._wake = earliest(one.wake_at for one in self.running.values()) or math.inf
        return None if self._wake == math.inf else self._wake

    @property
    def round(self) -> int:
        """How many rounds of allreduce we have seen, of the fragment that has seen the most."""
        return max(
            (one.seq for one in self.running.values() if isinstance(one, PullExchange) and one.synchronous), default=0
        )

    def begin(self, now: Seconds) -> None:
        """Of all that we hold."""
        self.running = {fragment.index: self._exchange(fragment, now) for fragment in self.setup().fragments}
        self._wake = None

    def add(self, fragments: Iterable[Fragment], now: Seconds) -> None:
        """Of those that have none yet."""
        for fragment in fragments:
            if fragment.index not in self.running:
                self.running[fragment.index] = self._exchange(fragment, now)
                self._wake = None

    def drop(self, lost: Sequence[int]) -> None:
        for index in lost:
            self.running.pop(index, None)
            self._wake = None

    def woke(self, event: Woke, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        if self._wake is None or now >= self._wake:
            for index, exchange in self.running.items():
                wake_at = exchange.wake_at
                if wake_at is not None and now >= wake_at:
                    effects += self.tell(index, event, now)
        return effects

    def tell(self, index: int, event: object, now: Seconds) -> list[Effect]:
        """To the exchange of a fragment, which there must be."""
        self._wake = None
        return self.running[index].handle(event, now)

    def refusal(self, message: Message, index: int) -> Refused | None:
        """Why a question about a fragment is not one for its exchange; None if it is."""
        setup = self.setup()
        if index not in self.running and not setup.config.synchronous:
            return Refused(Reason.NOT_READY if setup.holds(index) else Reason.FRAGMENT)
        algorithm = setup.config.gossip.algorithm
        if not isinstance(message, QUESTIONS[algorithm]):
            return Refused(Reason.ALGORITHM, f"this run gossips by {algorithm}")
        return None

    def _exchange(self, fragment: Fragment, now: Seconds) -> Gossip:
        """Windows of the fragments are staggered, so that one at a time is on the wire."""
        setup = self.setup()
        gossip = setup.config.gossip
        synchronous = gossip.algorithm == "allreduce"
        phase = (fragment.index + 1) / len(setup.cuts)
        if not synchronous and gossip.algorithm != "pull":
            phase = self.chance.random()  # peers that ask each other at the same time only get in each other's way
        context = FragmentContext(setup.run, setup.own.peer, fragment.index, phase, gossip.max_age_s)
        close_at = context.next_close(now, self.selection.period_s(0))
        if gossip.algorithm == "symmetric":
            return SwapExchange(context, self.selection, close_at)
        if gossip.algorithm == "push_sum":
            return PushExchange(context, self.selection, close_at)
        rounds = [entry.record.round for entry in self.selection.roster.live.values()]
        seq = max(rounds, default=0)
        if synchronous:
            return PullExchange(context, self.selection, close_at, synchronous=True, seq=seq)
        return PullExchange(context, self.selection, close_at, light=("delta",), whole_every=gossip.consensus_every)


__all__ = ["FragmentExchanges"]
