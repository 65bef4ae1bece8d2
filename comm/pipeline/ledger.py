"""The ledger of gradient sums: which micro-batches count in the optimizer's steps, each exactly once or not at all.

    IN_DOUBT   a micro-batch's gradient is in a sum; its origin peer has not decided yet
    COMMITTED  its origin peer has all gradients of the route: the micro-batch counts
    ABORTED    its origin peer took another route, gave up, or is gone: the micro-batch must not count

Start with `GradientLedger`. A micro-batch counts if a step uses its gradient. A step needs a sealed sum: it gets no
more gradients, and a new sum begins. The training thread keeps each sealed sum in a buffer (a slot).

With exact gradients, an aborted execution has an `Undo` job: the training thread runs the passes once more, and
subtracts the gradient from the open sum. This happens before the next step, while no other execution takes memory. Such
a sum is sealed only once all its executions are committed.

Where the weights have changed since the gradient was computed, it cannot be taken out: an aborted execution drops its
whole sum. Gradients are then spread evenly over the slots, so that an abort loses few of them. A sum that is
not finite is always dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from decentral.comm.wire.messages import ExecutionId, Hop
from decentral.comm.wire.transport import Effect
from decentral.core.jobs import Apply, Drop, Seal, Undo
from decentral.core.journal.events import CountedLine, UncountedLine
from decentral.core.journal.field_kinds import CountedExecution
from decentral.core.machine import Log
from decentral.core.reasons import Reason


class CommitState(Enum):
    """The origin peer's decision on an execution: whether its gradients count."""

    IN_DOUBT = auto()
    COMMITTED = auto()
    ABORTED = auto()


@dataclass(frozen=True, slots=True)
class GradientEntry:
    """An execution at this peer whose gradients are in one of the ledger's sums."""

    execution: ExecutionId
    last: int  # first layer that this peer did not compute: it computed [execution.first, last)
    tokens: int  # number of text tokens in the micro-batch
    loss: float  # sum of the loss over the micro-batch's tokens, in nats
    own: bool
    undo: Undo | None = None  # the job that takes the gradients out of the open sum; None: that is impossible

    def counted(self) -> CountedExecution:
        """Return this execution in the form that journal lines use."""
        return CountedExecution(
            self.execution.origin, self.execution.number, self.execution.first, self.last, self.tokens
        )


