"""The inner optimizer: it clips the gradients of fragments, and takes steps on their flat vectors. Start at `Inner`."""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from decentral.core import config
from decentral.core.choices import OPTIMIZERS
from decentral.engine import heap
from decentral.engine.fragment import Live
from decentral.engine.optimizers import Operands, StretchOptimizer, round_stochastically

AT_ONCE_ELEMENTS = 1 << 24  # on a CPU, the gradients of larger models are freed fragment by fragment during a step
FINAL_RATE = 0.1  # the learning rate decays to this share of its peak at `train.total_steps`


def step_fragments(lives: Sequence[tuple[Live, Sequence[Tensor]]], steps: int, rate: float, void: Tensor) -> None:
    """Take one optimizer step of several fragments, with one call for each kind of optimizer (see `step_together`).

    Changes theta and the optimizer state in place. The caller counts the step (`Live.count`).

    Args:
        lives: Each fragment with its gradients: one for each parameter, or one flat vector [n].
        steps: Number of optimizer steps taken before this step.
        rate: The learning rate.
        void: fp32 scalar on the weights' device: 1 if the gradients are not finite, so that nothing changes; else 0.
    """
    work = [one for live, gradients in lives for one in _work(live, live.begin_step(gradients))]
    step_together([(one.stretch, one.operands) for one in work], steps, rate, void)
    for one in work:
        if one.wide is not one.theta:
            round_stochastically(one.wide, one.theta, one.live.chance(f"step {one.stretch.begin}"))
    for live, _ in lives:
        live.end_step()


@dataclass(frozen=True, slots=True)
class StretchWork:
    """The inputs of an optimizer step on the parameters of a fragment that one `StretchOptimizer` trains."""

    live: Live
    stretch: StretchOptimizer
    operands: Operands
    wide: Tensor  # the weights as fp32; the same tensor as `theta` if `theta` is fp32
    theta: Tensor  # these parameters' part of the fragment's flat weight vector


def _work(live: Live, gradients: Sequence[Tensor]) -> Iterator[StretchWork]:
    """Yield the inputs of the optimizer step for each parameter range of a fragment.

    `gradients` has one tensor for each parameter, or one flat vector [n].
    """
    for stretch in live.state.stretches:
        theta = live.theta[stretch.begin : stretch.end]
        wide = theta.float()
        operands = stretch.operands(wide, [part.float() for part in _within(stretch, gradients)])
        yield StretchWork(live, stretch, operands, wide, theta)


