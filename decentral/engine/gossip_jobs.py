"""Carry out gossip on the weights of all fragments: close windows, merge, and export the states that joining peers get.

A window is a period of a fragment's training; at its end, the peer publishes what the fragment has learned in it.
`FragmentGossip` returns the program (`threads`) of each gossip job: CloseWindow, Rest, EncodeSections, Merge and
ExportState. Start reading at `FragmentGossip.program`. The training thread only copies weights and adds corrections;
the worker thread does the rest. Partners' contributions are checked before they are merged. The numerics are in the
update rules, one for each algorithm (`UpdateRule`).
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip import update_rules
from decentral.comm.gossip.update_rules import Correction, PartnerWindow, RuleTools, UpdateRule, Window
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.engine.fragment import Arrive, Live
from decentral.engine.threads import Phase, Program, finish

WindowCounts = tuple[int, bool]
"""A fragment's tokens since its last window ended, and whether it is `resting`."""


@dataclass(slots=True)
class GossipedFragment:
    """A fragment with its update rule, and the state of its current window."""

    live: Live
    rule: UpdateRule
    layout: Layout  # tensors in the blobs that this peer publishes
    on_request: Layout  # tensors that are encoded only when a partner asks for them
    codings: Layout = ()  # tensors with two codecs, the usual one and one for a thin link; a window uses one
    newcomer: bool = False  # whether merges give the next window weight 0, since the optimizer moments are not warm yet
    resting: bool = False  # True while no partner reads this fragment's windows: no window is closed then

    @property
    def index(self) -> int:
        """The fragment's index in the model."""
        return self.live.fragment.index

    def copied(self) -> Generator[Phase, None, Tensor]:
        """Copy theta between two steps, continue on the worker thread, and return the copy: fp32 [n] in host memory."""
        arrive = self.live.copy_out(self.rule.buffer)
        yield Phase.BESIDE
        return arrive()

    def end_window(self) -> Window:
        """Return the tokens and steps of the current window, and begin a window of 0 tokens.

        If `newcomer` is set, the returned window has 0 tokens, so that merges give it weight 0.
        """
        live = self.live
        window = Window(0 if self.newcomer else live.tokens, live.steps)
        live.tokens, self.newcomer = 0, False
        return window

    def counts(self) -> WindowCounts:
        """Return the counts of the current window as a checkpoint stores them."""
        return self.live.tokens, self.resting

    def takes_sum(self) -> bool:
        """Return whether the update rule accepts this peer's sum of gradients. Other peers apply the same check."""
        try:
            self.rule.check({"gradient": self.live.grad})
        except ProtocolError:
            return False
        return True

    def correct(self, correction: Correction | None) -> Generator[Phase, None, bool]:
        """Apply a correction to theta between two steps; if it is None, do nothing. Call this on the worker thread.

        Returns:
            Whether there was a correction; the program then continues on the training thread.
        """
        if correction is not None:
            replaced, vector = correction.replaces, self.live.copy_in(correction.vector)
            del correction  # `vector` may take less memory, and many corrections may wait for the same step
            yield Phase.EDGE
            if replaced is None:
                self.live.add(vector)
            elif replaced.steps == self.live.steps:
                self.live.theta.copy_(vector)  # so theta is bit-identical on all holders
            else:
                self.live.add(vector - replaced.theta.to(vector.device))
            self.live.mark_changed("theta")
            return True
        return False

    def checkpoint_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name that `with_rule` yields, with a tensor of the same shape on the meta device."""
        for name, tensor in self.live.shapes().items():
            yield f"{self.index}.{name}", tensor
        for name, elements in self.rule.state_lengths().items():
            yield f"{self.index}.rule.{name}", torch.empty(elements, device="meta")

    def with_rule(self, copies: dict[str, Arrive]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each of the fragment's tensors in a checkpoint: `copies`, and the rule's state.

        Args:
            copies: What `Live.copied` has returned. It is emptied: a tensor is no longer kept once it was yielded.
        """
        state: Mapping[str, Tensor] = {}
        try:
            for name in list(copies):
                tensor = copies.pop(name)()
                if name == "theta":
                    state = self.rule.state(tensor.cpu().float())
                yield f"{self.index}.{name}", tensor
                del tensor
            for name, tensor in state.items():
                yield f"{self.index}.rule.{name}", tensor
                del tensor
        finally:
            for arrive in copies.values():  # after a failure too, each copy must be taken from where it waits
                arrive()

    def fold(self) -> Generator[Phase, None, bool]:
        """Update the rule's slow weights with the training since `resting` was set, without publishing a window.

        Returns:
            True if theta was corrected; the program then continues on the training thread. False: it continues on the
            worker thread.
        """
        yield Phase.EDGE
        self.end_window()
        return (yield from self.correct(self.rule.fold((yield from self.copied()))))

    def accepted(
        self, contributions: Sequence[jobs.Contribution]
    ) -> tuple[list[PartnerWindow], list[tuple[PeerId, str]]]:
        """Return the contributions that pass the checks, and (partner, reason) for each refused contribution."""
        parts, rejected = [], []
        for one in contributions:
            try:
                require_layout(one, self.rule.sections, (*self.layout, *self.codings, *self.on_request))
                parts.append(self.rule.partner_window(one))
            except ProtocolError as error:
                rejected.append((one.peer, error.reason))
        return parts, rejected


