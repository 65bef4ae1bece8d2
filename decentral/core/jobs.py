"""The jobs that the event loop gives to the compute threads, and the outcomes that these threads report.

Jobs and outcomes are plain values: tensors pass between event loop and threads only as encoded bytes, a blob and the
layout of its sections. Jobs that use the live weights run between two training steps, in order; gossip, states for
newcomers and checkpoints run beside training (engine/threads.py). Each job has exactly one outcome: the outcome that
its docstring names, with the job's `fragment`, `local_id` or `round`, or else `JobFailed`.

A stage execution is one micro-batch in the layers of one peer; `local_id` is its number at this peer. `tokens` of a
contribution or an outcome count text tokens. Window `seq` of a fragment is the training between two exchanges of the
fragment. Sealing a sum of gradients means that no gradient is added to it any more, and that it waits in a `slot` for
its optimizer step.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.fragments import Layout
from decentral.core.ids import PeerId
from decentral.core.synthetic import Blob
from decentral.core.time_spent import TimeSpent
from decentral.core.units import Seconds

DIVERGED = "training has diverged"  # if a peer's reason to stop begins with these words, it exits with code 2
MOST_UNDER_WAY = 48  # a peer has at most this many micro-batches in flight; each needs one of its 64 open requests

Donated = tuple[int, Layout, Blob]
"""A fragment's state from a donor: the fragment's index, the blob's layout, the blob."""


AppliedTokens = tuple[tuple[int, int, int], ...]
"""(first, last, tokens) of each fragment that a step changed: its layers [first, last) and the step's tokens."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Another peer's encoded update of a fragment, with the tokens of that peer's steps."""

    peer: PeerId
    tokens: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Job: end window `seq` of a fragment, and encode its result, which partners may pull. Outcome: `WindowClosed`.

    Attributes:
        blocking: Whether training pauses until the `Merge` of this window is done.
        thin: Whether the link is slow: sections are sent in the algorithm's shorter code (q1 in pull), if it has two.
    """

    fragment: int
    seq: int
    blocking: bool = False
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Job: publish no windows of a fragment until the next `CloseWindow`, since no peer reads them. Outcome: `Rested`.

    Training continues. The slow weights are updated at the next `CloseWindow`, or when a newcomer requests the state.
    """

    fragment: int


@dataclass(frozen=True, slots=True)
class EncodeSections:
    """Job: encode, for a partner that requests them, sections `names` of window `seq` that `CloseWindow` left out.

    Outcome: `SectionsEncoded`. The job must come before the window's `Merge`.
    """

    fragment: int
    seq: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Job: take the outer step of window `seq` with this peer's and its partners' contributions. Outcome: `Merged`.

    `contributions` has only the partners' contributions; it may be empty.
    """

    fragment: int
    seq: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class ExportState:
    """Job: encode a fragment's state for a newcomer. Outcome: `StateExported`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Job: start from donors' states, one per fragment, at learning-rate step `step`. Outcome: `StateImported`."""

    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SetClock:
    """Job: raise this peer's learning-rate step to `step`, the step of the swarm. Outcome: `ClockSet`.

    A higher step of this peer stays unchanged in asynchronous training; in synchronous rounds it is set to `step`.
    `versions` are the fragments' versions, as in `Advance`.
    """

    step: int
    versions: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Job: measure the held-out loss of the weights. Outcome: `Evaluated`."""


@dataclass(frozen=True, slots=True)
class Save:
    """Job: write a checkpoint. Outcome: `Saved` or `SaveFailed`."""


