"""What a change of layers (jobs.Move) brings and takes, found and checked before anything changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.core import jobs
from decentral.train.fragment_gossip import unpacked
from decentral.train.sections import Codecs

RetainedState = tuple[int, jobs.Layout, bytes]
"""Of a fragment that was given up: the learning-rate step, its sections, and the blob."""


@dataclass(frozen=True, slots=True)
class SpanChange:
    gained: list[int]  # fragments
    lost: list[int]
    states: dict[int, dict[str, Tensor]]  # of gained ones; what is not among them begins with its initial weights


def span_change_of(
    job: jobs.ChangeSpan,
    cuts: Sequence[jobs.Fragment],
    held: Sequence[jobs.Fragment],
    layouts: Mapping[int, jobs.Layout],
    codecs: Codecs,
    kept: Callable[[int], RetainedState | None],
) -> SpanChange:
    """`cuts` and `layouts`, of a fragment's state: of the whole model. `kept(fragment)`: what the disk has of it.

    Raises ProtocolError if a state that came with the job is not as it should be.
    """
    gained = [cut.index for cut in cuts if job.first <= cut.first < job.last and cut not in held]
    lost = [cut.index for cut in held if not job.first <= cut.first < job.last]
    given = {fragment: (fragment, layout, blob) for fragment, layout, blob in job.blobs}
    for index in gained:
        found = None if index in given else kept(index)
        if found is not None and found[1] == layouts[index]:
            given[index] = index, found[1], found[2]
    blobs = [given[index] for index in sorted(given)]
    return SpanChange(gained, lost, unpacked(codecs, blobs, {index: layouts[index] for index in gained}))


__all__ = ["RetainedState", "SpanChange", "span_change_of"]
