"""The gossip of all fragments on this peer: ends of windows, merges, and the state that newcomers get.

FragmentGossip's programs are the jobs CloseWindow, Rest, EncodeSections, Merge and ExportState, on live weights whoever
trains them: engine/compute.py on a device, a simulator in virtual time. The training thread gives a copy of the weights
and takes a correction; all else goes on beside it (engine/threads.py). What comes from partners is checked here
before it moves anything; the numerics are in the update rules of comm/gossip and comm/rounds.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip import update_rules
from decentral.comm.gossip.update_rules import Correction, Parts, RuleTools, UpdateRule, Window
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Layout
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.engine.fragment import Live, copy_in, copy_out
from decentral.engine.threads import Phase, Program, finish

Steps = Generator[Phase, None, None]
"""A part of a program."""

WindowCounts = tuple[int, float, bool]
"""Of a fragment since its last close: its tokens, the sum of its learning rates, and whether it rests."""


@dataclass(slots=True)
class GossipedFragment:
    """A fragment's gossip: its rule, and what its next window counts for."""

    live: Live
    rule: UpdateRule
    layout: Layout  # the sections of the blobs that we publish
    on_request: Layout  # the sections that are encoded when somebody asks for them
    codings: Layout = ()  # all forms of the sections that come in several codes
    newcomer: bool = False  # its first window counts for nothing: fresh moments make poor steps
    resting: bool = False  # nobody reads its windows, so none is closed

    @property
    def index(self) -> int:
        return self.live.fragment.index

    def copied(self) -> Generator[Phase, None, Tensor]:
        """From a step edge to the worker: a copy of theta at the edge."""
        theta = self.rule.buffer()
        arrive = copy_out(self.live, theta)
        yield Phase.BESIDE
        arrive()
        return theta

    def end_window(self) -> Window:
        """What was trained since the last call. It is counted anew from now."""
        live = self.live
        window = Window(0 if self.newcomer else live.tokens, live.lr_sum, live.steps)
        live.tokens, live.lr_sum, self.newcomer = 0, 0.0, False
        return window

    def counts(self) -> WindowCounts:
        return self.live.tokens, self.live.lr_sum, self.resting

    def takes_sum(self) -> bool:
        """Whether all holders will take the sum of gradients that is in `live`."""
        try:
            self.rule.check({"gradient": self.live.grad})
        except ProtocolError:
            return False
        return True

    def correct(self, correction: Correction | None) -> Steps:
        """From the worker to the next step edge, if there is anything to correct."""
        if correction is not None:
            vector = copy_in(correction.vector, self.live.theta.device)
            yield Phase.EDGE
            replaced = correction.replaces
            if replaced is None:
                self.live.add(vector)
            elif replaced.steps == self.live.steps:
                self.live.theta.copy_(vector)  # the very bits that all others have
            else:
                self.live.add(vector - replaced.theta.to(vector.device))
            self.live.touch("theta")

    def checkpoint_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The names in `with_rule`, in its order, with tensors on the meta device."""
        for name, tensor in self.live.tensors().items():
            yield f"{self.index}.{name}", tensor.to("meta")
        for name, elements in self.rule.kept().items():
            yield f"{self.index}.rule.{name}", torch.empty(elements, device="meta")

    def with_rule(self, live: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint keeps of the fragment, by name: these live tensors, and the rule's state that fits them."""
        for name, tensor in live.items():
            yield f"{self.index}.{name}", tensor
        for name, tensor in self.rule.state(live["theta"].cpu().float()).items():
            yield f"{self.index}.rule.{name}", tensor

    def fold(self) -> Generator[Phase, None, bool]:
        """Takes what was trained while it rested into the slow weights. Returns whether it ended at an edge."""
        yield Phase.EDGE
        self.end_window()
        theta = yield from self.copied()
        correction = self.rule.fold(theta)
        yield from self.correct(correction)
        return correction is not None

    def read(self, contributions: Sequence[jobs.Contribution]) -> tuple[list[Parts], list[tuple[PeerId, str]]]:
        """What can be merged, and the partners that we refused, with the reason."""
        parts, rejected = [], []
        for one in contributions:
            try:
                self.rule.fits(one, (*self.layout, *self.codings, *self.on_request))
                parts.append(self.rule.read(one))
            except ProtocolError as error:
                rejected.append((one.peer, error.reason))
        return parts, rejected


