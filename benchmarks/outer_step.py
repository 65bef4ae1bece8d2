"""The outer step as pure functions of fp32 vectors: the reference of the tests, and of the experiments on convergence.

The product's step (comm/gossip/outer_kernels.py) has alpha = 0 and beta = gamma = 1. Beyond it there is NoLoCo's
momentum (arXiv 2506.10911), and a first moment of AdamW that follows the merged step:

    close:  d = b - theta;  b = theta;  a = e + d;  q = Q(a);  e = a - q       publish (phi, q, tokens, r)
            d is the window's pseudo-gradient, q is what partners read of it
    merge:  g = sum_j w_j q_j               w_j = tokens_j / sum of tokens, ourselves included
            cons = sum_j w_j (phi - phi_j)  over those partners whose slow weights were pulled
            m = alpha m + g;  u = -beta (g + alpha m) - gamma cons;  phi += u
            correction = rho (phi - b), added to theta and b at the next step edge
    moment: exp_avg += rho kappa (1 - beta1^t) (sqrt(v_hat) + eps) (g / r_mean - q / r)
            r = a window's sum of learning rates; r_mean = sum_j w_j r_j

A lone peer's phi follows theta with gain beta / (1 - alpha), one by default: g enters with beta (1 + alpha), and its
echo in m adds beta alpha^2 / (1 - alpha). Why the moment: a window's progress is the sum of rate * m / sqrt(v) over its
steps, so the merged progress tells the swarm's mean m without a byte on the wire. docs/results/convergence.md has what
both are worth.

All vectors are fp32 [n]: one fragment, flattened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decentral.comm.gossip.influence import token_weights

Quantise = Callable[[Tensor], Tensor]
"""What the partners will read: decode(encode(x)), fp32 [n]."""


@dataclass(frozen=True, slots=True)
class Constants:
    alpha: float = 0.0  # outer momentum
    beta: float = 1.0  # outer step
    gamma: float = 1.0  # pull towards the partners' slow weights


@dataclass(frozen=True, slots=True)
class Slow:
    """A fragment's slow state, besides the live weights theta."""

    phi: Tensor  # slow weights
    baseline: Tensor  # b: theta as the last close left it, plus the corrections since
    momentum: Tensor  # m
    residual: Tensor  # e: what quantisation has kept back


@dataclass(frozen=True, slots=True)
class WindowUpdate:
    """What one peer did in a window, as others read it. `phi` is None where only the pseudo-gradient was pulled."""

    pseudo_gradient: Tensor  # q
    tokens: int
    lr_sum: float  # sum of the learning rates of its steps
    phi: Tensor | None = None
    part: slice = field(default_factory=lambda: slice(None))  # the numbers of `phi` that were pulled


@dataclass(frozen=True, slots=True)
class OuterStep:
    """`correction` is owed to theta, and the baseline of `slow` has it already: it is not counted as progress."""

    slow: Slow
    correction: Tensor
    step: Tensor  # g
    lr_sum: float  # r_mean


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state of the fragment after `t` steps: bias_1 = 1 - beta1^t, bias_2 = 1 - beta2^t."""

    exp_avg_sq: Tensor
    bias_1: float
    bias_2: float
    eps: float = 1e-8


def start(theta: Tensor) -> Slow:
    """The slow state of a fragment that has made no progress yet."""
    zero = torch.zeros_like(theta)
    return Slow(theta.clone(), theta.clone(), zero, zero.clone())


def close(slow: Slow, theta: Tensor, quantise: Quantise) -> tuple[Slow, Tensor]:
    """Ends a window: the new state, and q [n], the pseudo-gradient since the last close as partners will read it."""
    owed = slow.residual + (slow.baseline - theta)
    published = quantise(owed)
    return replace(slow, baseline=theta.clone(), residual=owed - published), published


def merge(
    slow: Slow,
    own: WindowUpdate,
    partners: Sequence[WindowUpdate],
    constants: Constants,
    rho: float,
    reshape: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> OuterStep:
    """Takes the outer step of our closed window with those of our partners; none of them is a solo step.

    `reshape` changes the mean of the pseudo-gradients, given our own, before it moves the slow weights.
    """
    everyone = [own, *partners]
    weights = token_weights([window.tokens for window in everyone])
    step, apart = torch.zeros_like(own.pseudo_gradient), torch.zeros_like(own.pseudo_gradient)
    for weight, window in zip(weights, everyone, strict=True):
        step += weight * window.pseudo_gradient
        if window.phi is not None:
            apart[window.part] += weight * (slow.phi - window.phi)[window.part]
    step = step if reshape is None else reshape(step, own.pseudo_gradient)
    momentum = constants.alpha * slow.momentum + step
    phi = slow.phi - constants.beta * (step + constants.alpha * momentum) - constants.gamma * apart
    correction = rho * (phi - slow.baseline)
    lr_sum = sum(weight * window.lr_sum for weight, window in zip(weights, everyone, strict=True))
    return OuterStep(Slow(phi, slow.baseline + correction, momentum, slow.residual), correction, step, lr_sum)


def moment_shift(own: WindowUpdate, outcome: OuterStep, moments: Moments, strength: float) -> Tensor:
    """What to add to AdamW's exp_avg so that it follows the merged step; `strength` is rho kappa.

    Zero for a peer that took no step in the window: it cannot tell its own part from the others'.
    """
    if own.lr_sum <= 0 or outcome.lr_sum <= 0 or moments.bias_2 <= 0:
        return torch.zeros_like(own.pseudo_gradient)
    scale = (moments.exp_avg_sq / moments.bias_2).sqrt() + moments.eps
    return strength * moments.bias_1 * scale * (outcome.step / outcome.lr_sum - own.pseudo_gradient / own.lr_sum)


def limited(vector: Tensor, length: Tensor) -> Tensor:
    """The vector, no longer than `length`: a partner's absurd claims move us by a bounded amount."""
    scaled: Tensor = vector * (length / torch.linalg.vector_norm(vector).clamp_min(1e-30)).clamp(max=1.0)
    return scaled
