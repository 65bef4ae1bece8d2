"""What travels between two layers is read back as it was written."""

import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.activations import ActivationFormat
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.model import decoder


def format_of(vocabulary: int = 256) -> ActivationFormat:
    model = config.ModelConfig(depth=1, width=32, context=16, vocabulary=vocabulary)
    run = config.Config(model=model, routes=config.RoutesConfig(wire="fp32"))
    return ActivationFormat(run, blockwise, decoder.widths(model))


@pytest.mark.parametrize("vocabulary", [256, 1 << 17])
def test_a_micro_batch_is_read_back_as_it_was_packed(vocabulary: int) -> None:
    activations = format_of(vocabulary)
    hidden_BTD = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    targets_BT = torch.randint(vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    layout, blob = activations.pack(1, hidden_BTD, targets_BT)
    assert (layout,) == activations.forms(1, 2).entering
    read_BTD, read_BT = activations.unpack(jobs.Forward(0, 1, 3, 2, layout, blob))
    assert torch.equal(read_BTD, hidden_BTD)
    assert torch.equal(read_BT, targets_BT)


def test_a_gradient_of_another_micro_batch_s_shape_is_refused() -> None:
    activations = format_of()
    layout, blob = activations.encode_gradient(torch.zeros(2, 16, 32))
    with pytest.raises(ProtocolError, match="shape"):
        activations.decode_gradient(layout, blob, torch.Size((1, 16, 32)))
