"""The interface of update rules, which merge a fragment's weights with partners' weights. Start at `UpdateRule`.

Each gossip algorithm has its own rule, in comm/gossip or comm/rounds. A rule holds a fragment's gossip state in host
memory. At a window's end it encodes a blob for partners (`close`), and it turns partners' blobs into a correction of
the weights (`merge`). It works beside training on a copy of the weights: the training thread provides the copy, and
adds the correction, between two steps (engine/gossip_jobs.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip.outer_kernels import OuterKernels
from decentral.core.choices import ALGORITHMS, load
from decentral.core.config import GossipConfig
from decentral.core.fragments import Layout, Section
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution, PartnerWork
from decentral.engine.fragment import Live

SLICES = 32  # a vector on request has at most this many slices: in int8 one has half the bytes of a sparse window
# A vector on request has fewer slices if they would be smaller: each costs a merge about 0.2 ms, whatever its size.
SLICE_NUMBERS = 1 << 15
SLICE_BLOCK = 256  # a slice has a multiple of this many numbers: whole codec blocks
SCALAR = "scalar"  # stands in place of a codec for a section that is a single fp32 number


@dataclass(frozen=True, slots=True)
class RuleTools:
    """The codecs, kernels and settings that update rules compute with."""

    codecs: Codecs
    kernels: OuterKernels
    pinned: bool = False  # True: vectors are in pinned host memory, for fast copies to a GPU
    optimizer: str = "adamw"  # `train.optimizer`, which decides how much of a late correction is applied

    def vector(self, elements: int) -> Tensor:
        """Return an uninitialised fp32 vector [elements] in host memory."""
        return torch.empty(elements, pin_memory=self.pinned)


@dataclass(frozen=True, slots=True)
class Window:
    """How much training a closed window contains, and how many steps this peer had taken when it ended."""

    tokens: int
    steps: int  # total number of steps that this peer had taken by the window's end
    thin: bool = False  # whether `close` uses `thin_codecs`


@dataclass(frozen=True, slots=True)
class ClosedWeights:
    """A fragment's weights [n] when a window was closed, and the number of steps that this peer had taken by then."""

    theta: Tensor
    steps: int


@dataclass(frozen=True, slots=True)
class Correction:
    """A change of the live weights after a merge.

    By default `vector` is added to the weights. If `replaces` is given, `vector` takes the place of those weights, and
    the changes that training has made to the live weights since then are kept.
    """

    vector: Tensor  # fp32 [n]
    replaces: ClosedWeights | None = None


@dataclass(frozen=True, slots=True)
class PartnerWindow:
    """A partner's window, decoded: fp32 vectors [n] in host memory by section name ([1] for a scalar section)."""

    peer: PeerId
    tokens: int
    vectors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PulledWindow(PartnerWindow):
    """A partner's window in the `pull` algorithm, with its sections still encoded; the merge decodes them once."""

    pseudo_gradient: bytes | memoryview = b""  # encoded in q4
    length: float = 0.0  # L2 norm of the pseudo-gradient
    slow: Sequence[tuple[slice, bytes | memoryview]] = ()  # the slices of slow weights that were pulled, in int8
    # L2 distance of slow weights from ours, if they are as far in all other slices; 0 if none were pulled.
    distance: float = 0.0


