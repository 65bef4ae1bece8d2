"""One training step: fetch, forward, backward, step, report. Nothing here knows that there is a network.

`train_step` takes it; `Counters` count what a peer has done so far, and what its training thread has spent its time on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from decentral.core import config, jobs
from decentral.core.time_spent import KINDS, TimeSpent
from decentral.core.units import Seconds
from decentral.engine.fragment import Inner, rate_at
from decentral.model import decoder

Fetch = Callable[[], tuple[Tensor, Tensor]]
"""Gives the next micro-batch: inputs_BT and targets_BT."""


class TimeAccount:
    """Every second between two calls goes to one kind, so nothing is counted twice and nothing is left out."""

    def __init__(self, clock: Callable[[], Seconds] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def spent_on(self, kind: str) -> None:
        """The time since the last call went into this."""
        now = self._clock()
        self._seconds[kind] += now - self._since
        self._since = now

    def take(self, beside: Seconds = 0.0) -> TimeSpent:
        """What was spent since this was last taken."""
        taken, self._seconds = self._seconds, dict.fromkeys(KINDS, 0.0)
        return TimeSpent.by_kind({**taken, "beside": beside})


@dataclass(slots=True)
class Counters:
    """A checkpoint keeps all of these but `time`."""

    own_steps: int = 0  # inner steps that this peer has taken
    lr_step: int = 0  # the swarm's learning-rate step, as far as this peer knows it
    tokens: int = 0
    micro_batches: int = 0  # the number of this peer's next micro-batch
    versions: dict[int, bytes] = field(default_factory=dict)  # by fragment, in synchronous runs: comm/rounds
    time: TimeAccount = field(default_factory=TimeAccount, compare=False)

    def stepped(
        self, tokens: int, loss: float, micro_batches: int, steps: int = 1, beside_s: Seconds = 0.0
    ) -> jobs.Stepped:
        """Counts so many steps, taken with so many tokens, and reports them with the time that they took.

        `beside_s`: processor time of the worker since it was last reported.
        """
        self.own_steps += steps
        self.lr_step += steps
        self.tokens += tokens
        spent = self.time.take(beside_s)
        return jobs.Stepped(self.own_steps, self.lr_step, tokens, loss, spent, micro_batches)

    def follow(self, lr_step: int, exactly: bool = False) -> None:
        """Take over the swarm's learning-rate step where it is ahead of ours; `exactly`, in any case.

        In a synchronous run it is exact, because there the steps of all peers are equal.
        """
        self.lr_step = lr_step if exactly else max(self.lr_step, lr_step)


class ModelForward(Protocol):
    """A model's layers as one function."""

    def __call__(self, tokens_BT: Tensor, /) -> Tensor:
        """logits_BTV"""

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, /) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar."""


class Replica(Protocol):
    """The whole model at work: its layers, their optimizer, and both as one function. engine/span.py has one."""

    @property
    def run(self) -> config.Config: ...

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    @property
    def inner(self) -> Inner: ...

    @property
    def forward(self) -> ModelForward: ...


class Ranks(Protocol):
    """The processes that take each step of a peer together: those of an island (engine/island.py), or one alone."""

    rank: int
    size: int

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Begins a step on all ranks. Gives the layers as the function with which it is to be taken."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch's passes. After those of a step's last one the gradients are the mean of all ranks'."""

    def end(self, figure: Tensor) -> Tensor:
        """Ends the step. Gives the mean of this scalar over all ranks."""


class Alone:
    """The Ranks of a peer with one device."""

    rank, size = 0, 1

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        return replica.forward

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def end(self, figure: Tensor) -> Tensor:
        return figure


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a peer computes, its arithmetic, and how much slower than it is the device shall seem.

    In an island it is one rank's; `ranks` leads to the others.
    """

    device: torch.device
    dtype: torch.dtype
    throttle: float = 1.0  # computing takes this many times as long
    emulated_s: float = 0.0  # a micro-batch takes at least this long
    ranks: Ranks = field(default=ALONE, repr=False, compare=False)

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if mixed else torch.bfloat16, enabled=mixed)

    def sent(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this batch on the device. The host goes on while it is copied to a GPU, from pinned memory."""
        inputs_BT, targets_BT = (one.pin_memory() for one in batch) if self.device.type == "cuda" else batch
        return inputs_BT.to(self.device, non_blocking=True), targets_BT.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    tokens: int
    micro_batches: int


