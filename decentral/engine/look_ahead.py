"""Predict the weights at the time of a micro-batch's backward pass, so that its forward pass can use them too.

With `routes.overlap`, the peer takes steps between a micro-batch's forward and backward pass, so the gradient would be
stale. The forward pass therefore uses predicted weights (SpecTrain: Chen et al., arXiv 1809.02839):

    ahead = theta + lateness * (theta after the last step - theta before it)

The backward pass uses the same weights as the forward pass, so the gradient is exact at these weights (weight stashing:
PipeDream, arXiv 1806.03377, section 3.3). A fragment's lateness is the number of steps that the fragment takes between
a micro-batch's two passes, as a moving average. A step without a gradient for the fragment is not counted.
docs/results/routes.md has measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.engine.fragment import Live

FOLLOWS = 0.1  # the moving average of the lateness gives the newest micro-batch this weight
MOST_AHEAD = 8.0  # a prediction looks at most this many steps ahead, since the last step tells little about later ones


@dataclass(frozen=True, slots=True)
class WeightsAhead:
    """Predicted weights for both passes of a micro-batch. A key is a fragment's position in the peer's span, from 0."""

    vectors: Mapping[int, Tensor]
    steps: Mapping[int, int]  # how many steps each fragment had taken when its weights were predicted


class LookAhead:
    """Predicts the weights of the fragments that a peer holds. Only the training thread may use it."""

    def __init__(self, lives: Sequence[Live]) -> None:
        """Begin with no recorded step: predictions equal the present weights. `lives`: the span's fragments."""
        self._lives = lives
        self._moved = [torch.zeros_like(live.theta) for live in lives]  # last step's change of each fragment's weights
        self.steps = [0] * len(lives)
        self.lateness = [0.0] * len(lives)  # moving average: each fragment's steps between a micro-batch's two passes

    def weights(self, first: int, last: int) -> WeightsAhead:
        """Return new vectors with the predicted weights of the fragments within layers [first, last)."""
        vectors = {}
        for place, live in enumerate(self._lives):
            if first <= live.fragment.first and live.fragment.last <= last:
                steps = min(self.lateness[place], MOST_AHEAD)
                vectors[place] = torch.add(live.theta, self._moved[place], alpha=steps)
        return WeightsAhead(vectors, {place: self.steps[place] for place in vectors})

    @contextmanager
    def at(self, ahead: WeightsAhead) -> Iterator[None]:
        """Make the layers compute with predicted weights inside the context, and with theta again after it."""
        for place, vector in ahead.vectors.items():
            self._lives[place].compute_with(vector)
        try:
            yield
        finally:
            for place in ahead.vectors:
                self._lives[place].compute_with(self._lives[place].theta)

    @contextmanager
    def during_step(self, index: int) -> Iterator[None]:
        """Record how the step inside the context changes the fragment at position `index` of the peer's span."""
        live, moved = self._lives[index], self._moved[index]
        before = live.theta.clone()
        yield
        torch.sub(live.theta, before, out=moved)
        self.steps[index] += 1

    def came_back(self, ahead: WeightsAhead) -> None:
        """Count a micro-batch, whose backward pass has just been computed, in the moving averages of lateness.

        Args:
            ahead: The weights that both passes of the micro-batch used.
        """
        for place, steps in ahead.steps.items():
            late = min(self.steps[place] - steps, MOST_AHEAD)
            self.lateness[place] += FOLLOWS * (late - self.lateness[place])