class UpdateRule:
    """The base class of update rules; an instance holds one fragment's gossip state.

    All vectors are fp32 [n], flattened, in host memory. By default a rule has no slow weights: it keeps no state, and a
    newcomer starts from a donor's live weights. The mappings below have section names as keys, and codecs or SCALAR as
    values.
    """

    sections: Mapping[str, str] = {"theta": "int8"}
    """The sections that `close` packs, in this order."""

    thin_codecs: Mapping[str, str] = {}
    """Other codecs, for a thin link, of sections that `close` packs."""

    on_request: Layout = ()
    """The sections that `encode` packs only when a partner asks for them."""

    donated: Mapping[str, str] = {"theta": "fp32"}
    """The sections of the state that a newcomer gets."""

    weights_section: str = "theta"
    """The section of `donated` that has the fragment's weights."""

    donates_live: bool = True
    """Whether a newcomer's state includes the live weights, so that it must be read between two steps."""

    left_out: tuple[PeerId, ...] = ()
    """The partners that the last merge did not trust, so that their windows were not used."""

    work: tuple[PartnerWork, ...] = ()
    """What the trusted windows of the last merge show of the work behind them; () if the rule cannot tell."""

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        """Create this peer's rule for a fragment with the weights `theta` [n].

        If theta is on the meta device, only n is known: call `load` or `adopt` next.
        """
        self.tools, self.elements = tools, theta.numel()

    def buffer(self) -> Tensor:
        """Return the vector into which the caller copies theta for the next `close` or `fold`."""
        return self.tools.vector(self.elements)

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """End the window: pack the sections for partners, given the weights `theta` [n] at the window's end."""
        raise NotImplementedError

    def encode(self, packer: Packer, names: Sequence[str]) -> None:
        """Pack these sections of `on_request`; call it between a window's close and its merge."""

    def partner_window(self, one: Contribution) -> PartnerWindow:
        """Return a partner's window, decoded; its layout must have been checked (`gossip_jobs.require_layout`).

        Raises:
            ProtocolError: If a codec or `check` refuses the window.
        """
        vectors = unpack(self.tools.codecs, one.layout, one.blob)
        self.check(vectors)
        return PartnerWindow(one.peer, one.tokens, vectors)

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Check a partner's vectors, whose layout is right and whose numbers are finite; by default accept them all.

        Raises:
            ProtocolError: If this rule cannot merge the vectors.
        """

    def merge(self, partners: Sequence[PartnerWindow], steps: int) -> Correction | None:
        """Take the outer step with partners' windows, and return the change of the live weights.

        Args:
            partners: The partners' windows; if empty, the step uses our own window alone.
            steps: Number of steps that this peer will have taken when the correction is applied.
        """
        raise NotImplementedError

    def fold(self, theta: Tensor) -> Correction | None:
        """Add the training since the last close to the slow weights without publishing it.

        `theta` [n] is a copy of the current weights.

        Returns:
            The correction of the live weights; None if nothing is to be corrected, as in a rule without slow weights.
        """
        return None

    # Synchronous training calls `close_round` and `advance` instead of `close` and `merge`; both use the live weights.

    def close_round(self, live: Live, packer: Packer) -> None:
        """Pack this peer's sum of gradients in the round for the other holders of the fragment."""
        raise NotImplementedError

    def advance(self, live: Live, sums: Sequence[PartnerWindow]) -> None:
        """Take the round's step on the live tensors, with the gradient sums of all holders."""
        raise NotImplementedError

    def state_lengths(self) -> Mapping[str, int]:
        """Return the name and length of each vector in `state`, in the order of `state`."""
        return {}

    def state(self, theta: Tensor) -> Mapping[str, Tensor]:
        """Return, by name, the vectors [n] that a checkpoint must store besides the weights `theta`."""
        return {}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        """Continue with the weights `theta` [n] and a checkpoint's `state`; with an empty state, start a new rule."""

    def donate(self, live: Live, packer: Packer) -> None:
        """Pack the state from which a newcomer starts."""
        packer.add(self.weights_section, self.donated[self.weights_section], live.theta.float())

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Start as a new rule does, but from a donor's state, and overwrite the live weights with that state.

        The rule may use the vectors of `donated` as its own, and change them.
        """
        live.theta.copy_(donated[self.weights_section])
        self.load(live.theta, {})


def layout_of(sections: Mapping[str, str], parameters: int, codecs: Codecs) -> Layout:
    """Return the layout of a blob with these sections (name to codec), for a fragment of `parameters` numbers."""
    found = []
    for name, codec in sections.items():
        codec, elements = ("fp32", 1) if codec == SCALAR else (codec, parameters)
        found.append(Section(name, codec, elements, codecs.size(codec, elements)))
    return tuple(found)


def sliced(name: str, codec: str, parameters: int, codecs: Codecs) -> dict[Section, slice]:
    """Return the sections of a vector that is sent in slices, each with the slice of the vector that it has.

    There are at most SLICES of them, of at least SLICE_NUMBERS numbers and of whole codec blocks, but for the last.
    """
    numbers = max(SLICE_NUMBERS, SLICE_BLOCK * math.ceil(parameters / (SLICES * SLICE_BLOCK)))
    parts = [slice(begin, min(begin + numbers, parameters)) for begin in range(0, parameters, numbers)]
    lengths = [part.stop - part.start for part in parts]
    return {
        Section(f"{name}.{place}", codec, length, codecs.size(codec, length)): part
        for place, (part, length) in enumerate(zip(parts, lengths, strict=True))
    }


def donated(gossip: GossipConfig) -> Mapping[str, str]:
    """Return the sections (name to codec) of the state from which a newcomer starts, in the run's algorithm."""
    return _rule(gossip).donated


def weights_section(gossip: GossipConfig) -> str:
    """Return the name of the section of `donated` that has the fragment's weights."""
    return _rule(gossip).weights_section


def rule(gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> UpdateRule:
    """Return a new rule of the run's algorithm for a fragment with the weights theta [n], at this peer."""
    return _rule(gossip)(gossip, theta, peer, tools)


def _rule(gossip: GossipConfig) -> type[UpdateRule]:
    found: type[UpdateRule] = load(ALGORITHMS[gossip.algorithm].rule)
    return found
