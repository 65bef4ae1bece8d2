"""Whether training has diverged: many gradients are not finite, or the loss has risen far above its best.

A peer whose training has diverged goes on for a while, since the weights of others may bring it back. Meanwhile it
warns, and keeps the checkpoint from before.
"""

from dataclasses import dataclass

from decentral.core.machine import Effect, log
from decentral.core.outcomes import DIVERGED
from decentral.core.units import Seconds

SETTLED_STEPS = 20  # a mean over fewer steps is noise
MOST_STEPS_DROPPED = 0.25  # of the last steps; a large model in bf16 drops one now and then
LEAST_RISE = 1.0  # nats of the mean loss above its best: noise and harder text raise it by less
BEST_FORGOTTEN = 1e-4  # at each step, of the way to the present loss: some day harder text is what is usual
HOPELESS = 2.0  # times the starting loss; below it, steps may bring it down again
LEARNED = 0.85  # times the starting loss; below it, a loss that stays where it is comes from harder text
STOP_STEPS, STOP_S = 100, 60.0  # after both, without recovery, a peer stops, or takes the loss as usual
SAID_EVERY_S = 60.0


@dataclass(slots=True)
class Divergence:
    """Judges each step by its gradient, and by the mean loss of the last steps."""

    guess: float  # nats; the loss of a model that gives each token the same chance
    dropped: int = 0  # steps that trained nothing, as their gradients were not finite
    hopeless: bool = False  # it has lasted, and waiting longer would not help
    _steps: int = 0
    _dropped_share: float = 0.0
    _mean: float = 0.0
    _best: float = 0.0  # of the means
    _start: float = 0.0  # the first step's loss, or that of a guess if it is larger; 0: no loss is known
    _since: tuple[int, Seconds] | None = None  # the step and the time at which it began; None: training is well
    _said_at: Seconds = 0.0

    def stepped(self, dropped: bool, loss: float | None, now: Seconds) -> list[Effect]:
        """Take a step into account, and return a line for the journal now and then while training has diverged.

        Args:
            dropped: Whether the step trained nothing, because its gradient was not finite.
            loss: The step's mean loss in nats; None: it was not finite, or is not known.
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
            self._since, self._said_at = (self._steps, now), now - SAID_EVERY_S
        lasted = self._steps >= self._since[0] + STOP_STEPS and now >= self._since[1] + STOP_S
        if lasted and not self._drops and self._mean < LEARNED * self._start:
            self._best, self._since = self._mean, None
            return []
        self.hopeless = lasted and (dropped or (loss is not None and loss > HOPELESS * self._start))
        if now < self._said_at + SAID_EVERY_S:
            return []
        self._said_at = now
        return [log("error", reason=self.trouble)]

    @property
    def trouble(self) -> str:
        """What the user reads while training has diverged; "" while it has not."""
        if self._drops:
            why = f"many steps trained nothing ({self._dropped_share:.0%}), as their gradients are not finite"
        elif self._mean > self._best + max(LEAST_RISE, (self._start - self._best) / 2):
            why = f"the loss has risen from {self._best:.3f} to {self._mean:.3f}"
        else:
            return ""
        return f"{DIVERGED}: {why}; the last good checkpoint stays. A lower train.learning_rate may help"

    @property
    def _drops(self) -> bool:
        return self._dropped_share > MOST_STEPS_DROPPED
