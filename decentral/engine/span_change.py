"""A change of span (jobs.ChangeSpan): which fragments it brings and takes, and how a peer gets from one to the other.

Everything is checked, and what is given up is on the disk, before anything changes; a change that fails is undone.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from decentral.core import jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment, Layout
from decentral.core.reasons import Reason
from decentral.engine.gossip_jobs import FragmentGossip, unpacked
from decentral.engine.step import Counters
from decentral.model.start_weights import StartWeightsError

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
    """The fragments that a peer holds, and their gossip: engine/span.py."""

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
