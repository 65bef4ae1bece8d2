"""With a bottleneck, blocks change only the first channels of the hidden values."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from decentral.core import config
from decentral.model import decoder, huggingface, shape
from decentral.model.bottleneck import TokenFeatures

NARROW = config.ModelConfig(width=64, depth=2, heads=2, context=16, bottleneck=8)
TOKENS_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))


def strong_layers(model: config.ModelConfig) -> list[nn.Module]:
    """Layers with weights so large that each branch changes the hidden values visibly."""
    layers = decoder.build(model, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in layers:
            for weight in layer.parameters():
                nn.init.normal_(weight, std=0.3)
    return layers


def test_blocks_change_only_the_first_channels() -> None:
    layers = strong_layers(NARROW)
    entering_BTD: Tensor = layers[0](TOKENS_BT)
    leaving_BTD = layers[2](layers[1](entering_BTD))
    assert torch.equal(leaving_BTD[..., 8:], entering_BTD[..., 8:])
    assert bool((leaving_BTD[..., :8] != entering_BTD[..., :8]).all())


def test_hidden_values_are_restored_from_the_channels_sent_and_the_tokens() -> None:
    layers = strong_layers(NARROW)
    hidden_BTD: Tensor = layers[1](layers[0](TOKENS_BT))
    assert torch.equal(TokenFeatures(NARROW)(hidden_BTD[..., :8], TOKENS_BT), hidden_BTD)


def test_the_parameters_are_counted_as_they_are() -> None:
    counted = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder.build(NARROW, seed=0)]
    assert counted == NARROW.layer_parameters == decoder.parameters(NARROW)
    whole = NARROW.model_copy(update={"bottleneck": None})
    assert sum(NARROW.layer_flops) < sum(whole.layer_flops)


@pytest.mark.parametrize("biases", [False, True])
def test_an_export_computes_the_same_in_transformers(biases: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    block = shape.BlockOptions(attention_bias=biases, mlp_bias=biases)
    model = NARROW.model_copy(update={"block": block})
    layers = strong_layers(model)
    with torch.no_grad():
        ours_BTV: Tensor = nn.Sequential(*layers)(TOKENS_BT)
    huggingface.write(tmp_path, config.Config(model=model), layers)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        read_BTV = theirs(TOKENS_BT).logits
    assert torch.allclose(read_BTV, ours_BTV, atol=1e-4 * float(ours_BTV.abs().max()))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"bottleneck": 64}, "bottleneck 64 must be less than width 64"),
        ({"lora": {}}, "model.bottleneck needs a model that starts from nothing"),
        ({"weights": "0" * 32}, "model.bottleneck needs a model that starts from nothing"),
        ({"family": "mistral"}, "family mistral does not support bottleneck"),
        ({"layers": "package.module:function"}, "model.bottleneck works only with the built-in model"),
    ],
)
def test_a_bottleneck_that_cannot_be_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config.ModelConfig.model_validate({"width": 64, "depth": 2, "heads": 2, "bottleneck": 8, **keys})