def unpacked(
    codecs: Codecs, blobs: Sequence[jobs.Donated], expected: Mapping[int, Layout]
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
    """A peer's fragments and their rules. Its programs run in the phases of engine/threads.py."""

    def __init__(self, gossip: config.GossipConfig, peer: PeerId, tools: RuleTools) -> None:
        self.tools, self.gossip, self.peer = tools, gossip, peer
        self.merging: set[int] = set()  # the fragments whose merges training waits for
        self.steps_to_edge: Callable[[], int] = lambda: 0
        """Steps that training still takes before a correction made now is added."""

        self._by_index: dict[int, GossipedFragment] = {}

    @property
    def fragments(self) -> list[GossipedFragment]:
        return list(self._by_index.values())

    def of(self, fragment: int) -> GossipedFragment:
        return self._by_index[fragment]

    def program(self, job: jobs.GossipJob) -> Program:
        """The job in its phases. Where the fragment was given up before its turn came, nothing happens."""
        program = self._program(job)
        yield next(program)
        if job.fragment in self._by_index:
            return (yield from program)
        exported = isinstance(job, jobs.ExportState)
        return jobs.StateExported(job.fragment, (), b"") if exported else jobs.NotHeld(job.fragment)

    def _program(self, job: jobs.GossipJob) -> Program:
        match job:
            case jobs.CloseWindow():
                return self._close(job)
            case jobs.Rest(fragment):
                return self._rest(fragment)
            case jobs.EncodeSections(fragment, seq):
                return self._encode(fragment, seq)
            case jobs.Merge():
                return self._merge(job)
            case jobs.ExportState(fragment):
                return self._export(fragment)

    def begin(self, newcomer: bool) -> None:
        self.merging = set()
        for gossiped in self.fragments:
            gossiped.newcomer = newcomer

    def begin_anew(self, newcomers: Collection[int]) -> None:
        """The first window of these fragments counts for nothing."""
        for index in newcomers:
            self._by_index[index].newcomer = True

    def _close(self, job: jobs.CloseWindow) -> Program:
        yield Phase.EDGE
        gossiped = self._by_index[job.fragment]
        if job.hold:
            self.merging.add(job.fragment)
        elif not gossiped.live.steps:
            yield Phase.EDGE  # after the first step, which shall not wait for a window that has nothing to say
        if not gossiped.rule.ready:
            yield Phase.BESIDE
            gossiped.rule.make_ready()
            yield Phase.EDGE
        if gossiped.resting:
            at_edge = yield from gossiped.fold()
            if not at_edge:
                yield Phase.EDGE
            gossiped.resting = False
        window = gossiped.end_window()
        theta = yield from gossiped.copied()
        packer = Packer(self.tools.codecs)
        gossiped.rule.sparsely = job.sparse
        gossiped.rule.close(theta, window, packer)
        layout, blob = packer.finish()
        assert set(layout) <= {*gossiped.layout, *gossiped.codings}
        tokens, lr_sum, on_request = window.tokens, window.lr_sum, gossiped.on_request
        return jobs.WindowClosed(job.fragment, job.seq, tokens, lr_sum, layout, blob, on_request, gossiped.codings)

    def _rest(self, fragment: int) -> Program:
        yield Phase.EDGE
        self._by_index[fragment].resting = True
        return jobs.Rested(fragment)

    def _encode(self, fragment: int, seq: int) -> Program:
        yield Phase.BESIDE
        packer = Packer(self.tools.codecs)
        self._by_index[fragment].rule.encode(packer)
        layout, blob = packer.finish()
        return jobs.SectionsEncoded(fragment, seq, layout, blob)

    def _merge(self, job: jobs.Merge) -> Program:
        yield Phase.BESIDE
        gossiped = self._by_index[job.fragment]
        parts, rejected = gossiped.read(job.contributions)
        steps = gossiped.live.steps + self.steps_to_edge()
        yield from gossiped.correct(gossiped.rule.merge(parts, steps))
        left_out = gossiped.rule.left_out
        rejected += [(peer, Reason.OPPOSED) for peer in left_out]
        if job.fragment in self.merging:
            yield Phase.EDGE
            self.merging.discard(job.fragment)
        used = tuple(part.peer for part in parts if part.peer not in left_out)
        return jobs.Merged(job.fragment, job.seq, used, tuple(rejected))

    def _export(self, fragment: int) -> Program:
        yield Phase.BESIDE
        gossiped = self._by_index[fragment]
        if gossiped.resting:
            if not gossiped.rule.ready:
                gossiped.rule.make_ready()
            at_edge = yield from gossiped.fold()
            if at_edge:
                yield Phase.BESIDE
        if gossiped.rule.donates_live:
            yield Phase.EDGE
        packer = Packer(self.tools.codecs)
        gossiped.rule.donate(gossiped.live, packer)
        layout, blob = packer.finish()
        return jobs.StateExported(fragment, layout, blob)

    # With exact gradients: both at a step edge

    def close_round(self, fragment: int, seq: int) -> jobs.WindowClosed:
        """Encodes the sum of the round's gradients."""
        gossiped, packer = self._by_index[fragment], Packer(self.tools.codecs)
        live = gossiped.live
        gossiped.rule.close_round(live, packer)
        tokens, lr_sum, live.tokens, live.lr_sum = live.tokens, live.lr_sum, 0, 0.0
        layout, blob = packer.finish()
        return jobs.WindowClosed(fragment, seq, tokens, lr_sum, layout, blob)

    def advance(self, fragment: int, sums: Sequence[jobs.Contribution]) -> list[tuple[PeerId, str]]:
        """Takes the round's step with these sums; gives the peers whose sums were refused, with the reasons."""
        gossiped = self._by_index[fragment]
        parts, rejected = gossiped.read(sums)
        gossiped.rule.advance(gossiped.live, parts)
        return rejected

    # States of newcomers

    def export(self, fragment: int) -> jobs.StateExported:
        """The fragment's state as a newcomer gets it, at once: the worker must be held."""
        exported = finish(self._export(fragment))
        assert isinstance(exported, jobs.StateExported)
        return exported

    def state_layouts(self) -> list[Layout]:
        """The layout of each fragment's export: what a newcomer may expect of its donors."""
        return [self.state_layout(gossiped.live.fragment.parameters) for gossiped in self.fragments]

    def state_layout(self, parameters: int) -> Layout:
        """The layout of the export of a fragment with so many parameters."""
        return update_rules.layout_of(update_rules.donated(self.gossip), parameters, self.tools.codecs)

    def decoded(self, blobs: Sequence[jobs.Donated]) -> dict[int, dict[str, Tensor]]:
        """States of fragments that we hold, as fp32 vectors. Raises ProtocolError unless all are as expected."""
        return unpacked(self.tools.codecs, blobs, dict(zip(self._by_index, self.state_layouts(), strict=True)))

    def start(self, donated: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Begins these fragments anew from what a donor gave: by fragment and section, fp32 [n]."""
        for index, vectors in donated.items():
            gossiped = self._by_index[index]
            gossiped.rule.adopt(gossiped.live, vectors)
            gossiped.resting = False
            gossiped.live.touch()

    def hold(self, lives: Sequence[Live], undrawn: Collection[int] = ()) -> None:
        """Holds these fragments from now on: those that are here as they are, others from their weights.

        Those of the `undrawn` that are new have no weights yet: `start`, `load`, or another `hold` must follow.
        """
        known = {id(gossiped.live): gossiped for gossiped in self._by_index.values()}
        self._by_index = {
            live.fragment.index: known.get(id(live)) or self._new(live, live.fragment.index not in undrawn)
            for live in lives
        }
        self.merging &= self._by_index.keys()

    def _new(self, live: Live, drawn: bool) -> GossipedFragment:
        theta = live.theta if drawn else live.theta.to("meta")
        made = update_rules.rule(self.gossip, theta, self.peer, self.tools)
        n, codecs = live.fragment.parameters, self.tools.codecs
        layouts = (update_rules.layout_of(one, n, codecs) for one in (made.sections, made.on_request, made.sparse))
        published, on_request, sparse = layouts
        dense = tuple(section for section in published if section.name in made.sparse)
        return GossipedFragment(live, made, published, on_request, (*dense, *sparse))

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint must keep, by fragment and name. The worker must be held."""
        return {name: tensor for one in self.fragments for name, tensor in one.with_rule(one.live.tensors())}

    def windows(self) -> list[WindowCounts]:
        """What a checkpoint must keep besides."""
        return [gossiped.counts() for gossiped in self.fragments]

    def load(self, tensors: Mapping[str, Tensor], windows: Sequence[WindowCounts], steps: int) -> None:
        """Goes on from a checkpoint. Raises KeyError, ValueError or RuntimeError if it is of another model."""
        for gossiped, (tokens, lr_sum, resting) in zip(self.fragments, windows, strict=True):
            live, prefix = gossiped.live, f"{gossiped.index}."
            gossiped.resting = resting
            for name, tensor in live.tensors().items():
                tensor.copy_(tensors[prefix + name])
            live.tokens, live.lr_sum, live.steps = tokens, lr_sum, steps
            live.touch()
            own = {n.removeprefix(prefix + "rule."): t for n, t in tensors.items() if n.startswith(prefix + "rule.")}
            gossiped.rule.load(live.theta, own)
