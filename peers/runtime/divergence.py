"""Detect that training has diverged: many gradients are not finite, or the loss has risen far above its lowest mean.

A peer whose training has diverged goes on for a while, since gossip with other peers' weights may repair its own.
Meanwhile it warns the user, and does not overwrite its last checkpoint.
"""

from dataclasses import dataclass

from decentral.core.jobs import DIVERGED
from decentral.core.journal.events import REPEAT_S, ErrorLine
from decentral.core.machine import Log
from decentral.core.units import Seconds

SETTLED_STEPS = 20  # the loss is averaged over about this many steps, as a mean over fewer is too noisy to judge
MOST_STEPS_DROPPED = 0.25  # training has diverged if more than this share of steps is skipped; a few are usual in bf16
LEAST_RISE = 1.0  # training has not diverged before the mean loss is this many nats above its minimum: noise adds less
BEST_FORGOTTEN = 1e-4  # each step raises the remembered minimum loss by this share of its distance from the mean loss
HOPELESS = 2.0  # if divergence lasts, a peer stops at a loss above this many times the starting loss
LEARNED = 0.85  # lasting divergence does not stop a peer whose mean loss is below this share of the starting loss
STOP_STEPS, STOP_S = 100, 60.0  # divergence "lasts" after both this many steps and this many seconds


@dataclass(slots=True)
class Divergence:
    """The detector of divergence; `judge_step` must be called with the result of every step."""

    guess: float  # loss in nats of a model that considers all tokens equally likely
    dropped: int = 0
    hopeless: bool = False  # whether divergence has lasted and the latest step was skipped or had a very high loss
    _steps: int = 0
    _dropped_share: float = 0.0
    _mean: float = 0.0
    _best: float = 0.0  # lowest mean loss, raised a little by each step (BEST_FORGOTTEN)
    _start: float = 0.0  # loss of the first step, but at least `guess`; 0 before the first step
    _since: tuple[int, Seconds] | None = None  # step and time at which divergence began; None if training is sound
    _said_at: Seconds = 0.0

    def judge_step(self, dropped: bool, loss: float | None, now: Seconds) -> list[Log]:
        """Update the detector with a step; while training has diverged, return a warning every REPEAT_S.

        Args:
            dropped: Whether the step was skipped, because its gradient was not finite.
            loss: The step's mean loss in nats per token; None: the loss was not finite, or is not known.
            now: Unix time in seconds.
        """
        self._steps, self.dropped = self._steps + 1, self.dropped + dropped
        weight = 1 / min(self._steps, SETTLED_STEPS)
        self._dropped_share += (dropped - self._dropped_share) / SETTLED_STEPS
        if loss is not None:
            self._start = self._start or max(self.guess, loss)
            self._mean += (loss - self._mean) * weight
            forgotten = self._best + BEST_FORGOTTEN * (min(self._mean, self._start) - self._best)
            self._best = min(self._mean, forgotten) if self._steps > SETTLED_STEPS else self._start
        if not self.trouble:
            self._since, self.hopeless = None, False
            return []
        if self._since is None:
            self._since, self._said_at = (self._steps, now), now - REPEAT_S
        lasted = self._steps >= self._since[0] + STOP_STEPS and now >= self._since[1] + STOP_S
        if lasted and not self._drops and self._mean < LEARNED * self._start:
            self._best, self._since = self._mean, None
            return []
        self.hopeless = lasted and (dropped or (loss is not None and loss > HOPELESS * self._start))
        if now < self._said_at + REPEAT_S:
            return []
        self._said_at = now
        return [Log(ErrorLine(reason=self.trouble))]

    @property
    def trouble(self) -> str:
        """Return why training has diverged, and what the user can do; "" if it has not diverged."""
        if self._drops:
            why = f"{self._dropped_share:.0%} of recent steps were skipped, since their gradients were not finite"
        elif self._mean > self._best + max(LEAST_RISE, (self._start - self._best) / 2):
            why = f"the mean loss has risen from {self._best:.3f} (best) to {self._mean:.3f} nats per token"
        else:
            return ""
        return f"{DIVERGED}: {why}; the last good checkpoint is kept. A lower train.learning_rate may help"

    @property
    def _drops(self) -> bool:
        return self._dropped_share > MOST_STEPS_DROPPED
