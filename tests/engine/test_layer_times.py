"""A peer measures one layer of each kind of the model, whichever layers it holds."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from decentral.core.config import Config, ModelConfig, TrainConfig
from decentral.core.layer_work import KindCosts, shape_of
from decentral.engine import layer_times, measure, memory
from decentral.engine.fragment import fragments_of
from decentral.engine.layer_times import LayerTrial, layer_costs
from decentral.model import decoder

RUN = Config(model=ModelConfig(depth=2, width=32, vocabulary=64, context=8))
CPU = measure.choose("cpu")


def trial(run: Config = RUN) -> LayerTrial:
    return LayerTrial(run, tuple(fragments_of(run)), CPU, 2, 1e12, 1 << 30)


def layers_of(run: Config) -> dict[int, nn.Module]:
    return dict(enumerate(decoder.build(run.model, 0)))


def test_each_kind_is_measured_on_layers_that_are_held_or_built_for_it() -> None:
    held, built = layer_costs(trial(), layers_of(RUN)), layer_costs(trial(), {})
    for one, other in zip(held, built, strict=True):
        assert one is not None
        assert other is not None
        assert min(one.forward_s, one.backward_s, other.forward_s, other.backward_s) > 0
        assert one[2:] == other[2:]


def test_the_bytes_of_activations_are_at_most_those_that_are_counted() -> None:
    costs, counted = layer_costs(trial(), {}), memory.layer_bytes(RUN)
    assert costs.block is not None
    assert 0.5 * counted[1].token < costs.block.activation_bytes <= counted[1].token


def test_the_bytes_of_state_are_those_that_a_peer_with_a_part_counts() -> None:
    costs, needs = layer_costs(trial(), {}), memory.needs(RUN)
    embedding, block, head = (one.state_bytes for one in costs if one is not None)
    assert embedding + RUN.model.depth * block + head == pytest.approx(sum(needs.state_of_parts), rel=0.01)


def test_a_kind_that_is_not_held_and_does_not_fit_is_not_measured() -> None:
    layers = layers_of(RUN)
    found = layer_costs(replace(trial(), free_bytes=1000), {1: layers[1]})
    assert found == KindCosts(block=found.block)
    assert found.block is not None


def test_layers_of_the_users_own_code_are_not_measured() -> None:
    run = Config(model=ModelConfig(layers="package.module:function"))
    assert layer_costs(replace(trial(), run=run), layers_of(RUN)) == KindCosts()


def test_with_adapters_the_frozen_embedding_costs_no_backward_pass() -> None:
    run = Config(model=ModelConfig.model_validate({**RUN.model.model_dump(by_alias=True), "lora": {"rank": 2}}))
    found = layer_costs(trial(run), {})
    assert found.embedding is not None
    assert found.embedding.backward_s < found.embedding.forward_s


class Clock:
    """A clock that a layer moves on by `layer_s` in its forward pass."""

    def __init__(self) -> None:
        self.now = 0.0


class SlowLayer(nn.Module):
    """A block whose forward pass takes `layer_s` by a clock."""

    def __init__(self, clock: Clock, layer_s: float) -> None:
        super().__init__()
        self.clock, self.layer_s, self.passes = clock, layer_s, 0

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        self.clock.now += self.layer_s
        self.passes += 1
        return hidden_BTD * 2


@pytest.mark.parametrize(("layer_s", "passes"), [(0.01, 1 + layer_times.PASSES), (0.1, 4), (1.0, 2)])
def test_a_slow_layer_is_measured_less_often(monkeypatch: pytest.MonkeyPatch, layer_s: float, passes: int) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    layer = SlowLayer(clock, layer_s)
    found = trial().cost_of(1, layer)
    assert found is not None
    assert layer.passes == passes
    assert found.forward_s == pytest.approx(layer_s / 16)


def test_layers_that_take_long_by_their_flops_are_measured_with_fewer_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    found = replace(trial(), flops=1.0).cost_of(1, SlowLayer(clock, 0.1))
    assert found is not None
    assert found.forward_s == pytest.approx(0.1 / 8)


def test_throttling_and_emulation_are_part_of_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    emulated = replace(trial(), device=replace(CPU, throttle=2.0, emulated_s=16.0))
    costs, (embedding, blocks, head) = layer_costs(emulated, {}), shape_of(emulated.cuts)
    found = [one.seconds for one in costs if one is not None]
    assert found == pytest.approx([2 * embedding, blocks, 2 * head])  # 16 tokens take 32 s; there are two blocks


def test_bfloat16_weights_are_measured_as_they_are_trained() -> None:
    run = Config(model=RUN.model, train=TrainConfig(weights="bfloat16"))
    assert all(one is not None for one in layer_costs(trial(run), {}))
    assert torch.get_default_dtype() == torch.float32
