"""What all update rules have in common: how a fragment's weights are merged with those of partners.

A rule holds a fragment's gossip state, in host memory. It turns a window's end into a blob for partners (`close`), and
what partners sent into a correction of the weights (`merge`). It works beside training, on a copy of the weights: the
training thread gives the copy and takes the correction at step edges (engine/gossip_jobs.py). Each gossip algorithm
has its own rule, in comm/gossip or comm/rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip.outer_kernels import OuterKernels
from decentral.core.choices import ALGORITHMS, load
from decentral.core.config import GossipConfig
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Layout, Section, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.core.reasons import Reason
from decentral.engine.fragment import Live

SCALAR = "scalar"  # in place of a codec: the section holds one fp32 number, however long the fragment is


@dataclass(frozen=True, slots=True)
class RuleTools:
    """What rules compute with."""

    codecs: Codecs
    kernels: OuterKernels
    pinned: bool = False  # whether host memory shall be pinned, because the device is a GPU
    optimizer: str = "adamw"  # `train.optimizer`, on which it depends how late corrections are taken

    def vector(self, elements: int) -> Tensor:
        """An fp32 vector in host memory, with any content."""
        return torch.empty(elements, pin_memory=self.pinned)


@dataclass(frozen=True, slots=True)
class Window:
    """What stands behind a closed window."""

    tokens: int
    lr_sum: float  # sum of the learning rates of its steps
    steps: int  # that this peer had taken when it ended


@dataclass(frozen=True, slots=True)
class ClosedWeights:
    """A fragment's weights [n] at the close of a window, when so many steps had been taken."""

    theta: Tensor
    steps: int


@dataclass(frozen=True, slots=True)
class Correction:
    """`vector` [n] is added to the live weights, or takes the place of those of a close.

    Training waits for such a merge, but steps with gradients of routes may come between: they stay.
    """

    vector: Tensor
    replaces: ClosedWeights | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A partner's blob, unpacked: fp32 vectors [n] in host memory, by section; those of a scalar are [1]."""

    peer: PeerId
    tokens: int
    lr_sum: float
    vectors: dict[str, Tensor]


class UpdateRule:
    """One fragment's rule. All vectors are fp32 [n], flattened, in host memory.

    By default a rule has no slow weights: it keeps no state, and a newcomer starts from a donor's live weights.
    """

    sections: Mapping[str, str] = {"theta": "int8"}
    """The sections that `close` packs, in this order: name to codec, or to SCALAR."""

    sparse: Mapping[str, str] = {}
    """The sections that `close` packs in another code where `sparsely` says so, likewise."""

    sparsely: bool = False
    """Whether the next window's sections have their codes of `sparse`."""

    on_request: Mapping[str, str] = {}
    """The sections that are encoded only when a partner asks for them, likewise: `encode` packs them."""

    donated: Mapping[str, str] = {"theta": "fp32"}
    """The sections that a newcomer gets, likewise."""

    donates_live: bool = True
    """Whether a newcomer's state is read off the live weights, at a step edge."""

    left_out: tuple[PeerId, ...] = ()
    """The partners whose parts the last merge did not use, because they work against us."""

    ready: bool = True
    """Whether all memory that the next window needs is written; else `make_ready` does it, beside training."""

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        """Of a theta on the meta device only the length is known: `load` or `adopt` must follow."""
        self.tools, self.elements = tools, theta.numel()

    def make_ready(self) -> None:
        """Writes what a rule that has just begun has put off."""

    def buffer(self) -> Tensor:
        """Where the copy of theta for the next `close` or `fold` goes."""
        return self.tools.vector(self.elements)

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """Ends the window and packs what partners may have."""
        raise NotImplementedError

    def encode(self, packer: Packer) -> None:
        """Packs the sections of `on_request`, as they are between a window's close and its merge."""

    def read(self, one: Contribution) -> Parts:
        """A partner's contribution, whose layout was checked. Raises ProtocolError if it cannot be merged."""
        vectors = unpack(self.tools.codecs, one.layout, one.blob)
        self.check(vectors)
        return Parts(one.peer, one.tokens, one.lr_sum, vectors)

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Raises ProtocolError if what a partner sent cannot be merged, though it is finite and has our layout."""

    def merge(self, parts: Sequence[Parts], steps: int) -> Correction | None:
        """The outer step with what partners sent; without parts it is a solo step.

        `steps`: that we will have taken when the correction is added.
        """
        raise NotImplementedError

    def fold(self, theta: Tensor) -> Correction | None:
        """Takes what was trained while nobody read our windows into the slow weights, if the rule has any."""
        return None

    # Of exact algorithms, in the place of `close` and `merge`: at a step edge, on the live tensors themselves

    def close_round(self, live: Live, packer: Packer) -> None:
        """Packs what the other holders need of a round."""
        raise NotImplementedError

    def advance(self, live: Live, parts: Sequence[Parts]) -> None:
        """Takes the round's step."""
        raise NotImplementedError

    # Checkpoints and newcomers

    def kept(self) -> Mapping[str, int]:
        """The names and lengths of what `state` gives, in its order."""
        return {}

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        """All that a checkpoint with these weights must keep."""
        return {}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        """Goes on from `state`, with these weights."""

    def donate(self, live: Live, packer: Packer) -> None:
        """Packs what a newcomer starts from."""
        packer.add("theta", self.donated["theta"], live.theta.float())

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Starts anew, theta included, from what a donor packed. The vectors are the rule's from now on."""
        live.theta.copy_(donated["theta"])
        self.load(live.theta, {})

    def fits(self, one: Contribution, allowed: Layout) -> None:
        """Raises ProtocolError unless its sections are of those `allowed`, and all of `sections` are among them."""
        names = [section.name for section in one.layout]
        if not set(one.layout) <= set(allowed) or not set(self.sections) <= set(names) or len(set(names)) < len(names):
            raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")
        if len(one.blob) != layout_bytes(one.layout):
            raise ProtocolError(Reason.SHAPE, "its sections do not add up to its blob")


def layout_of(sections: Mapping[str, str], parameters: int, codecs: Codecs) -> Layout:
    """The layout of a blob with these sections, for a fragment of so many parameters."""
    found = []
    for name, codec in sections.items():
        codec, elements = ("fp32", 1) if codec == SCALAR else (codec, parameters)
        found.append(Section(name, codec, elements, codecs.size(codec, elements)))
    return tuple(found)


def donated(gossip: GossipConfig) -> Mapping[str, str]:
    """The sections that a newcomer gets under this algorithm."""
    return _rule(gossip).donated


def rule(gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> UpdateRule:
    """A new rule of the run's algorithm, for the fragment whose weights theta [n] are, at this peer."""
    return _rule(gossip)(gossip, theta, peer, tools)


def _rule(gossip: GossipConfig) -> type[UpdateRule]:
    found: type[UpdateRule] = load(ALGORITHMS[gossip.algorithm].rule)
    return found
