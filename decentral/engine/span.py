"""The layers that a peer holds: live weights, inner optimizer, gossip, work for routes; and how it changes to others.

`change_span` carries a change (jobs.ChangeSpan) out. Everything is checked, and what is given up is on the disk, before
anything changes; a change that fails is undone.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from decentral.comm.gossip.update_rules import RuleTools
from decentral.comm.pipeline.activations import ActivationFormat
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import ActivationForms, Fragment, Layout, share
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.engine.fragment import Inner, Live, fragments_of
from decentral.engine.gossip_jobs import FragmentGossip, unpacked
from decentral.engine.stage_runner import StageRunner
from decentral.engine.step import Chain, Counters, Device, ModelForward
from decentral.model import decoder
from decentral.model.start_weights import StartWeightsError


class Span:
    """Holds no layers until `hold` says which, and then those until `hold` says others.

    `forward` is the model where the span is all of it. For a part of the model it only serves to measure the device.
    """

    def __init__(self, run: config.Config, peer: PeerId, tools: RuleTools, device: Device) -> None:
        self.run, self.device = run, device
        self.cuts = tuple(fragments_of(run))  # of the whole model
        self.activations = ActivationFormat(run, tools.codecs, decoder.widths(run.model))
        self.layers: list[nn.Module] = []
        self.fragments: list[Fragment] = []
        self.gossip = FragmentGossip(run.gossip, peer, tools)
        self.inner = Inner([], run.train)
        self.forward: ModelForward = Chain([])
        self._stages: StageRunner | None = None
        self._undrawn: set[int] = set()  # fragments without weights

    def hold(self, first: int, last: int, drawn: bool = True) -> None:
        """Holds layers [first, last): those that are here as they are, the others with their initial weights.

        Without `drawn`, the others have no weights until a checkpoint or donors give them (`given`), or else `draw`.

        Layers that are not wanted any more are let go of before new ones are built, so that the device never holds
        both. No execution may be pending. Raises RuntimeError where the device's memory is too small, and
        StartWeightsError where there are no weights to begin with; another call of `hold` must follow then.
        """
        run, device = self.run, self.device.device
        wanted = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        assert (wanted[0].first, wanted[-1].last) == (first, last), "a span is whole fragments"
        lives = {one.live.fragment: one.live for one in self.gossip.fragments if one.live.fragment in wanted}
        new_cuts = {cut.index for cut in wanted if cut not in lives}
        start = self.fragments[0].first if self.fragments else 0
        layers = {start + at: layer for at, layer in enumerate(self.layers) if first <= start + at < last}
        self.layers, self.fragments, self._stages = list(layers.values()), list(lives), None
        self.inner, self.forward = Inner([], run.train), Chain([])
        self.gossip.hold(list(lives.values()))
        for begin, end in _gaps(layers, first, last):
            new = decoder.placed(decoder.build(run.model, run.seed, begin, end, drawn), run, device)
            layers |= dict(enumerate(new, begin))
            lives |= {
                cut: Live(cut, new, device, run.train, range(begin, self.model_layers), drawn)
                for cut in wanted
                if begin <= cut.first < end
            }
        self.layers, self.fragments = [layers[at] for at in range(first, last)], wanted
        self._undrawn = set() if drawn else new_cuts
        ordered = [lives[fragment] for fragment in wanted]
        self.gossip.hold(ordered, undrawn=self._undrawn)
        self.inner = Inner(ordered, run.train)
        self.forward = Chain(self.layers, run.train.compile and device.type == "cuda", run, first)
        if len(wanted) < len(self.cuts) or run.synchronous:
            self._stages = self._at_work(alone=True)

    def given(self, fragments: Iterable[int]) -> None:
        """A checkpoint or donors have given these fragments their weights."""
        self._undrawn.difference_update(fragments)

    def touch_memory(self) -> None:
        """Writes to the memory of fragments without weights, to be called while these are on their way.

        A step would be the first to write to most of it, and new memory is slow.
        """
        if self.device.device.type == "cpu":
            for live in self.inner.lives:
                if live.fragment.index in self._undrawn:
                    live.touch_memory()

    def draw(self) -> None:
        """Gives fragments that still have no weights their initial ones. To be called before anything reads them."""
        if not self._undrawn:
            return
        lives, first, last = self.inner.lives, self.fragments[0].first, self.fragments[-1].last
        layers = decoder.build(self.run.model, self.run.seed, first, last)
        for live in lives:
            if live.fragment.index in self._undrawn:
                live.draw(layers, first)
                live.touch("theta")
        self.gossip.hold([live for live in lives if live.fragment.index not in self._undrawn])
        self.gossip.hold(lives)  # the slow weights of the others begin with the initial weights
        self._undrawn.clear()

    @property
    def model_layers(self) -> int:
        return self.cuts[-1].last

    @property
    def share(self) -> float:
        """The part of the model's parameters that this span has."""
        return share(self.cuts, self.fragments[0].first, self.fragments[-1].last)

    @property
    def stages(self) -> StageRunner:
        """The layers at work for routes. A peer that also steps by itself has no sums for them before the first use."""
        if self._stages is None:
            self._stages = self._at_work(alone=False)
        return self._stages

    def clear_sums(self) -> None:
        """Empties the sums of gradients: they belong to other weights, or are what measuring the device has left."""
        if self._stages is not None:
            self._stages.sums.clear()

    def forms(self, layer: int, sequences: int) -> ActivationForms:
        """Of a micro-batch that enters this layer."""
        return self.activations.forms(layer, sequences)

    def all_state_layouts(self) -> tuple[Layout, ...]:
        """The layout of every fragment's state as a newcomer gets it, of the whole model."""
        return tuple(self.gossip.state_layout(cut.parameters) for cut in self.cuts)

    def _at_work(self, alone: bool) -> StageRunner:
        return StageRunner(self.run, self.layers, self.inner.lives, self.activations, self.device, alone)


