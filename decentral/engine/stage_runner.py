"""The executions of micro-batches in this peer's layers, and the optimizer's step on the gradients that they leave.

    forward    decode what came, run the layers, keep the graph, encode what goes on
    backward   decode the gradient that came back, run the graph backwards, encode the gradient of what came
    seal       the sum of gradients so far is set apart; later ones go into a new sum
    apply      the optimizer's step on each fragment with a sealed sum, divided by the tokens behind it

Gradients are those of the sum of the tokens' losses, not of their mean: sums of micro-batches of any size then add up
to the exact gradient of all their tokens, and each fragment divides by the tokens that it has seen itself. Tokens are
those that are learned from: a micro-batch's targets say which, and travel with it.

Each fragment is clipped by itself to `clip_norm`: no peer knows the norm over layers that others hold.

Shapes: B sequences, T positions, D width, V vocabulary.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from decentral.comm.pipeline.activations import ActivationFormat, likeness
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import FORWARD_PART, Layout
from decentral.core.reasons import Reason
from decentral.engine.fragment import Live, has_finite_norm, step_clipped
from decentral.engine.look_ahead import LookAhead, WeightsAhead
from decentral.engine.step import Device, slow_down
from decentral.model import decoder


@dataclass(slots=True)
class PendingBackward:
    """An execution of layers [first, last), with what its backward pass needs."""

    first: int
    last: int
    tokens: int  # that are trained
    input_BTD: Tensor | None  # the leaf whose gradient goes to the stage before; None at layer 0, which tokens enter
    output_BTD: Tensor  # at the model's end what enters its last layer
    ahead: WeightsAhead | None = None  # what it is computed with, where steps do not wait for its backward pass


class GradientSums:
    """Sums of gradients, a vector [n] for each fragment: the one that is being filled, and sealed ones by slot.

    `alone`: nothing else uses the lives' gradients, so the filled sums are these.
    """

    def __init__(self, lives: Sequence[Live], slots: int, alone: bool) -> None:
        wide = torch.float32
        self.filled = [live.grad if alone else torch.zeros_like(live.grad, dtype=wide) for live in lives]
        self.filled_tokens = [0] * len(lives)
        self.sealed = [[torch.zeros_like(live.grad, dtype=wide) for live in lives] for _ in range(slots)]
        self.sealed_tokens = [[0] * len(lives) for _ in range(slots)]
        self.executions: list[int] = []  # tokens of those whose gradients are being filled in

    def seal(self, slot: int) -> tuple[int, ...]:
        """Moves the filled sum into this slot; gives the executions that are in it."""
        for filled, sealed in zip(self.filled, self.sealed[slot], strict=True):
            sealed.copy_(filled)
        self.sealed_tokens[slot] = self.filled_tokens
        executions = tuple(self.executions)
        self.clear()
        return executions

    def clear(self) -> None:
        """Empties the filled sum."""
        for filled in self.filled:
            filled.zero_()
        self.filled_tokens, self.executions = [0] * len(self.filled), []


class StageRunner:
    """Consecutive layers at work for routes. Not thread-safe: the training thread owns it.

    `alone`: the peer takes no steps but those of routes, so that the gradients of its live weights may be the sums.
    """

    def __init__(
        self,
        run: config.Config,
        layers: Sequence[nn.Module],
        lives: Sequence[Live],
        activations: ActivationFormat,
        device: Device,
        alone: bool,
    ) -> None:
        self.run, self.lives, self.activations, self.device = run, lives, activations, device
        self.start, self.end = lives[0].fragment.first, len(activations.widths)  # `end`: of the model
        self.layers = decoder.recomputed(run, layers, self.start)
        self.alone = alone and run.train.weights == "float32"  # many micro-batches do not add up in bf16
        self.pending: dict[int, PendingBackward] = {}
        self.sums = GradientSums(lives, run.routes.slots, self.alone)
        self.ahead = LookAhead(lives) if self.alone and run.routes.overlap else None
        self._parameters = max(1, sum(decoder.parameters(run.model)))

    def draw(self, job: jobs.Draw, number: int, batch: tuple[Tensor, Tensor]) -> jobs.Outcome:
        """Runs inputs_BT and targets_BT of our own data, its micro-batch `number`, from layer 0 on."""
        inputs_BT, targets_BT = batch
        began = time.perf_counter()
        tokens = decoder.trained_tokens(targets_BT)
        execution = self._through(inputs_BT.to(self.device.device), None, tokens, (0, job.last))
        return self._forwarded(job, execution, targets_BT, began, number)

    def forward(self, job: jobs.Forward) -> jobs.Outcome:
        """Runs another peer's micro-batch. At the model's end the loss and the backward pass follow at once."""
        began = time.perf_counter()
        try:
            hidden_BTD, targets_BT = self.activations.unpack(job)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.token, error.reason)
        input_BTD = hidden_BTD.to(self.device.device).requires_grad_()
        tokens = decoder.trained_tokens(targets_BT)
        execution = self._through(input_BTD, input_BTD, tokens, (job.first, job.last))
        return self._forwarded(job, execution, targets_BT, began)

    def backward(self, job: jobs.Backward) -> jobs.Outcome:
        """The blob is the gradient of the output that `forward` or `draw` gave."""
        began = time.perf_counter()
        execution = self.pending.get(job.token)
        if execution is None:
            return jobs.ExecutionFailed(job.token, Reason.FORGOTTEN)
        try:
            gradient_BTD = self.activations.decode_gradient(job.layout, job.blob, execution.output_BTD.shape)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.token, error.reason)
        del self.pending[job.token]
        self._accumulate(job.token, execution, execution.output_BTD, gradient_BTD.to(execution.output_BTD))
        done = self._backed(job, execution, 0.0)
        self._slow_down(execution, began, 1 - FORWARD_PART)
        return done

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten:
        """Lets go of what is held for these executions' backward passes."""
        for token in tokens:
            self.pending.pop(token, None)
        return jobs.Forgotten()

    def compare(self, job: jobs.Compare) -> jobs.Compared:
        """What does not decode is like nothing."""
        *others, newest = (self._decoded(job, layout, blob) for layout, blob in job.gradients)
        return jobs.Compared(job.token, tuple(likeness(newest, other) for other in others))

    def _decoded(self, job: jobs.Compare, layout: Layout, blob: bytes) -> Tensor | None:
        formats = self.activations
        shape = torch.Size((job.sequences, formats.context, formats.widths[job.first]))
        try:
            return formats.decode_gradient(layout, blob, shape)
        except ProtocolError:
            return None

    def seal(self, slot: int) -> jobs.Sealed:
        """The sum is sound if `apply` will take its step in every fragment: what is counted is in the weights."""
        sound = all(has_finite_norm(filled) for filled in self.sums.filled)
        return jobs.Sealed(self.sums.seal(slot), slot, sound)

    def drop(self, slot: int) -> jobs.Forgotten:
        self.sums.sealed_tokens[slot] = [0] * len(self.lives)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens:
        """The optimizer's step on each fragment, with the mean gradient of what is sealed there."""
        sums = self.sums
        applied: list[tuple[int, int, int]] = []
        for index, live in enumerate(self.lives):
            gradient, tokens = sums.sealed[slot][index], sums.sealed_tokens[slot][index]
            with self.ahead.step(index) if self.ahead and tokens else nullcontext():
                if tokens and step_clipped(live, gradient.div_(tokens), lr_step, tokens):
                    applied.append((live.fragment.first, live.fragment.last, tokens))
        self.drop(slot)
        return tuple(applied)

    def _through(
        self, entering: Tensor, input_BTD: Tensor | None, tokens: int, layers: tuple[int, int]
    ) -> PendingBackward:
        """`entering`: tokens_BT at layer 0, else hidden_BTD. The model's last layer is left to its loss."""
        first, last = layers
        if first > 0:
            entering = entering.to(self.lives[0].theta.dtype)
        execution = PendingBackward(first, last, tokens, input_BTD, entering)
        if self.ahead and last < self.end:  # at the model's end the backward pass follows at once
            execution.ahead = self.ahead.weights(first, last)
        with self._computing(execution), self.device.autocast():
            for layer in self.layers[first - self.start : min(last, self.end - 1) - self.start]:
                execution.output_BTD = layer(execution.output_BTD)
        return execution

    def _computing(self, execution: PendingBackward) -> AbstractContextManager[None]:
        """Within it the layers compute with the execution's weights."""
        if self.ahead is None or execution.ahead is None:
            return nullcontext()
        return self.ahead.at(execution.ahead)

    def _forwarded(
        self,
        job: jobs.Draw | jobs.Forward,
        execution: PendingBackward,
        targets_BT: Tensor,
        began: float,
        number: int = 0,
    ) -> jobs.Outcome:
        """The output and the targets for the next stage; at the model's end the loss, and the way back from it."""
        if execution.last == self.end:
            targets_BT = targets_BT.to(self.device.device)
            with self.device.autocast():
                mean = decoder.last_loss(self.run, self.layers[-1], execution.output_BTD, targets_BT)
            loss = mean * execution.tokens
            if not torch.isfinite(loss):
                return jobs.ExecutionFailed(job.token, Reason.NAN)
            self._accumulate(job.token, execution, loss, None)
            done = self._backed(job, execution, float(loss.detach()))
            self._slow_down(execution, began, 1.0)
            return replace(done, number=number)
        self.pending[job.token] = execution
        layout, blob = self.activations.pack(execution.last, execution.output_BTD.detach(), targets_BT, job.thin)
        self._slow_down(execution, began, FORWARD_PART)
        return jobs.ForwardDone(job.token, number, len(targets_BT), execution.tokens, layout, blob)

    def _accumulate(self, token: int, execution: PendingBackward, root: Tensor, gradient: Tensor | None) -> None:
        """Runs the graph backwards from `root`, whose gradient this is, and adds what it leaves to the sums."""
        if not self.alone:
            for live in self.lives:
                live.grad.zero_()
        with self._computing(execution):
            torch.autograd.backward([root], None if gradient is None else [gradient])
        if self.ahead and execution.ahead is not None:
            self.ahead.came_back(execution.ahead)
        self.sums.executions.append(token)
        for index, live in enumerate(self.lives):
            if execution.first <= live.fragment.first and live.fragment.last <= execution.last:
                self.sums.filled_tokens[index] += execution.tokens
                if not self.alone:
                    self.sums.filled[index] += live.grad

    def _backed(
        self, job: jobs.Draw | jobs.Forward | jobs.Backward, execution: PendingBackward, loss: float
    ) -> jobs.BackwardDone:
        """The gradient of the input, for the stage before."""
        if execution.input_BTD is None:
            return jobs.BackwardDone(job.token, execution.tokens, loss, (), b"")
        assert execution.input_BTD.grad is not None
        layout, blob = self.activations.encode_gradient(execution.input_BTD.grad, job.thin)
        return jobs.BackwardDone(job.token, execution.tokens, loss, layout, blob)

    def _slow_down(self, execution: PendingBackward, began: float, part: float) -> None:
        """`part`: of the computing of this micro-batch in these layers."""
        fragments = (live.fragment for live in self.lives)
        inside = sum(one.parameters for one in fragments if execution.first <= one.first < execution.last)
        slow_down(self.device, time.perf_counter() - began, inside / self._parameters * part)
