"""The gossip of all fragments on this peer: ends of windows, merges, and the state that newcomers get.

FragmentGossip carries out CloseWindow, Merge, Absorb, ExportState and ImportState on live weights, whoever trains
them: train/compute.py on a device, a simulator in virtual time. What comes from partners is checked here before it
moves anything; the numerics are in the update rules of decentral/algorithms.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from decentral.core import config, jobs
from decentral.core.algorithms import algorithm
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.train import update_rules
from decentral.train.inner import Live
from decentral.train.sections import Codecs, Packer, unpack

CLIP_TO_MEDIAN = 2.0  # a partner's pseudo-gradient is no longer than this many times the median of recent ones
RECENT_LENGTHS = 16
BEFORE_START = -1
EVERY_ROUND = -2  # with exact gradients, training waits for each round's merge


@dataclass(slots=True)
class GossipedFragment:
    """A fragment's gossip: its rule, and the lengths of recent pseudo-gradients."""

    live: Live
    rule: update_rules.UpdateRule
    layout: jobs.Layout  # the sections of the blobs that we publish
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LENGTHS))
    own_length: float = 0.0  # the length of what we published last
    newcomer: bool = False  # its first window counts for nothing: fresh moments make poor steps

    def fits(self, one: jobs.Contribution) -> None:
        """Raises ProtocolError unless its sections are ours, or those of ours that suffice for a merge."""
        names = {section.name for section in one.layout}
        needed = {self.rule.clipped} if self.rule.clipped else {section.name for section in self.layout}
        if not one.layout or not set(one.layout) <= set(self.layout) or not needed <= names:
            raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")
        if len(names) != len(one.layout) or len(one.blob) != sum(section.size for section in one.layout):
            raise ProtocolError(Reason.SHAPE, "its sections do not add up to its blob")

    def clip(self, vector: Tensor) -> None:
        """Shortens it: one peer that diverges, or lies, moves us no further than twice what is usual.

        Our own length counts as usual: steps grow during the warm-up, everybody's alike.
        """
        length = float(torch.linalg.vector_norm(vector))
        usual = max(self.own_length, median(self.lengths) if self.lengths else length)
        limit = CLIP_TO_MEDIAN * usual
        if length > limit > 0:
            vector *= limit / length
        self.lengths.append(min(length, limit) if limit > 0 else length)


def unpacked(
    codecs: Codecs, blobs: Sequence[jobs.Donated], expected: Mapping[int, jobs.Layout]
) -> dict[int, dict[str, Tensor]]:
    """Donated states as fp32 vectors on the CPU, by fragment. Raises ProtocolError unless each is as expected."""
    given = [fragment for fragment, _, _ in blobs]
    if given != sorted(set(given)) or not set(given) <= set(expected):
        raise ProtocolError(Reason.FRAGMENT, f"states of {given}; expected {sorted(expected)}")
    for fragment, layout, _ in blobs:
        if layout != expected[fragment]:
            raise ProtocolError(Reason.SHAPE, f"fragment {fragment} has another layout")
    return {fragment: unpack(codecs, layout, blob) for fragment, layout, blob in blobs}