def _gaps(layers: Mapping[int, nn.Module], first: int, last: int) -> list[tuple[int, int]]:
    """The stretches [begin, end) of [first, last) that are not among these layers."""
    missing = [at for at in range(first, last) if at not in layers]
    begins = [at for at in missing if at - 1 not in missing]
    return [(begin, next(at for at in range(begin, last + 1) if at not in missing)) for begin in begins]


RetainedState = tuple[int, Layout, bytes]
"""The state of a fragment that was given up: the learning-rate step, its sections, and the blob."""


class RetainedStore(Protocol):
    """The states of fragments that a peer has given up, on its disk: engine/checkpoint.py."""

    def write(self, state: jobs.Donated, step: int) -> None:
        """Raises OSError and leaves the old state."""

    def read(self, fragment: int) -> RetainedState | None: ...

    def forget(self, fragments: Iterable[int]) -> None: ...

    def steps(self, fragments: Iterable[int]) -> jobs.RetainedStates: ...


class HeldSpan(Protocol):
    """The fragments that a peer holds, and their gossip: a Span, or the simulator's."""

    cuts: tuple[Fragment, ...]  # of the whole model
    fragments: list[Fragment]  # the held ones
    gossip: FragmentGossip

    def hold(self, first: int, last: int, drawn: bool = True) -> None:
        """Holds layers [first, last): those that are here as they are, the others with their initial weights, or
        without `drawn` with none until they are `given`."""

    def given(self, fragments: Iterable[int]) -> None:
        """These fragments have got their weights."""

    def all_state_layouts(self) -> tuple[Layout, ...]:
        """The layout of every fragment's state as a newcomer gets it, of the whole model."""


def change_span(job: jobs.ChangeSpan, span: HeldSpan, retained: RetainedStore, counters: Counters) -> jobs.SpanChanged:
    """Holds the job's layers from now on. No execution may be pending. An outcome that is not accepted says why."""
    held, layouts = span.fragments, dict(enumerate(span.all_state_layouts()))
    gained = [cut.index for cut in span.cuts if job.first <= cut.first < job.last and cut not in held]
    lost = [cut.index for cut in held if not job.first <= cut.first < job.last]
    try:
        states = _states(job, span.gossip, retained, {index: layouts[index] for index in gained})
    except ProtocolError as error:
        return jobs.SpanChanged(False, error.reason)
    given_up = [(out.fragment, out.layout, out.blob) for out in map(span.gossip.export, lost)]
    try:
        for state in given_up:
            retained.write(state, counters.lr_step)
        span.hold(job.first, job.last, drawn=not states.keys() >= set(gained))
    except (OSError, RuntimeError, StartWeightsError) as error:  # a full disk, a device out of memory
        if span.fragments != held:
            span.hold(held[0].first, held[-1].last, drawn=False)
            span.gossip.start(unpacked(span.gossip.tools.codecs, given_up, layouts))
            span.given(lost)
        return jobs.SpanChanged(False, _reason(error))
    span.gossip.start(states)
    span.given(states)
    span.gossip.begin_anew(gained)
    retained.forget(gained)
    counters.follow(job.step)
    return jobs.SpanChanged(True, kept=retained.steps(cut.index for cut in span.cuts))


def _reason(error: Exception) -> Reason:
    match error:
        case StartWeightsError():
            return Reason.NO_WEIGHTS
        case OSError():
            return Reason.DISK
    return Reason.MEMORY


def _states(
    job: jobs.ChangeSpan, gossip: FragmentGossip, retained: RetainedStore, gained: Mapping[int, Layout]
) -> dict[int, dict[str, Tensor]]:
    """The states of gained fragments, from the job or else from the disk if they fit; others get their initial weights.

    `gained` has the layout of each. Raises ProtocolError if a state that came with the job is not as it should be.
    """
    given = {fragment: (fragment, layout, blob) for fragment, layout, blob in job.blobs}
    for index, expected in gained.items():
        found = None if index in given else retained.read(index)
        if found is not None and found[1] == expected:
            given[index] = index, found[1], found[2]
    return unpacked(gossip.tools.codecs, [given[index] for index in sorted(given)], gained)
