"""What all update rules have in common: how a fragment's weights are merged with those of partners.

A rule holds a fragment's gossip state. It turns a window's end into a blob for partners (`close`), and what partners
sent into new weights (`merge`). Each gossip algorithm has its own, in decentral/algorithms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.core.algorithms import algorithm
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.core.jobs import Layout, Section
from decentral.train.inner import Live
from decentral.train.sections import Codecs, Packer

SCALAR = "scalar"  # in place of a codec: the section holds one fp32 number, however long the fragment is


@dataclass(frozen=True, slots=True)
class Parts:
    """A partner's blob, unpacked: fp32 vectors [n] on the fragment's device, by section; those of a scalar are [1]."""

    peer: PeerId
    tokens: int
    lr_sum: float  # sum of the learning rates of the window's steps
    vectors: dict[str, Tensor]


class UpdateRule:
    """One fragment's rule. All vectors are fp32 [n], flattened, on the fragment's device.

    By default a rule has no slow weights: it keeps no state, and a newcomer starts from a donor's live weights.
    """

    sections: Mapping[str, str] = {"theta": "int8"}
    """The sections that `close` packs, in this order: name to codec, or to SCALAR."""

    donated: Mapping[str, str] = {"theta": "fp32"}
    """The sections that a newcomer gets, likewise."""

    clipped: str | None = None
    """The section whose length is limited against that of recent ones, if any. A partner always sends it."""

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId) -> None: ...

    def close(self, live: Live, packer: Packer) -> None:
        """Ends the window and packs what partners may have. The caller resets the window's counts afterwards."""
        raise NotImplementedError

    def merge(self, live: Live, parts: Sequence[Parts]) -> None:
        """Changes theta, and exp_avg where AdamW's first moment follows; without parts it is a solo step."""
        raise NotImplementedError

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Raises ProtocolError if what a partner sent cannot be merged, though it is finite and has our layout."""

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must keep."""
        return {}

    def load(self, live: Live, state: dict[str, Tensor]) -> None:
        """Goes on from `state`; theta is already what it was."""

    def donate(self, live: Live, packer: Packer) -> None:
        """Packs what a newcomer starts from."""
        packer.add("theta", self.donated["theta"], live.theta)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Starts anew, theta included, from what a donor packed."""
        live.theta.copy_(donated["theta"])
        self.load(live, {})


def layout_of(sections: Mapping[str, str], parameters: int, codecs: Codecs) -> Layout:
    """The layout of a blob with these sections, for a fragment of so many parameters."""
    found = []
    for name, codec in sections.items():
        codec, elements = ("fp32", 1) if codec == SCALAR else (codec, parameters)
        found.append(Section(name, codec, elements, codecs.size(codec, elements)))
    return tuple(found)


def donated(gossip: GossipConfig) -> Mapping[str, str]:
    """The sections that a newcomer gets under this algorithm."""
    made: type[UpdateRule] = algorithm(gossip.algorithm).rule
    return made.donated


def rule(gossip: GossipConfig, theta: Tensor, peer: PeerId) -> UpdateRule:
    """A new rule of the run's algorithm, for the fragment whose weights theta [n] are, at this peer."""
    made: UpdateRule = algorithm(gossip.algorithm).rule(gossip, theta, peer)
    return made
