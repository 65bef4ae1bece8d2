"""The live weights: a span's layers, kept as one flat vector [n] per fragment, and the optimizer on those vectors.

Each parameter is a view into its fragment's vector, so that gossip, averaging and the optimizer are a few vector
operations per fragment, however many tensors the layers have. Within a fragment the matrices that Muon trains come
first: with `train.optimizer: muon` those of all layers but the model's first and last. AdamW trains the others: first
the decayed ones (matrices), then those that are not (gains).

`copy_out` and `copy_in` move such a vector between a device and host memory, and the training thread need not wait. On
a GPU it only puts a copy within the device into its stream; the way to host memory and back is a side stream's, from
and to pinned memory, and the worker waits for it. On the CPU both are the same memory, and a copy is a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from decentral.core import config, rng
from decentral.core.choices import OPTIMIZERS
from decentral.core.fragments import Fragment
from decentral.engine.optimizers import (
    Operands,
    OptimizerState,
    StretchOptimizer,
    round_stochastically,
    step_together,
    views,
)
from decentral.model import decoder

FINAL_RATE = 0.1  # share of the learning rate that is left at `train.total_steps`


def fragments_of(run: config.Config) -> list[Fragment]:
    """The fragments of the run's model. Every peer of a run has the same ones."""
    return fragments(decoder.parameters(run.model), run.gossip.fragment_parameters)


def fragments(parameters: Sequence[int], at_least: int) -> list[Fragment]:
    """Groups consecutive layers until a group has `at_least` parameters; a short tail joins the group before it."""
    groups: list[list[int]] = []  # [first, last, parameters]
    for index, count in enumerate(parameters):
        if groups and groups[-1][2] < at_least:
            groups[-1] = [groups[-1][0], index + 1, groups[-1][2] + count]
        else:
            groups.append([index, index + 1, count])
    if len(groups) > 1 and groups[-1][2] < at_least:
        _, last, count = groups.pop()
        groups[-1] = [groups[-1][0], last, groups[-1][2] + count]
    return [Fragment(number, first, last, count) for number, (first, last, count) in enumerate(groups)]


