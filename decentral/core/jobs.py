"""What the event loop asks of the threads that compute (jobs), and what they report (outcomes).

All are plain values: tensors cross this border only as encoded bytes, a blob and the layout of its sections. Jobs that
touch live weights are done at step edges, in order; gossip, states for newcomers and checkpoints go on beside training
(engine/threads.py). Each job has exactly one outcome: the one that its docstring names, with the same `fragment`,
`token` or `round`, or JobFailed. A `token` names an execution at this peer; `tokens` of a contribution or an outcome
count text.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.fragments import Layout
from decentral.core.ids import PeerId
from decentral.core.synthetic import Blob
from decentral.core.time_spent import TimeSpent
from decentral.core.units import Seconds

DIVERGED = "training has diverged"  # the prefix of a stop reason that `prepare.train` turns into exit code 2
MOST_UNDER_WAY = 48  # micro-batches at a peer: each is an open question, and one sender has 64 at another peer

Donated = tuple[int, Layout, Blob]
"""A fragment's state from a donor: the fragment's index, the sections of the blob, and the blob."""


AppliedTokens = tuple[tuple[int, int, int], ...]
"""What a step took into the weights: the layers [first, last) of each fragment, and its tokens."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Another peer's blob for a fragment, with the tokens and the sum of learning rates that stand behind it."""

    peer: PeerId
    tokens: int
    lr_sum: float
    layout: Layout
    blob: bytes


# Jobs


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """End the fragment's window `seq` and encode what others may pull -> WindowClosed.

    `hold`: take no further step before this window's Merge. `sparse`: in the shorter of the algorithm's codes.
    """

    fragment: int
    seq: int
    hold: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Nobody is there to read the fragment's windows: keep none until the next CloseWindow -> Rested.

    What is trained meanwhile goes into the slow weights when the next window is closed or a newcomer asks for them.
    """

    fragment: int


@dataclass(frozen=True, slots=True)
class EncodeSections:
    """Encode the sections of window `seq` that are made only on request; its Merge comes later -> SectionsEncoded."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Take the outer step of window `seq` with these contributions -> Merged. Without any it is a solo step."""

    fragment: int
    seq: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class ExportState:
    """Encode the state of the fragment that a newcomer needs -> StateExported."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Start from donors' states, one per fragment, at the swarm's learning-rate step -> StateImported."""

    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SetClock:
    """Follow the swarm's learning-rate step if it is ahead of ours -> ClockSet. `versions` are as in Advance."""

    step: int
    versions: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the held-out loss of the weights -> Evaluated."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint -> Saved, or SaveFailed."""


@dataclass(frozen=True, slots=True)
class Start:
    """Train from now on, since the state is complete -> Started. A newcomer's first window carries no weight."""

    newcomer: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """End the training thread after all jobs before this one. It has no outcome."""


# Jobs of routed training (comm/pipeline/router.py)


