"""What the event loop asks of the threads that compute (jobs), and what they report (outcomes).

All are plain values: tensors cross this border only as encoded bytes, a blob and the layout of its sections. Jobs that
touch live weights are done at step edges, in order; gossip, states for newcomers and checkpoints go on beside training
(train/job_phases.py). Each job has exactly one outcome: the one that its docstring names, with the same `fragment`,
`token` or `round`, or JobFailed. A `token` names an execution at this peer; `tokens` of a contribution or an outcome
count text.
"""

from dataclasses import dataclass

from decentral.core.fragments import Fragment as Fragment
from decentral.core.fragments import Layout as Layout
from decentral.core.fragments import Section as Section
from decentral.core.fragments import share as share
from decentral.core.ids import PeerId
from decentral.core.outcomes import Absorbed as Absorbed
from decentral.core.outcomes import AppliedTokens as AppliedTokens
from decentral.core.outcomes import BackwardDone as BackwardDone
from decentral.core.outcomes import ClockSet as ClockSet
from decentral.core.outcomes import Compared as Compared
from decentral.core.outcomes import Evaluated as Evaluated
from decentral.core.outcomes import ExecutionFailed as ExecutionFailed
from decentral.core.outcomes import Forgotten as Forgotten
from decentral.core.outcomes import ForwardDone as ForwardDone
from decentral.core.outcomes import GossipOutcome as GossipOutcome
from decentral.core.outcomes import JobFailed as JobFailed
from decentral.core.outcomes import Likeness as Likeness
from decentral.core.outcomes import Merged as Merged
from decentral.core.outcomes import NotHeld as NotHeld
from decentral.core.outcomes import Number as Number
from decentral.core.outcomes import Outcome as Outcome
from decentral.core.outcomes import Rested as Rested
from decentral.core.outcomes import RetainedExported as RetainedExported
from decentral.core.outcomes import RetainedStates as RetainedStates
from decentral.core.outcomes import RoundClosed as RoundClosed
from decentral.core.outcomes import Saved as Saved
from decentral.core.outcomes import SaveFailed as SaveFailed
from decentral.core.outcomes import Sealed as Sealed
from decentral.core.outcomes import SectionsEncoded as SectionsEncoded
from decentral.core.outcomes import SpanChanged as SpanChanged
from decentral.core.outcomes import SpanOutcome as SpanOutcome
from decentral.core.outcomes import StageOutcome as StageOutcome
from decentral.core.outcomes import Started as Started
from decentral.core.outcomes import StateExported as StateExported
from decentral.core.outcomes import StateImported as StateImported
from decentral.core.outcomes import StateOutcome as StateOutcome
from decentral.core.outcomes import Stepped as Stepped
from decentral.core.outcomes import WindowClosed as WindowClosed
from decentral.core.synthetic import Blob

MOST_UNDER_WAY = 48  # micro-batches at a peer: each is an open question, and one sender has 64 at another peer

Donated = tuple[int, Layout, Blob]
"""A fragment's state from a donor: the fragment's index, the sections of the blob, and the blob."""


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
class Absorb:
    """Push-sum: add the mass that a partner pushed -> Absorbed.

    If the contribution's `peer` is ourselves, it is our own mass that nobody took.
    """

    fragment: int
    contribution: Contribution


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


# Jobs of routed training (comm/routes/router.py)


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
GossipJob = CloseWindow | Rest | EncodeSections | Merge | Absorb | ExportState
SpanJob = ChangeSpan | ExportRetained
Job = GossipJob | SpanJob | RoundJob | ImportState | SetClock | Evaluate | Save | Start | Finish | StageJob
