"""Training and gossip on a device whose streams run beside each other: nothing reads what is not written yet."""

from collections.abc import Callable, Iterator

import pytest
import torch

from decentral.core import config
from decentral.engine import accelerator
from decentral.engine.fragment import Live, copy_in, fragments_of
from decentral.engine.inner import Inner
from decentral.engine.step import Chain, Device, queue_step
from decentral.model import decoder
from tests.engine.stand_in_device import DEVICE, OutOfOrder, StandIn, stand_in

RUN = config.load(None, ["model.width=16", "model.depth=1", "model.heads=2", "model.context=8", "train.micro_batch=2"])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    accelerator.side_stream.cache_clear()
    with stand_in(monkeypatch) as device:
        yield device
    accelerator.side_stream.cache_clear()


def trained() -> tuple[Chain, Inner]:
    layers = decoder.build(RUN.model, 0)
    lives = [Live(one, layers, DEVICE, RUN.train) for one in fragments_of(RUN)]
    return Chain(layers), Inner(lives, RUN.train)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)


def test_a_step_waits_for_its_batch_and_its_report_for_the_step(device: StandIn) -> None:
    chain, inner = trained()
    queued = queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32))
    assert queued.report().loss > 0


def test_a_report_that_does_not_wait_is_found(device: StandIn) -> None:
    chain, inner = trained()
    queued = queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32))
    with pytest.raises(OutOfOrder):
        float(queued.figures[0])


def test_a_snapshot_is_whole_though_training_goes_on(device: StandIn) -> None:
    chain, inner = trained()
    live = inner.lives[0]
    before = live.theta.clone()
    arrive = live.copy_out(lambda: torch.empty(live.theta.numel()))
    queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32))
    assert arrive().sum().item() == before.to("cpu").sum().item()


def test_a_copy_on_another_stream_that_waits_for_no_step_is_found(device: StandIn) -> None:
    chain, inner = trained()
    queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32))
    into = torch.empty(inner.lives[0].theta.numel())
    with device.stream(device.Stream(DEVICE)), pytest.raises(OutOfOrder, match="may still be writing"):
        into.copy_(inner.lives[0].theta, non_blocking=True)


def test_a_snapshot_that_is_read_before_it_arrives_is_found(device: StandIn) -> None:
    chain, inner = trained()
    queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32))
    into = torch.empty(inner.lives[0].theta.numel())
    into.copy_(inner.lives[0].theta, non_blocking=True)
    with pytest.raises(OutOfOrder, match="may still be writing"):
        into.numpy()


def test_an_event_that_is_recorded_without_a_stream_orders_nothing_on_the_second_gpu(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inner = trained()
    record: Callable[..., None] = type(device.Event()).record
    monkeypatch.setattr(type(device.Event()), "record", lambda event, stream=None: record(event))
    with pytest.raises(OutOfOrder, match="may still be writing"):
        inner.lives[0].copy_out(lambda: torch.empty(inner.lives[0].theta.numel()))()


def test_a_correction_has_arrived_before_training_adds_it(device: StandIn) -> None:
    chain, inner = trained()
    correction = copy_in(torch.ones(inner.lives[0].theta.numel()), DEVICE)
    assert correction.device == DEVICE
    inner.lives[0].add(correction)
    assert queue_step(chain, [batch()], inner, 0, RUN.train, Device(DEVICE, torch.float32)).report().loss > 0


def test_a_correction_whose_memory_is_not_kept_for_training_is_found(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inner = trained()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    correction = copy_in(torch.ones(inner.lives[0].theta.numel()), DEVICE)
    with pytest.raises(OutOfOrder, match="may be given to others"):
        inner.lives[0].add(correction)
