"""A micro-batch's way through this peer's layers, and the optimizer's step on what such ways leave behind.

    forward    decode what came, run the layers, keep the graph, encode what goes on
    backward   decode the gradient that came back, run the graph backwards, encode the gradient of what came
    seal       the sum of gradients so far is set apart; later ones go into a new sum
    apply      AdamW on each fragment with a sealed sum, divided by the tokens behind it

Gradients are of the sum of the tokens' losses, not of their mean: sums of micro-batches of any size then add up to the
exact gradient of all their tokens, and each fragment divides by the tokens that it has seen itself.

Each fragment is clipped by itself to `clip_norm`: no peer knows the norm over layers that others hold.

Shapes: B sequences, T positions, D width.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.jobs import FORWARD_PART, Layout, Section
from decentral.core.reasons import Reason
from decentral.train import gpt
from decentral.train.inner import Live, step_clipped
from decentral.train.sections import Codecs
from decentral.train.step import Device, slow_down


def layout(run: config.Config, codecs: Codecs, width: int, sequences: int) -> Layout:
    """Of what travels between two layers: hidden values of `width` numbers a token, and the targets."""
    tokens = sequences * run.model.context
    numbers = tokens * width
    wire, narrow = run.routes.wire, run.model.vocabulary <= 1 << 16
    return (
        Section("hidden", wire, numbers, codecs.size(wire, numbers)),
        Section("targets", "u16" if narrow else "u32", tokens, tokens * (2 if narrow else 4)),
    )


@dataclass(slots=True)
class PendingBackward:
    """What a backward pass needs. `entered` is the leaf whose gradient goes back; None at layer 0."""

    first: int
    last: int
    entered_BTD: Tensor | None
    left_BTD: Tensor
    tokens: int


@dataclass(slots=True)
class GradientSums:
    """Sums of gradients: the one that is being filled, and those that are sealed, by slot."""

    filled: list[Tensor]  # by fragment; a peer that trains in no other way fills its own gradients in place
    sealed: list[list[Tensor]]
    filled_tokens: list[int]
    sealed_tokens: list[list[int]]
    executions: list[int] = field(default_factory=list)  # whose gradients are being filled in


class StageRunner:
    """The layers [start, start + len(layers)) at work for routes. Not thread-safe: the compute thread owns it."""

    def __init__(
        self,
        run: config.Config,
        layers: Sequence[nn.Module],
        lives: Sequence[Live],
        widths: Sequence[int],
        device: Device,
        codecs: Codecs,
        alone: bool,
    ) -> None:
        """`widths[x]`: numbers a token between layers x - 1 and x. `alone`: nobody else uses the lives' gradients."""
        self.run, self.layers, self.lives, self.widths = run, layers, lives, widths
        self.device, self.codecs, self.alone = device, codecs, alone
        self.start = lives[0].fragment.first
        self.end = len(widths)
        self.held: dict[int, PendingBackward] = {}
        count = len(lives)
        grads = [live.grad for live in lives] if alone else [torch.zeros_like(live.grad) for live in lives]
        slots = range(run.routes.slots)
        sealed = [[torch.zeros_like(live.grad) for live in lives] for _ in slots]
        self.sums = GradientSums(grads, sealed, [0] * count, [[0] * count for _ in slots])
        self._parameters = max(1, sum(gpt.parameters(run.model)))

    # Through the layers

    def draw(
        self, token: int, last: int, batch: tuple[Tensor, Tensor], number: int
    ) -> jobs.ForwardDone | jobs.BackwardDone | jobs.ExecutionFailed:
        """Our own data, from layer 0 to `last`. At the model's end the loss and the backward pass follow at once."""
        inputs_BT, targets_BT = batch
        began = time.perf_counter()
        left_BTD = self._through(inputs_BT.to(self.device.device), 0, last)
        if last == self.end:
            return self._turn(
                token, PendingBackward(0, last, None, left_BTD, targets_BT.numel()), targets_BT, began, number
            )
        self.held[token] = PendingBackward(0, last, None, left_BTD, inputs_BT.numel())
        forwarded = self._forwarded(token, number, left_BTD, targets_BT, last)
        slow_down(self.device, time.perf_counter() - began, self._share(0, last) * FORWARD_PART)
        return forwarded

    def forward(self, job: jobs.Forward) -> jobs.ForwardDone | jobs.BackwardDone | jobs.ExecutionFailed:
        """Through [first, last). At the model's end the loss and the backward pass follow at once."""
        began = time.perf_counter()
        try:
            hidden, targets_BT = self._decode(job)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.token, error.reason)
        entered_BTD = hidden.requires_grad_()
        left = self._through(entered_BTD, job.first, job.last)
        if job.last < self.end:
            self.held[job.token] = PendingBackward(job.first, job.last, entered_BTD, left, targets_BT.numel())
            forwarded = self._forwarded(job.token, 0, left, targets_BT, job.last)
            slow_down(self.device, time.perf_counter() - began, self._share(job.first, job.last) * FORWARD_PART)
            return forwarded
        held = PendingBackward(job.first, job.last, entered_BTD, left, targets_BT.numel())
        return self._turn(job.token, held, targets_BT, began)

    def backward(self, job: jobs.Backward) -> jobs.BackwardDone | jobs.ExecutionFailed:
        began = time.perf_counter()
        held = self.held.get(job.token)
        if held is None:
            return jobs.ExecutionFailed(job.token, Reason.FORGOTTEN)
        try:
            gradient = self._hidden(job.layout, job.blob, held.left_BTD.shape)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.token, error.reason)
        del self.held[job.token]
        backed = self._back(job.token, held, gradient, 0.0)
        slow_down(self.device, time.perf_counter() - began, self._share(held.first, held.last) * (1 - FORWARD_PART))
        return backed

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten:
        for token in tokens:
            self.held.pop(token, None)
        return jobs.Forgotten()

    # The optimizer's step

    def seal(self, slot: int) -> jobs.Sealed:
        sums = self.sums
        for filled, sealed in zip(sums.filled, sums.sealed[slot], strict=True):
            sealed.copy_(filled)
            filled.zero_()
        sums.sealed_tokens[slot], sums.filled_tokens = sums.filled_tokens, [0] * len(self.lives)
        executions, sums.executions = tuple(sums.executions), []
        return jobs.Sealed(executions, slot)

    def drop(self, slot: int) -> jobs.Forgotten:
        self.sums.sealed_tokens[slot] = [0] * len(self.lives)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> None:
        """AdamW on each fragment, with the mean gradient of what is sealed there."""
        sums = self.sums
        for live, gradient, tokens in zip(self.lives, sums.sealed[slot], sums.sealed_tokens[slot], strict=True):
            if tokens:
                step_clipped(live, gradient.div_(tokens), lr_step, tokens)
        self.drop(slot)

    def clear(self) -> None:
        """What is in the sums is over, or was of other weights."""
        for filled in self.sums.filled:
            filled.zero_()
        self.sums.filled_tokens, self.sums.executions = [0] * len(self.lives), []

    # Helpers

    def _turn(
        self, token: int, held: PendingBackward, targets_BT: Tensor, began: float, number: int = 0
    ) -> jobs.BackwardDone | jobs.ExecutionFailed:
        """At the model's end: the loss of the logits that `held` left with, and the way back from it."""
        loss = gpt.loss_of(held.left_BTD, targets_BT.to(self.device.device)) * held.tokens
        if not torch.isfinite(loss):
            return jobs.ExecutionFailed(token, Reason.NAN)
        backed = self._back(token, replace(held, left_BTD=loss), None, float(loss.detach()))
        slow_down(self.device, time.perf_counter() - began, self._share(held.first, held.last))
        return replace(backed, number=number)

    def _share(self, first: int, last: int) -> float:
        """The part of the model that layers [first, last) are, of those that we hold."""
        fragments = (live.fragment for live in self.lives)
        return sum(one.parameters for one in fragments if first <= one.first < last) / self._parameters

    def _through(self, entered: Tensor, first: int, last: int) -> Tensor:
        with self.device.autocast():
            for layer in self.layers[first - self.start : last - self.start]:
                entered = layer(entered)
        return entered

    def _back(self, token: int, held: PendingBackward, gradient: Tensor | None, loss: float) -> jobs.BackwardDone:
        """Adds to the sums, and encodes the gradient of what came in."""
        if not self.alone:
            for live in self.lives:
                live.grad.zero_()
        torch.autograd.backward([held.left_BTD], None if gradient is None else [gradient])
        sums = self.sums
        sums.executions.append(token)
        for index, live in enumerate(self.lives):
            if held.first <= live.fragment.first and live.fragment.last <= held.last:
                sums.filled_tokens[index] += held.tokens
                if not self.alone:
                    sums.filled[index] += live.grad
        if held.entered_BTD is None:
            return jobs.BackwardDone(token, held.tokens, loss, (), b"")
        assert held.entered_BTD.grad is not None
        section, blob = self._encode(held.entered_BTD.grad)
        return jobs.BackwardDone(token, held.tokens, loss, (section,), blob)

    def _forwarded(self, token: int, number: int, left_BTD: Tensor, targets_BT: Tensor, last: int) -> jobs.ForwardDone:
        section, hidden = self._encode(left_BTD.detach())
        sequences = len(targets_BT)
        expected = layout(self.run, self.codecs, self.widths[last], sequences)
        assert section == expected[0], f"layer {last} gives {section}, not {expected[0]}"
        narrow = torch.uint16 if expected[1].codec == "u16" else torch.uint32
        targets = targets_BT.cpu().to(narrow).contiguous().view(torch.uint8).numpy().tobytes()
        return jobs.ForwardDone(token, number, sequences, targets_BT.numel(), expected, hidden + targets)

    def _encode(self, hidden_BTD: Tensor) -> tuple[Section, bytes]:
        flat, wire = hidden_BTD.float().flatten(), self.run.routes.wire
        blob = self.codecs.encode(wire, flat)
        return Section("hidden", wire, flat.numel(), len(blob)), blob

    def _decode(self, job: jobs.Forward) -> tuple[Tensor, Tensor]:
        """hidden_BTD on our device, targets_BT int64. Raises ProtocolError for what is not both, whole and finite."""
        B, T = job.sequences, self.run.model.context
        expected = layout(self.run, self.codecs, self.widths[job.first], B)
        if job.layout != expected or len(job.blob) != sum(section.size for section in expected):
            raise ProtocolError(Reason.SHAPE, "not what enters this layer")
        hidden = self._hidden(expected[:1], job.blob[: expected[0].size], torch.Size((B, T, self.widths[job.first])))
        width = torch.uint16 if expected[1].codec == "u16" else torch.uint32
        targets_BT = torch.frombuffer(bytearray(job.blob[expected[0].size :]), dtype=width).to(torch.int64).view(B, T)
        if int(targets_BT.max()) >= self.run.model.vocabulary:
            raise ProtocolError(Reason.VOCABULARY, "a target that is no token")
        return hidden, targets_BT

    def _hidden(self, sections: Layout, blob: bytes, shape: torch.Size) -> Tensor:
        if len(sections) != 1 or sections[0].codec != self.run.routes.wire or sections[0].elements != shape.numel():
            raise ProtocolError(Reason.SHAPE, "not the hidden values of this micro-batch")
        values = self.codecs.decode(self.run.routes.wire, memoryview(blob), shape.numel())
        return values.to(self.device.device).view(shape)
