"""Gossip in an island whose ranks divide the model: one rank, a fragment's owner, has all of the fragment's state.

An island is a peer with several devices, with a process (a rank) for each. The owner has an ordinary `PullRule`. Rank 0
has `RemoteRule` in its place, which lets the owner do the work. At a close, the ranks send their parts of theta to the
owner (4 bytes a parameter), which sends the encoded window to rank 0. At a merge, the owner gets partners' encoded
windows, and sends each rank its part of the correction (4 bytes). So the ranks divide gossip's memory and work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip.pull_rule import STATE_VECTORS, PullRule, codecs_of, slices_of
from decentral.comm.gossip.update_rules import Correction, PartnerWindow, RuleTools, UpdateRule, Window
from decentral.core.config import GossipConfig
from decentral.core.fragments import Layout, Section
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution, PartnerWork
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.sharded import THETA, ShardedLive
from decentral.engine.shards import Shards, Slot


@dataclass(frozen=True, slots=True)
class Packed:
    """Sections that an owner has packed, each with its bytes."""

    sections: list[Section]
    parts: list[bytes]

    def unpack(self, packer: Packer) -> None:
        """Append the sections to a packer."""
        for section, part in zip(self.sections, self.parts, strict=True):
            packer.add_encoded(section.name, section.codec, section.elements, part)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What rank 0 learns of a merge: the partners that were left out, and the work that windows show."""

    left_out: tuple[PeerId, ...]
    work: tuple[PartnerWork, ...]


class OwnerWork:
    """The gossip of the fragments that this rank owns. `RemoteRule` on rank 0 calls its methods, by `Shards.call`.

    Each `gather` or `scatter` here pairs with a `feed` or `spread` of `RemoteRule`, in the same sequence.
    """

    def __init__(self, gossip: GossipConfig, peer: PeerId, tools: RuleTools, shards: Shards) -> None:
        """Begin without rules: `load` makes them."""
        self.gossip, self.peer, self.tools, self.shards = gossip, peer, tools, shards
        self._rules: dict[int, PullRule] = {}
        self._windows: dict[int, dict[PeerId, PartnerWindow]] = {}  # by fragment: windows that wait for their merge
        self._corrections: dict[int, Tensor] = {}  # by fragment: correction that `scatter_correction` scatters
        self._states: dict[int, dict[str, Tensor]] = {}  # by fragment: vectors that `pop_state` returns

    def load(self, fragment: int, vectors: Sequence[Tensor] = ()) -> None:
        """Set the state from theta in `Slot.SNAPSHOT` and from STATE_VECTORS; without these, start with phi = theta."""
        theta = self.shards.gather(fragment, Slot.SNAPSHOT)
        if fragment not in self._rules:
            self._rules[fragment] = PullRule(self.gossip, theta.to("meta"), self.peer, self.tools)
        self._rules[fragment].load(theta, dict(zip(STATE_VECTORS, vectors, strict=False)))

    def close(self, fragment: int, window: Window) -> Packed:
        """Close a window; the weights are theta's snapshot."""
        theta = self.shards.gather(fragment, Slot.SNAPSHOT)
        rule, packer = self._rules[fragment], Packer(self.tools.codecs)
        rule.close(theta, window, packer)
        return Packed(packer.sections, packer.parts)

    def encode(self, fragment: int, names: Sequence[str]) -> Packed:
        """Pack these slices of the slow weights."""
        packer = Packer(self.tools.codecs)
        self._rules[fragment].encode(packer, names)
        return Packed(packer.sections, packer.parts)

    def add_window(self, fragment: int, peer: PeerId, tokens: int, layout: Layout, vectors: Sequence[Tensor]) -> None:
        """Check a partner's window (`Contribution`), and keep it for the next merge. `vectors`: its bytes, uint8.

        Raises:
            ProtocolError: If a codec refuses a section.
        """
        (blob,) = vectors
        one = Contribution(peer, tokens, layout, blob.numpy().tobytes())
        self._windows.setdefault(fragment, {})[one.peer] = self._rules[fragment].partner_window(one)

    def merge(self, fragment: int, partners: Sequence[PeerId], steps: int) -> MergeResult:
        """Take the outer step with the windows of these partners; `scatter_correction` then gives the correction."""
        rule, windows = self._rules[fragment], self._windows.pop(fragment, {})
        self._corrections[fragment] = rule.merge([windows[peer] for peer in partners], steps).vector
        return MergeResult(rule.left_out, rule.work)

    def fold(self, fragment: int) -> bool:
        """Add unpublished training to phi, given theta's snapshot; return whether theta needs a correction."""
        correction = self._rules[fragment].fold(self.shards.gather(fragment, Slot.SNAPSHOT))
        if correction is not None:
            self._corrections[fragment] = correction.vector
        return correction is not None

    def scatter_correction(self, fragment: int) -> None:
        """Give each rank its part of the correction."""
        self.shards.scatter(fragment, Slot.CORRECTION, self._corrections.pop(fragment))

    def keep_state(self, fragment: int, vectors: Sequence[Tensor]) -> None:
        """Compute a checkpoint's vectors, which `pop_state` then returns. `vectors`: theta, which rank 0 has whole."""
        (theta,) = vectors
        self._states[fragment] = self._rules[fragment].state(theta)

    def pop_state(self, fragment: int, name: str) -> Tensor:
        """Return one of the vectors that `keep_state` has computed, and forget it."""
        return self._states[fragment].pop(name)

    def slow_weights(self, fragment: int) -> Tensor:
        """Return the slow weights phi."""
        return self._rules[fragment].phi


