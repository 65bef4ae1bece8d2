"""Whether training has diverged: many gradients are not finite, or the loss has risen far above its best.

A peer whose training has diverged goes on for a while, since the weights of others may bring it back. Meanwhile it
warns, and keeps the checkpoint from before.
"""

from dataclasses import dataclass

from decentral.core.jobs import DIVERGED
from decentral.core.journal.events import ErrorLine
from decentral.core.machine import Log
from decentral.core.units import Seconds

SETTLED_STEPS = 20  # a mean over fewer steps is noise
MOST_STEPS_DROPPED = 0.25  # of the last steps; a large model in bf16 drops one now and then
LEAST_RISE = 1.0  # nats of the mean loss above its best: noise and harder text raise it by less
BEST_FORGOTTEN = 1e-4  # share by which the best mean drifts to the present mean each step, since text may get harder
HOPELESS = 2.0  # times the starting loss; below this, training may still recover by itself
LEARNED = 0.85  # times the starting loss; below this, a loss that stays risen comes from harder text
STOP_STEPS, STOP_S = 100, 60.0  # after both, without recovery, a peer stops, or takes the present loss as usual
SAID_EVERY_S = 60.0


@dataclass(slots=True)
class Divergence:
    """A detector of divergence, fed with each step's gradient and loss."""

    guess: float  # nats: the loss of uniform guesses, which give each token the same probability
    dropped: int = 0  # steps that trained nothing, as their gradients were not finite
    hopeless: bool = False  # whether training has diverged for STOP_STEPS and STOP_S and shows no sign of recovery
    _steps: int = 0
    _dropped_share: float = 0.0
    _mean: float = 0.0
    _best: float = 0.0  # of the means
    _start: float = 0.0  # the first step's loss, or that of uniform guesses if it is larger; 0: no loss is known
    _since: tuple[int, Seconds] | None = None  # step and time at which divergence began; None: training is well
    _said_at: Seconds = 0.0

    def stepped(self, dropped: bool, loss: float | None, now: Seconds) -> list[Log]:
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
        return [Log(ErrorLine(reason=self.trouble))]

    @property
    def trouble(self) -> str:
        """Why training has diverged, and what the user can do; "" while it has not."""
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