class Live:
    """One fragment's live weights theta [n], their gradient and optimizer state, and what was trained in the window.

    The layers' parameters become views into theta, and their gradients into `grad`. `train.weights` is their dtype.
    """

    def __init__(
        self,
        fragment: Fragment,
        layers: Sequence[nn.Module],
        device: torch.device,
        train: config.TrainConfig,
        numbers: range | None = None,
        drawn: bool = True,
    ) -> None:
        """`numbers`: of the model's layers, from the first one of `layers` to the model's last; by default `layers` are
        all there are. Without `drawn`, theta is whatever the memory holds until a checkpoint, donors or `draw` give it.

        Raises UserError where an optimizer is missing on this machine.
        """
        self.fragment, self.train = fragment, train
        numbers = range(len(layers)) if numbers is None else numbers
        self._last = numbers[-1]
        groups = self._groups(layers, numbers.start)
        parameters = [parameter for group in groups for parameter in group]
        shapes = [parameter.shape for parameter in parameters]
        dtype = getattr(torch, train.weights)
        if drawn:
            self.theta = _flat(parameters).to(device, dtype)
        else:
            self.theta = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
        self._parameters = parameters
        self._grad: Tensor | None = None
        matrices, gains = (sum(parameter.numel() for parameter in group) for group in groups[1:])
        self.state = OptimizerState([block.shape for block in groups[0]], matrices, gains, train, device)
        self.tokens = 0  # since the last window's end
        self.lr_sum = 0.0  # sum of the learning rates since the last window's end
        self.steps = 0  # of the optimizer on this fragment: for its bias correction and for a newcomer's own warm-up
        self.touched = set[str]()  # of `tensors`: those that changed otherwise than by Inner.step; engine/island.py
        self.compute_with(self.theta)

    def compute_with(self, weights: Tensor) -> None:
        """Makes the layers compute with this vector [n].

        Only passes use these weights; optimizer, gossip and checkpoints keep using theta.
        """
        shapes = [parameter.shape for parameter in self._parameters]
        for parameter, weight in zip(self._parameters, views(weights, shapes), strict=True):
            parameter.data = weight

    @property
    def grad(self) -> Tensor:
        """The gradient as one vector [n] to which backward passes add; from its first use on, it is always there."""
        if self._grad is None:
            self._grad = torch.zeros_like(self.theta)
            shapes = [parameter.shape for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, views(self._grad, shapes), strict=True):
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        return self._grad

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient, in their order in theta; views of `grad`, once that is there.

        Where nothing collects them, a backward pass gives parameters new ones: to add to zeros would take a tenth of
        the time of a large model's small step. The norm of the parts rounds otherwise than that of the whole, and ranks
        of an island whose first one works for routes, too, must take the same step.
        """
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]

    def zero_grad(self) -> None:
        if self._grad is not None:
            self._grad.zero_()
            return
        for parameter in self._parameters:
            parameter.grad = None

    def touch_memory(self) -> None:
        """Writes to all that the first step will write, where nothing of it is in use yet: new memory is slow at first.

        The gradients' memory is free again when the first step begins, and serves the gradients then.
        """
        self.theta.zero_()
        for tensor in self.state.tensors.values():
            tensor.zero_()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def draw(self, layers: Sequence[nn.Module], start: int) -> None:
        """Takes the weights of other layers of the same kind. They begin with the model's layer `start`."""
        groups = self._groups(layers, start)
        self.theta.copy_(_flat([parameter for group in groups for parameter in group]))

    def _groups(self, layers: Sequence[nn.Module], start: int) -> tuple[list[nn.Parameter], ...]:
        """The fragment's parameters in their order in theta: Muon's matrices, AdamW's matrices, gains."""
        blocks, matrices, gains = [], [], []
        apart = bool(OPTIMIZERS[self.train.optimizer].stretch)
        for number in range(self.fragment.first, self.fragment.last):
            for parameter in layers[number - start].parameters():
                if parameter.ndim < 2:
                    gains.append(parameter)
                elif apart and 0 < number < self._last and parameter.ndim == 2:
                    blocks.append(parameter)
                else:
                    matrices.append(parameter)
        return blocks, matrices, gains

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint must keep."""
        return {"theta": self.theta, **self.state.tensors}

    def touch(self, *names: str) -> None:
        """Marks these of `tensors`, or all of them, as changed otherwise than by a step that all ranks take."""
        self.touched.update(names or self.tensors())

    def copy_theta(self, into: Tensor) -> None:
        """Copies theta into an fp32 vector [n] in host memory."""
        into.copy_(self.theta)

    def add(self, correction: Tensor) -> None:
        """Adds an fp32 vector [n] in host memory to theta."""
        correction = correction.to(self.theta.device, non_blocking=True)
        if self.theta.dtype == torch.float32:
            self.theta += correction
        else:
            round_stochastically(self.theta + correction, self.theta, self.chance("add"))

    def work(self, gradients: Sequence[Tensor]) -> Iterator["Work"]:
        """Yield what a step of each stretch works on, with gradients as `gradients` gives them."""
        for stretch in self.state.stretches:
            theta = self.theta[stretch.begin : stretch.end]
            wide = theta.float()  # theta itself, unless it is in bf16
            operands = stretch.operands(wide, [part.float() for part in self._within(stretch, gradients)])
            yield Work(self, stretch, operands, wide, theta)

    def _within(self, stretch: StretchOptimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the stretch's parameters."""
        if len(gradients) == 1:
            return [gradients[0].flatten()[stretch.begin : stretch.end]]
        ends = accumulate(gradient.numel() for gradient in gradients)
        return [one for one, end in zip(gradients, ends, strict=True) if stretch.begin < end <= stretch.end]

    def chance(self, what: str) -> torch.Generator:
        """The same on all peers, so that those which take the same steps stay the same."""
        seed = rng.seed_of(self.fragment.index, what, self.steps) % 2**63
        return torch.Generator(self.theta.device).manual_seed(seed)

    def count(self, tokens: int, rate: float) -> None:
        """A step was taken with so many tokens, at this learning rate."""
        self.tokens += tokens
        self.lr_sum += rate
        self.steps += 1


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of a fragment, the operands of its step, and its weights: in fp32, and as the fragment keeps them."""

    live: Live
    stretch: StretchOptimizer
    operands: Operands
    wide: Tensor
    theta: Tensor


def step_fragments(lives: Sequence[tuple[Live, Sequence[Tensor]]], steps: int, rate: float) -> None:
    """Take one optimizer step of several fragments, with one call for each kind of optimizer (see `step_together`).

    Args:
        lives: Fragments with gradients as `Live.gradients` gives them, or one flat vector each.
        steps: How many steps were taken before this one.
        rate: The learning rate.
    """
    work = [one for live, gradients in lives for one in live.work(gradients)]
    step_together([(one.stretch, one.operands) for one in work], steps, rate)
    for one in work:
        if one.wide is not one.theta:
            round_stochastically(one.wide, one.theta, one.live.chance(f"step {one.stretch.begin}"))


class Inner:
    """The optimizers of all fragments, and the gradient's norm over them."""

    def __init__(self, lives: Sequence[Live], train: config.TrainConfig) -> None:
        self.lives = lives
        self.train = train

    @property
    def steps(self) -> int:
        return self.lives[0].steps

    def zero_grad(self) -> None:
        for live in self.lives:
            live.zero_grad()

    def clip(self) -> Tensor:
        """Scale the gradient of all fragments to a norm of at most `clip_norm`. Return the norm before, on the CPU."""
        gradients = [gradient for live in self.lives for gradient in live.gradients()]
        norms = torch._foreach_norm(gradients, 2.0, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)).cpu()  # the one wait for the device in a step
        scale = self.train.clip_norm / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_(gradients, float(scale))
        return norm

    def step(self, rate: float, tokens: int) -> None:
        """A step with the present gradients; `rate` is the learning rate, `tokens` what the gradients are of."""
        steps, pairs = self.steps, [(live, live.gradients()) for live in self.lives]
        if self.train.weights == "float32":
            step_fragments(pairs, steps, rate)
        else:  # one fragment's weights in fp32 at a time
            for pair in pairs:
                step_fragments([pair], steps, rate)
        for live in self.lives:
            live.count(tokens, rate)


