"""Manage the layers that a peer holds (`Span`). To hold a layer means to have its weights and to train them.

`change_span` replaces the held layers (the job `ChangeSpan`). First it checks the states that other peers have sent for
new fragments, and writes the states of fragments that the peer gives up to the disk. If the change fails, the peer
keeps its old layers.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from decentral.comm.gossip.update_rules import RuleTools
from decentral.comm.pipeline.activations import ActivationFormat
from decentral.core import config, jobs
from decentral.core.choices import ALGORITHMS, load
from decentral.core.errors import ProtocolError
from decentral.core.fragments import ActivationForms, Fragment, Layout
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.engine import accelerator
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.gossip_jobs import FragmentGossip, unpacked
from decentral.engine.inner import Inner
from decentral.engine.stage_runner import StageRunner
from decentral.engine.step import Chain, Counters, Device, ModelForward
from decentral.engine.threads import Phase, Program
from decentral.model import decoder
from decentral.model.start_weights import StartWeightsError


class Span:
    """The layers that a peer holds, set by `build_layers`, with their optimizer, gossip and executions.

    The attribute `forward` computes the held layers. If they are not the whole model, `forward` serves only to measure
    the device's speed.
    """

    def __init__(self, run: config.Config, peer: PeerId, tools: RuleTools, device: Device) -> None:
        """Begin without layers.

        Args:
            run: The run's config.
            peer: This peer's id.
            tools: Codecs and kernels of the update rules.
            device: The device on which to compute.
        """
        self.run, self.device = run, device
        self.cuts = tuple(fragments_of(run))
        self.activations = ActivationFormat(run, tools.codecs, decoder.widths(run.model))
        self.layers: list[nn.Module] = []
        self.fragments: list[Fragment] = []
        self.gossip = FragmentGossip(run.gossip, peer, tools)
        if device.ranks.sharded:
            from decentral.engine.sharded import Orders  # this loads DTensor, for islands only

            assert isinstance(device.ranks, Orders), "an island has the parts"
            sharded = load(ALGORITHMS[run.gossip.algorithm].sharded)
            self.gossip = sharded(run.gossip, peer, tools, device.ranks.shards)
        self.inner = Inner([], run.train)
        self.forward: ModelForward = Chain([])
        self._stages: StageRunner | None = None
        self._undrawn: set[int] = set()  # held fragments whose weights are not initialised yet

    def build_layers(self, first: int, last: int, drawn: bool = True) -> None:
        """Hold the layers [first, last): keep layers that the peer already has, free the others, and build the rest.

        In an island that shards, ignore the arguments and hold a part of every layer, with initial weights if
        `sharded.draws`.

        Layers that are no longer held are freed before new layers are built, so the device never holds both. No
        execution may be pending.

        Args:
            first: The first layer, at which a fragment begins.
            last: The layer after the last layer to hold, at which a fragment ends.
            drawn: True: new layers get their initial weights. False: new layers stay uninitialised until weights from
                a checkpoint or other peers are loaded (then call `given`), or until `initialise` is called.

        Raises:
            RuntimeError: If the device's memory is too small. The span then has only some layers: call `build_layers`
                again.
            StartWeightsError: If the folder of the initial weights is missing or wrong. The span then has only some
                layers: call `build_layers` again.
        """
        if self.device.ranks.sharded:
            self._hold_part()
            return
        run, device = self.run, self.device.device
        wanted = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        assert (wanted[0].first, wanted[-1].last) == (first, last), "a span is whole fragments"
        lives = {one.live.fragment: one.live for one in self.gossip.fragments if one.live.fragment in wanted}
        new_cuts = {cut.index for cut in wanted if cut not in lives}
        start = self.fragments[0].first if self.fragments else 0
        layers = {start + at: layer for at, layer in enumerate(self.layers) if first <= start + at < last}
        self.layers, self.fragments, self._stages = list(layers.values()), list(lives), None
        self.inner, self.forward = Inner([], run.train), Chain([])
        self.gossip.set_lives(list(lives.values()))
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
        self.gossip.set_lives(ordered, undrawn=self._undrawn)
        self.inner = Inner(ordered, run.train)
        self.forward = Chain(self.layers, run.train.compile and not accelerator.compile_failure(device), run, first)
        if len(wanted) < len(self.cuts) or run.synchronous:
            self._stages = self._at_work(only_routed=True)

    def _hold_part(self) -> None:
        """Hold this rank's part of every layer, with initial weights if this machine has them."""
        from decentral.engine import sharded

        island = self.device.ranks
        assert isinstance(island, sharded.Orders), "an island has the parts"
        built = sharded.build(self.run, self.device.device, island)
        self.layers, self.fragments = built.layers, list(self.cuts)
        self.inner, self.forward = built.inner, built.forward
        self._undrawn = set() if sharded.draws(self.run.model) else {cut.index for cut in self.cuts}
        self.gossip.set_lives(built.inner.lives)

    def given(self, fragments: Iterable[int]) -> None:
        """Record that these fragments (indices) have weights from a checkpoint or a peer; `initialise` skips them."""
        self._undrawn.difference_update(fragments)

    def map_memory(self) -> None:
        """On a CPU, write zeros to fragments without weights, so that their memory is mapped before training begins.

        Call this while the peer waits for weights from other peers.
        """
        if self.device.device.type == "cpu":
            for live in self.inner.lives:
                if live.fragment.index in self._undrawn:
                    live.map_memory()

    def initialise(self) -> None:
        """Sample initial weights for fragments without weights. Call this before anything reads the weights."""
        if not self._undrawn:
            return
        lives, first, last = self.inner.lives, self.fragments[0].first, self.fragments[-1].last
        layers = decoder.build(self.run.model, self.run.seed, first, last)
        for live in lives:
            if live.fragment.index in self._undrawn:
                live.set_weights(layers, first)
                live.mark_changed("theta")
        self.gossip.set_lives([live for live in lives if live.fragment.index not in self._undrawn])
        self.gossip.set_lives(lives)  # add all fragments again, now with gossip state made from their new weights
        self._undrawn.clear()

    @property
    def model_layers(self) -> int:
        """The number of layers of the whole model."""
        return self.cuts[-1].last

    @property
    def stages(self) -> StageRunner:
        """The executor of routed micro-batches. With the whole model, the first use allocates gradient sums."""
        if self._stages is None:
            self._stages = self._at_work(only_routed=False)
        return self._stages

    def clear_sums(self) -> None:
        """Discard the gradients summed so far, because they are those of older weights or of a speed measurement."""
        if self._stages is not None:
            self._stages.sums.clear()

    def forms(self, layer: int, sequences: int) -> ActivationForms:
        """Return the layouts in which a micro-batch may enter `layer`, and in which its gradient may be sent back."""
        return self.activations.forms(layer, sequences)

    def all_state_layouts(self) -> tuple[Layout, ...]:
        """Return, for each fragment of the whole model, the layout of the state that peers send to each other."""
        return tuple(self.gossip.state_layout(cut.parameters) for cut in self.cuts)

    def _at_work(self, only_routed: bool) -> StageRunner:
        return StageRunner(self.run, self.layers, self.inner.lives, self.activations, self.device, only_routed)