@dataclass(frozen=True, slots=True)
class Start:
    """Job: begin to train; all held fragments must have their states. Outcome: `Started`.

    If `newcomer`, this peer has just received its state, and its first window of each fragment has weight 0 in merges.
    """

    newcomer: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Job: end the training thread after all earlier jobs. It has no outcome."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Job: run a micro-batch of this peer's own data forward through layers [0, last). Outcome: as for `Forward`.

    If `thin`, here and in the jobs below, the result has the run's shorter encoding, for thin (slow) links.
    """

    local_id: int
    last: int
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Job: run another peer's micro-batch forward through layers [first, last).

    The blob contains hidden_BTD and targets_BT, with B = `sequences`. Outcome: `ForwardDone`. If `last` is the model's
    end, the job also computes the loss and the backward pass; outcome: `BackwardDone`. If the blob is refused or the
    loss is not finite, outcome: `ExecutionFailed`.
    """

    local_id: int
    first: int
    last: int
    sequences: int
    layout: Layout
    blob: bytes
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """Job: run the backward pass of execution `local_id`. Outcome: `BackwardDone` or `ExecutionFailed`.

    The blob contains the gradient of the hidden_BTD that the execution's `ForwardDone` returned.
    """

    local_id: int
    layout: Layout
    blob: bytes
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Job: free the activations of these executions; no backward pass will need them. Outcome: `Forgotten`."""

    executions: tuple[int, ...]  # `local_id` of each of them


@dataclass(frozen=True, slots=True)
class Compare:
    """Job: compare the last of `gradients` with each earlier one, to find a wrong peer. Outcome: `Compared`.

    Several peers have run the same stage execution (an audit). Each gradient is the gradient of the hidden_BTD that
    enters layer `first`, as computed by one of these peers.
    """

    local_id: int  # identifies the audit
    sequences: int
    first: int
    gradients: tuple[tuple[Layout, bytes], ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Job: take an optimizer step with the sealed sum of gradients in `slot`. Outcome: `Stepped`.

    `tokens` and `micro_batches` count this peer's own micro-batches in the sum; `loss` is the mean over all tokens of
    the sum, in nats per token.
    """

    tokens: int
    micro_batches: int
    loss: float
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Seal:
    """Job: seal the open sum of gradients in `slot`, and begin a new sum. Outcome: `Sealed`.

    `ready` are committed executions. If the sealed sum is finite and consists of exactly these executions, the job
    `then` runs at once, before any later forward pass, and the outcome is `Stepped`.
    """

    ready: tuple[int, ...] = ()
    then: Apply | None = None
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Job: discard the sealed sum in `slot`, because an execution in it was aborted. Outcome: `Forgotten`."""

    slot: int = 0


@dataclass(frozen=True, slots=True)
class Undo:
    """Job: take the gradients of an aborted execution out of the open sum. Outcome: `Undone`.

    The execution's passes are run once more, and the gradients are subtracted. If a merge of gossip has changed the
    weights since the first time, the difference stays in the sum.
    """

    forward: Forward
    backward: Backward | None = None  # None: the execution ends with the model's last layer

    @property
    def local_id(self) -> int:
        """Return the execution's number at this peer."""
        return self.forward.local_id


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """Job: change this peer's span to layers [first, last) while no execution is in flight. Outcome: `SpanChanged`.

    `blobs` are donors' states of new fragments, at learning-rate step `step`. A new fragment without a donor's state
    starts from the state that the disk retains, or else from initial weights. The states of fragments that this peer
    gives up are saved on the disk.
    """

    first: int
    last: int
    blobs: tuple[Donated, ...]
    step: int