def _within(stretch: StretchOptimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return a fragment's gradients, in the form that they have, of the parameters that this optimizer trains."""
    if len(gradients) == 1:
        return [gradients[0].flatten()[stretch.begin : stretch.end]]
    ends = accumulate(gradient.numel() for gradient in gradients)
    return [one for one, end in zip(gradients, ends, strict=True) if stretch.begin < end <= stretch.end]


def step_together(work: Sequence[tuple[StretchOptimizer, Operands]], steps: int, rate: float, void: Tensor) -> None:
    """Take one optimizer step of all parameter ranges, with one call of `step` for all ranges of the same `kind`.

    Fewer calls save time on a GPU, which waits for its host between calls.

    Args:
        work: Optimizers of parameter ranges, with the tensors of their steps; weights and moments change in place.
        steps: Number of optimizer steps taken before this step.
        rate: The learning rate.
        void: Scalar as in `StretchOptimizer.step`: 1 if nothing may change.
    """
    kinds: dict[Hashable, list[tuple[StretchOptimizer, Operands]]] = {}
    for stretch, operands in work:
        kinds.setdefault(stretch.kind, []).append((stretch, operands))
    for alike in kinds.values():
        parts = [operands for _, operands in alike]
        together = Operands(
            [one for part in parts for one in part.weights],
            [one for part in parts for one in part.gradients],
            [one for part in parts for one in part.first],
            [one for part in parts for one in part.second],
        )
        alike[0][0].step(together, steps, rate, void)


class Inner:
    """The inner optimizer of a peer: it clips the gradient of all fragments together, then steps each fragment."""

    def __init__(self, lives: Sequence[Live], train: config.TrainConfig) -> None:
        """Set up the optimizer of all fragments that the peer holds. `train`: the section `train` of the config."""
        self.lives = lives
        self.train = train
        self._ended_at = 0.0  # when the last step ended, by `time.perf_counter`
        self._took_s = 0.0  # how long the last step took, without the passes before it

    @property
    def at_once(self) -> bool:
        """Whether one call steps all fragments together.

        This is faster, but needs more memory. Weights that are not fp32 are stepped one fragment at a time, because
        each step needs fp32 copies of the weights that it changes. On a CPU, large models are stepped so too, because
        the gradients of a fragment are freed after its step.
        """
        return self.train.weights == "float32" and not self._large

    @property
    def _large(self) -> bool:
        on_cpu = self.lives[0].theta.device.type == "cpu"
        return on_cpu and sum(live.fragment.parameters for live in self.lives) > AT_ONCE_ELEMENTS

    def _frees_memory(self, passes_s: float) -> bool:
        """Return whether a step returns the memory of the passes to the system. `passes_s`: how long they took.

        It does so if the optimizer takes longer than the passes, as the next passes map the memory anew, which takes 4%
        of their time (85 M parameters, 128 tokens).
        """
        return self._large and OPTIMIZERS[self.train.optimizer].frees_gradients and passes_s < self._took_s

    @property
    def steps(self) -> int:
        """The number of optimizer steps on the first fragment; `step_all` uses this number for every fragment."""
        return self.lives[0].steps

    def zero_grad(self) -> None:
        """Set the gradients of all fragments to zero."""
        for live in self.lives:
            live.zero_grad()

    def clip(self) -> Tensor:
        """Scale the gradient of all fragments together, in place, to a norm of at most `train.clip_norm`.

        Returns:
            The norm before scaling, a scalar on the device, for which the host of a GPU does not wait. It is not finite
            if the gradient has a NaN or an infinity.
        """
        gradients = [gradient for live in self.lives for gradient in live.gradients()]
        norm = self._norm(torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32)))
        scale = self.train.clip_norm / (norm + 1e-6)
        if norm.device.type != "cpu":
            torch._foreach_mul_(gradients, scale.clamp(max=1.0))
        elif scale < 1:
            torch._foreach_mul_(gradients, float(scale))
        return norm

    def _norm(self, norms: Tensor) -> Tensor:
        """Return the norm of the whole gradient. `norms`: a vector with the norm of each parameter's gradient."""
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm

    def step_all(self, rate: float, tokens: int, void: Tensor | None = None) -> None:
        """Take an optimizer step on all fragments, count it, and free the gradients.

        Args:
            rate: The learning rate.
            tokens: Number of tokens in this step.
            void: fp32 scalar on the device: 1 if the gradients are not finite, so that no weights change, else 0; None
                means 0. The step is counted in both cases: call `uncount` once the host has read a 1.
        """
        steps = self.steps
        void = torch.zeros((), device=self.lives[0].theta.device) if void is None else void
        began = time.perf_counter()
        if self._frees_memory(began - self._ended_at):
            heap.return_free_pages()
        for together in [self.lives] if self.at_once else [[live] for live in self.lives]:
            step_fragments([(live, live.gradients()) for live in together], steps, rate, void)
            for live in together:
                live.free_gradients()
                live.count(tokens)
        self._ended_at = time.perf_counter()
        self._took_s = self._ended_at - began

    def uncount(self, tokens: int) -> None:
        """Take back the count of a step on `tokens` tokens, which has changed no weights."""
        for live in self.lives:
            live.uncount(tokens)


def step_clipped(live: Live, gradient: Tensor, lr_step: int, tokens: int) -> bool:
    """Clip the gradient of one fragment and take its optimizer step, unless the gradient is not finite.

    Args:
        live: The fragment.
        gradient: The fragment's mean gradient [n] over the tokens, scaled in place; `live.grad` or another vector.
        lr_step: The swarm's learning-rate step.
        tokens: Number of tokens over which the gradient is averaged.

    Returns:
        Whether the step was taken.
    """
    train = live.train
    norm = _norm(gradient)
    if not torch.isfinite(norm):
        return False
    gradient *= (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    rate = rate_at(train, lr_step, live.steps)
    step_fragments([(live, [gradient])], live.steps, rate, torch.zeros_like(norm))
    live.count(tokens)
    live.mark_changed()
    return True


def has_finite_norm(gradient: Tensor) -> bool:
    """Return whether the norm of a gradient [n] is finite; if it is not, `step_clipped` takes no step."""
    return bool(torch.isfinite(_norm(gradient)))


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def rate_at(train: config.TrainConfig, lr_step: int, own_steps: int) -> float:
    """Return the learning rate: linear warm-up, then `train.peak_rate` or, with `train.total_steps`, a linear decay.

    The decay ends at `total_steps` with FINAL_RATE times the peak.

    Args:
        train: The section `train` of the config.
        lr_step: The swarm's learning-rate step.
        own_steps: Steps that this peer has taken. Warm-up counts the smaller of `lr_step` and `own_steps`, so that a
            peer that joins late warms up too.
    """
    warm = min(1.0, (min(lr_step, own_steps) + 1) / (train.warmup_steps + 1))
    if train.total_steps is None:
        return train.peak_rate * warm
    left = max(0.0, 1 - max(0, lr_step - train.warmup_steps) / max(1, train.total_steps - train.warmup_steps))
    return train.peak_rate * warm * (FINAL_RATE + (1 - FINAL_RATE) * left)
