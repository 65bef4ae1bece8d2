"""Layers that no peer holds any more, or first ones at which nobody begins: which peer takes them over, and when.

All peers that know the same roster rank the same candidates. A candidate's span fits its memory, has the most of the
lost layers, and gives up only layers that others hold. First layers count as held only by peers that may originate; a
peer that only donates does not take them. After a random back-off the first candidate moves
(scheduler/placement/move.py); every TURN_S later one more may, in case those before it could not.

The state comes from a peer that retains one. Where none does, the layers wait for their holder, which may come back
with its checkpoint: newly initialised weights, once they train, would be taken for the newer ones. Only after
INITIALISE_AFTER_S the layers start from initial weights, and while a peer is joining with them, which may be that
holder, after RETURN_S.

Peers with the whole model begin no micro-batches for others. Where they alone hold the first layers, peers with other
parts have nothing to do, so one of these takes the first layers, though they are not lost. Where they alone hold later
layers, micro-batches wait there for work that these peers have anyway: a peer with a part takes such layers from them,
if enough other parts hold what it gives up, and only after the time in which a holder starts again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.units import Seconds
from decentral.scheduler.placement.evaluate import FIRST, TrainingPeer

RECOVERY_BACKOFF_S = 2.0  # upper bound of the random back-off
TURN_S = 10.0  # between the turns of two candidates
RELIEF_TURN_S = 600.0  # likewise for layers that are not lost: two peers that move are worse than none
RELIEF_PAUSE_S = 60.0  # from one try of a peer to the next, and twice as long each time; RELIEF_TURN_S at most
JOINING_S = 120.0  # a peer that is joining keeps others from its layers for so long, whether it comes or not
RELIEVE_AFTER_S = 30.0  # a peer that starts again is back by then
RETURN_S = 1800.0  # likewise where all that was learned there would be lost
INITIALISE_AFTER_S = 60.0  # without a holder, for a layer whose state nobody retains


@dataclass(slots=True)
class Gaps:
    """Fragments that no peer holds which trains, and since when.

    One with which a peer is joining is waited for, but not without end: strangers could say so of all fragments, and
    never come. The time is the gap's, so that it does not help to change names.
    """

    _since: dict[int, Seconds] = field(default_factory=dict)

    def not_waited_for(
        self, gaps: Sequence[int], joining: Sequence[range], now: Seconds, most_s: Seconds = JOINING_S
    ) -> list[int]:
        """Those of these fragments with which no peer is joining, or which have been waited for so long."""
        self._since = {index: self._since.get(index, now) for index in gaps}
        return [
            index for index in gaps if now >= self._since[index] + most_s or not any(index in span for span in joining)
        ]


@dataclass(slots=True)
class LayerRecovery:
    own: PeerId
    needs: MemoryNeeds
    chance: Random
    _unheld: Gaps = field(default_factory=Gaps)
    _unbegun: Gaps = field(default_factory=Gaps)  # the first fragment, where no part begins micro-batches there
    _unshared: Gaps = field(default_factory=Gaps)  # those that no part holds
    _lost_since: dict[int, Seconds] = field(default_factory=dict)  # by lost fragment that may be initialised one day
    _turns_at: Seconds | None = None  # when the first candidate's turn begins
    _left_since: dict[int, Seconds] = field(default_factory=dict)  # by fragment that is left to whole-model peers
    _relief_at: Seconds = 0.0  # when this peer may try to take some of these
    _relief_pause_s: Seconds = RELIEF_PAUSE_S

    def span_to_take(
        self,
        members: Mapping[PeerId, TrainingPeer],
        joining: Sequence[range],
        now: Seconds,
        is_retained: Callable[[int], bool],
    ) -> tuple[range, bool] | None:
        """The span that this peer should move to now, if any, and whether lost layers in it may be initialised.

        `joining`: spans of the peers that are joining. `is_retained(fragment)`: whether some peer retains its state.
        """
        count = len(self.needs.fragments)
        unheld = _missing(count, members)
        lost = self._unheld.not_waited_for(unheld, joining, now)
        given_up = self._unheld.not_waited_for(unheld, joining, now, RETURN_S)
        self._lost_since = {index: self._lost_since.get(index, now) for index in given_up}
        initial = {index for index, since in self._lost_since.items() if now >= since + INITIALISE_AFTER_S}
        ready = [index for index in lost if index in initial or is_retained(index)]
        beginning = [member.held for member in members.values() if member.originates and len(member.held) < count]
        idle = beginning and not lost and not any(FIRST in span for span in beginning)
        parts_joining = [span for span in joining if len(span) < count]
        if self._unbegun.not_waited_for([FIRST] if idle else [], parts_joining, now):
            ready = [FIRST]
        if not ready:
            self._turns_at = None
            return None
        if self._turns_at is None:
            self._turns_at = now + RECOVERY_BACKOFF_S * self.chance.random()
        if now < self._turns_at:
            return None
        turns = 1 + int((now - self._turns_at) / TURN_S)
        ours = [span for peer, span in ranked(self.needs, members, ready)[:turns] if peer == self.own]
        return (ours[0], any(index in lost and not is_retained(index) for index in ready)) if ours else None

    def span_to_relieve(
        self, members: Mapping[PeerId, TrainingPeer], joining: Sequence[range], now: Seconds, keep: int
    ) -> range | None:
        """The span that this peer should move to now, if any, as whole-model peers alone have held some of it for long.

        `keep`: other peers with parts that have to hold what it gives up. To be called at each review, for the times.
        """
        count = len(self.needs.fragments)
        parts = {peer: member for peer, member in members.items() if len(member.held) < count}
        unshared = _missing(count, parts) if parts and not _missing(count, members) else []  # lost ones come first
        left = self._unshared.not_waited_for(unshared, [span for span in joining if len(span) < count], now)
        self._left_since = {index: self._left_since.get(index, now) for index in left}
        if not left:
            self._relief_at, self._relief_pause_s = 0.0, RELIEF_PAUSE_S
        waited = {index: now - since - RELIEVE_AFTER_S for index, since in self._left_since.items()}
        ready = [index for index, seconds in waited.items() if seconds >= 0]
        if not ready or FIRST in left or now < self._relief_at:  # the first layers are not waited for: span_to_take
            return None
        # Equal speeds differ by how they were measured. All have to name the same peer, so they do not count here.
        alike = {peer: replace(member, tokens_per_s=0.0) for peer, member in parts.items()}
        turns = 1 + int(max(waited.values()) / RELIEF_TURN_S)
        return next((span for peer, span in ranked(self.needs, alike, ready, keep)[:turns] if peer == self.own), None)

    def relief_tried(self, now: Seconds) -> None:
        """This peer has begun to move there. Should that fail, it waits before it tries again, ever longer."""
        self._relief_at = now + self._relief_pause_s
        self._relief_pause_s = min(RELIEF_TURN_S, 2 * self._relief_pause_s)

    def is_left(self, span: range) -> bool:
        """Whether whole-model peers alone hold something of this span."""
        return any(index in span for index in self._left_since)


def _missing(count: int, members: Mapping[PeerId, TrainingPeer]) -> list[int]:
    """The fragments, of so many, that none of these peers holds."""
    return [index for index in range(count) if not any(index in member.held for member in members.values())]


def _has(member: TrainingPeer, fragment: int) -> bool:
    """Whether others may leave the fragment to this peer: at the first one, somebody has to begin micro-batches."""
    return fragment in member.held and (member.originates or fragment != FIRST)


def ranked(
    needs: MemoryNeeds, members: Mapping[PeerId, TrainingPeer], lost: Sequence[int], keep: int = 1
) -> list[tuple[PeerId, range]]:
    """The peers with a part that could take lost fragments, each with its best span; best first, equal ones by id.

    `keep`: other holders among these that each fragment has to have which such a peer gives up.
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
            span = range(begin, end if end - begin < len(holders) else end - 1)  # never the whole model
            taken = sum(index in span for index in lost)
            given_up = [index for index in member.held if index not in span]
            if taken and all(holders[index] - _has(member, index) >= keep for index in given_up):
                options.append((-taken, len(given_up), begin, span))
        if options:
            taken, given_up_count, _, span = min(options, key=lambda one: one[:3])
            found.append((taken, given_up_count, -member.tokens_per_s, peer, span))
    return [(peer, span) for _, _, _, peer, span in sorted(found, key=lambda one: one[:4])]
