"""Configurations as model cards and hubs have them: the same logits as transformers', beyond the first positions too.

Each folder's config.json is written by hand, as transformers 4 wrote them, with the fields that real ones have and
without those that they lack: what a field that is absent means is what transformers takes it for.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.core import config, model_families
from decentral.core.own_inputs import OwnInputs
from decentral.core.sampling import Sampling
from decentral.core.swarm_config import received
from decentral.train import decoding, gpt, huggingface, start_weights
from decentral.train.step import Chain, Device
from tests.train.hf_folders import loaded, logits, transformers, written

Fields = dict[str, Any]
LENGTH = 160  # of a text: beyond FIRST, and beyond the windows
FIRST = 96  # positions of a first training
TOKENS = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
CPU = Device(torch.device("cpu"), torch.float32)


def fields(model_type: str, head: int = 64, **more: object) -> Fields:
    """Two blocks, with twice as many heads for queries as for keys."""
    return {
        "architectures": ["x"],
        "model_type": model_type,
        "vocab_size": 256,
        "hidden_size": 4 * head,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
        **more,
    }


def divisors(head: int, step: float) -> list[float]:
    return [1.0 + step * pair for pair in range(head // 2)]


ROPES: dict[str, Fields] = {
    "plain": {},
    "theta of a million": {"rope_theta": 1e6},
    "theta in the mapping": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic, within": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "dynamic, beyond": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": FIRST},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": FIRST,
            "rope_type": "llama3",
        },
    },
    "llama3, positions at the top": {
        "original_max_position_embeddings": FIRST,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
    },
    "yarn of the cards of Qwen2.5 and Qwen3": {
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "yarn, short": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": FIRST}},
    "yarn, positions at the top": {
        "original_max_position_embeddings": FIRST,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "yarn, positions in both": {
        "original_max_position_embeddings": FIRST,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "yarn, positions in neither": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, turns of its own": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": FIRST,
            "beta_fast": 8,
            "beta_slow": 2,
        }
    },
    "yarn, one mscale": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": FIRST, "mscale": 0.7}
    },
    "yarn, both mscales": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": FIRST,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        }
    },
    "yarn, attention_factor": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": FIRST,
            "attention_factor": 1.3,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        }
    },
    "yarn, not truncated": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": FIRST,
            "beta_fast": 9.0,
            "truncate": False,
        }
    },
    "yarn, without a factor": {
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": FIRST}
    },
    "two mappings": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    },
}
LONG = {"original_max_position_embeddings": FIRST}
MODELS: dict[str, Fields] = {
    "llama, biases": fields("llama", attention_bias=True, mlp_bias=True),
    "llama, tied": fields("llama", tie_word_embeddings=True),
    "llama, one head for all keys": fields("llama", num_key_value_heads=1),
    "llama, as many heads for keys": fields("llama", num_key_value_heads=None),
    "llama, heads wider than the model": fields("llama", head_dim=128),
    "mistral, window": fields("mistral", sliding_window=40),
    "mistral, window not named": fields("mistral"),
    "mistral, no window": fields("mistral", sliding_window=None),
    "qwen2": fields("qwen2", sliding_window=40, use_sliding_window=False, max_window_layers=2),
    "qwen3": fields("qwen3", head_dim=128, tie_word_embeddings=True),
    "qwen3, biases": fields("qwen3", head_dim=64, attention_bias=True),
    "olmo2": fields("olmo2", rope_theta=500000, attention_bias=False, attention_dropout=0.0),
    "olmo2, biases": fields("olmo2", attention_bias=True),
    "smollm3": fields("smollm3", num_hidden_layers=5, rope_theta=5e6, sliding_window=None, use_sliding_window=False),
    "smollm3, layers named": fields("smollm3", no_rope_layers=[0, 1], tie_word_embeddings=False),
    "smollm3, theta not named": fields("smollm3", rope_theta=None) | {"rope_theta": 2000000.0},
    "granite": fields(
        "granite",
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.015625,
        embedding_multiplier=12,
        logits_scaling=8,
        mlp_bias=False,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
    ),
    "granite, multipliers not named": fields("granite", attention_bias=True, mlp_bias=True),
    "phi3, code of its own": fields(
        "phi3",
        auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        sliding_window=40,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        original_max_position_embeddings=4096,
    ),
    "phi3, longrope": fields(
        "phi3",
        sliding_window=262144,
        rope_scaling={"type": "longrope", "short_factor": divisors(64, 0.01), "long_factor": divisors(64, 0.5)},
        **LONG,
    ),
    "phi3, longrope, not yet long": fields(
        "phi3",
        rope_scaling={"type": "longrope", "short_factor": divisors(64, 0.01), "long_factor": divisors(64, 0.5)},
        original_max_position_embeddings=LENGTH,
    ),
    "phi3, part of each head": fields(
        "phi3",
        head=128,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        rope_scaling={"type": "longrope", "short_factor": divisors(96, 0.01), "long_factor": divisors(96, 0.5)},
        **LONG,
    ),
    "llama, longrope": fields(
        "llama",
        rope_scaling={
            "rope_type": "longrope",
            "factor": 3.0,
            "short_factor": divisors(64, 0.01),
            "long_factor": divisors(64, 0.5),
            **LONG,
        },
    ),
    "no number for the norms": {name: one for name, one in fields("olmo2").items() if name != "rms_norm_eps"},
}


def ours(folder: Path, *overrides: str) -> Tensor:
    with torch.no_grad():
        return Chain(gpt.build(run_from(folder, *overrides).model, 0))(TOKENS)


def run_from(folder: Path, *overrides: str) -> config.Config:
    return config.load(None, [f"model.from={folder}", f"model.context={LENGTH}", "train.micro_batch=1", *overrides])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_scaled_positions_give_transformers_logits(tmp_path: Path, name: str, head: int) -> None:
    theirs = logits(written(tmp_path / "in", fields("llama", head, **ROPES[name])), TOKENS)
    assert apart(ours(tmp_path / "in"), theirs) < 1e-4
    run = run_from(tmp_path / "in")
    huggingface.write(tmp_path / "out", run, gpt.build(run.model, run.seed))
    assert apart(logits(loaded(tmp_path / "out"), TOKENS), theirs) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_gives_transformers_logits_there_and_back(tmp_path: Path, name: str) -> None:
    theirs = logits(written(tmp_path / "in", MODELS[name]), TOKENS)
    assert apart(ours(tmp_path / "in"), theirs) < 1e-4
    run = run_from(tmp_path / "in")
    huggingface.write(tmp_path / "out", run, gpt.build(run.model, run.seed))
    assert apart(logits(loaded(tmp_path / "out"), TOKENS), theirs) < 1e-4
    assert apart(ours(tmp_path / "out"), theirs) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_s_config_travels_to_who_joins(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    run = run_from(tmp_path, "model.lora.rank=4", "data.kind=tokens", "data.path=x")
    run = run.model_copy(update={"model": run.model.model_copy(update={"weights": "0" * 32})})
    found = received(run.canonical())
    joined = found.adopt(OwnInputs(data="x", model_folder=str(tmp_path)))
    assert joined.digest() == run.digest()


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_writes_what_transformers_writes(tmp_path: Path, name: str) -> None:
    theirs = written(tmp_path / "in", MODELS[name])
    prompt, more = TOKENS[:, : FIRST - 4], 8
    # Without a cache, for all but Phi-3 keep keys of a short text in a long one.
    sampling = {"do_sample": False, "use_cache": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = theirs.generate(prompt, max_new_tokens=more, **sampling)
    layers = gpt.build(run_from(tmp_path / "in", "model.context=16").model, 0)
    written_here = decoding.generate(layers, prompt[0].tolist(), Sampling(temperature=0, tokens=more), CPU)
    assert list(written_here) == tokens[0, prompt.shape[1] :].tolist()


def test_the_yarn_of_the_cards_is_known_by_its_numbers(tmp_path: Path) -> None:
    """Llama 3's bounds in the place of yarn's show at the usual sizes of heads, and are exported as what they were."""
    written(tmp_path / "in", fields("qwen2", 128, **ROPES["yarn of the cards of Qwen2.5 and Qwen3"]))
    scaling = run_from(tmp_path / "in").model.rope_scaling
    assert scaling is not None
    assert (scaling.low, scaling.high, scaling.positions) == (1.0, 32.0, 32768)


def test_a_head_in_the_file_is_taken_though_the_config_ties_it(tmp_path: Path) -> None:
    written(tmp_path / "in", fields("llama"))
    fixed = json.loads((tmp_path / "in" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "in" / "config.json").write_text(json.dumps(fixed))
    assert apart(ours(tmp_path / "in"), logits(loaded(tmp_path / "in"), TOKENS)) < 1e-4


def test_a_tied_folder_may_have_the_head_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = logits(written(tmp_path / "in", fields("llama", tie_word_embeddings=True)), TOKENS)
    file = tmp_path / "in" / start_weights.WHOLE
    weights = load_file(file)
    weights[start_weights.HEAD] = weights.pop(start_weights.EMBEDDING)
    save_file(weights, file, {"format": "pt"})
    assert torch.equal(logits(loaded(tmp_path / "in"), TOKENS), theirs)
    assert apart(ours(tmp_path / "in"), theirs) < 1e-4


ABSENT = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "sliding_window", "head_dim")


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "granite", "phi3"])
def test_a_field_that_is_absent_means_what_transformers_takes_it_for(tmp_path: Path, kind: str, absent: str) -> None:
    sizes = {"num_attention_heads": 32, "hidden_size": 1024}  # for which each family's default of the rest is valid
    left = {key: value for key, value in fields(kind, **sizes).items() if key != absent}
    (tmp_path / "config.json").write_text(json.dumps(left))
    theirs, model = transformers.AutoConfig.from_pretrained(tmp_path), run_from(tmp_path).model
    assert model.n_kv_heads == theirs.num_key_value_heads
    assert model.norm_eps == theirs.rms_norm_eps
    assert model.rope_theta == theirs.rope_parameters["rope_theta"]
    assert model.d_head == getattr(theirs, "head_dim", 1024 // 32)
    assert model.window == getattr(theirs, "sliding_window", None)
    assert model_families.is_tied(tmp_path) is theirs.tie_word_embeddings
