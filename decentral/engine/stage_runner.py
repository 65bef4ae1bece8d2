"""Execute routed micro-batches in this peer's layers, and take optimizer steps with their gradients.

A routed micro-batch passes through the layers of several peers, forward and backward. An execution is the part that one
peer computes.

    forward    decode the input, run the layers, keep the graph, encode the output for the next peer
    backward   decode the output's gradient, run the graph backwards, encode the input's gradient for the previous peer
    undo       run both passes of an aborted execution again, and subtract its gradients from the sum
    seal       set the sum of gradients aside for a step; later gradients go into a new sum
    apply      take each fragment's optimizer step with a sealed sum, divided by the sum's number of tokens

Start reading at `StageRunner.forward`. Gradients are those of the sum of the tokens' losses, not of the mean. So the
gradients of micro-batches of any size can be added; each fragment then divides the sum by the number of tokens that
passed through it. Masked targets, which the loss ignores, are not counted. The gradient of each fragment is clipped
alone to `train.clip_norm`, since no peer knows the norm over the layers of other peers.

Shapes: B sequences, T positions, D width, V vocabulary.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from decentral.comm.pipeline.activations import ActivationFormat, Entering, likeness
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Layout
from decentral.core.layer_work import forward_share, share
from decentral.core.reasons import Reason
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.inner import has_finite_norm, step_clipped
from decentral.engine.look_ahead import LookAhead, WeightsAhead
from decentral.engine.step import Device, slow_down
from decentral.model import decoder
from decentral.model.bottleneck import TokenFeatures


@dataclass(slots=True)
class PendingBackward:
    """A micro-batch after its forward pass through layers [first, last), with the tensors for its backward pass."""

    first: int
    last: int
    tokens: int  # number of the micro-batch's tokens that count for the loss
    input_BTD: Tensor | None  # None at layer 0; else the gradient of this goes to the previous peer
    output_BTD: Tensor  # what the next peer gets (of a bottleneck, K channels), or the input of the model's last layer
    ahead: WeightsAhead | None = None  # with `routes.overlap`, both passes use these predicted weights


class GradientSums:
    """Sums of gradients, with one vector [n] per fragment.

    New gradients are added to the open sum. A sealed sum is complete: it waits in a slot until its step is taken.
    """

    def __init__(self, lives: Sequence[Live], slots: int, only_routed: bool) -> None:
        """Allocate the sums, all zero.

        Args:
            lives: The fragments.
            slots: Number of sealed sums that may wait at the same time.
            only_routed: Whether nothing else uses the fragments' own gradient vectors (`Live.grad`). True: add
                gradients to them, so they are the open sum. False: allocate separate vectors for the open sum.
        """
        wide = torch.float32
        self.filled = [live.grad if only_routed else torch.zeros_like(live.grad, dtype=wide) for live in lives]
        self.filled_tokens = [0] * len(lives)
        self.sealed = [[torch.zeros_like(live.grad, dtype=wide) for live in lives] for _ in range(slots)]
        self.sealed_tokens = [[0] * len(lives) for _ in range(slots)]
        self.executions: list[int] = []  # ids of the executions in the open sum: the field `local_id` of their jobs

    def seal(self, slot: int) -> tuple[int, ...]:
        """Move the open sum into a slot, set the open sum to zero, and return the ids of the executions in the slot."""
        for filled, sealed in zip(self.filled, self.sealed[slot], strict=True):
            sealed.copy_(filled)
        self.sealed_tokens[slot] = self.filled_tokens
        executions = tuple(self.executions)
        self.clear()
        return executions

    def clear(self) -> None:
        """Set the open sum to zero, and forget its executions and tokens."""
        for filled in self.filled:
            filled.zero_()
        self.filled_tokens, self.executions = [0] * len(self.filled), []


class StageRunner:
    """The executor of routed micro-batches in a peer's layers. Only the training thread may use it."""

    def __init__(
        self,
        run: config.Config,
        layers: Sequence[nn.Module],
        lives: Sequence[Live],
        activations: ActivationFormat,
        device: Device,
        only_routed: bool,
    ) -> None:
        """Set up the sums of gradients.

        Args:
            run: The run's config.
            layers: The peer's layers.
            lives: The fragments of these layers.
            activations: Encoder and decoder of hidden states and their gradients.
            device: The device on which to compute.
            only_routed: Whether this peer takes steps only with gradients of routed micro-batches, because it holds
                a part of the model or the run is synchronous. If True, the fragments' own gradients are the open sum,
                unless they are bf16.
        """
        self.run, self.lives, self.activations, self.device = run, lives, activations, device
        # `start` is the index of this peer's first layer, and `end` is the number of layers of the model.
        self.start, self.end = lives[0].fragment.first, len(activations.widths)
        self.layers = decoder.recomputed(run, layers, self.start)
        self.only_routed = only_routed and run.train.weights == "float32"  # bf16 is too coarse to add up many gradients
        self.pending: dict[int, PendingBackward] = {}
        self.sums = GradientSums(lives, run.routes.slots, self.only_routed)
        self.ahead = LookAhead(lives) if self.only_routed and run.routes.overlap else None
        self._cuts = tuple(fragments_of(run))
        self.features: TokenFeatures | None = None  # of a model with a bottleneck
        if run.model.bottleneck is not None:
            embedding = layers[0] if self.start == 0 else None
            own = embedding.features if isinstance(embedding, decoder.Embedding) else None
            self.features = own or TokenFeatures(run.model).to(device.device)

    def draw(self, job: jobs.Draw, name: int, batch: tuple[Tensor, Tensor]) -> jobs.Outcome:
        """Run a micro-batch of this peer's data forward; if the job ends at the model's last layer, also backward.

        Args:
            job: The job, with the execution's id.
            name: The number by which other peers know the micro-batch (`MicroBatchNames`), which becomes
                `ForwardDone.number`. It is not the number that chose the batch.
            batch: inputs_BT and targets_BT.
        """
        inputs_BT, targets_BT = batch
        began = time.perf_counter()
        tokens = decoder.trained_tokens(targets_BT)
        execution = self._through(inputs_BT.to(self.device.device), None, tokens, (0, job.last))
        return self._forwarded(job, execution, batch, began, name)

    def forward(self, job: jobs.Forward) -> jobs.Outcome:
        """Run another peer's micro-batch forward; if the job ends at the model's last layer, also run it backward."""
        began = time.perf_counter()
        try:
            entering = self.activations.unpack(job)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.local_id, error.reason)
        input_BTD = entering.hidden_BTD.to(self.device.device).requires_grad_()
        tokens = decoder.trained_tokens(entering.targets_BT)
        restored_BTD = self._restored(input_BTD, entering.inputs_BT)
        execution = self._through(restored_BTD, input_BTD, tokens, (job.first, job.last))
        return self._forwarded(job, execution, (entering.inputs_BT, entering.targets_BT), began)

    def backward(self, job: jobs.Backward) -> jobs.Outcome:
        """Run the backward pass of an execution, given the encoded gradient of its output.

        Returns:
            BackwardDone; ExecutionFailed if no such execution is pending, or the gradient does not decode.
        """
        began = time.perf_counter()
        execution = self.pending.get(job.local_id)
        if execution is None:
            return jobs.ExecutionFailed(job.local_id, Reason.FORGOTTEN)
        try:
            gradient_BTD = self.activations.decode_gradient(job.layout, job.blob, execution.output_BTD.shape)
        except ProtocolError as error:
            return jobs.ExecutionFailed(job.local_id, error.reason)
        del self.pending[job.local_id]
        self._accumulate(job.local_id, execution, execution.output_BTD, gradient_BTD)
        done = self._backed(job, execution, 0.0)
        self._slow_down(execution, began, forward=False)
        return replace(done, given_norm=float(gradient_BTD.norm()))

    def undo(self, job: jobs.Undo) -> jobs.Undone:
        """Run an execution's passes again, and subtract the gradients from the open sum.

        Returns:
            The outcome. It is not done, and the sum is unchanged, if the sum has no gradients of the execution, or the
            loss is not finite this time.
        """
        began = time.perf_counter()
        if job.local_id not in self.sums.executions:
            return jobs.Undone(job.local_id, False)
        entering = self.activations.unpack(job.forward)
        first, last, tokens = job.forward.first, job.forward.last, decoder.trained_tokens(entering.targets_BT)
        restored_BTD = self._restored(entering.hidden_BTD.to(self.device.device), entering.inputs_BT)
        execution = self._through(restored_BTD, None, tokens, (first, last))
        if job.backward is None:
            loss = self._loss(execution, entering.targets_BT)
            if not torch.isfinite(loss):
                return jobs.Undone(job.local_id, False)
            self._add(execution, -loss, None, -tokens)
        else:
            shape = execution.output_BTD.shape
            gradient_BTD = self.activations.decode_gradient(job.backward.layout, job.backward.blob, shape)
            self._add(execution, execution.output_BTD, -gradient_BTD, -tokens)
        self.sums.executions.remove(job.local_id)
        slow_down(self.device, time.perf_counter() - began, share(self._cuts, first, last))
        return jobs.Undone(job.local_id, True)

    def forget(self, executions: Sequence[int]) -> jobs.Forgotten:
        """Free the autograd graphs of the executions with these ids: no backward pass will be requested for them."""
        for execution in executions:
            self.pending.pop(execution, None)
        return jobs.Forgotten()

    def compare(self, job: jobs.Compare) -> jobs.Compared:
        """Compare the job's newest gradient with each of its older gradients, by cosine and ratio of norms.

        A gradient that cannot be decoded is UNLIKE every other gradient.
        """
        *others, newest = (self._decoded(job, layout, blob) for layout, blob in job.gradients)
        return jobs.Compared(job.local_id, tuple(likeness(newest, other) for other in others))

    def _decoded(self, job: jobs.Compare, layout: Layout, blob: bytes) -> Tensor | None:
        formats = self.activations
        shape = torch.Size((job.sequences, formats.context, formats.widths[job.first]))
        try:
            return formats.decode_gradient(layout, blob, shape)
        except ProtocolError:
            return None

    def seal(self, slot: int) -> jobs.Sealed:
        """Move the open sum of gradients into a slot; the outcome says whether all its gradients are finite."""
        sound = all(has_finite_norm(filled) for filled in self.sums.filled)
        return jobs.Sealed(self.sums.seal(slot), slot, sound)

    def drop(self, slot: int) -> jobs.Forgotten:
        """Discard the sum of gradients that waits in this slot for its optimizer step."""
        self.sums.sealed_tokens[slot] = [0] * len(self.lives)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens:
        """Take each fragment's optimizer step with the mean gradient of the sealed sum in a slot; empty the slot.

        Args:
            lr_step: The swarm's learning-rate step.
            slot: The slot of the sealed sum.

        Returns:
            (first layer, layer after the last, tokens) of each fragment that stepped. A fragment without tokens, or
            with a gradient that is not finite, takes no step.
        """
        sums = self.sums
        applied: list[tuple[int, int, int]] = []
        for index, live in enumerate(self.lives):
            gradient, tokens = sums.sealed[slot][index], sums.sealed_tokens[slot][index]
            with self.ahead.during_step(index) if self.ahead and tokens else nullcontext():
                if tokens and step_clipped(live, gradient.div_(tokens), lr_step, tokens):
                    applied.append((live.fragment.first, live.fragment.last, tokens))
        self.drop(slot)
        return tuple(applied)

    def _restored(self, hidden_BTD: Tensor, inputs_BT: Tensor | None) -> Tensor:
        """Return hidden values with all channels: what a peer sends lacks the features of the tokens."""
        if self.features is None or inputs_BT is None:
            return hidden_BTD
        restored_BTD: Tensor = self.features(hidden_BTD, inputs_BT.to(hidden_BTD.device))
        return restored_BTD

    def _through(
        self, entering: Tensor, input_BTD: Tensor | None, tokens: int, layers: tuple[int, int]
    ) -> PendingBackward:
        """Run layers forward, except the model's last, which runs with the loss. `entering`: tokens or hidden_BTD."""
        first, last = layers
        if first > 0:
            entering = entering.to(self.lives[0].theta.dtype)
        execution = PendingBackward(first, last, tokens, input_BTD, entering)
        if self.ahead and last < self.end:  # else the backward pass follows at once, without a step between
            execution.ahead = self.ahead.weights(first, last)
        with self._computing(execution), self.device.autocast():
            for layer in self.layers[first - self.start : min(last, self.end - 1) - self.start]:
                execution.output_BTD = layer(execution.output_BTD)
        if last < self.end:
            execution.output_BTD = execution.output_BTD[..., : self.activations.widths[last]]
        return execution

    def _computing(self, execution: PendingBackward) -> AbstractContextManager[None]:
        """Return the context in which the layers compute with the execution's predicted weights, if there are any."""
        if self.ahead is None or execution.ahead is None:
            return nullcontext()
        return self.ahead.at(execution.ahead)

    def _forwarded(
        self,
        job: jobs.Draw | jobs.Forward,
        execution: PendingBackward,
        batch: tuple[Tensor | None, Tensor],
        began: float,
        number: int = 0,
    ) -> jobs.Outcome:
        """Return ForwardDone; at the model's end, run the backward pass too, and return BackwardDone instead."""
        inputs_BT, targets_BT = batch
        if execution.last == self.end:
            loss = self._loss(execution, targets_BT)
            if not torch.isfinite(loss):
                return jobs.ExecutionFailed(job.local_id, Reason.NAN)
            self._accumulate(job.local_id, execution, loss, None)
            done = self._backed(job, execution, float(loss.detach()))
            self._slow_down(execution, began, forward=True)
            return replace(done, number=number)
        self.pending[job.local_id] = execution
        leaving = Entering(execution.output_BTD.detach(), targets_BT, inputs_BT)
        layout, blob = self.activations.pack(execution.last, leaving, job.thin)
        self._slow_down(execution, began, forward=True)
        return jobs.ForwardDone(job.local_id, number, len(targets_BT), execution.tokens, layout, blob)

    def _loss(self, execution: PendingBackward, targets_BT: Tensor) -> Tensor:
        """Run the model's last layer, and return the sum of the tokens' losses."""
        with self.device.autocast():
            targets_BT = targets_BT.to(self.device.device)
            mean = decoder.last_loss(self.run, self.layers[-1], execution.output_BTD, targets_BT)
        return mean * execution.tokens

    def _accumulate(self, local_id: int, execution: PendingBackward, root: Tensor, gradient: Tensor | None) -> None:
        """Run an execution's backward pass from `root`, and add the result to the open sum.

        `local_id` is the execution's id; `gradient` is the gradient of `root`, or None if `root` is the loss.
        """
        self._add(execution, root, gradient, execution.tokens)
        if self.ahead and execution.ahead is not None:
            self.ahead.came_back(execution.ahead)
        self.sums.executions.append(local_id)

    def _add(self, execution: PendingBackward, root: Tensor, gradient: Tensor | None, tokens: int) -> None:
        """Add the gradients of a backward pass from `root` to the open sum, and `tokens` to its numbers of tokens."""
        if not self.only_routed:
            for live in self.lives:
                live.grad.zero_()
        with self._computing(execution):
            torch.autograd.backward([root], None if gradient is None else [gradient.to(root)])
        for index, live in enumerate(self.lives):
            if execution.first <= live.fragment.first and live.fragment.last <= execution.last:
                self.sums.filled_tokens[index] += tokens
                if not self.only_routed:
                    self.sums.filled[index] += live.grad

    def _backed(
        self, job: jobs.Draw | jobs.Forward | jobs.Backward, execution: PendingBackward, loss: float
    ) -> jobs.BackwardDone:
        """Return the outcome of a backward pass, with the encoded gradient of the input for the previous peer."""
        if execution.input_BTD is None:
            return jobs.BackwardDone(job.local_id, execution.tokens, loss, (), b"")
        assert execution.input_BTD.grad is not None
        layout, blob = self.activations.encode_gradient(execution.input_BTD.grad, job.thin)
        return jobs.BackwardDone(job.local_id, execution.tokens, loss, layout, blob)

    def _slow_down(self, execution: PendingBackward, began: float, forward: bool) -> None:
        """Sleep after an execution's forward job (if not `forward`: backward job), to imitate a slower device."""
        first, last = execution.first, execution.last
        part = forward_share(self._cuts, first, last)
        part = part if forward else share(self._cuts, first, last) - part
        slow_down(self.device, time.perf_counter() - began, part)
