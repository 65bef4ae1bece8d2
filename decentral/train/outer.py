"""The outer step of asynchronous gossip: pure functions from fp32 vectors to fp32 vectors.

One-sided, token-weighted NoLoCo (arXiv 2506.10911, eq. 4-6) with the fragments of Streaming DiLoCo (2501.18512)
and quantised error feedback (Karimireddy et al., arXiv 1901.09847).

    close:  d = b - theta;  b = theta;  a = e + d;  q = Q(a);  e = a - q          publish (phi, q, tokens)
    merge:  g = sum_j w_j q_j;  cons = sum_j w_j (phi - phi_j);  w_j = tokens_j / sum tokens, ourselves included
            m = alpha m + g;  u = -beta (g + alpha m) - gamma cons;  phi += u
            correction = u + d, added to theta and b at the next step edge

Conserved: every unit of local progress d enters phi once, whatever the latency, because b moves at the close and
the residual of Q lives in e alone (q + e_after = e_before + d). With beta = 1 - alpha a lone peer's phi follows
theta with gain one: the sum of beta (1 + alpha) alpha^k ... over all later merges of one g is beta / (1 - alpha).

All vectors are fp32 [n]: one fragment, flattened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Quantise = Callable[[Tensor], Tensor]
"""What the partners will read: decode(encode(x)), fp32 [n]."""


@dataclass(frozen=True, slots=True)
class Constants:
    alpha: float = 0.3  # outer momentum
    beta: float = 0.7  # outer step
    gamma: float = 0.7  # pull towards the partners' slow weights


@dataclass(frozen=True, slots=True)
class Slow:
    """A fragment's slow state, besides the live weights theta."""

    phi: Tensor  # slow weights
    baseline: Tensor  # b: theta as the last close left it
    momentum: Tensor  # m
    residual: Tensor  # e: what quantisation has kept back


@dataclass(frozen=True, slots=True)
class Closed:
    """A window's result: `delta` is what was trained, `sent` is what partners can read of it."""

    delta: Tensor
    sent: Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class Partner:
    phi: Tensor
    sent: Tensor
    tokens: int


def start(theta: Tensor) -> Slow:
    zero = torch.zeros_like(theta)
    return Slow(theta.clone(), theta.clone(), zero, zero.clone())


def close(slow: Slow, theta: Tensor, tokens: int, quantise: Quantise) -> tuple[Slow, Closed]:
    """Ends a window: takes the progress since the last close off theta and out for publication."""
    delta = slow.baseline - theta
    owed = slow.residual + delta
    sent = quantise(owed)
    return replace(slow, baseline=theta.clone(), residual=owed - sent), Closed(delta, sent, tokens)


def merge(slow: Slow, closed: Closed, partners: Sequence[Partner], constants: Constants) -> tuple[Slow, Tensor]:
    """Takes the outer step. Gives the new state and the correction that theta is still owed.

    The caller adds the correction to theta; the baseline already has it, so it is not counted as progress.
    """
    weights = token_weights([closed.tokens, *(partner.tokens for partner in partners)])
    step = weights[0] * closed.sent
    apart = torch.zeros_like(step)
    for weight, partner in zip(weights[1:], partners, strict=True):
        step = step + weight * partner.sent
        apart = apart + weight * (slow.phi - partner.phi)
    momentum = constants.alpha * slow.momentum + step
    update = -constants.beta * (step + constants.alpha * momentum) - constants.gamma * apart
    correction = update + closed.delta
    new = replace(slow, phi=slow.phi + update, momentum=momentum, baseline=slow.baseline + correction)
    return new, correction


def token_weights(tokens: Sequence[int]) -> list[float]:
    """Each one's share of all tokens; equal shares when nobody has trained."""
    total = sum(tokens)
    return [count / total for count in tokens] if total else [1 / len(tokens)] * len(tokens)
