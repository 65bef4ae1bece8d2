"""One training step: forward, backward, step, report. Nothing here depends on the network.

Start reading at `queue_step`. `Counters` counts a peer's steps and tokens, and the time of its training thread.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from decentral.core import config, jobs
from decentral.core.time_spent import KINDS, TimeSpent
from decentral.core.units import Seconds
from decentral.engine import accelerator
from decentral.engine.inner import Inner, rate_at
from decentral.model import decoder

Batch = tuple[Tensor, Tensor]
"""Sequences: inputs_BT and targets_BT."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Let the calling thread, and threads that it starts meanwhile, treat denormals (numbers below 1.2e-38) as zero.

    Use it in a thread that trains. Processors compute with denormals up to a hundred times more slowly: after 50 steps
    of 85 M parameters with AdamW, they made a step 1.4 times as long. GPUs are not affected.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class TimeAccount:
    """An account of a thread's time, in which every second counts for exactly one kind of work."""

    def __init__(self, clock: Callable[[], Seconds] = time.perf_counter) -> None:
        """Start to count time now. `clock`: returns the time in seconds."""
        self._clock = clock
        self._since = clock()
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def spent_on(self, kind: str) -> None:
        """Add the time since the last call of this method to a kind of work, one of KINDS."""
        now = self._clock()
        self._seconds[kind] += now - self._since
        self._since = now

    def take(self, beside: Seconds = 0.0) -> TimeSpent:
        """Return the seconds of each kind of work since the last call; `beside` is the worker thread's seconds."""
        taken, self._seconds = self._seconds, dict.fromkeys(KINDS, 0.0)
        return TimeSpent.by_kind({**taken, "beside": beside})


@dataclass(slots=True)
class Counters:
    """The counters of a peer's training. A checkpoint stores all but `time`."""

    own_steps: int = 0
    lr_step: int = 0  # this peer's estimate of how many steps the swarm has taken, which sets the learning rate
    tokens: int = 0
    micro_batches: int = 0  # the number of this peer's next micro-batch
    versions: dict[int, bytes] = field(default_factory=dict)  # fragment -> version of its weights, in synchronous runs
    time: TimeAccount = field(default_factory=TimeAccount, compare=False)

    def count_steps(
        self, tokens: int, loss: float, micro_batches: int, steps: int = 1, beside_s: Seconds = 0.0
    ) -> jobs.Stepped:
        """Add steps to the counters, `lr_step` included, and return their report with the time since the last report.

        Args:
            tokens: Number of tokens in these steps.
            loss: Mean loss in nats per token.
            micro_batches: Micro-batches trained in these steps.
            steps: Number of steps.
            beside_s: Processor time of the worker since the last report.
        """
        self.own_steps += steps
        self.lr_step += steps
        self.tokens += tokens
        spent = self.time.take(beside_s)
        return jobs.Stepped(self.own_steps, self.lr_step, tokens, loss, spent, micro_batches)

    def uncount(self, tokens: int) -> None:
        """Take back tokens of a step that turned out to have changed no weights."""
        self.tokens -= tokens

    def follow(self, lr_step: int, exactly: bool = False) -> None:
        """Set this peer's learning-rate step to the swarm's if the swarm's is larger.

        Args:
            lr_step: The swarm's step.
            exactly: Set it even if the swarm's is smaller, as in synchronous runs, where all peers have the same step.
        """
        self.lr_step = lr_step if exactly else max(self.lr_step, lr_step)


class ModelForward(Protocol):
    """Interface of a model's layers as one function; `Chain`, `AveragedForward` and `ShardedForward` implement it."""

    def __call__(self, tokens_BT: Tensor, /) -> Tensor:
        """Return logits_BTV."""

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, /) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""


class Replica(Protocol):
    """Interface of a model on one device, or of a rank's part of it; `Span` and `BuiltReplica` implement it."""

    @property
    def run(self) -> config.Config:
        """The run's config."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """All layers of the model."""

    @property
    def inner(self) -> Inner:
        """The optimizer of all fragments."""

    @property
    def forward(self) -> ModelForward:
        """The layers as one function."""


@dataclass(frozen=True, slots=True)
class BuiltReplica:
    """A model on a rank, without gossip and checkpoints; it implements `Replica`."""

    run: config.Config
    layers: list[nn.Module]
    inner: Inner
    forward: ModelForward


class Ranks(Protocol):
    """Interface to the processes that train one peer together: the ranks of an `Island`, or one process (`Alone`)."""

    rank: int
    size: int

    @property
    def readers(self) -> int:
        """The number of ranks that have micro-batches of their own."""

    @property
    def sharded(self) -> bool:
        """Whether each rank has only a part of the model."""

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Begin a step, or a measurement, on all ranks, and return the model as a function."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's passes. Gradients are averaged over ranks only if `last` is True."""

    def end(self, figures: Tensor) -> Tensor:
        """End the step or measurement; return the mean of `figures`, such as the loss, over all ranks."""

    def shared(self, batch: Batch) -> Batch:
        """Return a micro-batch of rank 0, and give it to the other ranks if they have none of their own."""

    def evaluating(self, replica: Replica, part: Batch) -> ModelForward:
        """Return the model as a function. The caller computes the loss of `part` with it next, without gradients."""