class SharedMemory:
    """A place for copies that copies nothing: it implements `CopyMemory` for a caller that reads between two steps."""

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        return dict(tensors)


def require_layout(one: jobs.Contribution, required: Collection[str], allowed: Layout) -> None:
    """Check the layout of a partner's window.

    Raises:
        ProtocolError: If a section is not in `allowed` or comes twice, a section named in `required` is missing, or the
            sections' sizes do not add up to the size of the blob.
    """
    names = [section.name for section in one.layout]
    if not set(one.layout) <= set(allowed) or not set(required) <= set(names) or len(set(names)) < len(names):
        raise ProtocolError(Reason.SHAPE, "expected this run's sections, each once; a name, codec or size differs")
    if len(one.blob) != layout_bytes(one.layout):
        expected = f"expected a blob of {layout_bytes(one.layout)} bytes, as its sections say"
        raise ProtocolError(Reason.SHAPE, f"{expected}; got {len(one.blob)} bytes")


def unpacked(
    codecs: Codecs, blobs: Sequence[jobs.Donated], expected: Mapping[int, Layout]
) -> dict[int, dict[str, Tensor]]:
    """Decode donated states, and return them: fragment -> section -> fp32 vector [n] on the CPU.

    Args:
        codecs: Decoders of the sections.
        blobs: The states, in increasing order of fragments.
        expected: The layout that each fragment's state must have.

    Raises:
        ProtocolError: If a fragment is not in `expected` or out of order, a layout differs, or a blob does not decode.
    """
    given = [fragment for fragment, _, _ in blobs]
    if given != sorted(set(given)) or not set(given) <= set(expected):
        raise ProtocolError(Reason.FRAGMENT, f"got states of fragments {given}; allowed: {sorted(expected)}, in order")
    for fragment, layout, _ in blobs:
        if layout != expected[fragment]:
            raise ProtocolError(Reason.SHAPE, f"the layout of fragment {fragment}'s state differs from this run's")
    return {fragment: unpack(codecs, layout, blob) for fragment, layout, blob in blobs}