@dataclass(frozen=True, slots=True)
class ExportRetained:
    """Job: read from the disk the retained state of a fragment. Outcome: `RetainedExported`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class RetainCopy:
    """Job: write another peer's state of a fragment, at step `step`, to the disk. Outcome: `RetainedChanged`."""

    fragment: int
    layout: Layout
    blob: Blob
    step: int


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Job: delete the retained state of a fragment if its learning-rate step is `step`. Outcome: `RetainedChanged`."""

    fragment: int
    step: int


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Job: encode this peer's sums of gradients of round number `round`, and clear them. Outcome: `RoundClosed`.

    Each sum belongs to one fragment, and all other peers that hold the fragment receive the sum. If any sum is not
    finite, or includes an execution that is not in `executions`, no sum is encoded.
    """

    round: int
    executions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Job: take the optimizer step of round number `round` in every held fragment, with all holders' sums of gradients.

    Outcome: `Stepped`.

    `tokens`, `micro_batches` and `loss` are as in `Apply`.
    """

    round: int
    sums: tuple[tuple[int, tuple[Contribution, ...]], ...]  # (fragment, all holders' sums, sorted by peer)
    versions: tuple[tuple[int, bytes], ...]  # (fragment, digest) after the step, for the checkpoint
    tokens: int
    micro_batches: int
    loss: float


StageJob = Draw | Forward | Backward | Forget | Compare | Seal | Apply | Drop | Undo
RoundJob = CloseRound | Advance
GossipJob = CloseWindow | Rest | EncodeSections | Merge | ExportState
SpanJob = ChangeSpan | ExportRetained | RetainCopy | DropCopy
Job = GossipJob | SpanJob | RoundJob | ImportState | SetClock | Evaluate | Save | Start | Finish | StageJob


@dataclass(frozen=True, slots=True)
class Stepped:
    """Outcome: one optimizer step (inner step) was taken."""

    step: int
    lr_step: int
    tokens: int
    loss: float  # mean loss, nats per token
    spent: TimeSpent  # time since the previous step, including the time of jobs
    micro_batches: int
    executions: tuple[int, ...] = ()  # those of a Seal that took the step at once; after Apply: (), Sealed names them
    refused: tuple[tuple[int, PeerId, str], ...] = ()  # (fragment, peer, reason) of each sum that was refused
    applied: AppliedTokens | None = None  # tokens by fragment; None unless micro-batches passed through several peers
    dropped: bool = False  # whether nothing was trained, because the gradient was not finite


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """Outcome: the encoded pseudo-gradient of a fragment's window, with the window's tokens.

    In a `RoundClosed`, the blob is instead this peer's sum of gradients of one synchronous round.
    """

    fragment: int
    seq: int
    tokens: int
    layout: Layout
    blob: bytes
    on_request: Layout = ()  # sections that the blob lacks; EncodeSections can still encode them until the merge
    codings: Layout = ()  # all encodings of each section that has more than one encoding
    cost_s: Seconds = 0.0  # time that the job took on the training thread and on its worker thread
    ago_s: Seconds = 0.0  # time between the end of the job and its report; long if the process was suspended meanwhile

    def reported(self, ago_s: Seconds) -> "WindowClosed":
        """Return a copy with `ago_s`, the time between the end of the job and its report to the event loop."""
        return replace(self, ago_s=ago_s)


@dataclass(frozen=True, slots=True)
class Rested:
    """Outcome: the fragment publishes no windows until the next `CloseWindow`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class NotHeld:
    """Outcome: nothing was done, because this peer gave up the fragment before the job started."""

    fragment: int


@dataclass(frozen=True, slots=True)
class SectionsEncoded:
    """Outcome: the sections of window `seq` that a partner asked for."""

    fragment: int
    seq: int
    layout: Layout
    blob: bytes
    cost_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class PartnerWork:
    """What a merge shows of the work behind a partner's window, and of our own window for comparison.

    If a share of the partner's window copies other windows, both numbers of tokens are reduced by this share.
    """

    peer: PeerId
    claimed: float  # tokens that the partner claims for its window
    own: float  # tokens of our own window
    length: float  # L2 norm of the partner's pseudo-gradient
    own_length: float  # L2 norm of our own pseudo-gradient


@dataclass(frozen=True, slots=True)
class Merged:
    """Outcome: the outer step of window `seq` was taken."""

    fragment: int
    seq: int
    used: tuple[PeerId, ...]
    rejected: tuple[tuple[PeerId, str], ...]  # peers whose contributions were left out, each with the reason
    cost_s: Seconds = 0.0
    work: tuple[PartnerWork, ...] = ()  # one entry for each partner whose window was trusted


@dataclass(frozen=True, slots=True)
class StateExported:
    """Outcome: a fragment's state for a newcomer; `blob` is empty if this peer no longer holds the fragment."""

    fragment: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class StateImported:
    """Outcome: either all donors' states were adopted (`accepted`), or no state was adopted, for the given `reason`."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClockSet:
    """Outcome: this peer's learning-rate step after a `SetClock`."""

    step: int


