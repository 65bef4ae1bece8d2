"""What the event loop asks of the compute thread, and what the compute thread reports.

Plain values: tensors cross this border only as encoded bytes. The compute thread takes jobs at step edges, in
order, and every job has exactly one outcome with the same `fragment` (or `JobFailed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.ids import PeerId

FORWARD_PART = 1 / 3  # of a micro-batch's computing; the rest is its backward pass
MOST_UNDER_WAY = 48  # micro-batches at a peer: each is an open question, and comm/net/streams.py answers 64 at once


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive layers `[first, last)` that are gossiped together; the same cut on every peer of a run."""

    index: int
    first: int
    last: int
    parameters: int


def share(cuts: Sequence[Fragment], first: int, last: int) -> float:
    """The part of the parameters of a model, cut into these, in layers [first, last)."""
    inside = sum(cut.parameters for cut in cuts if first <= cut.first and cut.last <= last)
    return inside / sum(cut.parameters for cut in cuts)


def forward_part(last: int, layers: int) -> float:
    """Of a micro-batch's computing in layers up to `last`, what is done at once: at the model's end all of it, since
    the backward pass follows."""
    return 1.0 if last == layers else FORWARD_PART


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor inside a blob: `elements` numbers written with `codec` into `size` bytes.

    It travels, so its fields have bounds (comm/wire/codec.py holds them).
    """

    name: Annotated[str, Strict(), Field(max_length=32)]
    codec: Annotated[str, Strict(), Field(max_length=16)]
    elements: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    size: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]


Layout = tuple[Section, ...]
Donated = tuple[int, Layout, bytes]
"""A fragment's state, as its holder gives it to others: which fragment, its sections, and the blob."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a partner sent for a fragment: its blob, how many tokens and which sum of learning rates stand behind it."""

    peer: PeerId
    tokens: int
    lr_sum: float
    layout: Layout
    blob: bytes


# Jobs


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """End the fragment's window and encode what others may have, as number `seq`. `hold`: wait for the merge."""

    fragment: int
    seq: int
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Take the outer step of window `seq` with these contributions; none of them is a solo step."""

    fragment: int
    seq: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Absorb:
    """Push-sum: add mass that a partner pushed, or take back (`peer` is ourselves) mass that nobody took."""

    fragment: int
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class ExportState:
    """Encode what a newcomer needs of the fragment."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Start from a donor's state: one blob per fragment; `step` is the swarm's learning-rate step."""

    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SetClock:
    """Follow the swarm's learning-rate step, where it is ahead of ours. `versions`: see Advance."""

    step: int
    versions: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Held-out loss of the live weights."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint."""