class Alone:
    """The `Ranks` of a peer with one device, which has only one process."""

    rank, size, readers, sharded = 0, 1, 1, False

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Return `replica.forward`; there are no other ranks to prepare."""
        return replica.forward

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def end(self, figures: Tensor) -> Tensor:
        """Return `figures` unchanged, since there is only one rank."""
        return figures

    def shared(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def evaluating(self, replica: Replica, part: Batch) -> ModelForward:
        """Return `replica.forward`."""
        return replica.forward


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a peer or one of its ranks computes, its dtype, and how it imitates a slower device."""

    device: torch.device
    dtype: torch.dtype
    throttle: float = 1.0  # computing is slowed down by this factor
    emulated_s: float = 0.0  # a micro-batch through the whole model is made to take at least this many seconds
    ranks: Ranks = field(default=ALONE, repr=False, compare=False)

    def autocast(self) -> torch.autocast:
        """Return the context in which torch computes products in `dtype`."""
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if mixed else torch.bfloat16, enabled=mixed)

    def sent(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a copy of a micro-batch on the device. With a GPU, the host does not wait for the copy."""
        inputs_BT, targets_BT = (one.pin_memory() for one in batch) if accelerator.has_streams(self.device) else batch
        return inputs_BT.to(self.device, non_blocking=True), targets_BT.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one `train_step`. If the gradient was not finite, tokens and micro-batches are 0."""

    loss: float  # mean, in nats per token
    tokens: int
    micro_batches: int


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step in a GPU's queue, or one that a CPU has already taken. `report` waits for the step."""

    figures: Tensor  # [2] in host memory: the mean loss, and the gradient's norm before clipping
    complete: torch.Event | None  # a GPU records this event when `figures` may be read; None for a CPU
    inner: Inner
    tokens: int
    micro_batches: int

    def report(self) -> StepReport:
        """Wait until the device has computed the step's gradient, and return the report. Call it once."""
        if self.complete is not None:
            self.complete.synchronize()
        loss, norm = self.figures.tolist()
        if math.isfinite(norm):
            return StepReport(loss, self.tokens, self.micro_batches)
        self.inner.uncount(self.tokens)
        return StepReport(loss, 0, 0)


def steps_ahead(device: Device) -> int:
    """Return how many steps the host may queue before it reads the report of the first of them.

    The result is 1 if the peer has one GPU, because a GPU that waited for its host between two steps would idle while
    the host launches the next forward pass. Otherwise it is 0; the ranks of an island wait for each other in each step.
    """
    return int(accelerator.has_streams(device.device) and device.ranks.size == 1)


def train_step(
    forward: ModelForward,
    batches: Sequence[Batch],
    inner: Inner,
    lr_step: int,
    train: config.TrainConfig,
    device: Device,
) -> StepReport:
    """Take one inner step, wait for it, and return its report. Arguments as for `queue_step`."""
    return queue_step(forward, batches, inner, lr_step, train, device).report()


def queue_step(
    forward: ModelForward,
    batches: Sequence[Batch],
    inner: Inner,
    lr_step: int,
    train: config.TrainConfig,
    device: Device,
) -> QueuedStep:
    """Queue one inner step with the gradient of the mean loss over these micro-batches.

    A step whose gradient is not finite changes no weights, and its report counts no tokens. The report counts the
    micro-batches of all ranks of an island; its number of tokens is this rank's tokens times the number of ranks that
    have micro-batches of their own.

    Args:
        forward: The model, as `Ranks.begin` returns it.
        batches: The micro-batches of this rank, at least one.
        inner: The optimizer of the model's fragments.
        lr_step: The swarm's learning-rate step.
        train: The section `train` of the config.
        device: The device on which to compute.
    """
    ranks, began = device.ranks, time.perf_counter()
    inner.zero_grad()
    own_tokens = [decoder.trained_tokens(targets_BT) for _, targets_BT in batches]
    losses, tokens = [], sum(own_tokens) * ranks.readers
    for number, batch in enumerate(batches, 1):
        with ranks.micro_batch(last=number == len(batches)):
            with device.autocast():
                inputs_BT, targets_BT = device.sent(batch)
                loss = forward.loss(inputs_BT, targets_BT)
            part = loss / (sum(own_tokens) / own_tokens[number - 1])
            part.backward()  # type: ignore[no-untyped-call]
        losses.append(part.detach())
        slow_down(device, time.perf_counter() - began)
        began = time.perf_counter()
    norm, rate = inner.clip(), rate_at(train, lr_step, inner.steps)
    figures = ranks.end(torch.stack((torch.stack(losses).sum(), norm))).to("cpu", non_blocking=True)
    complete = None
    if accelerator.has_streams(device.device):
        streams = accelerator.streams(device.device)
        complete = streams.Event(blocking=True)
        complete.record(streams.current_stream(device.device))
    inner.step_all(rate, tokens, void=(~torch.isfinite(norm)).float())
    return QueuedStep(figures, complete, inner, tokens, len(batches) * ranks.readers)


def held_out_loss(forward: ModelForward, batch: tuple[Tensor, Tensor], device: Device, at_once: int) -> float:
    """Return the mean loss in nats per token of a held-out batch, computed for `at_once` sequences at a time."""
    parts = [held_out_part(forward, part, device) for part in parts_of(batch, at_once)]
    return sum(parts) / decoder.trained_tokens(batch[1])


def parts_of(batch: tuple[Tensor, Tensor], at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch in parts of at most `at_once` sequences."""
    inputs_BT, targets_BT = batch
    for start in range(0, len(inputs_BT), at_once):
        yield inputs_BT[start : start + at_once], targets_BT[start : start + at_once]


@torch.no_grad()
def held_out_part(forward: ModelForward, part: tuple[Tensor, Tensor], device: Device) -> float:
    """Return the sum of the losses of all targets that are not MASKED, in nats, without computing gradients."""
    with device.autocast():
        inputs_BT, targets_BT = device.sent(part)
        loss = forward.loss(inputs_BT, targets_BT)
    return float(loss) * decoder.trained_tokens(part[1])


class Chain:
    """Consecutive layers of a model as one function; it implements `ModelForward`.

    It can train only the whole model. A part of the model serves only to measure the device's speed: if the part lacks
    the first layer, the input is zeros; if it lacks the head, the output is hidden states, not logits.
    """

    def __init__(
        self, layers: Sequence[nn.Module], compiled: bool = False, run: config.Config | None = None, first: int = 0
    ) -> None:
        """Make one function of the layers.

        Args:
            layers: Consecutive layers of the model.
            compiled: Whether to use torch.compile on each layer, so that all blocks share one compiled function.
            run: The run's config, which may ask to recompute activations to save memory; None: activations are kept.
            first: Index of the first of these layers in the model.
        """
        ends = run is not None and first + len(layers) == len(decoder.parameters(run.model))
        self.run = run if ends else None
        self.dtype = torch.float32 if run is None else getattr(torch, run.train.weights)
        self.entering = 0
        if run is not None and first > 0:
            model = run.model
            self.entering = model.d_model if model.layers is None else decoder.widths(model)[first]
        ready = list(layers) if run is None else decoder.recomputed(run, layers, first)
        ready = list(map(_compiled, ready)) if compiled else ready
        self.trunk: Callable[[Tensor], Tensor] = nn.Sequential(*ready[:-1])
        self.head: Callable[[Tensor], Tensor] = ready[-1] if ready else nn.Identity()

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV, or the last layer's hidden_BTD if the layers end before the model's head."""
        return self.head(self._hidden(tokens_BT))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""
        if self.run is None:
            return decoder.loss_of(self(tokens_BT), targets_BT)
        return decoder.last_loss(self.run, self.head, self._hidden(tokens_BT), targets_BT)

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the last layer's input, hidden_BTD."""
        if not self.entering:
            return self.trunk(tokens_BT)
        zeros_BTD = torch.zeros((*tokens_BT.shape, self.entering), device=tokens_BT.device, dtype=self.dtype)
        return self.trunk(zeros_BTD.requires_grad_())


class LossModule(nn.Module):
    """A model and its loss as one module, as torch's wrappers need them to combine the ranks' gradients."""

    def __init__(self, layers: Sequence[nn.Module], forward: ModelForward) -> None:
        """Register the parameters of the layers. The method `forward` computes the loss of the argument `forward`."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = forward.loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""
        return self.loss(tokens_BT, targets_BT)


def _compiled(layer: nn.Module) -> nn.Module:
    compiled = torch.compile(layer)
    assert isinstance(compiled, nn.Module), "torch.compile returns a module for a module"
    return compiled


def slow_down(device: Device, took_s: float, share: float = 1.0) -> None:
    """Sleep until the computation has taken as long as on the throttled or emulated device.

    With this, several slow peers can share one fast machine.

    Args:
        device: The device, with `throttle` and `emulated_s`.
        took_s: Seconds that the computation took.
        share: The computed share of one micro-batch through the whole model.
    """
    goal_s = max(took_s, device.emulated_s * share) * device.throttle
    if goal_s > took_s:
        accelerator.wait(device.device)
        time.sleep(goal_s - took_s)