@dataclass(frozen=True, slots=True)
class Draw:
    """Begin a micro-batch of our own data: forward through our layers up to `last` -> as for Forward.

    `thin`, here and below: what leaves has the shorter of the run's forms.
    """

    token: int
    last: int
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Take another peer's micro-batch through layers [first, last) -> ForwardDone, or ExecutionFailed.

    The blob holds hidden_BTD and targets_BT, with B = `sequences`. If `last` is the model's end, the loss and the
    backward pass follow at once -> BackwardDone.
    """

    token: int
    first: int
    last: int
    sequences: int
    layout: Layout
    blob: bytes
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """Go back through the same layers; the blob is the gradient of the hidden_BTD that we sent on -> as for Forward."""

    token: int
    layout: Layout
    blob: bytes
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what these executions keep for their backward passes; nobody waits for them -> Forgotten."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare gradients of the hidden_BTD that enter layer `first`: the last one with each one before -> Compared."""

    token: int  # of an audit
    sequences: int
    first: int
    gradients: tuple[tuple[Layout, bytes], ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Take the optimizer's step with a sealed sum -> Stepped, which repeats the tokens, micro-batches and loss.

    They describe our own micro-batches in the sum; `loss` is the mean over the sum's tokens.
    """

    tokens: int
    micro_batches: int
    loss: float
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Seal:
    """Close the sum of gradients and keep it in this slot -> Sealed. Later backward passes fill the next sum.

    If it is the sum of exactly the `ready` executions, which are all committed, and sound, `then` is done at once,
    before any later forward pass -> Stepped.
    """

    ready: tuple[int, ...] = ()
    then: Apply | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw a sealed sum away, because an execution in it was aborted -> Forgotten."""

    slot: int = 0


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """Hold layers [first, last) from now on; no execution is here -> SpanChanged.

    `blobs` are the states of fragments that we do not hold yet. A new fragment without one begins with the state that
    the disk retains, or else with its initial weights. Fragments that we give up are retained on the disk. `step` is
    the donors' learning-rate step.
    """

    first: int
    last: int
    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class ExportRetained:
    """Read the state of a fragment that was retained when we gave its layers up -> RetainedExported."""

    fragment: int


# Jobs of synchronous rounds (comm/rounds/round.py)


@dataclass(frozen=True, slots=True)
class CloseRound:
    """End the round's sums of gradients, and encode them for the other holders of our layers -> RoundClosed.

    If the sums hold other executions than these, they count nowhere and are not encoded.
    """

    round: int
    executions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Take the round's step in every fragment with all holders' sums -> Stepped, which repeats the rest as for Apply.

    `versions` are those of the fragments after the step, for the checkpoint.
    """

    round: int
    sums: tuple[tuple[int, tuple[Contribution, ...]], ...]  # by fragment, in the order of the peers
    versions: tuple[tuple[int, bytes], ...]
    tokens: int
    micro_batches: int
    loss: float


StageJob = Draw | Forward | Backward | Forget | Compare | Seal | Apply | Drop
RoundJob = CloseRound | Advance
GossipJob = CloseWindow | Rest | EncodeSections | Merge | ExportState
SpanJob = ChangeSpan | ExportRetained
Job = GossipJob | SpanJob | RoundJob | ImportState | SetClock | Evaluate | Save | Start | Finish | StageJob


# Outcomes


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step. `spent` is the training thread's time since the last one, jobs included."""

    step: int
    lr_step: int
    tokens: int
    loss: float
    spent: TimeSpent
    micro_batches: int
    executions: tuple[int, ...] = ()  # after a Seal: the tokens of the executions in the step
    refused: tuple[tuple[int, PeerId, str], ...] = ()  # after an Advance: fragment, the sum's peer, and the reason
    applied: AppliedTokens | None = None  # after a step with gradients of routes
    dropped: bool = False  # the gradient was not finite, so nothing was trained


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """The encoded pseudo-gradient of one fragment's window, with the tokens and learning rates that went into it.

    In a RoundClosed it is the sum of gradients of one synchronous round.
    """

    fragment: int
    seq: int
    tokens: int
    lr_sum: float
    layout: Layout
    blob: bytes
    on_request: Layout = ()  # sections that EncodeSections makes, until the window is merged
    codings: Layout = ()  # all forms of the sections that come in several codes, ours included
    cost_s: Seconds = 0.0  # of the training thread and of the worker beside it
    ago_s: Seconds = 0.0  # how long the host took to say so: it is minutes where the process was stopped

    def reported(self, ago_s: Seconds) -> "WindowClosed":
        return replace(self, ago_s=ago_s)


@dataclass(frozen=True, slots=True)
class Rested:
    fragment: int


@dataclass(frozen=True, slots=True)
class NotHeld:
    """The fragment was given up before the job's turn came."""

    fragment: int


@dataclass(frozen=True, slots=True)
class SectionsEncoded:
    fragment: int
    seq: int
    layout: Layout
    blob: bytes
    cost_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Merged:
    """The contributions of the `used` peers went into the step; those of the `rejected` did not, for a reason."""

    fragment: int
    seq: int
    used: tuple[PeerId, ...]
    rejected: tuple[tuple[PeerId, str], ...]
    cost_s: Seconds = 0.0


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
    """Training begins at this learning-rate step."""

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
    cost_s: Seconds = 0.0  # of the training thread and of the worker beside it


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The checkpoint could not be written; the one before it stays, and the peer goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Another job raised an error, after which the peer cannot go on. `job` is its name for the journal."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """The blob holds hidden_BTD and targets_BT for the next stage.

    `number` is that of a micro-batch that we drew, unique at this peer.
    """

    token: int
    number: int
    sequences: int
    tokens: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """The weights' gradients are in the sum; the blob is the gradient of the hidden_BTD that came in.

    `loss` is summed over the tokens; only the last stage knows it.
    """

    token: int
    tokens: int
    loss: float
    layout: Layout
    blob: bytes
    number: int = 0  # of a micro-batch that we drew and took to the model's end


@dataclass(frozen=True, slots=True)
class ExecutionFailed:
    """The blob was refused. Nothing has changed, and the execution can be tried again."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The executions whose gradients are in the sealed sum.

    If it is not `sound`, its norm is not finite in some fragment, so that no step can be taken with it.
    """

    tokens: tuple[int, ...]
    slot: int = 0
    sound: bool = True


@dataclass(frozen=True, slots=True)
class Likeness:
    """How like one gradient is to another: their cosine, and its length over the other's."""

    cosine: float
    ratio: float


UNLIKE = Likeness(-1.0, 0.0)
"""That of what is no gradient."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How like the last gradient is to each one before."""

    token: int
    likeness: tuple[Likeness, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A Forget or a Drop is done."""


Number = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
RetainedStates = tuple[tuple[Number, Number], ...]
"""The fragments whose state the disk retains, each with its learning-rate step."""


@dataclass(frozen=True, slots=True)
class SpanChanged:
    """If not accepted, all is as before, and `reason` says why. `kept` are the states that the disk retains now."""

    accepted: bool
    reason: str = ""
    kept: RetainedStates = ()


@dataclass(frozen=True, slots=True)
class RetainedExported:
    """The retained state. If nothing can be read, the layout is empty."""

    fragment: int
    step: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The executions whose gradients are in the sums. There are no sums if they are empty or not all of it counts."""

    round: int
    executions: tuple[int, ...]
    sums: tuple[WindowClosed, ...]


StageOutcome = ForwardDone | BackwardDone | ExecutionFailed | Sealed | Compared | Forgotten | Stepped
GossipOutcome = WindowClosed | Rested | NotHeld | SectionsEncoded | Merged | StateExported
SpanOutcome = SpanChanged | RetainedExported
StateOutcome = StateImported | ClockSet | Evaluated | Saved | SaveFailed | Started
Outcome = StageOutcome | GossipOutcome | SpanOutcome | RoundClosed | StateOutcome | JobFailed
