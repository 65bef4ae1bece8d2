"""The live weights: a span's layers, kept as one flat vector [n] per fragment, and AdamW on those vectors.

Each parameter is a view into its fragment's vector, so that gossip, averaging and the optimizer are a few vector
operations per fragment, however many tensors the layers have. Within a fragment the decayed parameters (matrices)
come first, then the others (gains), as AdamW treats them differently.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from decentral.core import config
from decentral.core.jobs import Fragment
from decentral.train import gpt


def fragments_of(run: config.Config) -> list[Fragment]:
    """The fragments of the run's model. Every peer of a run has the same ones."""
    return fragments(gpt.parameters(run.model), run.gossip.fragment_parameters)


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
    return [Fragment(number, *group) for number, group in enumerate(groups)]


class Live:
    """One fragment's live weights theta [n], their gradient and AdamW moments, and what was trained in the window.

    The layers' parameters become views into theta, and their gradients into `grad`.
    """

    def __init__(
        self,
        fragment: Fragment,
        layers: Sequence[nn.Module],
        device: torch.device,
        train: config.TrainConfig,
        start: int = 0,
    ) -> None:
        """`layers` begin with the model's layer `start`."""
        matrices, gains = _matrices_and_gains(fragment, layers, start)
        self.fragment = fragment
        self.theta = flat_weights(fragment, layers, start).to(device)
        self.grad = torch.zeros_like(self.theta)
        self.exp_avg = torch.zeros_like(self.theta)
        self.exp_avg_sq = torch.zeros_like(self.theta)
        self.tokens = 0  # since the last window's end
        self.lr_sum = 0.0  # sum of the learning rates since the last window's end
        self.steps = 0  # of AdamW on this fragment: for its bias correction and for a newcomer's own warm-up
        self.touched = set[str]()  # of `tensors`: those that changed otherwise than by Inner.step; train/island.py
        self.train = train
        self.decayed = sum(p.numel() for p in matrices)
        begin = 0
        for parameter in matrices + gains:
            end = begin + parameter.numel()
            parameter.data = self.theta[begin:end].view(parameter.shape)
            parameter.grad = self.grad[begin:end].view(parameter.shape)
            begin = end

    def tensors(self) -> dict[str, Tensor]:
        return {"theta": self.theta, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def touch(self, *names: str) -> None:
        """Marks these of `tensors`, or all of them, as changed otherwise than by a step that all ranks take."""
        self.touched.update(names or self.tensors())

    def copy_theta(self, into: Tensor) -> None:
        """Copies theta into an fp32 vector [n] in host memory."""
        into.copy_(self.theta)

    def add(self, correction: Tensor) -> None:
        """Adds an fp32 vector [n] in host memory to theta."""
        self.theta += correction.to(self.theta.device, non_blocking=True)

    def count(self, tokens: int, rate: float) -> None:
        """A step was taken with so many tokens, at this learning rate."""
        self.tokens += tokens
        self.lr_sum += rate
        self.steps += 1


def flat_weights(fragment: Fragment, layers: Sequence[nn.Module], start: int) -> Tensor:
    """The fragment's weights as one fp32 vector [n]: a copy. `layers` begin with the model's layer `start`."""
    matrices, gains = _matrices_and_gains(fragment, layers, start)
    return torch.cat([p.detach().float().flatten() for p in matrices + gains])


def _matrices_and_gains(
    fragment: Fragment, layers: Sequence[nn.Module], start: int
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    own = [p for layer in layers[fragment.first - start : fragment.last - start] for p in layer.parameters()]
    return [p for p in own if p.ndim >= 2], [p for p in own if p.ndim < 2]


class Inner:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over all fragments, through torch's fused kernel."""

    def __init__(self, lives: Sequence[Live], train: config.TrainConfig) -> None:
        self.lives = lives
        self.train = train

    @property
    def steps(self) -> int:
        return self.lives[0].steps

    def zero_grad(self) -> None:
        for live in self.lives:
            live.grad.zero_()

    def clip(self) -> Tensor:
        """Scales the gradient of all fragments to a norm of at most `clip_norm`; gives the norm that it had."""
        lengths = [torch.linalg.vector_norm(live.grad) for live in self.lives]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(lengths))
        scale = (self.train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for live in self.lives:
            live.grad.mul_(scale)
        return norm

    def step(self, rate: float, tokens: int) -> None:
        """AdamW with the present gradients; `rate` is the learning rate, `tokens` what the gradients are of."""
        steps = self.steps
        for live in self.lives:
            _adamw(live, live.grad, steps, rate)
            live.count(tokens, rate)


def step_clipped(live: Live, gradient: Tensor, lr_step: int, tokens: int) -> None:
    """AdamW on one fragment by itself, with its mean gradient [n], clipped by itself; no step if that is not finite.

    `gradient` may be another vector than `live.grad`, and is scaled in place. `lr_step` is the swarm's.
    """
    train = live.train
    norm = torch.linalg.vector_norm(gradient)
    if not torch.isfinite(norm):
        return
    gradient *= (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    rate = rate_at(train, lr_step, live.steps)
    _adamw(live, gradient, live.steps, rate)
    live.count(tokens, rate)
    live.touch()


def _adamw(live: Live, gradient: Tensor, steps: int, rate: float) -> None:
    train = live.train
    for stretch, decay in ((slice(0, live.decayed), train.weight_decay), (slice(live.decayed, None), 0.0)):
        if not live.theta[stretch].numel():
            continue
        adamw(
            [live.theta[stretch]],
            [gradient[stretch]],
            [live.exp_avg[stretch]],
            [live.exp_avg_sq[stretch]],
            [],
            [torch.tensor(float(steps), device=live.theta.device)],
            fused=True,
            amsgrad=False,
            beta1=train.beta1,
            beta2=train.beta2,
            lr=rate,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )


def rate_at(train: config.TrainConfig, lr_step: int, own_steps: int) -> float:
    """Learning rate: linear warm-up, then constant, or linear decay to `final_rate` at `total_steps`.

    `lr_step` is the swarm's step; `own_steps` counts this AdamW's, so that a newcomer warms up by itself.
    """
    warm = min(1.0, (min(lr_step, own_steps) + 1) / (train.warmup_steps + 1))
    if train.total_steps is None:
        return train.learning_rate * warm
    left = max(0.0, 1 - max(0, lr_step - train.warmup_steps) / max(1, train.total_steps - train.warmup_steps))
    return train.learning_rate * warm * (train.final_rate + (1 - train.final_rate) * left)