class RemoteGossip(FragmentGossip):
    """The gossip of an island that shards, on rank 0."""

    rules = OwnerWork  # `follow` (engine/island.py) makes one on each other rank

    def __init__(self, gossip: GossipConfig, peer: PeerId, tools: RuleTools, shards: Shards) -> None:
        """Begin without fragments, and let rank 0 own some."""
        super().__init__(gossip, peer, tools)
        shards.own(self.rules(gossip, peer, tools, shards))

    def _rule(self, live: Live, drawn: bool) -> UpdateRule:
        assert isinstance(live, ShardedLive), "an island that shards has only parts of fragments"
        return RemoteRule(self.gossip, live, self.peer, self.tools)


class RemoteRule(UpdateRule):
    """Rank 0's access to the `PullRule` of a fragment's owner."""

    donated, weights_section, donates_live = PullRule.donated, PullRule.weights_section, PullRule.donates_live

    def __init__(self, gossip: GossipConfig, live: ShardedLive, peer: PeerId, tools: RuleTools) -> None:
        """Make the owner begin with phi = theta."""
        self.live, self.shards, self.index = live, live.ranks.shards, live.fragment.index
        shape_only = torch.empty(live.fragment.parameters, device="meta")
        super().__init__(gossip, shape_only, peer, tools)
        self.sections, self.thin_codecs = codecs_of(gossip)
        self.on_request = tuple(slices_of(self.elements, tools.codecs))
        self.load(shape_only, {})

    def _call(
        self,
        request: Callable[..., object],
        vectors: Sequence[Tensor] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> object:
        return self.shards.call(self.index, request, vectors, meanwhile)

    def _feed_snapshot(self) -> None:
        self.shards.feed(self.index, Slot.SNAPSHOT)

    def _spread_correction(self) -> Correction:
        """Give each rank its part of the correction, for `ShardedLive.add`; return a correction without a vector."""
        self._call(OwnerWork.scatter_correction, meanwhile=lambda: self.shards.spread(self.index, Slot.CORRECTION))
        return Correction(torch.empty(0))

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """Pack the window's pseudo-gradient. The weights are the ranks' snapshot, not `theta`.

        Raises:
            ProtocolError: If a number is not finite.
        """
        packed = self._call(partial(OwnerWork.close, window=window), meanwhile=self._feed_snapshot)
        assert isinstance(packed, Packed), packed
        packed.unpack(packer)

    def encode(self, packer: Packer, names: Sequence[str]) -> None:
        """Pack these slices of the slow weights phi."""
        packed = self._call(partial(OwnerWork.encode, names=tuple(names)))
        assert isinstance(packed, Packed), packed
        packed.unpack(packer)

    def partner_window(self, one: Contribution) -> PartnerWindow:
        """Let the owner check and keep a partner's window, and return it without its vectors.

        Raises:
            ProtocolError: If a codec refuses a section.
        """
        blob = torch.frombuffer(bytearray(one.blob), dtype=torch.uint8)
        request = partial(OwnerWork.add_window, peer=one.peer, tokens=one.tokens, layout=one.layout)
        self._call(request, [blob])
        return PartnerWindow(one.peer, one.tokens, {})

    def merge(self, partners: Sequence[PartnerWindow], steps: int) -> Correction:
        """Take the outer step with the windows of these partners, and give the ranks the correction."""
        result = self._call(partial(OwnerWork.merge, partners=[one.peer for one in partners], steps=steps))
        assert isinstance(result, MergeResult), result
        self.left_out, self.work = result.left_out, result.work
        return self._spread_correction()

    def fold(self, theta: Tensor) -> Correction | None:
        """Add all unpublished training to phi. The weights are the ranks' snapshot, not `theta`."""
        return self._spread_correction() if self._call(OwnerWork.fold, meanwhile=self._feed_snapshot) else None

    def state_lengths(self) -> Mapping[str, int]:
        """Return the name and length of each vector in `state`."""
        return dict.fromkeys(STATE_VECTORS, self.elements)

    def state(self, theta: Tensor) -> Mapping[str, Tensor]:
        """Return phi and `owed`, given the whole weights `theta`. Each vector comes from the owner when it is read."""
        self._call(OwnerWork.keep_state, [theta])
        return _State(self)

    def fetch_state(self, name: str) -> Tensor:
        """Return a vector of the owner's state, once."""
        vector = self._call(partial(OwnerWork.pop_state, name=name))
        assert isinstance(vector, Tensor), vector
        return vector

    def load(self, theta: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state from all ranks' weights, not `theta`, and a checkpoint's `state`; without it, set phi = theta.

        Raises:
            KeyError, ValueError: If a vector is missing, or has another number of elements than this fragment's.
        """
        vectors = [state[name].float() for name in STATE_VECTORS] if state else []
        if any(one.numel() != self.elements for one in vectors):
            raise ValueError(f"the gossip state has {[one.numel() for one in vectors]} elements, not {self.elements}")
        self.live.snapshot()
        self._call(OwnerWork.load, vectors, self._feed_snapshot)

    def donate(self, live: Live, packer: Packer) -> None:
        """Pack the slow weights, from which a newcomer starts."""
        phi = self._call(OwnerWork.slow_weights)
        assert isinstance(phi, Tensor), phi
        packer.add("phi", self.donated["phi"], phi)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Start with a donor's slow weights, and overwrite the live weights with them."""
        live.load({THETA: donated["phi"]})
        self.load(donated["phi"], {})


@dataclass(frozen=True, slots=True)
class _State(Mapping[str, Tensor]):
    """The vectors of an owner's state; each may be read once."""

    rule: RemoteRule

    def __getitem__(self, name: str) -> Tensor:
        return self.rule.fetch_state(name)

    def __iter__(self) -> Iterator[str]:
        return iter(STATE_VECTORS)

    def __len__(self) -> int:
        return len(STATE_VECTORS)