def step_clipped(live: Live, gradient: Tensor, lr_step: int, tokens: int) -> bool:
    """A step of one fragment by itself, with its mean gradient [n], clipped by itself; none if that is not finite.

    Returns whether it was taken.

    `gradient` may be another vector than `live.grad`, and is scaled in place. `lr_step` is the swarm's.
    """
    train = live.train
    norm = _norm(gradient)
    if not torch.isfinite(norm):
        return False
    gradient *= (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    rate = rate_at(train, lr_step, live.steps)
    step_fragments([(live, [gradient])], live.steps, rate)
    live.count(tokens, rate)
    live.touch()
    return True


def has_finite_norm(gradient: Tensor) -> bool:
    """Whether `step_clipped` takes a step with this gradient, or with a part of it."""
    return bool(torch.isfinite(_norm(gradient)))


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def rate_at(train: config.TrainConfig, lr_step: int, own_steps: int) -> float:
    """Learning rate: linear warm-up, then constant, or linear decay to a tenth at `total_steps`.

    `lr_step` is the swarm's step; `own_steps` counts this peer's, so that a newcomer warms up by itself.
    """
    warm = min(1.0, (min(lr_step, own_steps) + 1) / (train.warmup_steps + 1))
    if train.total_steps is None:
        return train.peak_rate * warm
    left = max(0.0, 1 - max(0, lr_step - train.warmup_steps) / max(1, train.total_steps - train.warmup_steps))
    return train.peak_rate * warm * (FINAL_RATE + (1 - FINAL_RATE) * left)


Arrive = Callable[[], None]
"""Waits until the copy is in host memory; to be called beside training."""


def copy_out(live: Live, into: Tensor) -> Arrive:
    """At a step edge: takes theta as it is now. It is in `into` [n], fp32 in host memory, after `Arrive`."""
    if live.theta.device.type == "cpu":
        live.copy_theta(into)
        return lambda: None
    staged = torch.empty(into.shape, dtype=into.dtype, device=live.theta.device)
    live.copy_theta(staged)
    taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
    taken.record(torch.cuda.current_stream(staged.device))  # without it: the stream of the current device, GPU 0

    def arrive() -> None:
        side = _side_stream(staged.device)
        with torch.cuda.stream(side):
            side.wait_event(taken)
            into.copy_(staged, non_blocking=True)
        side.synchronize()  # so that the staged copy may be freed, and host memory read

    return arrive


def copy_in(vector: Tensor, device: torch.device) -> Tensor:
    """Beside training: a vector [n] in host memory, on the device; what follows in any stream finds it there.

    Its memory is the side stream's. Training's stream may be behind: it is not free for the next copy before that has
    done what it was given with the vector until the vector was let go of.
    """
    if device.type == "cpu":
        return vector
    side = _side_stream(device)
    with torch.cuda.stream(side):
        on_device = vector.to(device, non_blocking=True)
    on_device.record_stream(torch.cuda.current_stream(device))
    side.synchronize()
    return on_device


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