def _gaps(layers: Mapping[int, nn.Module], first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of layers within [first, last) that are missing in `layers`."""
    missing = [at for at in range(first, last) if at not in layers]
    begins = [at for at in missing if at - 1 not in missing]
    return [(begin, next(at for at in range(begin, last + 1) if at not in missing)) for begin in begins]


RetainedState = tuple[int, Layout, bytes]
"""The state of a fragment on disk: its learning-rate step, the layout of the state, and its blob."""


class RetainedStore(Protocol):
    """Interface of the store for states of fragments that the peer does not hold: given up, or copied from a holder.

    `RetainedStateStore` writes them to files; the simulator's `SurrogateDisk` has them in memory.
    """

    def write(self, state: jobs.Donated, step: int) -> None:
        """Replace the stored state of a fragment. If the disk fails, keep the stored state and raise OSError."""

    def write_copy(self, state: jobs.Donated, step: int) -> None:
        """Store a holder's state. If the disk is too small or fails, raise OSError."""

    def read(self, fragment: int) -> RetainedState | None:
        """Return the retained state of a fragment; None if the store has no readable state of the fragment."""

    def forget(self, fragments: Iterable[int]) -> None:
        """Delete the retained states of these fragments."""

    def steps(self, fragments: Iterable[int]) -> jobs.RetainedStates:
        """Return (fragment, learning-rate step) for each of `fragments` that has a retained state."""


class HeldSpan(Protocol):
    """Interface of the fragments that a peer holds; `Span` and the simulator's `SurrogateSpan` implement it."""

    cuts: tuple[Fragment, ...]
    fragments: list[Fragment]
    gossip: FragmentGossip

    def build_layers(self, first: int, last: int, drawn: bool = True) -> None:
        """Make [first, last) the held layers. New layers get initial weights if `drawn`, otherwise they get none."""

    def given(self, fragments: Iterable[int]) -> None:
        """Record that these fragments (indices) have weights from a checkpoint or a peer, and need no initial ones."""

    def all_state_layouts(self) -> tuple[Layout, ...]:
        """Return, for each fragment of the whole model, the layout of the state that peers send to each other."""


def change_span(job: jobs.ChangeSpan, span: HeldSpan, retained: RetainedStore, counters: Counters) -> Program:
    """Return the program that replaces the held layers. No micro-batch may be waiting for its backward pass.

    A new fragment gets the job's state; if the job has none, the state retained on disk; if the disk has none, initial
    weights. Merges ignore the new fragment's next update, since its optimizer moments are fresh. States of fragments
    that the peer no longer holds are written to the disk.

    Args:
        job: The new layers, with states of fragments from other peers.
        span: The held fragments, changed in place.
        retained: The store for states of fragments that the peer no longer holds.
        counters: The peer's counters. If the job's learning-rate step is larger, it replaces the peer's.

    Returns:
        The program. If it refuses the change, its outcome has the reason, and the peer still holds its old layers.
    """
    yield Phase.HELD
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
        span.build_layers(job.first, job.last, drawn=not states.keys() >= set(gained))
    except (OSError, RuntimeError, StartWeightsError) as error:
        if span.fragments != held:
            span.build_layers(held[0].first, held[-1].last, drawn=False)
            span.gossip.start(unpacked(span.gossip.tools.codecs, given_up, layouts))
            span.given(lost)
        return jobs.SpanChanged(False, _reason(error))
    span.gossip.start(states)
    span.given(states)
    span.gossip.begin_anew(gained)
    retained.forget(gained)
    counters.follow(job.step)
    return jobs.SpanChanged(True, retained=retained.steps(cut.index for cut in span.cuts))


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
    """Return the states of gained fragments by fragment and section, from the job or else from the disk.

    The result omits fragments without a state. `gained` has the layout that each gained fragment's state must have.
    Raises ProtocolError if a state in the job is not of a gained fragment, has another layout, or does not decode.
    """
    given = {fragment: (fragment, layout, blob) for fragment, layout, blob in job.blobs}
    for index, expected in gained.items():
        found = None if index in given else retained.read(index)
        if found is not None and found[1] == expected:
            given[index] = index, found[1], found[2]
    return unpacked(gossip.tools.codecs, [given[index] for index in sorted(given)], gained)
