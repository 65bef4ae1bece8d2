"""Which micro-batches' gradients go into the optimizer's steps: each once, or not at all.

    held      its gradient is in the sum that is being filled, or in the sealed one; its origin peer has not decided yet
    settled   its origin peer has the whole route's gradients: it counts
    void      its origin peer tried another way, gave up, or is gone: it must not count

Gradients cannot be taken out of a sum, so a sum is sealed, later gradients go into the next one, and the sealed sum is
applied when all in it are settled, or dropped when one of them is void. There are a few slots for sealed sums. What
waits is spread over them evenly: the fewer micro-batches are in a sum, the fewer go with one that is void.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from decentral.comm.wire.messages import ExecutionId, Hop
from decentral.core.jobs import Apply, Drop, Seal
from decentral.core.machine import Effect, Log, log


class CommitState(Enum):
    HELD = auto()
    SETTLED = auto()
    VOID = auto()


@dataclass(frozen=True, slots=True)
class GradientEntry:
    """An execution whose gradients we have. `loss` is the sum over its tokens; `own`: we are its origin peer."""

    execution: ExecutionId
    last: int
    tokens: int
    loss: float
    own: bool

    def line(self) -> list[object]:
        return [self.execution.origin, self.execution.number, self.execution.first, self.last, self.tokens]


@dataclass(slots=True)
class GradientLedger:
    at_least: int  # micro-batches in one step, where there are so many
    slots: int = 1  # sealed sums at a time
    quiet: bool = True  # nothing is between its forward and its backward pass, or that does not matter
    entries: dict[int, GradientEntry] = field(default_factory=dict)  # by token
    marks: dict[int, CommitState] = field(default_factory=dict)
    closing: dict[int, tuple[int, ...]] = field(default_factory=dict)  # who is in each sealed sum: by slot
    sealing: bool = False
    counted: int = 0
    dropped: int = 0

    def add(self, token: int, entry: GradientEntry, mark: CommitState) -> list[Effect]:
        """Its gradients are in the sum that is being filled."""
        self.entries[token], self.marks[token] = entry, mark
        return self._turn()

    def settle(self, token: int) -> list[Effect]:
        return self._mark(token, CommitState.SETTLED)

    def void(self, token: int) -> list[Effect]:
        return self._mark(token, CommitState.VOID)

    def sealed(self, tokens: tuple[int, ...], slot: int = 0) -> list[Effect]:
        """The compute thread tells whose gradients are in a sealed sum."""
        self.sealing, self.closing[slot] = False, tokens
        return self._turn()

    def stepped(self, tokens: tuple[int, ...]) -> list[Effect]:
        """The sum was complete when it was sealed, and its step has been taken."""
        self.sealing = False
        return [self._counted(self._taken(tokens)), *self._turn()]

    def look(self, quiet: bool) -> list[Effect]:
        """Whether a step may be taken now without changing weights that a backward pass still needs."""
        self.quiet = quiet
        return self._turn()

    @property
    def waiting(self) -> bool:
        """Whether enough gradients for a step are there."""
        return len(self.entries) >= self.at_least

    def _mark(self, token: int, mark: CommitState) -> list[Effect]:
        """A decision is final: what comes later is too late."""
        if self.marks.get(token) is not CommitState.HELD:
            return []
        self.marks[token] = mark
        return self._turn()

    def _turn(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.sealing:
            return effects  # it may be followed by its step at once: the journal has steps in the order they are taken
        for slot in list(self.closing):
            effects += self._finish(slot)
        if not self.quiet or len(self.closing) == self.slots:
            return effects
        sealed = sum(map(len, self.closing.values()))
        even = -(-len(self.entries) // (self.slots + 1)) if self.slots > 1 else 0
        if len(self.entries) - sealed >= max(self.at_least, even):
            self.sealing = True
            effects.append(self._seal())
        return effects

    def _seal(self) -> Seal:
        slot = next(slot for slot in range(self.slots) if slot not in self.closing)
        closing = {token for tokens in self.closing.values() for token in tokens}
        filled = [token for token in self.entries if token not in closing]
        if any(self.marks[token] is not CommitState.SETTLED for token in filled):
            return Seal(slot=slot)
        return Seal(tuple(filled), self._apply([self.entries[token] for token in filled], slot), slot)

    def _finish(self, slot: int) -> list[Effect]:
        closing = self.closing[slot]
        marks = [self.marks[token] for token in closing]
        if CommitState.HELD in marks and CommitState.VOID not in marks:
            return []
        void = sum(self.marks[token] is CommitState.VOID for token in closing)
        entries = self._taken(closing)
        del self.closing[slot]
        if void:
            self.dropped += len(entries)
            return [Drop(slot), log("uncounted", of=[entry.line() for entry in entries], void=void)]
        return [self._apply(entries, slot), self._counted(entries)]

    def _taken(self, tokens: tuple[int, ...]) -> list[GradientEntry]:
        for token in tokens:
            del self.marks[token]
        return [self.entries.pop(token) for token in tokens]

    def _apply(self, entries: list[GradientEntry], slot: int) -> Apply:
        own = [entry for entry in entries if entry.own]
        loss = sum(entry.loss for entry in entries) / max(1, sum(entry.tokens for entry in entries))
        return Apply(sum(entry.tokens for entry in own), len(own), loss, slot)

    def _counted(self, entries: list[GradientEntry]) -> Log:
        self.counted += len(entries)
        return log("counted", of=[entry.line() for entry in entries])


def reaches_the_end(hops: tuple[Hop, ...], first: int, layers: int) -> bool:
    """Whether these hops carry on from layer `first` to the model's end, without a gap or an overlap."""
    for hop in hops:
        if hop.first != first or hop.last <= hop.first:
            return False
        first = hop.last
    return first == layers