@dataclass(frozen=True, slots=True)
class Started:
    """Outcome: training begins at this learning-rate step."""

    step: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Outcome: the held-out loss over `tokens` tokens, in nats per token."""

    tokens: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Outcome: a checkpoint is on the disk."""

    lr_step: int  # the learning-rate step that the checkpoint stores
    bytes: int
    cost_s: Seconds = 0.0  # time that the job took on the training thread and on its worker thread


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Outcome: the checkpoint could not be written; the peer keeps running, and a previous checkpoint is kept."""

    reason: str
    kept: bool = True  # False: the state folder was deleted, and with it all checkpoints

    @property
    def said(self) -> str:
        """Return as text for people which checkpoint is left, and why there is no new one."""
        return f"the old one stays: {self.reason}" if self.kept else f"none is left: {self.reason}"


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Outcome: a job raised an error after which the peer must stop. `job` is the job's name for the journal."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """Outcome: a blob of hidden_BTD and targets_BT for the next stage."""

    local_id: int
    number: int  # number by which other peers know this peer's own micro-batch; 0 for another peer's micro-batch
    sequences: int
    tokens: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """Outcome: the weights' gradients were added to the open sum; the blob is the gradient of the input hidden_BTD."""

    local_id: int
    tokens: int
    loss: float  # nats, summed over the tokens; 0.0 unless this stage is the model's last
    layout: Layout
    blob: bytes
    number: int = 0  # number by which other peers know this peer's own micro-batch; 0 for another peer's micro-batch
    given_norm: float | None = None  # L2 norm of the gradient in the job `Backward`; None: the job had none


@dataclass(frozen=True, slots=True)
class ExecutionFailed:
    """Outcome: the forward or backward pass was refused or failed; no gradient was added to a sum."""

    local_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Outcome: the open sum of gradients was sealed. The sum waits in `slot` for its optimizer step."""

    executions: tuple[int, ...]  # `local_id` of each stage execution whose gradient is in the sum
    slot: int = 0
    sound: bool = True  # False if the sum's norm in a fragment is not finite; no step can use such a sum


@dataclass(frozen=True, slots=True)
class Likeness:
    """How similar a later gradient is to an earlier gradient: the cosine, and the later norm over the earlier norm."""

    cosine: float
    ratio: float


UNLIKE = Likeness(-1.0, 0.0)
"""The likeness given to a gradient that is zero, not finite, or cannot be decoded."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Outcome: how similar the last gradient is to each earlier gradient."""

    local_id: int
    likeness: tuple[Likeness, ...]


@dataclass(frozen=True, slots=True)
class Undone:
    """Outcome: whether the gradients of an execution were taken out of the open sum, which is else unchanged."""

    local_id: int
    done: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Outcome: a `Forget` or a `Drop` is done."""


Number = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
RetainedStates = tuple[tuple[Number, Number], ...]
"""(fragment, learning-rate step) of each state that the disk retains."""


@dataclass(frozen=True, slots=True)
class SpanChanged:
    """Outcome: either the span was changed (`accepted`), or nothing was changed, for the given `reason`."""

    accepted: bool
    reason: str = ""
    retained: RetainedStates = ()  # stored states of fragments that this peer no longer trains


@dataclass(frozen=True, slots=True)
class RetainedChanged:
    """Outcome of RetainCopy or DropCopy: the states that the disk retains now."""

    fragment: int
    retained: RetainedStates
    reason: str = ""  # why the disk refused the copy; "" if the job succeeded


@dataclass(frozen=True, slots=True)
class RetainedExported:
    """Outcome: a fragment's retained state from the disk; `layout` is empty if no state can be read."""

    fragment: int
    step: int
    layout: Layout
    blob: bytes


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Outcome: this peer's sums of gradients of round number `round`, one for each fragment with gradients."""

    round: int
    executions: tuple[int, ...]  # `local_id` of each stage execution whose gradient was in the sums
    sums: tuple[WindowClosed, ...]  # empty if there were no gradients, or if the sums were discarded


StageOutcome = ForwardDone | BackwardDone | ExecutionFailed | Sealed | Compared | Undone | Forgotten | Stepped
GossipOutcome = WindowClosed | Rested | NotHeld | SectionsEncoded | Merged | StateExported
SpanOutcome = SpanChanged | RetainedExported | RetainedChanged
StateOutcome = StateImported | ClockSet | Evaluated | Saved | SaveFailed | Started
Outcome = StageOutcome | GossipOutcome | SpanOutcome | RoundClosed | StateOutcome | JobFailed