def train_step(
    forward: ModelForward, fetch: Fetch, inner: Inner, lr_step: int, train: config.TrainConfig, device: Device
) -> StepReport:
    """One inner step with the gradient of `train.accumulate` micro-batches' mean loss of a token.

    One that is not finite is dropped, and the report counts nothing: what is counted is in the weights.

    `lr_step` is the swarm's step, from which the learning rate follows. The loss is the mean over the trained tokens.
    Each rank of an island takes as many micro-batches, and the report is of all of them, as if each rank's had as many
    trained tokens as this one's.
    """
    ranks, began = device.ranks, time.perf_counter()
    inner.zero_grad()
    batches = [fetch() for _ in range(train.accumulate)]
    own_tokens = [decoder.trained_tokens(targets_BT) for _, targets_BT in batches]
    losses, tokens = [], sum(own_tokens) * ranks.size
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
    loss_sum = torch.stack(losses).sum().to("cpu", non_blocking=True)  # it has arrived when `clip` returns
    counts = bool(torch.isfinite(inner.clip()))
    if counts:
        inner.step(rate_at(train, lr_step, inner.steps), tokens)
    loss_mean = float(ranks.end(loss_sum))
    return StepReport(loss_mean, tokens * counts, train.accumulate * ranks.size * counts)


def held_out_loss(forward: ModelForward, batch: tuple[Tensor, Tensor], device: Device, at_once: int) -> float:
    """Mean loss in nats per token over the held-out inputs_BT and targets_BT, `at_once` sequences at a time."""
    parts = [held_out_part(forward, part, device) for part in parts_of(batch, at_once)]
    return sum(parts) / decoder.trained_tokens(batch[1])


def parts_of(batch: tuple[Tensor, Tensor], at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs_BT, targets_BT = batch
    for start in range(0, len(inputs_BT), at_once):
        yield inputs_BT[start : start + at_once], targets_BT[start : start + at_once]


@torch.no_grad()
def held_out_part(forward: ModelForward, part: tuple[Tensor, Tensor], device: Device) -> float:
    """The sum of the losses of these sequences' tokens, in nats."""
    with device.autocast():
        inputs_BT, targets_BT = device.sent(part)
        loss = forward.loss(inputs_BT, targets_BT)
    return float(loss) * decoder.trained_tokens(part[1])


class Chain:
    """Layers [first, ...) of a model one after another, as one function; with a run they save memory as it says.

    Where `first` is not the first layer this only serves to measure the device: zeros stand for the hidden values that
    would enter. Where the layers end before the model, their output stands for logits.
    """

    def __init__(
        self, layers: Sequence[nn.Module], compiled: bool = False, run: config.Config | None = None, first: int = 0
    ) -> None:
        ends = run is not None and first + len(layers) == len(decoder.parameters(run.model))
        self.run = run if ends else None
        self.dtype = torch.float32 if run is None else getattr(torch, run.train.weights)
        self.entering = 0 if run is None or first == 0 else decoder.widths(run.model)[first]
        ready = list(layers) if run is None else decoder.recomputed(run, layers, first)
        trunk, head = nn.Sequential(*ready[:-1]), ready[-1] if ready else nn.Identity()
        self.trunk: Callable[[Tensor], Tensor] = torch.compile(trunk) if compiled else trunk
        self.head: Callable[[Tensor], Tensor] = torch.compile(head) if compiled else head

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self._hidden(tokens_BT))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        if self.run is None:
            return decoder.loss_of(self(tokens_BT), targets_BT)
        return decoder.last_loss(self.run, self.head, self._hidden(tokens_BT), targets_BT)

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        """What enters the last layer."""
        if not self.entering:
            return self.trunk(tokens_BT)
        zeros_BTD = torch.zeros((*tokens_BT.shape, self.entering), device=tokens_BT.device, dtype=self.dtype)
        return self.trunk(zeros_BTD.requires_grad_())


def slow_down(device: Device, took_s: float, share: float = 1.0) -> None:
    """Sleeps as throttling and emulation ask for, so that several slow peers can share one machine.

    `share`: what part of one micro-batch through the whole model was computed in `took_s`.
    """
    goal_s = max(took_s, device.emulated_s * share) * device.throttle
    if goal_s > took_s:
        if device.device.type == "cuda":
            torch.cuda.synchronize(device.device)
        time.sleep(goal_s - took_s)
