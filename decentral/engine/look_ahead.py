"""Weights of the future: where steps are taken between a micro-batch's passes, it is computed with what they make.

With `routes.overlap` a gradient comes back some steps after its forward pass, and by then it is stale. So a forward
pass runs at the weights that its backward pass is likely to find, which follow from the last step (SpecTrain: Chen et
al., arXiv 1809.02839):

    ahead = theta + lateness * (theta after the last step - theta before it)

and its backward pass at the same ones (weight stashing: PipeDream, arXiv 1806.03377, section 3.3): so it is the exact
gradient there. The lateness is the mean number of steps between the passes of the micro-batches before, for each
fragment: a step without a gradient for a fragment is none of that fragment's. What it is worth: docs/results/routes.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.engine.fragment import Live

FOLLOWS = 0.1  # weight of the newest micro-batch in the mean lateness
MOST_AHEAD = 8.0  # steps; one step says nothing about what comes long after it


@dataclass(frozen=True, slots=True)
class WeightsAhead:
    """What a micro-batch is computed with, by the fragment's place in the span; the steps that had been taken then."""

    vectors: Mapping[int, Tensor]
    steps: Mapping[int, int]


class LookAhead:
    """The weights of a span's forward passes. Not thread-safe: the training thread owns it."""

    def __init__(self, lives: Sequence[Live]) -> None:
        self._lives = lives
        self._moved = [torch.zeros_like(live.theta) for live in lives]  # by the last step
        self.steps = [0] * len(lives)
        self.lateness = [0.0] * len(lives)

    def weights(self, first: int, last: int) -> WeightsAhead:
        """Vectors [n] of the fragments within layers [first, last), which nobody changes."""
        vectors = {}
        for place, live in enumerate(self._lives):
            if first <= live.fragment.first and live.fragment.last <= last:
                steps = min(self.lateness[place], MOST_AHEAD)
                vectors[place] = torch.add(live.theta, self._moved[place], alpha=steps)
        return WeightsAhead(vectors, {place: self.steps[place] for place in vectors})

    @contextmanager
    def at(self, ahead: WeightsAhead) -> Iterator[None]:
        """Within it the layers compute with these vectors."""
        for place, vector in ahead.vectors.items():
            self._lives[place].compute_with(vector)
        try:
            yield
        finally:
            for place in ahead.vectors:
                self._lives[place].compute_with(self._lives[place].theta)

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Within it the fragment of this place takes its step."""
        live, moved = self._lives[index], self._moved[index]
        before = live.theta.clone()
        yield
        torch.sub(live.theta, before, out=moved)
        self.steps[index] += 1

    def came_back(self, ahead: WeightsAhead) -> None:
        """A micro-batch that was computed with these. One that took for ever says no more than one that was late."""
        for place, steps in ahead.steps.items():
            late = min(self.steps[place] - steps, MOST_AHEAD)
            self.lateness[place] += FOLLOWS * (late - self.lateness[place])