class FragmentGossip:
    """A peer's fragments with their update rules, and the programs of its gossip jobs."""

    def __init__(self, gossip: config.GossipConfig, peer: PeerId, tools: RuleTools) -> None:
        """Begin without fragments; `set_lives` sets them."""
        self.tools, self.gossip, self.peer = tools, gossip, peer
        self.merging: set[int] = set()  # fragments whose merges must end before training continues
        self.steps_to_edge: Callable[[], int] = lambda: 0
        """Returns how many more steps training takes before it applies a correction that is computed now.

        `Compute.run` sets it: 0 while training takes no steps, else 1.
        """

        self._by_index: dict[int, GossipedFragment] = {}

    @property
    def fragments(self) -> list[GossipedFragment]:
        """The held fragments, in the order of layers."""
        return list(self._by_index.values())

    def of(self, fragment: int) -> GossipedFragment:
        """Return the held fragment with this index. Raises KeyError if it is not held."""
        return self._by_index[fragment]

    def program(self, job: jobs.GossipJob) -> Program:
        """Return the program of a gossip job.

        If the fragment is no longer held when the job begins, the program changes nothing. Its outcome is then NotHeld
        or, for the job ExportState, an empty StateExported.
        """
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
            case jobs.EncodeSections():
                return self._encode(job)
            case jobs.Merge():
                return self._merge(job)
            case jobs.ExportState(fragment):
                return self._export(fragment)

    def begin(self, newcomer: bool) -> None:
        """Stop waiting for merges. `newcomer`: whether merges give each fragment's next window weight 0."""
        self.merging = set()
        for gossiped in self.fragments:
            gossiped.newcomer = newcomer

    def begin_anew(self, newcomers: Collection[int]) -> None:
        """Let merges give weight 0 to the next window of these fragments, since their optimizer moments are fresh."""
        for index in newcomers:
            self._by_index[index].newcomer = True

    def _close(self, job: jobs.CloseWindow) -> Program:
        yield Phase.EDGE
        gossiped = self._by_index[job.fragment]
        if job.blocking:
            self.merging.add(job.fragment)
        elif not gossiped.live.steps:
            yield Phase.EDGE  # wait until after the next step: a window cannot be closed before the first step
        if gossiped.resting:
            at_edge = yield from gossiped.fold()
            if not at_edge:
                yield Phase.EDGE
            gossiped.resting = False
        window = replace(gossiped.end_window(), thin=job.thin)
        theta = yield from gossiped.copied()
        packer = Packer(self.tools.codecs)
        gossiped.rule.close(theta, window, packer)
        layout, blob = packer.finish()
        assert set(layout) <= {*gossiped.layout, *gossiped.codings}
        tokens, on_request = window.tokens, gossiped.on_request
        return jobs.WindowClosed(job.fragment, job.seq, tokens, layout, blob, on_request, gossiped.codings)

    def _rest(self, fragment: int) -> Program:
        yield Phase.EDGE
        self._by_index[fragment].resting = True
        return jobs.Rested(fragment)

    def _encode(self, job: jobs.EncodeSections) -> Program:
        yield Phase.BESIDE
        packer = Packer(self.tools.codecs)
        self._by_index[job.fragment].rule.encode(packer, job.names)
        layout, blob = packer.finish()
        return jobs.SectionsEncoded(job.fragment, job.seq, layout, blob)

    def _merge(self, job: jobs.Merge) -> Program:
        yield Phase.BESIDE
        gossiped = self._by_index[job.fragment]
        parts, rejected = gossiped.accepted(job.contributions)
        steps = gossiped.live.steps + self.steps_to_edge()
        correcting = gossiped.correct(gossiped.rule.merge(parts, steps))
        left_out = gossiped.rule.left_out
        rejected += [(peer, Reason.OPPOSED) for peer in left_out]
        used = tuple(part.peer for part in parts if part.peer not in left_out)
        del parts  # decoded windows take memory, and many merges may wait for the same step
        yield from correcting
        if job.fragment in self.merging:
            yield Phase.EDGE
            self.merging.discard(job.fragment)
        return jobs.Merged(job.fragment, job.seq, used, tuple(rejected), work=gossiped.rule.work)

    def _export(self, fragment: int) -> Program:
        yield Phase.BESIDE
        gossiped = self._by_index[fragment]
        if gossiped.resting:
            at_edge = yield from gossiped.fold()
            if at_edge:
                yield Phase.BESIDE
        if gossiped.rule.donates_live:
            yield Phase.EDGE
        packer = Packer(self.tools.codecs)
        gossiped.rule.donate(gossiped.live, packer)
        layout, blob = packer.finish()
        return jobs.StateExported(fragment, layout, blob)

    def close_round(self, fragment: int, seq: int) -> jobs.WindowClosed:
        """Return this peer's encoded sum of gradients of round `seq`, and set the window's tokens to 0.

        Call it between two steps.
        """
        gossiped, packer = self._by_index[fragment], Packer(self.tools.codecs)
        live = gossiped.live
        gossiped.rule.close_round(live, packer)
        tokens, live.tokens = live.tokens, 0
        layout, blob = packer.finish()
        return jobs.WindowClosed(fragment, seq, tokens, layout, blob)

    def advance(self, fragment: int, sums: Sequence[jobs.Contribution]) -> list[tuple[PeerId, str]]:
        """Take a fragment's step with the sums of gradients of all holders; return (peer, reason) for each refused sum.

        Call it between two steps.
        """
        gossiped = self._by_index[fragment]
        parts, rejected = gossiped.accepted(sums)
        gossiped.rule.advance(gossiped.live, parts)
        return rejected

    def export(self, fragment: int) -> jobs.StateExported:
        """Return the state of a fragment that is given up. Call it only while the worker waits (`Phase.HELD`)."""
        exported = finish(self._export(fragment))
        assert isinstance(exported, jobs.StateExported)
        return exported

    def state_layouts(self) -> list[Layout]:
        """Return the layout that the exported state of each held fragment has."""
        return [self.state_layout(gossiped.live.fragment.parameters) for gossiped in self.fragments]

    def state_layout(self, parameters: int) -> Layout:
        """Return the layout of the exported state of a fragment with this number of parameters."""
        return update_rules.layout_of(update_rules.donated(self.gossip), parameters, self.tools.codecs)

    def decoded(self, blobs: Sequence[jobs.Donated]) -> dict[int, dict[str, Tensor]]:
        """Decode donated states of held fragments, and return them: fragment -> section -> fp32 vector [n].

        Raises:
            ProtocolError: If a state does not decode, has another layout, or its fragment is not held or out of order.
        """
        return unpacked(self.tools.codecs, blobs, dict(zip(self._by_index, self.state_layouts(), strict=True)))

    def start(self, donated: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace the state of held fragments. `donated`: fragment -> section -> fp32 vector [n]."""
        for index, vectors in donated.items():
            gossiped = self._by_index[index]
            gossiped.rule.adopt(gossiped.live, vectors)
            gossiped.resting = False
            gossiped.live.mark_changed()

    def set_lives(self, lives: Sequence[Live], undrawn: Collection[int] = ()) -> None:
        """Set the held fragments. Fragments held before keep their gossip state; new fragments derive it from weights.

        Args:
            lives: The fragments to hold, in the order of layers.
            undrawn: Indices of fragments whose weights are uninitialised. A new fragment among them has no usable
                gossip state until a call of `start`, `load` or `set_lives` gives it one.
        """
        known = {id(gossiped.live): gossiped for gossiped in self._by_index.values()}
        self._by_index = {
            live.fragment.index: known.get(id(live)) or self._new(live, live.fragment.index not in undrawn)
            for live in lives
        }
        self.merging &= self._by_index.keys()

    def _new(self, live: Live, drawn: bool) -> GossipedFragment:
        made = self._rule(live, drawn)
        n, codecs = live.fragment.parameters, self.tools.codecs
        published, thin = (update_rules.layout_of(one, n, codecs) for one in (made.sections, made.thin_codecs))
        dense = tuple(section for section in published if section.name in made.thin_codecs)
        return GossipedFragment(live, made, published, made.on_request, (*dense, *thin))

    def _rule(self, live: Live, drawn: bool) -> UpdateRule:
        """Return a new update rule for a fragment. `drawn`: whether the fragment has weights."""
        theta = live.theta if drawn else live.theta.to("meta")
        return update_rules.rule(self.gossip, theta, self.peer, self.tools)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name. Call it only while the worker waits (`Phase.HELD`)."""
        room = SharedMemory()
        return {name: tensor for one in self.fragments for name, tensor in one.with_rule(one.live.copied(room))}

    def windows(self) -> list[WindowCounts]:
        """Return the counts of each fragment's current window, as a checkpoint stores them."""
        return [gossiped.counts() for gossiped in self.fragments]

    def load(self, tensors: Mapping[str, Tensor], windows: Sequence[WindowCounts], steps: int) -> None:
        """Set weights, optimizer state, gossip state and counts of the held fragments to the values in a checkpoint.

        Args:
            tensors: The checkpoint's tensors, as `tensors` returns them.
            windows: The counts of each fragment's window.
            steps: Optimizer steps taken.

        Raises:
            KeyError, ValueError, RuntimeError: If the checkpoint is of another model; some tensors may have changed.
        """
        for gossiped, (tokens, resting) in zip(self.fragments, windows, strict=True):
            live, prefix = gossiped.live, f"{gossiped.index}."
            gossiped.resting = resting
            for name in live.shapes():
                live.load({name: tensors[prefix + name]})
            live.tokens, live.steps = tokens, steps
            own = {
                one.removeprefix(prefix + "rule."): tensors[one] for one in tensors if one.startswith(prefix + "rule.")
            }
            gossiped.rule.load(live.theta, own)
