"""One training step: fetch, forward, backward, step, report. Nothing here knows that there is a network."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decentral.core import config
from decentral.train import gpt
from decentral.train.inner import Inner, rate_at

Fetch = Callable[[], tuple[Tensor, Tensor]]
"""Gives the next micro-batch: inputs_BT and targets_BT."""

Forward = Callable[[Tensor], Tensor]
"""Maps tokens_BT to logits_BTV."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a peer computes, its arithmetic, and how much slower than it is the device shall seem."""

    device: torch.device
    dtype: torch.dtype
    throttle: float = 1.0  # computing takes this many times as long
    emulated_s: float = 0.0  # a micro-batch takes at least this long

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if mixed else torch.bfloat16, enabled=mixed)


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    tokens: int
    micro_batches: int


def train_step(
    forward: Forward, fetch: Fetch, inner: Inner, lr_step: int, train: config.TrainConfig, device: Device
) -> StepReport:
    """One inner step with the mean gradient of `train.accumulate` micro-batches; one that is not finite is dropped.

    `lr_step` is the swarm's step, from which the learning rate follows. The loss is the mean over the micro-batches.
    """
    inner.zero_grad()
    losses, tokens = [], 0
    for _ in range(train.accumulate):
        began = time.perf_counter()
        inputs_BT, targets_BT = fetch()
        with device.autocast():
            loss = gpt.loss_of(forward(inputs_BT.to(device.device)), targets_BT.to(device.device))
        (loss / train.accumulate).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        tokens += inputs_BT.numel()
        slow_down(device, time.perf_counter() - began)
    if torch.isfinite(inner.clip()):
        inner.step(rate_at(train, lr_step, inner.steps), tokens)
    return StepReport(float(torch.stack(losses).mean()), tokens, train.accumulate)


def held_out_loss(forward: Forward, batch: tuple[Tensor, Tensor], device: Device, at_once: int) -> float:
    """Mean loss in nats per token over the held-out inputs_BT and targets_BT, `at_once` sequences at a time."""
    parts = [held_out_part(forward, part, device) for part in parts_of(batch, at_once)]
    return sum(parts) / len(batch[0])


def parts_of(batch: tuple[Tensor, Tensor], at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs_BT, targets_BT = batch
    for start in range(0, len(inputs_BT), at_once):
        yield inputs_BT[start : start + at_once], targets_BT[start : start + at_once]


@torch.no_grad()
def held_out_part(forward: Forward, part: tuple[Tensor, Tensor], device: Device) -> float:
    """The sum over these sequences of their mean losses in nats per token."""
    inputs_BT, targets_BT = part
    with device.autocast():
        loss = gpt.loss_of(forward(inputs_BT.to(device.device)), targets_BT.to(device.device))
    return float(loss) * len(inputs_BT)


def chain(layers: Sequence[nn.Module], compiled: bool) -> Forward:
    """The layers one after another, as one function."""
    model = nn.Sequential(*layers)
    return torch.compile(model) if compiled else model


def slow_down(device: Device, took_s: float, share: float = 1.0) -> None:
    """Sleeps as throttling and emulation ask for, so that several slow peers can share one machine.

    `share`: what part of one micro-batch through the whole model was computed in `took_s`.
    """
    goal_s = max(took_s, device.emulated_s * share) * device.throttle
    if goal_s > took_s:
        if device.device.type == "cuda":
            torch.cuda.synchronize(device.device)
        time.sleep(goal_s - took_s)
