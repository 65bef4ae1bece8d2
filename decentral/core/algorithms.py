"""The interface between a node and the machine that exchanges one fragment.

The gossip algorithms themselves are records of decentral/core/choices.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Log, log
from decentral.core.reasons import known_reason
from decentral.core.units import Seconds

if TYPE_CHECKING:
    from decentral.core.config import GossipConfig


class GossipView(Protocol):
    """What gossip needs to know of the swarm; peers/runtime/peer_selection.py knows it from the roster and the
    meter."""

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """The peers to exchange with in this window."""

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """All other peers that hold the fragment and train."""

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """The speed at which that peer can train the fragment at most, by its record; 0: not published yet."""

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long a transfer of `size` bytes from that peer may take."""

    def window_s(self) -> Seconds:
        """The length of the shortest windows."""

    def period_s(self, fragment: int, size: int) -> Seconds:
        """Seconds between two windows of a fragment whose snapshots have `size` bytes: a multiple of `window_s`."""

    def is_thin(self, fragment: int, size: int) -> bool:
        """Whether our link, and nothing else, would stretch the fragment's windows with snapshots of `size` bytes."""


@dataclass(slots=True)
class ExchangeCounts:
    """Counters of the exchanges that a peer has ended, all fragments together."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, ...]] = field(default_factory=Counter)  # keyed by (outcome, reason)

    def add(self, outcome: str, reason: str) -> None:
        self.outcomes[outcome] += 1
        self.reasons[outcome, known_reason(reason)] += 1


@dataclass(frozen=True, slots=True)
class FragmentContext:
    """What the exchange machine of one fragment is told when it is made."""

    run: RunId
    peer: PeerId  # ourselves
    fragment: int
    phase: float  # when its windows end, as a part of the period
    gossip: "GossipConfig"
    view: GossipView
    counts: ExchangeCounts = field(default_factory=ExchangeCounts)  # of all fragments of this peer
    restored_at: Seconds = 0.0  # what was published before it may be in the checkpoint that this peer goes on from
    fresh_s: Seconds = 60.0  # a snapshot that is no older is merged

    def period_s(self, size: int) -> Seconds:
        """Seconds between two windows of the fragment, where its snapshots have `size` bytes."""
        return self.view.period_s(self.fragment, size)

    def next_close(self, now: Seconds, size: int) -> Seconds:
        """When the fragment's next window ends: at the same instants on every peer that has the same phase.

        Aligned windows make fresh partners: their snapshots are as old as the exchange takes, not half a window
        older (docs/CONVERGENCE.md has what that is worth). Clocks need agree to a small part of the period only. Where
        windows are stretched, fragments take turns at the ends of the shortest windows; so a peer whose windows are
        twice as long as its partner's ends each of them together with one of the partner's.
        """
        period_s, window_s = self.period_s(size), self.view.window_s()
        turn = self.fragment % max(1, round(period_s / window_s))
        offset = window_s * (turn + self.phase)
        end = ((now - offset) // period_s + 1) * period_s + offset
        return end if end > now else end + period_s  # at a window's end, rounding may give that end again

    def partners(self, now: Seconds) -> Sequence[PeerId]:
        return self.view.partners(self.fragment, now)

    def max_age_s(self, size: int) -> Seconds:
        """An older snapshot is not merged. One of a partner whose windows are long may be as old as two of them."""
        return max(self.fresh_s, 2 * self.period_s(size))

    def exchange_ended(
        self, partner: PeerId | None, outcome: str, reason: str, seconds: Seconds, moved: tuple[int, int] = (0, 0)
    ) -> Log:
        """Count an exchange, and return the journal's line about it; `moved` is the bytes sent and received."""
        self.counts.add(outcome, reason)
        return log(
            "exchange",
            fragment=self.fragment,
            partner=partner,
            outcome=outcome,
            reason=reason,
            seconds=round(seconds, 4),
            sent_bytes=moved[0],
            received_bytes=moved[1],
        )
