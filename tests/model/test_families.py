"""A Hugging Face folder as a start: the same logits as transformers', before and after training, and back again."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decentral.core import config
from decentral.core.errors import UserError
from decentral.engine import memory
from decentral.engine.fragment import fragments_of
from decentral.engine.step import Chain
from decentral.model import decoder, families, huggingface, start_weights
from decentral.model.start_weights import StartWeightsError
from decentral.scheduler.throughput import layer_costs
from tests.engine.test_memory import really_kept
from tests.model.hf_folders import MODELS, SMALL, edited, loaded, logits, made

SCALING = ["rope_type", "factor", "original_max_position_embeddings", "rope_theta", "truncate", "beta_fast"]
SCALING += ["mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor", "short_factor", "long_factor"]
TOKENS = torch.randint(256, (3, 48), generator=torch.Generator().manual_seed(0))


def run_from(folder: Path, *overrides: str) -> config.Config:
    return config.load(None, [f"model.from={folder}", "train.micro_batch=2", *overrides])


def ours(run: config.Config) -> Tensor:
    with torch.no_grad():
        return Chain(decoder.build(run.model, run.seed))(TOKENS)


def test_each_family_has_a_model_of_transformers_to_be_compared_with() -> None:
    """In `MODELS` of hf_folders.py."""
    made_by = {kind.replace("Config", "ForCausalLM") for kind, _ in MODELS.values()}
    assert {family.architecture for family in families.FAMILIES.values()} == made_by


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_goes_in_and_out_with_the_same_logits(tmp_path: Path, name: str) -> None:
    theirs = logits(made(tmp_path / "in", name), TOKENS)
    run = run_from(tmp_path / "in")
    assert torch.allclose(ours(run), theirs, atol=1e-4)
    huggingface.write(tmp_path / "out", run, decoder.build(run.model, run.seed))
    back = loaded(tmp_path / "out")
    assert torch.equal(logits(back, TOKENS), theirs)
    assert type(back).__name__.startswith(MODELS[name][0].removesuffix("Config"))
    assert back.config.tie_word_embeddings is ("tied" in name)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_trained_since_is_in_the_export(tmp_path: Path, name: str) -> None:
    theirs = logits(made(tmp_path / "in", name), TOKENS)
    run = run_from(tmp_path / "in")
    layers = decoder.build(run.model, run.seed)
    with torch.enable_grad():
        Chain(layers, run=run).loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        trained = Chain(layers)(TOKENS)
    huggingface.write(tmp_path / "out", run, layers)
    assert torch.allclose(logits(loaded(tmp_path / "out"), TOKENS), trained, atol=1e-4)
    assert not torch.allclose(trained, theirs, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_a_family_are_those_of_its_layers(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    run = run_from(tmp_path)
    layers = decoder.build(run.model, run.seed)
    assert decoder.parameters(run.model) == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    for said, layer in zip(decoder.sizes(run.model), layers, strict=True):
        shapes = [parameter.shape for parameter in layer.parameters()]
        assert sorted(said.matrices) == sorted(shape.numel() for shape in shapes if len(shape) == 2)
        assert sorted(said.gains) == sorted(shape.numel() for shape in shapes if len(shape) == 1)
    kept = really_kept(run.model, 1)
    assert 0.8 * kept <= memory.activation_bytes(run.model)[1] <= 1.4 * kept


def test_flops_count_the_heads_channels_and_the_window() -> None:
    def flops(**keys: object) -> float:
        model = config.ModelConfig.model_validate({"depth": 1, "width": 64, "heads": 2, "context": 512, **keys})
        run = config.Config(model=model)
        return layer_costs.flops_per_token(run) - 6 * (sum(model.layer_parameters[1:]) + model.d_model)

    assert flops(head_channels=64) == 2 * flops()
    assert flops() == 3 * 2 * 512 * 64
    assert flops(family="mistral", window=512) == flops()
    assert flops(family="mistral", window=64) == pytest.approx(3 * 4 * 64 * (64 - 4))


def test_a_span_gets_the_folders_weights_of_its_layers(tmp_path: Path) -> None:
    made(tmp_path, "qwen3, wide heads, tied")
    run = run_from(tmp_path)
    whole, part = decoder.build(run.model, run.seed), decoder.build(run.model, run.seed, 2, 4)
    for one, other in zip(whole[2:], part, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert [cut.last for cut in fragments_of(run)][-1] == 4


def test_a_head_that_was_tied_is_trained_by_itself_from_then_on(tmp_path: Path) -> None:
    made(tmp_path, "llama 3, tied")
    layers = decoder.build(run_from(tmp_path).model, 0)
    weights = decoder.named_weights(layers, 2)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert weights["lm_head.weight"].data_ptr() != weights["model.embed_tokens.weight"].data_ptr()


# Folders that have files already


def test_an_export_may_be_written_again_in_its_folder(tmp_path: Path) -> None:
    made(tmp_path / "in")
    run = run_from(tmp_path / "in")
    for seed in (1, 2):
        layers = decoder.build(run.model.model_copy(update={"start_from": None}), seed)
        huggingface.write(tmp_path / "out", run, layers)
    with torch.no_grad():
        assert torch.allclose(logits(loaded(tmp_path / "out"), TOKENS), Chain(layers)(TOKENS), atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
        "adapter_model.safetensors",
    ],
)
def test_weights_of_another_model_are_left_and_the_export_is_refused(tmp_path: Path, name: str) -> None:
    made(tmp_path / "in")
    run, out = run_from(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    (out / name).write_text("old")
    with pytest.raises(
        UserError, match=rf"has another model's files \({name}\), .* choose another folder, or remove them"
    ):
        huggingface.write(out, run, decoder.build(run.model, run.seed))
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_text() == "old"


def test_a_chat_template_of_another_tokenizer_is_not_mixed_with_an_export(tmp_path: Path) -> None:
    made(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    run = run_from(tmp_path / "in")
    layers = decoder.build(run.model, run.seed)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("old")
    with pytest.raises(UserError, match=r"has another model's files \(chat_template\.jinja\)"):
        huggingface.write(tmp_path / "out", run, layers, tmp_path / "in")
    (tmp_path / "in" / "chat_template.jinja").write_text("new")
    huggingface.write(tmp_path / "out", run, layers, tmp_path / "in")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "new"


# What all members of a run must have alike


def test_the_same_weights_in_other_files_have_the_same_digest(tmp_path: Path) -> None:
    made(tmp_path / "one"), made(tmp_path / "several", shard="50kB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    runs = [run_from(tmp_path / name) for name in ("one", "several")]
    assert start_weights.digest(runs[0].model) == start_weights.digest(runs[1].model)
    assert torch.equal(ours(runs[0]), ours(runs[1]))


def test_one_file_counts_before_an_index_as_it_does_for_transformers(tmp_path: Path) -> None:
    made(tmp_path / "old", shard="50kB"), made(tmp_path / "new", num_hidden_layers=2, rms_norm_eps=1e-3)
    weights = loaded(tmp_path / "new")
    weights.model.norm.weight.data.mul_(2)
    weights.save_pretrained(tmp_path / "new")
    for file in (tmp_path / "new").glob("*.safetensors"):
        file.rename(tmp_path / "old" / file.name)
    assert torch.allclose(ours(run_from(tmp_path / "old")), logits(loaded(tmp_path / "old"), TOKENS), atol=1e-4)


def test_an_adapter_beside_a_model_is_not_passed_over(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter (adapter_config.json); expected a whole model; merge it with peft's PeftModel" in refusal(
        tmp_path
    )


def test_other_weights_have_another_digest_and_are_refused(tmp_path: Path) -> None:
    made(tmp_path / "one")
    other = made(tmp_path / "other")
    other.model.norm.weight.data[3] += 1e-6
    other.save_pretrained(tmp_path / "other")
    sealed = start_weights.digest(run_from(tmp_path / "one").model)
    model = run_from(tmp_path / "other").model.model_copy(update={"weights": sealed})
    with pytest.raises(StartWeightsError, match="its weights are not this run's initial weights"):
        decoder.build(model, 0)


def test_a_peer_without_the_folder_cannot_make_up_the_weights(tmp_path: Path) -> None:
    made(tmp_path)
    model = run_from(tmp_path).model.model_copy(update={"weights": "0" * 32, "start_from": None})
    with pytest.raises(StartWeightsError, match="give --model-from DIR"):
        decoder.build(model, 0)
    assert len(decoder.build(model, 0, drawn=False)) == 4


# Errors


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        ours(run_from(folder, *overrides))
    line = str(caught.value)
    assert line.isprintable()
    return line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt_neox"),
        ("hidden_act", "gelu"),
        ("model_type", "gemma3_text"),
        ("model_type", "qwen3_moe"),
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("auto_map", {"AutoModelForCausalLM": "code.Model"}),
        ("rope_type", {"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_scaling.mrope_section", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8]}),
        ("rope_scaling.partial_rotary_factor", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_field_that_is_not_computed_is_named(tmp_path: Path, field: str, value: object) -> None:
    made(tmp_path)
    edited(tmp_path, {"rope_parameters" if field.startswith("rope") else field: value})
    assert f"config.json: {field} is " in refusal(tmp_path)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    made(tmp_path)
    edited(tmp_path, {field: None})
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'} lacks {field}; give a folder that transformers saved"


def test_fields_as_transformers_4_wrote_them_mean_the_same(tmp_path: Path) -> None:
    made(tmp_path, "llama 3, tied")
    fields = json.loads((tmp_path / "config.json").read_text())
    before = run_from(tmp_path).model
    scaling = dict(fields["rope_parameters"])
    theta = scaling.pop("rope_theta")
    edited(tmp_path, {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling})
    assert run_from(tmp_path).model == before


def test_sizes_that_do_not_fit_the_weights_are_named(tmp_path: Path) -> None:
    made(tmp_path)
    edited(tmp_path, {"intermediate_size": 128})
    assert "mlp.gate_proj.weight has shape [96, 64]; config.json expects [128, 64]" in refusal(tmp_path)


def test_a_folder_that_lacks_a_tensor_or_all_of_them_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    edited(tmp_path, {"num_hidden_layers": 3})
    assert "has no tensor model.layers.2." in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert "the weights cannot be read" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "expected model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    said = refusal(tmp_path)
    assert "found only the pickle pytorch_model.bin; convert it with transformers' AutoModelForCausalLM" in said


def test_a_key_that_contradicts_the_folder_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    assert refusal(tmp_path, "model.depth=3").startswith("config: model.depth is 3, but")
    assert run_from(tmp_path, "model.depth=2", "model.context=32").model.context == 32


WRONG = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([8, 8])
READ = [*families.THEIR_NAMES, "model_type", "rope_theta", "rms_norm_eps", "layer_types", "rope_scaling"]
READ += [*families.BIASES, *families.MULTIPLIERS, "no_rope_layers", "no_rope_layer_interval"]
READ += ["partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings"]
KINDS = st.sampled_from(list(families.FAMILIES))
ROPES = st.sampled_from(["yarn", "longrope", "llama3", "dynamic"])


@given(
    KINDS,
    ROPES,
    st.dictionaries(st.sampled_from(READ), WRONG | st.dictionaries(st.sampled_from(SCALING), WRONG), min_size=1),
)
def test_any_value_of_a_field_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rope: str, changes: dict[str, object]
) -> None:
    divisors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
    fields = {"model_type": kind, **SMALL, "rope_scaling": {"rope_type": rope, "factor": 2.0, **divisors}} | changes
    (tmp_path_factory.getbasetemp() / "config.json").write_text(json.dumps(fields))
    try:
        run = run_from(tmp_path_factory.getbasetemp())
    except UserError as error:
        said = str(error)
    else:
        assert decoder.parameters(run.model)
        return
    assert said.splitlines() == [said]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "gone") in refusal(tmp_path / "gone")


def test_bytes_are_no_data_for_a_model_of_other_tokens(tmp_path: Path) -> None:
    made(tmp_path, vocab_size=300)
    assert "set data.kind to huggingface or tokens" in refusal(tmp_path)
