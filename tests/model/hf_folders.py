"""Hugging Face folders of tiny models with random weights, made by transformers itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'decentral[hf]'")

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **values}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with its own rope_theta": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama 3, tied": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        },
    ),
    "llama, linear rope": ("LlamaConfig", rope("linear")),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, yarn": ("Qwen2Config", rope("yarn", original_max_position_embeddings=16)),
    "qwen2, yarn by its own numbers": (
        "Qwen2Config",
        rope("yarn", original_max_position_embeddings=16, beta_fast=8.0, attention_factor=1.3, truncate=False),
    ),
    "qwen3, wide heads, tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 10, "rms_norm_eps": 1e-5}),
    "mistral without": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("Qwen3Config", {"attention_bias": True, "head_dim": 32}),
    "olmo2": ("Olmo2Config", {"pad_token_id": None}),
    "smollm3, tied": (
        "SmolLM3Config",
        {"tie_word_embeddings": True, "no_rope_layers": [1, 0], "pad_token_id": None},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
            "attention_dropout": 0.1,
        },
    ),
    "phi3 with a window": ("Phi3Config", {"sliding_window": 10, "pad_token_id": None}),
    "phi3, longrope": (
        "Phi3Config",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 1.5, 2.5, 4.0],
            },
        },
    ),
}


def made(folder: Path, name: str = "llama", shard: str = "5GB", **more: object) -> Any:
    """Writes the folder, in files of at most `shard`; gives transformers' model."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **options, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    drawn(model)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def written(folder: Path, fields: Mapping[str, object], seed: int = 0) -> Any:
    """Writes a folder whose config.json has just these fields; gives transformers' model of it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    drawn(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return loaded(folder)


def drawn(model: Any) -> None:
    """Draws large weights, so that a wrong angle or a lost bias shows."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)


def logits(model: Any, tokens_BT: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens_BT).logits
    return found


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def edited(folder: Path, changes: Mapping[str, object]) -> None:
    """Changes fields of the folder's config.json; those that become None are left out."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
