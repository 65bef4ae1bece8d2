"""Which micro-batches' gradients go into the optimizer's steps: each once, or not at all.

    in doubt   its gradient is in the sum that is being filled, or in a sealed one; its origin peer has not decided yet
    committed  its origin peer has the whole route's gradients: it counts
    aborted    its origin peer took another route, gave up, or is gone: it must not count

A sum that is not finite cannot be applied, whatever was decided: then nothing in it counts, and the journal says so.
Gradients cannot be taken out of a sum, so a sum is sealed, later gradients go into the next one, and the sealed sum is
applied when all in it are committed, or dropped when one of them is aborted. There are a few slots for sealed sums. The
gradients that wait are spread over them evenly: the fewer are in a sum, the fewer are lost with one that is aborted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from decentral.comm.wire.messages import ExecutionId, Hop
from decentral.comm.wire.transport import Effect
from decentral.core.jobs import Apply, Drop, Seal
from decentral.core.journal.events import CountedLine, UncountedLine
from decentral.core.journal.field_kinds import CountedExecution
from decentral.core.machine import Log
from decentral.core.reasons import Reason


class CommitState(Enum):
    IN_DOUBT = auto()
    COMMITTED = auto()
    ABORTED = auto()


@dataclass(frozen=True, slots=True)
class GradientEntry:
    """An execution whose gradients we have. `loss` is the sum over its tokens; `own`: we are its origin peer."""

    execution: ExecutionId
    last: int
    tokens: int
    loss: float
    own: bool

    def counted(self) -> CountedExecution:
        """The execution as the journal names it."""
        return CountedExecution(
            self.execution.origin, self.execution.number, self.execution.first, self.last, self.tokens
        )


class Ledger(Protocol):
    """What the router needs of the sums of gradients: GradientLedger, or the record of a synchronous round."""

    entries: dict[int, GradientEntry]  # the executions whose gradients are in a sum, by token
    quiet: bool  # no execution is between its forward and its backward pass, or that does not matter
    sealing: bool  # the training thread was told to seal a sum, and has not answered yet

    @property
    def waiting(self) -> bool:
        """Whether enough gradients for a step are there."""

    def expect(self, micro_batches: int) -> None:
        """From now on a step waits for at least so many micro-batches."""
        return

    def add(self, token: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        """The gradients of this execution are in the sum that is being filled."""

    def believes(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        """Whether a micro-batch can have gone through these hops, with this sum of losses, as far as we know."""

    def completed(self, token: int, hops: tuple[Hop, ...]) -> None:
        """A micro-batch of our own got through the model. `hops` are those after our own. `add` follows."""

    # Only a GradientLedger decides when a step is taken: elsewhere nothing follows from these.

    def commit(self, token: int) -> list[Effect]:
        return []

    def abort(self, token: int) -> list[Effect]:
        return []

    def sealed(self, tokens: tuple[int, ...], slot: int = 0, sound: bool = True) -> list[Effect]:
        """The training thread tells whose gradients are in a sealed sum, and whether a step can be taken with it."""
        return []

    def stepped(self, tokens: tuple[int, ...]) -> list[Effect]:
        """The sum was complete when it was sealed, and its step has been taken."""
        return []

    def look(self, quiet: bool) -> list[Effect]:
        """Whether a step may be taken now without changing weights that a backward pass still needs."""
        return []


@dataclass(slots=True)
class GradientLedger:
    micro_batches_per_step: int  # at least; fewer where there are not so many
    slots: int = 1  # sealed sums at a time
    quiet: bool = True
    entries: dict[int, GradientEntry] = field(default_factory=dict)
    states: dict[int, CommitState] = field(default_factory=dict)  # by token
    closing: dict[int, tuple[int, ...]] = field(default_factory=dict)  # tokens in each sealed sum, by slot
    sealing: bool = False

    def expect(self, micro_batches: int) -> None:
        self.micro_batches_per_step = micro_batches

    def add(self, token: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        self.entries[token], self.states[token] = entry, state
        return self._advance()

    def believes(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        return True

    def completed(self, token: int, hops: tuple[Hop, ...]) -> None:
        pass  # the decisions that the hops get are all that they need

    def commit(self, token: int) -> list[Effect]:
        return self._decide(token, CommitState.COMMITTED)

    def abort(self, token: int) -> list[Effect]:
        return self._decide(token, CommitState.ABORTED)

    def sealed(self, tokens: tuple[int, ...], slot: int = 0, sound: bool = True) -> list[Effect]:
        self.sealing = False
        if not sound:
            line = UncountedLine(of=_counted(self._taken(tokens)), void=0, reason=Reason.NAN)
            return [Drop(slot), Log(line), *self._advance()]
        self.closing[slot] = tokens
        return self._advance()

    def stepped(self, tokens: tuple[int, ...]) -> list[Effect]:
        self.sealing = False
        return [Log(CountedLine(of=_counted(self._taken(tokens)))), *self._advance()]

    def look(self, quiet: bool) -> list[Effect]:
        self.quiet = quiet
        return self._advance()

    @property
    def waiting(self) -> bool:
        return len(self.entries) >= self.micro_batches_per_step

    def _decide(self, token: int, state: CommitState) -> list[Effect]:
        """A decision is final: one that comes later is too late."""
        if self.states.get(token) is not CommitState.IN_DOUBT:
            return []
        self.states[token] = state
        return self._advance()

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.sealing:
            return effects  # Seal may include its step; wait for its outcome before any other step
        for slot in list(self.closing):
            effects += self._finish(slot)
        if not self.quiet or len(self.closing) == self.slots:
            return effects
        sealed = sum(map(len, self.closing.values()))
        even = -(-len(self.entries) // (self.slots + 1)) if self.slots > 1 else 0
        if len(self.entries) - sealed >= max(self.micro_batches_per_step, even):
            self.sealing = True
            effects.append(self._seal())
        return effects

    def _seal(self) -> Seal:
        slot = next(slot for slot in range(self.slots) if slot not in self.closing)
        closing = {token for tokens in self.closing.values() for token in tokens}
        filled = [token for token in self.entries if token not in closing]
        if any(self.states[token] is not CommitState.COMMITTED for token in filled):
            return Seal(slot=slot)
        return Seal(tuple(filled), self._apply([self.entries[token] for token in filled], slot), slot)

    def _finish(self, slot: int) -> list[Effect]:
        closing = self.closing[slot]
        states = [self.states[token] for token in closing]
        aborted = sum(state is CommitState.ABORTED for state in states)
        if CommitState.IN_DOUBT in states and not aborted:
            return []
        entries = self._taken(closing)
        del self.closing[slot]
        if aborted:
            return [Drop(slot), Log(UncountedLine(of=_counted(entries), void=aborted))]
        return [self._apply(entries, slot), Log(CountedLine(of=_counted(entries)))]

    def _taken(self, tokens: tuple[int, ...]) -> list[GradientEntry]:
        for token in tokens:
            del self.states[token]
        return [self.entries.pop(token) for token in tokens]

    def _apply(self, entries: list[GradientEntry], slot: int) -> Apply:
        own = [entry for entry in entries if entry.own]
        loss = sum(entry.loss for entry in entries) / max(1, sum(entry.tokens for entry in entries))
        return Apply(sum(entry.tokens for entry in own), len(own), loss, slot)


def _counted(entries: list[GradientEntry]) -> tuple[CountedExecution, ...]:
    return tuple(entry.counted() for entry in entries)