@dataclass(frozen=True, slots=True)
class Start:
    """Train from now on: the state is complete. `newcomer`: the first window's tokens carry no weight."""

    newcomer: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave the compute thread; whatever came before it in the queue is done first."""


# Jobs of a peer that holds a part of the model: comm/routes/router.py. `token` names an execution at this peer, and nowhere else.


@dataclass(frozen=True, slots=True)
class Draw:
    """Begin a micro-batch of our own data: forward through our layers up to `last`."""

    token: int
    last: int


@dataclass(frozen=True, slots=True)
class Forward:
    """ForwardRequest a micro-batch through layers [first, last). The blob is its hidden values and its targets.

    Where `last` is the model's end the loss and the backward pass follow at once.
    """

    token: int
    first: int
    last: int
    sequences: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradient of what we sent on is here: go back through the same layers."""

    token: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody waits for these any more: let go of what is held for their backward passes."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Take the optimizer's step with a sealed sum. The rest is for the report: what of it we started ourselves."""

    tokens: int
    micro_batches: int
    loss: float
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Seal:
    """Close the sum of gradients, and keep it in this slot: those of later backward passes go into the next one.

    If it is the sum of exactly these executions, all of which may be counted, `then` the step is taken at once, before any
    later forward pass; else it has to wait.
    """

    ready: tuple[int, ...] = ()
    then: Apply | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw a sealed sum away: not all of it may be counted."""

    slot: int = 0


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """Hold layers [first, last) from now on, while no execution is here.

    `blobs`: the state of those fragments that we do not hold yet; one that is not among them begins with what the disk
    keeps of it, else with its initial weights. What we hold and shall not is kept on the disk. `step` is the donors'
    learning-rate step.
    """

    first: int
    last: int
    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class ExportRetained:
    """Read what was kept of a fragment when its layers were given up."""

    fragment: int


# Jobs of synchronous rounds: comm/rounds/round.py


@dataclass(frozen=True, slots=True)
class CloseRound:
    """End the sums of gradients, and encode them for the other holders; not at all, if others' than `executions` are in."""

    round: int
    executions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Take the round's step in every fragment, with all holders' sums. The rest is for the report, as in Apply.

    `versions`: of the fragments after it, for the checkpoint.
    """

    round: int
    sums: tuple[tuple[int, tuple[Contribution, ...]], ...]  # by fragment, in the order of the peers
    versions: tuple[tuple[int, bytes], ...]
    tokens: int
    micro_batches: int
    loss: float


StageJob = Draw | Forward | Backward | Forget | Seal | Apply | Drop
RoundJob = CloseRound | Advance
GossipJob = CloseWindow | Merge | Absorb | ExportState
SpanJob = ChangeSpan | ExportRetained
Job = GossipJob | SpanJob | RoundJob | ImportState | SetClock | Evaluate | Save | Start | Finish | StageJob

# Outcomes


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step and the jobs since the last one: `seconds` of computing (throttling included)."""

    step: int
    lr_step: int
    tokens: int
    loss: float
    seconds: float
    micro_batches: int
    executions: tuple[int, ...] = ()  # of a Seal that was followed by its step
    refused: tuple[tuple[int, PeerId, str], ...] = ()  # of an Advance: fragment, whose sum, and why in one word


@dataclass(frozen=True, slots=True)
class WindowClosed:
    fragment: int
    seq: int
    tokens: int
    lr_sum: float
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class Merged:
    """`used`: whose contributions went in; `rejected`: whose did not, and the one-word reason."""

    fragment: int
    seq: int
    used: tuple[PeerId, ...]
    rejected: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Absorbed:
    fragment: int
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StateExported:
    fragment: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class StateImported:
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClockSet:
    step: int


@dataclass(frozen=True, slots=True)
class Started:
    """Training begins. `step` is the learning-rate step."""

    step: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    tokens: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job raised. Its peer goes on where it can; an error of our own stops it."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """What to send on: hidden values and targets. `number`: of a micro-batch that we drew, unique for this peer."""

    token: int
    number: int
    sequences: int
    tokens: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """The gradients are in the sum; the blob is that of the input. `loss`: its sum over the tokens, at the last hop."""

    token: int
    tokens: int
    loss: float
    layout: Layout
    blob: bytes
    number: int = 0  # of a micro-batch that we drew and carried to the model's end


@dataclass(frozen=True, slots=True)
class ExecutionFailed:
    """What came was refused; nothing has changed, and the execution can be tried again."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Whose gradients are in the sum that was sealed."""

    tokens: tuple[int, ...]
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Of Forget and Drop."""


Number = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
RetainedStates = tuple[tuple[Number, Number], ...]
"""Fragments of which the disk keeps a state, each with its learning-rate step."""


@dataclass(frozen=True, slots=True)
class SpanChanged:
    """Not accepted: all is as it was, for this one-word reason."""

    accepted: bool
    reason: str = ""
    kept: RetainedStates = ()


@dataclass(frozen=True, slots=True)
class RetainedExported:
    """No layout: nothing that can be read is there."""

    fragment: int
    step: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Whose gradients are in the sums. No sums: nothing was counted, or not all of it may be."""

    round: int
    executions: tuple[int, ...]
    sums: tuple[WindowClosed, ...]


Outcome = (
    SpanChanged
    | RetainedExported
    | ForwardDone
    | BackwardDone
    | ExecutionFailed
    | Sealed
    | Forgotten
    | RoundClosed
    | Stepped
    | WindowClosed
    | Merged
    | Absorbed
    | StateExported
    | StateImported
    | ClockSet
    | Started
    | Evaluated
    | Saved
    | JobFailed
)
