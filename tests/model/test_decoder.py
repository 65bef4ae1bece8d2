"""The model: Llama's arithmetic under Llama's names, cut into layers."""

import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentral.core import config
from decentral.core.errors import UserError
from decentral.engine.step import Chain
from decentral.model import decoder

GROUPED = config.ModelConfig(depth=2, width=32, heads=4, kv_heads=2, context=16, vocabulary=61)
PLAIN = config.ModelConfig(depth=2, width=32, heads=2, context=16, vocabulary=61)


def tokens(seed: int, sequences: int = 3) -> Tensor:
    return torch.randint(61, (sequences, 16), generator=torch.Generator().manual_seed(seed))


def logits(layers: list[nn.Module], tokens_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return Chain(layers)(tokens_BT)


# Building


def test_a_model_is_an_embedding_its_blocks_and_a_head() -> None:
    assert [type(layer) for layer in decoder.build(PLAIN, 0)] == [
        decoder.Embedding,
        decoder.Block,
        decoder.Block,
        decoder.Head,
    ]


def test_every_peer_with_the_seed_builds_the_same_weights() -> None:
    one, other = (nn.Sequential(*decoder.build(GROUPED, 7)).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_another_seed_builds_other_weights() -> None:
    one, other = (decoder.named_weights(decoder.build(GROUPED, seed), 2)["lm_head.weight"] for seed in (7, 8))
    assert not torch.equal(one, other)


def test_building_leaves_the_global_chance_alone() -> None:
    torch.manual_seed(0)
    undisturbed = torch.rand(1)
    torch.manual_seed(0)
    decoder.build(PLAIN, 7)
    assert torch.equal(torch.rand(1), undisturbed)


def test_an_untrained_model_finds_every_token_about_as_likely() -> None:
    inputs = tokens(0)
    loss = decoder.loss_of(logits(decoder.build(PLAIN, 0), inputs), tokens(1))
    assert float(loss) == pytest.approx(math.log(61), abs=0.1)


# What it computes


@pytest.mark.parametrize("model", [PLAIN, GROUPED], ids=["multi-head", "grouped-query"])
def test_later_tokens_do_not_change_earlier_logits(model: config.ModelConfig) -> None:
    layers, one, other = decoder.build(model, 0), tokens(0), tokens(0)
    other[:, 10:] = tokens(1)[:, 10:]
    assert torch.allclose(logits(layers, one)[:, :10], logits(layers, other)[:, :10], atol=1e-6)
    assert not torch.allclose(logits(layers, one)[:, 10:], logits(layers, other)[:, 10:], atol=1e-3)


def test_earlier_tokens_and_their_order_change_later_logits() -> None:
    layers, one = decoder.build(PLAIN, 0), tokens(0)
    assert not torch.allclose(logits(layers, one)[:, -1], logits(layers, one[:, torch.randperm(16)])[:, -1], atol=1e-4)


def test_a_sequence_may_be_shorter_than_the_context() -> None:
    layers, inputs = decoder.build(PLAIN, 0), tokens(0)
    assert torch.allclose(logits(layers, inputs[:, :5]), logits(layers, inputs)[:, :5], atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_in_nats() -> None:
    sure = torch.full((1, 2, 61), -50.0)
    sure[0, 0, 3] = sure[0, 1, 4] = 50.0
    assert float(decoder.loss_of(sure, torch.tensor([[3, 4]]))) == pytest.approx(0.0, abs=1e-6)
    assert float(decoder.loss_of(torch.zeros(1, 2, 61), torch.tensor([[3, 4]]))) == pytest.approx(math.log(61))


# Hugging Face


def test_every_weight_has_a_name_of_its_own_among_llamas() -> None:
    ours, others = decoder.build(GROUPED, 1), decoder.build(GROUPED, 2)
    theirs = decoder.named_weights(others, 2)  # these share their memory with the layers
    for name, weight in decoder.named_weights(ours, 2).items():
        theirs[name].copy_(weight)
    assert torch.equal(logits(others, tokens(0)), logits(ours, tokens(0)))


@pytest.mark.parametrize("model", [PLAIN, GROUPED], ids=["multi-head", "grouped-query"])
def test_parameters_are_counted_without_building_the_model(model: config.ModelConfig) -> None:
    assert decoder.parameters(model) == [
        sum(p.numel() for p in layer.parameters()) for layer in decoder.build(model, 0)
    ]


@pytest.mark.parametrize("model", [PLAIN, GROUPED], ids=["multi-head", "grouped-query"])
def test_transformers_llama_with_our_weights_gives_our_logits(model: config.ModelConfig) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install transformers")
    layers = decoder.build(model, 3)
    for parameter in nn.Sequential(*layers).parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.d_model,
            intermediate_size=model.d_hidden,
            num_hidden_layers=model.depth,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.n_kv_heads,
            max_position_embeddings=model.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )
    llama.load_state_dict(decoder.named_weights(layers, model.depth))
    with torch.no_grad():
        theirs = llama.eval()(tokens(0)).logits
    assert torch.allclose(logits(layers, tokens(0)), theirs, atol=1e-4, rtol=1e-4)


# A user's own model


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, importable by this name."""
    name = f"users_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def layers(model):\n"
        "    return [nn.Embedding(model.vocabulary, 8), nn.Linear(8, model.vocabulary)]\n"
        "def nothing(model): return []\n"
        "def one(model): return nn.Linear(1, 1)\n"
        "def mixed(model): return [nn.Linear(1, 1), 7]\n"
        "def no_arguments(): return []\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_own_layers_are_built_from_the_config(module: str) -> None:
    layers = decoder.build(config.ModelConfig(layers=f"{module}:layers", vocabulary=61), 0)
    assert logits(layers, tokens(0)).shape == (3, 16, 61)


def test_a_users_own_layers_are_the_same_for_the_same_seed(module: str) -> None:
    model = config.ModelConfig(layers=f"{module}:layers", vocabulary=61)
    assert torch.equal(logits(decoder.build(model, 5), tokens(0)), logits(decoder.build(model, 5), tokens(0)))


@pytest.mark.parametrize("function", ["gone", "nothing", "one", "mixed", "no_arguments", "number", ""])
def test_a_function_that_gives_no_layers_is_a_user_error(module: str, function: str) -> None:
    with pytest.raises(UserError, match=r"model\.layers"):
        decoder.build(config.ModelConfig(layers=f"{module}:{function}"), 0)


@pytest.mark.parametrize("name", ["no_such_module:layers", "no colon", ":layers", "", ":", ".relative:layers"])
def test_a_name_that_leads_nowhere_is_a_user_error(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.layers"):
        decoder.build(config.ModelConfig(layers=name), 0)


# Saving memory


def gradients(run: config.Config, layers: list[nn.Module]) -> tuple[float, list[Tensor]]:
    for layer in layers:
        layer.zero_grad()
    loss = Chain(layers, run=run).loss(tokens(0), tokens(1))
    loss.backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for layer in layers for parameter in layer.parameters()]
    return loss.item(), [one for one in found if one is not None]


def saving(model: config.ModelConfig, **train: object) -> config.Config:
    return config.Config(model=model, train=config.TrainConfig.model_validate(train))


def own_layers(model: config.ModelConfig) -> list[nn.Module]:
    """Its last layer mixes the positions of a sequence."""
    mixing = nn.Sequential(nn.Conv1d(16, 16, 1), nn.Linear(8, model.vocabulary))
    return [nn.Embedding(model.vocabulary, 8), nn.Linear(8, 8), mixing]


USERS = config.ModelConfig(layers=f"{__name__}:own_layers", context=16, vocabulary=61)


@pytest.mark.parametrize("model", [GROUPED, USERS], ids=["ours", "a user's"])
@pytest.mark.parametrize("logits_at_once", [61, 500, 61 * 16 * 3 - 1])
def test_a_loss_in_parts_is_that_of_the_whole(
    model: config.ModelConfig, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = decoder.build(model, 0)
    loss, found = gradients(saving(model), layers)
    monkeypatch.setattr(decoder, "LOGITS_AT_ONCE", logits_at_once)
    in_parts, same = gradients(saving(model), layers)
    assert in_parts == pytest.approx(loss, rel=1e-6)
    for one, other in zip(found, same, strict=True):
        assert torch.allclose(one, other, atol=1e-7, rtol=1e-4)


def test_a_loss_of_one_part_is_to_the_bit_that_of_logits_that_were_all_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = decoder.build(GROUPED, 0)
    monkeypatch.setattr(decoder, "LOGITS_AT_ONCE", 61 * 16 * 3)
    with torch.no_grad():
        loss = Chain(layers, run=saving(GROUPED)).loss(tokens(0), tokens(1))
        assert float(loss) == float(decoder.loss_of(logits(layers, tokens(0)), tokens(1)))


@pytest.mark.parametrize("model", [GROUPED, USERS], ids=["ours", "a user's"])
def test_blocks_that_are_computed_again_give_the_same_gradients_to_the_bit(model: config.ModelConfig) -> None:
    layers = decoder.build(model, 0)
    loss, found = gradients(saving(model), layers)
    again, same = gradients(saving(model, recompute=True), layers)
    assert again == loss
    assert all(torch.equal(one, other) for one, other in zip(found, same, strict=True))


def test_layers_of_other_peers_are_freed_before_the_next_layer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 2e9 parameters were in memory together."""
    there: list[int] = []
    built: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    class Counted(decoder.Block):
        def __init__(self, model: config.ModelConfig, rotated: bool = True) -> None:
            there.append(len(built))
            super().__init__(model, rotated)
            built.add(self)

    monkeypatch.setattr(decoder, "Block", Counted)
    assert decoder.build(config.ModelConfig(depth=4, width=64), 0, 0, 0) == []
    assert there == [0, 0, 0, 0]
