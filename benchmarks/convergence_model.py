"""All replicas of a small GPT as one stacked model; each forward and backward pass trains AT_ONCE of them.

It is the decoder of decentral/model/decoder.py with a leading peer dimension on every weight, so that a few peers
cost one batched matmul for each weight. The weights of a peer are one row of `theta_PN`; every weight is a
view into it, so that gossip is plain vector arithmetic on rows. AdamW is torch's fused kernel, per row; Muon is
decentral/engine/muon.py on the blocks' matrices, those that are fused here apart, and AdamW on the rest.

Shapes: P peers, N parameters, S sequences, T positions, D width, H heads, F hidden channels, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from decentral.core import config, rng
from decentral.engine.muon import muon_step

BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP_NORM = 0.9, 0.95, 1e-8, 0.1, 1.0

Optimizer = Literal["adamw", "muon"]
AT_ONCE = 2  # peers whose passes share one matmul: with more, the hidden values leave the caches
FUSED = {"qkv": 3, "up": 2}  # how many matrices of the model stand beside each other in one weight

Weights = dict[str, Tensor]
"""Weights by name: matrices are [P, inputs, outputs], gains [P, 1, D]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where each weight lies within a row."""

    model: config.ModelConfig

    def weights(self) -> dict[str, tuple[int, int]]:
        """The rows and columns of each weight, matrices first and gains last: only matrices are decayed."""
        width, hidden, vocabulary = self.model.d_model, self.model.d_hidden, self.model.vocabulary
        blocks = range(self.model.depth)
        matrices = {"embedding": (vocabulary, width), "head": (width, vocabulary)}
        for block in blocks:  # names with a dot are a block's: Muon's, where they are matrices
            matrices |= {f"{block}.qkv": (width, 3 * width), f"{block}.out": (width, width)}
            matrices |= {f"{block}.up": (width, 2 * hidden), f"{block}.down": (hidden, width)}
        gains = {f"{block}.{name}": (1, width) for block in blocks for name in ("norm1", "norm2")}
        return matrices | gains | {"norm": (1, width)}

    def size(self) -> int:
        return sum(rows * columns for rows, columns in self.weights().values())

    def decayed(self) -> int:
        return sum(rows * columns for rows, columns in self.weights().values() if rows > 1)

    def views(self, rows_PN: Tensor) -> Weights:
        views, start = {}, 0
        for name, (rows, columns) in self.weights().items():
            stop = start + rows * columns
            views[name] = rows_PN[:, start:stop].view(len(rows_PN), rows, columns)
            start = stop
        return views


def initial(shape: Shape, seed: int) -> Tensor:
    """The initial weights as one row [N], which is the same for all peers."""
    chance = torch.Generator().manual_seed(rng.seed_of(seed, "weights") % 2**63)
    parts = []
    for name, (rows, columns) in shape.weights().items():
        scale = 0.02 if name in ("embedding", "head") else rows**-0.5
        if name.endswith(("out", "down")):  # residual branches start small
            scale /= (2 * shape.model.depth) ** 0.5
        drawn = torch.randn(rows * columns, generator=chance) * scale
        parts.append(drawn if rows > 1 else torch.ones(columns))
    return torch.cat(parts)


class Replicas:
    """P peers' weights, gradients and optimizer state."""

    def __init__(self, shape: Shape, peers: int, seed: int, optimizer: Optimizer = "adamw") -> None:
        self.shape = shape
        self.theta_PN = initial(shape, seed).repeat(peers, 1)
        self.grad_PN = torch.zeros_like(self.theta_PN)
        self.first_PN = torch.zeros_like(self.theta_PN)  # AdamW's moments
        self.second_PN = torch.zeros_like(self.theta_PN)
        self.steps = [0] * peers
        self.optimizer = optimizer

    def train(self, inputs_PST: Tensor, targets_PST: Tensor, rate: float) -> None:
        """One step of the first peers, one for each micro-batch."""
        peers = len(inputs_PST)
        self.grad_PN.zero_()
        for begin in range(0, peers, AT_ONCE):
            some = slice(begin, min(begin + AT_ONCE, peers))
            weights, gradients = self.shape.views(self.theta_PN[some]), self.shape.views(self.grad_PN[some])
            leaves = {name: view.detach().requires_grad_() for name, view in weights.items()}
            for name, leaf in leaves.items():
                leaf.grad = gradients[name]
            losses_P(self.shape.model, leaves, inputs_PST[some], targets_PST[some]).sum().backward()  # type: ignore[no-untyped-call]
        for peer in range(peers):
            self._step(peer, rate)

    def _step(self, peer: int, rate: float) -> None:
        norm = torch.linalg.vector_norm(self.grad_PN[peer])
        self.grad_PN[peer] *= (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
        cut = self.shape.decayed()
        if self.optimizer == "muon":
            theta, gradient, first = (
                self.block_matrices(row, peer) for row in (self.theta_PN, self.grad_PN, self.first_PN)
            )
            muon_step(theta, gradient, first, rate, WEIGHT_DECAY)
        for part, decay in ((slice(0, self._adamws()), WEIGHT_DECAY), (slice(cut, None), 0.0)):
            rows = (self.theta_PN, self.grad_PN, self.first_PN, self.second_PN)
            theta, gradient, first, second = ([row[peer, part]] for row in rows)
            adamw(
                theta,
                gradient,
                first,
                second,
                [],
                [torch.tensor(float(self.steps[peer]))],
                fused=True,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=rate,
                weight_decay=decay,
                eps=EPSILON,
                maximize=False,
            )
        self.steps[peer] += 1

    def _adamws(self) -> int:
        """How many of the matrices' parameters AdamW trains: all, or those of embedding and head, which come first."""
        model = self.shape.model
        return 2 * model.vocabulary * model.d_model if self.optimizer == "muon" else self.shape.decayed()

    def block_matrices(self, rows_PN: Tensor, peer: int) -> list[Tensor]:
        """Views of the blocks' matrices in this peer's row."""
        found: list[Tensor] = []
        for name, view in self.shape.views(rows_PN[peer : peer + 1]).items():
            _, dot, kind = name.partition(".")
            if dot and view.shape[1] > 1:
                found += view[0].chunk(FUSED.get(kind, 1), dim=1)
        return found


def losses_P(model: config.ModelConfig, weights: Weights, inputs_PST: Tensor, targets_PST: Tensor) -> Tensor:
    """Each peer's mean cross-entropy on its own micro-batch."""
    P, S, T = inputs_PST.shape
    own = inputs_PST + torch.arange(P)[:, None, None] * model.vocabulary
    table = weights["embedding"].reshape(P * model.vocabulary, model.d_model)
    hidden = F.embedding(own.flatten(), table).view(P, S * T, model.d_model)
    for block in range(model.depth):
        inner = _normed(hidden, weights[f"{block}.norm1"])
        qkv = torch.bmm(inner, weights[f"{block}.qkv"]).view(P * S, T, 3, model.n_heads, -1).permute(2, 0, 3, 1, 4)
        turn = _turned(model, T)
        mixed = F.scaled_dot_product_attention(_rotate(qkv[0], turn), _rotate(qkv[1], turn), qkv[2], is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(P, S * T, model.d_model)
        hidden = torch.baddbmm(hidden, mixed, weights[f"{block}.out"])
        gate, up = torch.bmm(_normed(hidden, weights[f"{block}.norm2"]), weights[f"{block}.up"]).chunk(2, -1)
        hidden = torch.baddbmm(hidden, F.silu(gate) * up, weights[f"{block}.down"])
    logits = torch.bmm(_normed(hidden, weights["norm"]), weights["head"])
    losses = F.cross_entropy(logits.flatten(0, 1), targets_PST.flatten(), reduction="none")
    return losses.view(P, S * T).mean(dim=1)


def held_out_loss(shape: Shape, theta_N: Tensor, inputs_ST: Tensor, targets_ST: Tensor) -> float:
    with torch.no_grad():
        parts = zip(torch.split(inputs_ST, 64), torch.split(targets_ST, 64), strict=True)
        losses = [len(x) * losses_P(shape.model, shape.views(theta_N[None]), x[None], y[None]) for x, y in parts]
    return float(torch.stack(losses).sum()) / len(inputs_ST)


def _normed(hidden: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), eps=1e-5) * gain


def _turned(model: config.ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    channels = model.d_model // model.n_heads
    rates = model.rope_theta ** (-torch.arange(0, channels, 2).float() / channels)
    angles = torch.outer(torch.arange(positions).float(), rates)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
