"""Weights in training: one flat vector [n] for each fragment (`Live`). engine/inner.py has their optimizer.

Each parameter is a view into its fragment's vector, so gossip, averaging and the optimizer are a few vector operations
for each fragment, however many tensors its layers have. A vector holds first the matrices that `train.optimizer`
trains unless it is AdamW (in all layers but the model's first and last), then the matrices that AdamW trains with
weight decay, and last the gains, which AdamW trains without weight decay.

`copy_out` and `copy_in` copy such a vector to host memory and back without stopping training. On a GPU, the training
thread only queues a copy within the device for `copy_out`; the worker thread moves this copy to pinned host memory on a
side stream. `copy_in` copies on the side stream as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from decentral.core import config, rng
from decentral.core.choices import OPTIMIZERS
from decentral.core.fragments import Fragment
from decentral.engine import accelerator
from decentral.engine.optimizers import OptimizerState, round_stochastically, views
from decentral.model import decoder


def fragments_of(run: config.Config) -> list[Fragment]:
    """Return the fragments of the run's model. They are the same on all peers of the run."""
    found = fragments(decoder.parameters(run.model), run.gossip.fragment_parameters)
    if run.model.layers is not None:
        return found
    flops = run.model.layer_flops
    kinds = [flops[:1] + [0.0] * (len(flops) - 1), [0.0, *flops[1:-1], 0.0], [0.0] * (len(flops) - 1) + flops[-1:]]
    within = [[sum(kind[one.first : one.last]) for kind in kinds] for one in found]
    return [replace(one, work=(work[0], work[1], work[2])) for one, work in zip(found, within, strict=True)]


def fragments(parameters: Sequence[int], at_least: int) -> list[Fragment]:
    """Cut the model into fragments of consecutive layers with at least `at_least` parameters each, and return them.

    If the last layers have fewer parameters, they join the fragment before them. A model with fewer parameters is one
    fragment.

    Args:
        parameters: Number of trained parameters of each layer.
        at_least: Smallest number of parameters of a fragment.
    """
    groups: list[list[int]] = []  # for each fragment: [first layer, layer after the last, number of parameters]
    for index, count in enumerate(parameters):
        if groups and groups[-1][2] < at_least:
            groups[-1] = [groups[-1][0], index + 1, groups[-1][2] + count]
        else:
            groups.append([index, index + 1, count])
    if len(groups) > 1 and groups[-1][2] < at_least:
        _, last, count = groups.pop()
        groups[-1] = [groups[-1][0], last, groups[-1][2] + count]
    return [Fragment(number, first, last, count) for number, (first, last, count) in enumerate(groups)]


