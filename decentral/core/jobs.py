"""What the event loop asks of the compute thread, and what the compute thread reports.

Plain values: tensors cross this border only as encoded bytes. The compute thread takes jobs at step edges, in
order, and every job has exactly one outcome with the same `fragment` (or `JobFailed`).
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive layers `[first, last)` that are gossiped together; the same cut on every peer of a run."""

    index: int
    first: int
    last: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor inside a blob: `elements` numbers written with `codec` into `size` bytes.

    It travels, so its fields have bounds (comm/codec.py holds them).
    """

    name: Annotated[str, Strict(), Field(max_length=32)]
    codec: Annotated[str, Strict(), Field(max_length=16)]
    elements: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    size: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]


Layout = tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a partner sent for a fragment: its blob, how many tokens and which sum of learning rates stand behind it."""

    peer: PeerId
    tokens: int
    rates: float
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

    blobs: tuple[tuple[int, Layout, bytes], ...]
    step: int


@dataclass(frozen=True, slots=True)
class SetClock:
    """Follow the swarm's learning-rate step, where it is ahead of ours."""

    step: int


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


Job = CloseWindow | Merge | Absorb | ExportState | ImportState | SetClock | Evaluate | Save | Start | Finish

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


@dataclass(frozen=True, slots=True)
class WindowClosed:
    fragment: int
    seq: int
    tokens: int
    rates: float
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


Outcome = (
    Stepped
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
