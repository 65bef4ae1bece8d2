"""Decide which peer takes over layers that have lost their last holder, and when. See `LayerRecovery`.

**Turns.** All peers rank the candidates in the same way, if their rosters agree. A candidate's new span fits into its
memory, contains as many lost layers as possible, and gives up only layers that other peers hold. After a random
back-off, the first candidate moves (scheduler/placement/move.py). Every TURN_S one more candidate may move, in case the
earlier candidates could not.

**State.** The state of lost layers comes from a peer that retains it on its disk, because it gave the layers up or
copied them (scheduler/placement/cold_copies.py). If no peer retains it, the layers wait for their last holder, which
may return with its checkpoint. A peer takes layers only when all lost layers of its new span have a state. After
INITIALISE_AFTER_S the layers start from initial weights; at once, if no peer has trained yet. If the last holder
returns after that, its training of the layers is lost, since the new weights count as newer. While a peer with the lost
layers is joining, it may be their last holder, so the others wait up to RETURN_S.

**No candidate.** If no single move gives lost layers a holder, recovery is `stuck`: the peers then search for a plan in
which several of them move (scheduler/placement/plans.py). Layers that an adopted plan gives to a peer count as layers
of a joining peer.

**First layers.** Only peers that may begin micro-batches (`originates`) count as holders of the first layers, and only
such peers take them. Peers with the whole model begin no micro-batches for others. If only they hold the first layers,
a peer with another part takes these layers, since all peers with parts would otherwise be idle.

**Relief.** If only peers with the whole model hold some later layers, micro-batches queue there behind the holders' own
work. After RELIEVE_AFTER_S a peer with a part takes such layers over, if enough other parts hold what it gives up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.units import Seconds
from decentral.scheduler.placement.evaluate import FIRST, TrainingPeer

RECOVERY_BACKOFF_S = 2.0  # the first candidate for lost layers waits a random time of up to this before it moves
TURN_S = 10.0  # each further candidate for lost layers moves this much later than the one before
RELIEF_TURN_S = 600.0  # candidates to relieve whole-model peers take turns this far apart: simultaneous moves do harm
RELIEF_PAUSE_S = 60.0  # first pause between two moves of a peer that relieve whole-model peers; doubles each time
JOINING_S = 120.0  # a joining peer that has claimed lost layers may take this long to arrive before others take them
RELIEVE_AFTER_S = 30.0  # peers wait this long before relief, since a holder that only restarts is back by then
RETURN_S = 1800.0  # peers wait this long for a joining peer that may bring the only state of lost layers
# Lost layers whose state nobody has get initial weights after this time, in which no joining peer could bring a state.
INITIALISE_AFTER_S = 60.0


@dataclass(slots=True)
class Gaps:
    """The fragments that lack a holder of one kind (such as any holder), and since when each fragment has lacked it.

    If a peer with such a fragment is joining, other peers wait for that peer, but only for a limited time, since a
    stranger could announce all fragments and never join. The wait is counted per fragment and not per joining peer, so
    that a stranger cannot prolong it with a new peer id.
    """

    _since: dict[int, Seconds] = field(default_factory=dict)

    def not_waited_for(
        self, gaps: Sequence[int], joining: Sequence[range], now: Seconds, most_s: Seconds = JOINING_S
    ) -> list[int]:
        """Record which fragments lack a holder now, and return those for which peers need not wait any longer.

        Peers wait for a fragment while a peer with this fragment is joining, but for at most `most_s`.

        Args:
            gaps: All fragments that lack a holder now.
            joining: The spans of the peers that are joining.
            now: Unix time in seconds.
            most_s: Longest wait for a joining peer, counted from the first call that reported the fragment.
        """
        self._since = {index: self._since.get(index, now) for index in gaps}
        return [
            index for index in gaps if now >= self._since[index] + most_s or not any(index in span for span in joining)
        ]


@dataclass(slots=True)
class LayerRecovery:
    """The rule that decides when this peer takes over lost layers, or layers that only whole-model peers hold."""

    own: PeerId
    needs: MemoryNeeds
    chance: Random
    stuck: bool = False  # whether, at the last review, no single move could give the lost layers a holder
    initial: frozenset[int] = frozenset()  # fragments that nobody holds and that may start from initial weights
    _unheld: Gaps = field(default_factory=Gaps)  # fragments that no peer holds
    _unbegun: Gaps = field(default_factory=Gaps)  # the first fragment, if no peer with a part can begin micro-batches
    _unshared: Gaps = field(default_factory=Gaps)  # fragments held only by peers with the whole model
    # Lost fragment -> since when peers do not, or no longer, wait for a joining peer with this fragment.
    _lost_since: dict[int, Seconds] = field(default_factory=dict)
    _turns_at: Seconds | None = None  # time of the first candidate's turn; None if no layer is lost
    _left_since: dict[int, Seconds] = field(default_factory=dict)  # fragment -> since when it needs `span_to_relieve`
    _relief_at: Seconds = 0.0
    _relief_pause_s: Seconds = RELIEF_PAUSE_S

    def span_to_take(
        self,
        members: Mapping[PeerId, TrainingPeer],
        joining: Sequence[range],
        now: Seconds,
        is_retained: Callable[[int], bool],
        planned: Sequence[range] = (),
    ) -> tuple[range, bool] | None:
        """Decide whether this peer should take over lost layers now.

        Call this method at each review, since it measures how long layers have been lost.

        Args:
            members: The peers that train, ourselves included.
            joining: Spans of the peers that are joining.
            now: Unix time in seconds.
            is_retained: Function that tells whether some peer retains the state of the fragment with this index.
            planned: Spans that the adopted plan gives to peers that train.

        Returns:
            The span to move to, and whether lost layers in it may start from initial weights; None to stay.
        """
        count = len(self.needs.fragments)
        unheld = _missing(count, members)
        lost = self._unheld.not_waited_for(unheld, [*joining, *planned], now)
        given_up = self._unheld.not_waited_for(unheld, joining, now, RETURN_S)
        self._lost_since = {index: self._lost_since.get(index, now) for index in given_up}
        wait_s = INITIALISE_AFTER_S if any(member.has_trained for member in members.values()) else 0.0
        self.initial = frozenset(index for index, since in self._lost_since.items() if now >= since + wait_s)
        waits = {index for index in unheld if index not in self.initial and not is_retained(index)}
        ready = [index for index in lost if index not in waits]
        beginning = [member.held for member in members.values() if member.originates and len(member.held) < count]
        idle = beginning and not lost and not any(FIRST in span for span in beginning)
        parts_joining = [span for span in joining if len(span) < count]
        if self._unbegun.not_waited_for([FIRST] if idle else [], parts_joining, now):
            ready = [FIRST]
        candidates = ranked(self.needs, members, ready) if ready else []
        self.stuck = bool(ready) and not candidates
        # A move to a span with a fragment that waits for its state could not begin.
        candidates = [(peer, span) for peer, span in candidates if waits.isdisjoint(span)]
        if not candidates:
            self._turns_at = None
            return None
        if self._turns_at is None:
            self._turns_at = now + RECOVERY_BACKOFF_S * self.chance.random()
        if now < self._turns_at:
            return None
        turns = 1 + int((now - self._turns_at) / TURN_S)
        ours = [span for peer, span in candidates[:turns] if peer == self.own]
        return (ours[0], any(index in lost and not is_retained(index) for index in ready)) if ours else None

    def span_to_relieve(
        self, members: Mapping[PeerId, TrainingPeer], joining: Sequence[range], now: Seconds, keep: int
    ) -> range | None:
        """Decide whether this peer should now take layers that only peers with the whole model hold.

        Call this method at each review, since it measures how long only such peers have held each layer.

        Args:
            members: The peers that train, ourselves included.
            joining: Spans of the peers that are joining.
            now: Unix time in seconds.
            keep: Number of other peers with parts that must hold each fragment that this peer gives up.

        Returns:
            The span to move to; None to stay.
        """
        count = len(self.needs.fragments)
        parts = {peer: member for peer, member in members.items() if len(member.held) < count}
        unshared = _missing(count, parts) if parts and not _missing(count, members) else []  # recover lost layers first
        left = self._unshared.not_waited_for(unshared, [span for span in joining if len(span) < count], now)
        self._left_since = {index: self._left_since.get(index, now) for index in left}
        if not left:
            self._relief_at, self._relief_pause_s = 0.0, RELIEF_PAUSE_S
        waited = {index: now - since - RELIEVE_AFTER_S for index, since in self._left_since.items()}
        ready = [index for index, seconds in waited.items() if seconds >= 0]
        if not ready or FIRST in left or now < self._relief_at:  # the first fragment is left to `span_to_take`
            return None
        # Speeds are measured and vary from peer to peer; without them, all peers compute the same ranking.
        alike = {peer: replace(member, tokens_per_s=0.0) for peer, member in parts.items()}
        turns = 1 + int(max(waited.values()) / RELIEF_TURN_S)
        return next((span for peer, span in ranked(self.needs, alike, ready, keep)[:turns] if peer == self.own), None)

    def relief_tried(self, now: Seconds) -> None:
        """Record that this peer has begun a move for relief; the pause until its next try doubles each time."""
        self._relief_at = now + self._relief_pause_s
        self._relief_pause_s = min(RELIEF_TURN_S, 2 * self._relief_pause_s)

    def is_left(self, span: range) -> bool:
        """Return whether, at the last review, only peers with the whole model held some fragment of this span."""
        return any(index in span for index in self._left_since)


def _missing(count: int, members: Mapping[PeerId, TrainingPeer]) -> list[int]:
    """Return the fragments from 0 to `count` - 1 that none of these peers holds."""
    return [index for index in range(count) if not any(index in member.held for member in members.values())]


def _has(member: TrainingPeer, fragment: int) -> bool:
    """Return whether a peer holds a fragment; a holder of the first fragment must also begin micro-batches."""
    return fragment in member.held and (member.originates or fragment != FIRST)


def ranked(
    needs: MemoryNeeds, members: Mapping[PeerId, TrainingPeer], lost: Sequence[int], keep: int = 1
) -> list[tuple[PeerId, range]]:
    """Rank the peers with a part of the model that could take lost fragments, each with its best new span.

    Args:
        needs: The memory that fragments take.
        members: The peers that train.
        lost: The lost fragments, at least one.
        keep: Number of other members that must hold each fragment that a candidate gives up.

    Returns:
        (peer, span), sorted by most lost fragments taken, fewest fragments given up, highest speed, lowest id.
    """
    holders = [sum(_has(member, index) for member in members.values()) for index in range(len(needs.fragments))]
    found = []
    for peer, member in members.items():
        if len(member.held) == len(holders):
            continue
        furthest = widest_span(needs, member.memory_bytes)
        options = []
        for begin in range(FIRST if member.originates else FIRST + 1, max(lost) + 1):
            end = furthest(begin)
            span = range(begin, end if end - begin < len(holders) else end - 1)  # a move must not take the whole model
            taken = sum(index in span for index in lost)
            given_up = [index for index in member.held if index not in span]
            if taken and all(holders[index] - _has(member, index) >= keep for index in given_up):
                options.append((-taken, len(given_up), begin, span))
        if options:
            taken, given_up_count, _, span = min(options, key=lambda one: one[:3])
            found.append((taken, given_up_count, -member.tokens_per_s, peer, span))
    return [(peer, span) for _, _, _, peer, span in sorted(found, key=lambda one: one[:4])]
