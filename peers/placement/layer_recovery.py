"""Layers that nobody holds any more: who takes them over, and when.

All who know the same roster rank the same candidates: a span within the peer's memory that has the most of the lost
layers, and gives up only what others hold. After a random back-off the first one moves (peers/placement/span_move.py); every TURN_S
later the next one may, for the case that it could not.

The state comes from whoever keeps one. Where nobody does, the holder is waited for: it may come back with its
checkpoint, and initial weights, once they train, would be taken for the newer ones. So only after LOST_S the layers
begin anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.units import Seconds

RECOVERY_BACKOFF_S = 2.0  # at most
TURN_S = 10.0
LOST_S = 60.0


@dataclass(frozen=True, slots=True)
class TrainingPeer:
    """A peer that trains: its fragments, its memory for the model, its speed in tokens/s of the whole model."""

    held: range
    memory_bytes: int
    tokens_per_s: float
    rate: float = 0.0  # bytes/s, the lesser of up and down; 0: not measured yet


@dataclass(slots=True)
class LayerRecovery:
    own: PeerId
    needs: MemoryNeeds
    chance: Random
    _since: dict[int, Seconds] = field(default_factory=dict)  # lost fragments, and since when
    _turns_at: Seconds | None = None  # from when on candidates have their turns

    def look(
        self,
        members: Mapping[PeerId, TrainingPeer],
        coming: Sequence[range],
        now: Seconds,
        known: Callable[[int], bool],
    ) -> tuple[range, bool] | None:
        """The span that we should move to now, if any, and whether lost layers may begin with initial weights there.

        `coming`: spans of those who are joining. `known(fragment)`: whether somebody keeps a state of it.
        """
        spans = [*(member.held for member in members.values()), *coming]
        lost = [index for index in range(len(self.needs.fragments)) if not any(index in span for span in spans)]
        self._since = {index: self._since.get(index, now) for index in lost}
        ready = [index for index in lost if known(index) or now >= self._since[index] + LOST_S]
        if not ready:
            self._turns_at = None
            return None
        if self._turns_at is None:
            self._turns_at = now + RECOVERY_BACKOFF_S * self.chance.random()
        if now < self._turns_at:
            return None
        turns = 1 + int((now - self._turns_at) / TURN_S)
        ours = [span for peer, span in ranked(self.needs, members, ready)[:turns] if peer == self.own]
        return (ours[0], any(not known(index) for index in ready)) if ours else None


def ranked(
    needs: MemoryNeeds, members: Mapping[PeerId, TrainingPeer], lost: Sequence[int]
) -> list[tuple[PeerId, range]]:
    """Who could take lost fragments, and the span with which; the best first, equal ones by id."""
    holders = [sum(index in member.held for member in members.values()) for index in range(len(needs.fragments))]
    found = []
    for peer, member in members.items():
        furthest = widest_span(needs, member.memory_bytes)
        options = []
        for begin in range(max(lost) + 1):
            end = furthest(begin)
            span = range(begin, end if end - begin < len(holders) else end - 1)  # a part stays a part
            covers = sum(index in span for index in lost)
            given_up = [index for index in member.held if index not in span]
            if covers and all(holders[index] > 1 for index in given_up):
                options.append((-covers, len(given_up), begin, span))
        if options:
            covers, given_up_count, _, span = min(options, key=lambda one: one[:3])
            found.append((covers, given_up_count, -member.tokens_per_s, peer, span))
    return [(peer, span) for _, _, _, peer, span in sorted(found, key=lambda one: one[:4])]