class CopyMemory(Protocol):
    """Interface of a place for copies of tensors, such as `CopyRoom` in checkpoint.py, whose memory is used again."""

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors by name."""


Arrive = Callable[[], Tensor]
"""A function that waits until a copy is in host memory, and returns it; call it once, on the worker thread."""


class Live:
    """A fragment's weights in training (theta [n]), their gradient and optimizer state, and counts for gossip.

    The layers' parameters are views into theta. Their gradients are tensors of their own until `grad` is first used (in
    routed training), and then views into `grad`. All have dtype `train.weights`.
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
        """Move the fragment's parameters into one flat vector on the device.

        Args:
            fragment: The fragment.
            layers: Consecutive layers of the model that include the fragment's.
            device: The device of theta and the optimizer state.
            train: The section `train` of the config.
            numbers: Layer indices in the model, from the first of `layers` to the model's last layer; None: `layers` is
                the whole model.
            drawn: Whether `layers` have weights. False: theta stays uninitialised until a checkpoint, other peers or
                `set_weights` give it values.

        Raises:
            UserError: If a package that the optimizer needs is not installed.
        """
        self.fragment, self.train = fragment, train
        numbers = range(len(layers)) if numbers is None else numbers
        self._last = numbers[-1]
        groups = self._groups(layers, numbers.start)
        self._parameters = [parameter for group in groups for parameter in group]
        self._grad: Tensor | None = None
        self.tokens = 0  # number of tokens in the steps of the current gossip window
        self.steps = 0  # number of optimizer steps on this fragment, for AdamW's bias correction and the peer's warm-up
        self.changed_tensors = set[
            str
        ]()  # names of tensors that rank 0 has changed; `Island` copies them to the other ranks
        self.theta, self.state = self._placed(groups, device, drawn)

    def _placed(
        self, groups: Sequence[Sequence[nn.Parameter]], device: torch.device, drawn: bool
    ) -> tuple[Tensor, OptimizerState]:
        """Move the parameters, grouped as by `_groups`, into a new vector theta; return it with its optimizer state."""
        parameters, dtype = self._parameters, getattr(torch, self.train.weights)
        if drawn:
            theta = _flat(parameters).to(device, dtype)
        else:
            theta = torch.empty(sum(one.numel() for one in parameters), dtype=dtype, device=device)
        self.compute_with(theta)
        return theta, self._state([block.shape for block in groups[0]], groups[1:], device)

    def _state(
        self, blocks: Sequence[torch.Size], others: Sequence[Sequence[Tensor]], device: torch.device
    ) -> OptimizerState:
        """Return new optimizer state. `others`: AdamW's parameters, first those with weight decay, then the others."""
        matrices, gains = (sum(one.numel() for one in group) for group in others)
        return OptimizerState(blocks, matrices, gains, self.train, device)

    def compute_with(self, weights: Tensor) -> None:
        """Use the vector `weights` [n] in the layers' passes; optimizer, gossip and checkpoints still use theta."""
        shapes = [parameter.shape for parameter in self._parameters]
        for parameter, weight in zip(self._parameters, views(weights, shapes), strict=True):
            parameter.data = weight

    @property
    def grad(self) -> Tensor:
        """The gradient as one vector [n], to which backward passes add. The first use allocates the vector."""
        if self._grad is None:
            self._grad = torch.zeros_like(self.theta)
            shapes = [parameter.shape for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, views(self._grad, shapes), strict=True):
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        return self._grad

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, in the order of theta. If `grad` exists, they are views of `grad`.

        Until `grad` is first used, each backward pass allocates new gradients: adding to zeros would cost a tenth of
        the time of a large model's small step. Even if `grad` exists, the result has one tensor for each parameter. In
        an island, only rank 0 may have `grad` (for routed training), but all ranks must compute the same norm, and the
        norm of one flat vector is rounded differently.
        """
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]

    def zero_grad(self) -> None:
        """Set the gradient to zero, or free it if `grad` is not allocated."""
        if self._grad is not None:
            self._grad.zero_()
        self.free_gradients()

    def free_gradients(self) -> None:
        """Free the gradients of a step that has been taken, unless `grad` is allocated."""
        if self._grad is None:
            for parameter in self._parameters:
                parameter.grad = None

    def map_memory(self) -> None:
        """Write zeros to weights, optimizer state and gradients, so that their memory is mapped before the first step.

        Call it only before the fragment has weights. The first step frees these gradients, and reuses their memory.
        """
        self.theta.zero_()
        for tensor in self.state.tensors.values():
            tensor.zero_()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def set_weights(self, layers: Sequence[nn.Module], start: int) -> None:
        """Copy the weights of `layers` into theta. `start`: index of the first of these layers in the model."""
        groups = self._groups(layers, start)
        self.theta.copy_(_flat([parameter for group in groups for parameter in group]))

    def _groups(self, layers: Sequence[nn.Module], start: int) -> tuple[list[nn.Parameter], ...]:
        """Return the fragment's parameters in the order of theta: the stretch optimizer's matrices, AdamW's, gains."""
        blocks, matrices, gains = [], [], []
        has_stretch = bool(OPTIMIZERS[self.train.optimizer].stretch)
        for number in range(self.fragment.first, self.fragment.last):
            for parameter in layers[number - start].parameters():
                if parameter.ndim < 2:
                    gains.append(parameter)
                elif has_stretch and 0 < number < self._last and parameter.ndim == 2:
                    blocks.append(parameter)
                else:
                    matrices.append(parameter)
        return blocks, matrices, gains

    def tensors(self) -> dict[str, Tensor]:
        """Return theta and the optimizer state by name, as a checkpoint stores them, without copying them."""
        return {"theta": self.theta, **self.state.tensors}

    def copied(self, room: "CopyMemory") -> dict[str, Arrive]:
        """Copy theta and the optimizer state to the memory of `room`, between two steps.

        Returns:
            By name, the function that returns a copy with all its elements. Call each once, in this order.
        """
        return {name: partial(_same, copy) for name, copy in room.copied(self.tensors()).items()}

    def shapes(self) -> dict[str, Tensor]:
        """Return the tensors that `copied` copies, on the meta device: their shapes and dtypes, but no values."""
        return {name: tensor.to("meta") for name, tensor in self.tensors().items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite theta and optimizer state by name. Each of `values` has the shape that `shapes` gives it."""
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].copy_(value)
        self.changed_tensors.update(values)

    def copy_out(self, buffer: Callable[[], Tensor]) -> Arrive:
        """Begin to copy theta's present values to host memory. Call it on the training thread, between two steps.

        Args:
            buffer: Returns a new fp32 vector [n] in host memory, pinned if theta is on a GPU. A device that copies
                later calls it only then, since copies of many fragments may wait.

        Returns:
            The function that waits for the copy and returns it; call it once, on the worker thread.
        """
        if self.theta.device.type == "cpu":
            copy = buffer()
            self.copy_theta(copy)
            return lambda: copy
        staged = torch.empty(self.fragment.parameters, dtype=torch.float32, device=self.theta.device)
        self.copy_theta(staged)
        if not accelerator.has_streams(staged.device):
            return lambda: buffer().copy_(staged)
        streams = accelerator.streams(staged.device)
        taken = streams.Event()
        taken.record(streams.current_stream(staged.device))  # without an argument, record() would use a stream of GPU 0

        def arrive() -> Tensor:
            into, side = buffer(), accelerator.side_stream(staged.device)
            with streams.stream(side):
                side.wait_event(taken)
                into.copy_(staged, non_blocking=True)
            side.synchronize()  # only now is `into` complete, and `staged` no longer needed
            return into

        return arrive

    def copy_in(self, vector: Tensor) -> Tensor:
        """Copy a correction [n] from host memory to the device, for `add`. Call it on the worker thread."""
        return copy_in(vector, self.theta.device)

    def mark_changed(self, *names: str) -> None:
        """Mark these `tensors` (all, if no name is given) as changed on this rank only; an island then copies them."""
        self.changed_tensors.update(names or self.tensors())

    def copy_theta(self, into: Tensor) -> None:
        """Copy theta into an fp32 vector [n]."""
        into.copy_(self.theta)

    def add(self, correction: Tensor) -> None:
        """Add an fp32 vector [n] to theta in place, with stochastic rounding if theta is bf16."""
        correction = correction.to(self.theta.device, non_blocking=True)
        if self.theta.dtype == torch.float32:
            self.theta += correction
        else:
            round_stochastically(self.theta + correction, self.theta, self.chance("add"))

    def chance(self, what: str) -> torch.Generator:
        """Return a random generator for the purpose `what`, seeded by the fragment's index and number of steps.

        The generator is the same on all peers, so peers that take the same steps keep the same weights.
        """
        seed = rng.seed_of(self.fragment.index, what, self.steps) % 2**63
        return torch.Generator(self.theta.device).manual_seed(seed)

    def begin_step(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients for the optimizer step; `ShardedLive` first gathers the weights of its part in theta."""
        return gradients

    def end_step(self) -> None:
        """End an optimizer step. Here it does nothing; `ShardedLive` copies the result to the weights of its part."""

    def count(self, tokens: int) -> None:
        """Count an optimizer step on `tokens` tokens, in `steps` and in the current window."""
        self.tokens += tokens
        self.steps += 1

    def uncount(self, tokens: int) -> None:
        """Take back the count of a step that has changed no weights. A window that closed after the step keeps it."""
        self.tokens = max(0, self.tokens - tokens)
        self.steps -= 1


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def copy_in(vector: Tensor, device: torch.device) -> Tensor:
    """Copy a vector [n] from host memory to the device, wait for the copy, and return it. Call it on the worker thread.

    The side stream allocates the vector's memory. `record_stream` keeps the allocator from reusing this memory before
    the training stream has finished with the vector.
    """
    if device.type == "cpu":
        return vector
    if not accelerator.has_streams(device):
        return vector.to(device)
    streams, side = accelerator.streams(device), accelerator.side_stream(device)
    with streams.stream(side):
        on_device = vector.to(device, non_blocking=True)
    on_device.record_stream(streams.current_stream(device))
    side.synchronize()
    return on_device
