"""What the threads that compute report to the event loop: one outcome for each job, which core/jobs.py names.

All are plain values. Modules take them from core/jobs.py, beside the jobs.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.fragments import Layout
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.core.units import Seconds

DIVERGED = "training has diverged"  # the prefix of a stop reason that `prepare.train` turns into exit code 2
AppliedTokens = tuple[tuple[int, int, int], ...]
"""What a step took into the weights: the layers [first, last) of each fragment, and its tokens."""


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
    """The encoded window, or in a RoundClosed the sum of gradients, of a fragment and what stands behind it."""

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
GossipOutcome = WindowClosed | Rested | NotHeld | SectionsEncoded | Merged | Absorbed | StateExported
SpanOutcome = SpanChanged | RetainedExported
StateOutcome = StateImported | ClockSet | Evaluated | Saved | SaveFailed | Started
Outcome = StageOutcome | GossipOutcome | SpanOutcome | RoundClosed | StateOutcome | JobFailed