class Ledger(Protocol):
    """Interface through which the router records gradients, and learns which jobs to give to the training thread.

    GradientLedger implements it for asynchronous training, and ContributionRecord for synchronous rounds. A parameter
    `local_id`, and each of `executions`, is an execution's id (StageExecution.local_id).
    """

    entries: dict[int, GradientEntry]  # the executions whose gradients are in a sum, by StageExecution.local_id
    quiet: bool  # True: a step may change the weights now, as no execution needs the old ones (ExecutionTable.quiet)
    sealing: bool  # True while the training thread has a job that closes (seals) a gradient sum

    def waiting(self, steps: int = 1, least: int = 0) -> bool:
        """Return whether there are enough gradients for `steps` steps, and at least `least`.

        From two steps on, one gradient fewer is enough for them. Always False in a synchronous round, during which no
        step is taken.
        """
        return False

    def expect(self, micro_batches: int) -> None:
        """Set the minimum number of micro-batches in a step."""
        return

    def add(self, local_id: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        """Record that the open sum contains an execution's gradients; `state` is the origin peer's decision so far."""

    def accepts(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        """Return whether a next peer's answer may be used; `loss` is in nats, summed over `tokens` text tokens."""

    def completed(self, local_id: int, hops: tuple[Hop, ...]) -> None:
        """Record the other peers' hops on the route of one of our micro-batches. Call `add` for this id next."""

    # ContributionRecord inherits these empty methods, because a synchronous round itself decides when a step is taken.

    def commit(self, local_id: int) -> list[Effect]:
        """Mark an execution in doubt as committed, so that it counts; do nothing if it is decided or unknown."""
        return []

    def abort(self, local_id: int) -> list[Effect]:
        """Mark an execution in doubt as aborted, so that it does not count; do nothing if it is decided or unknown."""
        return []

    def sealed(self, executions: tuple[int, ...], slot: int = 0, sound: bool = True) -> list[Effect]:
        """Record that the training thread has sealed a sum.

        Args:
            executions: Those whose gradients are in the sum.
            slot: Number of the buffer in which the training thread keeps the sum.
            sound: Whether the sum is finite, so that a step can be taken with it.
        """
        return []

    def sealed_and_applied(self, executions: tuple[int, ...]) -> list[Effect]:
        """Record that a Seal job sealed a sum and took a step with it at once, so that `sealed` is not called.

        Args:
            executions: Those whose gradients are in the sum.
        """
        return []

    def undone(self, local_id: int, done: bool) -> list[Effect]:
        """Record the outcome of an Undo job; `done`: the aborted execution's gradients were taken out of the sum."""
        return []

    def due_jobs(self) -> list[Effect]:
        """Return the Undo, Seal, Apply and Drop jobs that can run now. The router sets `quiet` before."""
        return []


@dataclass(slots=True)
class GradientLedger:
    """The ledger of asynchronous training: origin peers' decisions determine which sums are applied or dropped."""

    micro_batches_per_step: int  # a step needs at least this many micro-batches
    slots: int = 1  # at most this many closed (sealed) gradient sums wait for commit decisions
    quiet: bool = True
    entries: dict[int, GradientEntry] = field(default_factory=dict)
    states: dict[int, CommitState] = field(default_factory=dict)  # decisions, by StageExecution.local_id
    # Key: buffer (slot) of a closed gradient sum. Value: StageExecution.local_id of each execution in the sum.
    sealed_sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sealing: bool = False
    undoing: set[int] = field(default_factory=set)  # executions that an Undo job takes out of the open sum

    def expect(self, micro_batches: int) -> None:
        """Set the minimum number of micro-batches in a step."""
        self.micro_batches_per_step = micro_batches

    def add(self, local_id: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        """Record that the open sum contains an execution's gradients; `state` is the origin peer's decision so far."""
        self.entries[local_id], self.states[local_id] = entry, state
        return self._advance()

    def accepts(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        """Return True: without rounds there is no list of members to check the hops against."""
        return True

    def completed(self, local_id: int, hops: tuple[Hop, ...]) -> None:
        """Do nothing: without rounds no contribution record lists the hops of a route."""

    def commit(self, local_id: int) -> list[Effect]:
        """Mark an execution in doubt as committed, and return the jobs that this makes possible, such as a step."""
        return self._decide(local_id, CommitState.COMMITTED)

    def abort(self, local_id: int) -> list[Effect]:
        """Mark an execution in doubt as aborted; if a sealed sum contains it, return the job that drops the sum."""
        return self._decide(local_id, CommitState.ABORTED)

    def sealed(self, executions: tuple[int, ...], slot: int = 0, sound: bool = True) -> list[Effect]:
        """Record that the training thread has sealed a sum; drop it at once if it is not finite."""
        self.sealing = False
        if not sound:
            line = UncountedLine(of=_counted(self._taken(executions)), void=0, reason=Reason.NAN)
            return [Drop(slot), Log(line), *self._advance()]
        self.sealed_sums[slot] = executions
        return self._advance()

    def sealed_and_applied(self, executions: tuple[int, ...]) -> list[Effect]:
        """Record that a Seal job sealed a sum and took a step with it at once."""
        self.sealing = False
        return [Log(CountedLine(of=_counted(self._taken(executions)))), *self._advance()]

    def undone(self, local_id: int, done: bool) -> list[Effect]:
        """Remove an execution whose gradients were taken out; if that failed, let it drop its whole sum."""
        self.undoing.discard(local_id)
        if done:
            return [Log(UncountedLine(of=_counted(self._taken((local_id,))), void=1)), *self._advance()]
        self.entries[local_id] = replace(self.entries[local_id], undo=None)
        return self._advance()

    def due_jobs(self) -> list[Effect]:
        """Return the Undo, Seal, Apply and Drop jobs that can run now."""
        return self._advance()

    def waiting(self, steps: int = 1, least: int = 0) -> bool:
        """Return whether there are enough gradients for `steps` steps, one fewer from two steps on, and `least`."""
        enough = max(least, steps * self.micro_batches_per_step - (steps > 1))
        return len(self.entries) - len(self._leaving()) >= enough

    def _leaving(self) -> list[Undo]:
        """Return the jobs that must take aborted executions' gradients out of the open sum before the next step."""
        aborted = (local_id for local_id, state in self.states.items() if state is CommitState.ABORTED)
        return [undo for local_id in aborted if (undo := self.entries[local_id].undo)]

    def _decide(self, local_id: int, state: CommitState) -> list[Effect]:
        """Decide on an execution in doubt. The first decision is final: a later one changes nothing."""
        if self.states.get(local_id) is not CommitState.IN_DOUBT:
            return []
        self.states[local_id] = state
        return self._advance()

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.sealing:
            return effects  # the Seal job may take a step: wait for its outcome
        for slot in list(self.sealed_sums):
            effects += self._finish(slot)
        if not self.quiet or len(self.sealed_sums) == self.slots:
            return effects
        if leaving := self._leaving():
            effects += [undo for undo in leaving if undo.local_id not in self.undoing]
            self.undoing.update(undo.local_id for undo in leaving)
            return effects
        if any(
            entry.undo and self.states[local_id] is CommitState.IN_DOUBT for local_id, entry in self.entries.items()
        ):
            return effects
        sealed = sum(map(len, self.sealed_sums.values()))
        even = -(-len(self.entries) // (self.slots + 1)) if self.slots > 1 else 0
        if len(self.entries) - sealed >= max(self.micro_batches_per_step, even):
            self.sealing = True
            effects.append(self._seal())
        return effects

    def _seal(self) -> Seal:
        slot = next(slot for slot in range(self.slots) if slot not in self.sealed_sums)
        in_sealed = {local_id for executions in self.sealed_sums.values() for local_id in executions}
        filled = [local_id for local_id in self.entries if local_id not in in_sealed]
        if any(self.states[local_id] is not CommitState.COMMITTED for local_id in filled):
            return Seal(slot=slot)
        return Seal(tuple(filled), self._apply([self.entries[local_id] for local_id in filled], slot), slot)

    def _finish(self, slot: int) -> list[Effect]:
        executions = self.sealed_sums[slot]
        states = [self.states[local_id] for local_id in executions]
        aborted = sum(state is CommitState.ABORTED for state in states)
        if CommitState.IN_DOUBT in states and not aborted:
            return []
        entries = self._taken(executions)
        del self.sealed_sums[slot]
        if aborted:
            return [Drop(slot), Log(UncountedLine(of=_counted(entries), void=aborted))]
        return [self._apply(entries, slot), Log(CountedLine(of=_counted(entries)))]

    def _taken(self, executions: tuple[int, ...]) -> list[GradientEntry]:
        for local_id in executions:
            del self.states[local_id]
        return [self.entries.pop(local_id) for local_id in executions]

    def _apply(self, entries: list[GradientEntry], slot: int) -> Apply:
        own = [entry for entry in entries if entry.own]
        loss = sum(entry.loss for entry in entries) / max(1, sum(entry.tokens for entry in entries))
        return Apply(sum(entry.tokens for entry in own), len(own), loss, slot)


def _counted(entries: list[GradientEntry]) -> tuple[CountedExecution, ...]:
    return tuple(entry.counted() for entry in entries)