class FragmentGossip:
    """A peer's fragments and their rules. Not thread-safe: whoever owns the weights calls it."""

    def __init__(self, gossip: config.GossipConfig, peer: PeerId, codecs: Codecs) -> None:
        self.codecs, self.gossip, self.peer = codecs, gossip, peer
        self.holding: int | None = BEFORE_START  # the fragment whose merge training waits for
        self._by_index: dict[int, GossipedFragment] = {}

    @property
    def fragments(self) -> list[GossipedFragment]:
        return list(self._by_index.values())

    def of(self, fragment: int) -> GossipedFragment:
        return self._by_index[fragment]

    def do(self, job: jobs.GossipJob) -> jobs.Outcome:
        match job:
            case jobs.CloseWindow(fragment, seq, hold):
                self.holding = fragment if hold else self.holding
                return self.close(fragment, seq)
            case jobs.Merge(fragment, seq, contributions):
                self.holding = None if self.holding == fragment else self.holding
                return self.merge(fragment, seq, contributions)
            case jobs.Absorb(fragment, contribution):
                return self.absorb(fragment, contribution)
            case jobs.ExportState(fragment):
                return self.export(fragment)

    def begin(self, newcomer: bool) -> None:
        self.holding = EVERY_ROUND if algorithm(self.gossip.algorithm).exact else None
        self.begin_anew(self._by_index if newcomer else ())

    def begin_anew(self, newcomers: Collection[int]) -> None:
        """The first window of these fragments counts for nothing."""
        for gossiped in self.fragments:
            gossiped.newcomer = gossiped.live.fragment.index in newcomers

    def close(self, fragment: int, seq: int) -> jobs.WindowClosed:
        gossiped = self._by_index[fragment]
        packer = Packer(self.codecs)
        gossiped.rule.close(gossiped.live, packer)
        if gossiped.rule.clipped:
            gossiped.own_length = float(torch.linalg.vector_norm(packer.read[gossiped.rule.clipped]))
        tokens, lr_sum = 0 if gossiped.newcomer else gossiped.live.tokens, gossiped.live.lr_sum
        gossiped.live.tokens, gossiped.live.lr_sum, gossiped.newcomer = 0, 0.0, False
        layout, blob = packer.finish()
        assert layout == gossiped.layout
        return jobs.WindowClosed(fragment, seq, tokens, lr_sum, layout, blob)

    def merge(self, fragment: int, seq: int, contributions: Sequence[jobs.Contribution]) -> jobs.Merged:
        gossiped = self._by_index[fragment]
        parts, rejected = self._decode(gossiped, contributions)
        gossiped.rule.merge(gossiped.live, parts)
        gossiped.live.touch("theta", "exp_avg")
        return jobs.Merged(fragment, seq, tuple(part.peer for part in parts), tuple(rejected))

    def absorb(self, fragment: int, contribution: jobs.Contribution) -> jobs.Absorbed:
        gossiped = self._by_index[fragment]
        parts, rejected = self._decode(gossiped, [contribution])
        if rejected:
            return jobs.Absorbed(fragment, False, rejected[0][1])
        gossiped.rule.merge(gossiped.live, parts)
        gossiped.live.touch("theta", "exp_avg")
        return jobs.Absorbed(fragment, True)

    def export(self, fragment: int) -> jobs.StateExported:
        packer = Packer(self.codecs)
        self._by_index[fragment].rule.donate(self._by_index[fragment].live, packer)
        return jobs.StateExported(fragment, *packer.finish())

    def state_layouts(self) -> list[jobs.Layout]:
        """The layout of each fragment's export: what a newcomer may expect of its donors."""
        return [self.state_layout(gossiped.live.fragment.parameters) for gossiped in self.fragments]

    def state_layout(self, parameters: int) -> jobs.Layout:
        """The layout of the export of a fragment with so many parameters."""
        return update_rules.layout_of(update_rules.donated(self.gossip), parameters, self.codecs)

    def adopt(self, blobs: Sequence[tuple[int, jobs.Layout, bytes]]) -> jobs.StateImported:
        """Adopts all of these or none: they are decoded and checked first. What nobody trains is not among them."""
        expected = dict(zip(self._by_index, self.state_layouts(), strict=True))
        try:
            donated = unpacked(self.codecs, blobs, expected)
        except ProtocolError as error:
            return jobs.StateImported(False, error.reason)
        self.start(donated)
        return jobs.StateImported(True)

    def start(self, donated: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Begins these fragments anew from what a donor gave: by fragment and section, fp32 [n]."""
        for index, vectors in donated.items():
            gossiped = self._by_index[index]
            device = gossiped.live.theta.device
            gossiped.rule.adopt(gossiped.live, {name: vector.to(device) for name, vector in vectors.items()})
            gossiped.live.touch()

    def hold(self, lives: Sequence[Live]) -> None:
        """Holds these fragments from now on: those that are here as they are, others from their weights."""
        known = {id(gossiped.live): gossiped for gossiped in self._by_index.values()}
        self._by_index = {live.fragment.index: known.get(id(live)) or self._new(live) for live in lives}
        if self.holding != BEFORE_START and self.holding not in self._by_index:
            self.holding = None

    def _new(self, live: Live) -> GossipedFragment:
        rule = update_rules.rule(self.gossip, live.theta, self.peer)
        layout = update_rules.layout_of(rule.sections, live.fragment.parameters, self.codecs)
        return GossipedFragment(live, rule, layout)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint must keep, by fragment and name."""
        kept: dict[str, Tensor] = {}
        for gossiped in self.fragments:
            prefix = f"{gossiped.live.fragment.index}."
            kept |= {prefix + name: value for name, value in gossiped.live.tensors().items()}
            kept |= {prefix + "rule." + name: value for name, value in gossiped.rule.state().items()}
        return kept

    def windows(self) -> list[tuple[int, float]]:
        """For each fragment its tokens, and the sum of its learning rates, since its last close."""
        return [(gossiped.live.tokens, gossiped.live.lr_sum) for gossiped in self.fragments]

    def load(self, tensors: Mapping[str, Tensor], windows: Sequence[tuple[int, float]], steps: int) -> None:
        """Goes on from a checkpoint. Raises KeyError, ValueError or RuntimeError if it is of another model."""
        for gossiped, (tokens, lr_sum) in zip(self.fragments, windows, strict=True):
            live, prefix = gossiped.live, f"{gossiped.live.fragment.index}."
            for name, tensor in live.tensors().items():
                tensor.copy_(tensors[prefix + name])
            live.tokens, live.lr_sum, live.steps = tokens, lr_sum, steps
            live.touch()
            own = {n.removeprefix(prefix + "rule."): t for n, t in tensors.items() if n.startswith(prefix + "rule.")}
            gossiped.rule.load(live, {name: tensor.to(live.theta.device) for name, tensor in own.items()})

    def _decode(
        self, gossiped: GossipedFragment, contributions: Sequence[jobs.Contribution]
    ) -> tuple[list[update_rules.Parts], list[tuple[PeerId, str]]]:
        """Partners' vectors on our device, and the partners that we refused, with the reason."""
        parts, rejected = [], []
        for one in contributions:
            try:
                gossiped.fits(one)
                vectors = unpack(self.codecs, one.layout, one.blob)
                gossiped.rule.check(vectors)
            except ProtocolError as error:
                rejected.append((one.peer, error.reason))
                continue
            on_device = {name: vector.to(gossiped.live.theta.device) for name, vector in vectors.items()}
            if gossiped.rule.clipped:
                gossiped.clip(on_device[gossiped.rule.clipped])
            parts.append(update_rules.Parts(one.peer, one.tokens, one.lr_sum, on_device))
        return parts, rejected
