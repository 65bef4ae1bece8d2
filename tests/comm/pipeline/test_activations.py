"""What travels between two layers is read back as it was written."""

from typing import get_args

import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.activations import ActivationFormat, Entering
from decentral.core import config, jobs
from decentral.core.choices import wires_of
from decentral.core.errors import ProtocolError
from decentral.model import decoder
from decentral.scheduler.throughput.layer_costs import crossing_bytes


def format_of(vocabulary: int = 256, bottleneck: int | None = None) -> ActivationFormat:
    model = config.ModelConfig(depth=1, width=32, context=16, vocabulary=vocabulary, bottleneck=bottleneck)
    run = config.Config(model=model, routes=config.RoutesConfig(wire="fp32"))
    return ActivationFormat(run, blockwise, decoder.widths(model))


@pytest.mark.parametrize("vocabulary", [256, 1 << 17])
def test_a_micro_batch_is_read_back_as_it_was_packed(vocabulary: int) -> None:
    activations = format_of(vocabulary)
    hidden_BTD = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    targets_BT = torch.randint(vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    layout, blob = activations.pack(1, Entering(hidden_BTD, targets_BT))
    assert (layout,) == activations.forms(1, 2).entering
    read = activations.unpack(jobs.Forward(0, 1, 3, 2, layout, blob))
    assert torch.equal(read.hidden_BTD, hidden_BTD)
    assert torch.equal(read.targets_BT, targets_BT)
    assert read.inputs_BT is None


@pytest.mark.parametrize("vocabulary", [256, 1 << 17])
def test_with_a_bottleneck_few_channels_and_the_tokens_are_sent(vocabulary: int) -> None:
    activations = format_of(vocabulary, bottleneck=4)
    written_BTK = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    inputs_BT, targets_BT = torch.randint(vocabulary, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    layout, blob = activations.pack(1, Entering(written_BTK, targets_BT, inputs_BT))
    assert (layout,) == activations.forms(1, 2).entering
    assert [section.elements for section in layout] == [2 * 16 * 4, 2 * 16, 2 * 16]
    read = activations.unpack(jobs.Forward(0, 1, 3, 2, layout, blob))
    assert torch.equal(read.hidden_BTD, written_BTK)
    assert torch.equal(read.targets_BT, targets_BT)
    assert read.inputs_BT is not None
    assert torch.equal(read.inputs_BT, inputs_BT)


def test_an_input_that_is_no_token_is_refused() -> None:
    activations = format_of(bottleneck=4)
    tokens_BT = torch.zeros(1, 16, dtype=torch.int64)
    layout, blob = activations.pack(1, Entering(torch.zeros(1, 16, 4), tokens_BT, tokens_BT + 256))
    with pytest.raises(ProtocolError, match="vocabulary"):
        activations.unpack(jobs.Forward(0, 1, 3, 1, layout, blob))


def test_a_gradient_of_another_micro_batch_s_shape_is_refused() -> None:
    activations = format_of()
    layout, blob = activations.encode_gradient(torch.zeros(2, 16, 32))
    with pytest.raises(ProtocolError, match="shape"):
        activations.decode_gradient(layout, blob, torch.Size((1, 16, 32)))


@pytest.mark.parametrize("vocabulary", [256, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("bottleneck", [None, 4])
def test_plans_count_the_bytes_that_a_token_takes_on_its_way(vocabulary: int, bottleneck: int | None) -> None:
    """With few channels the ids are most of these bytes, and plans left them out."""
    activations = format_of(vocabulary, bottleneck)
    model = config.ModelConfig(depth=1, width=32, context=16, vocabulary=vocabulary, bottleneck=bottleneck)
    sent = sum(section.size for section in activations.forms(1, sequences=3).entering[0])
    assert crossing_bytes(config.Config(model=model), value_bytes=4.0) * 3 * 16 == sent


@pytest.mark.parametrize("wire", get_args(config.RoutesConfig.model_fields["wire"].annotation))
def test_plans_count_the_bytes_of_each_codec_that_a_config_can_choose(wire: str) -> None:
    for one in wires_of(wire):
        mean = sum(blockwise.size(codec, 4096) for codec in (one.forward, one.backward)) / 4096 / 2
        assert one.value_bytes == pytest.approx(mean, rel=0.02)
