"""A folder that Hugging Face's transformers loads: our layers as a LlamaForCausalLM, and a tokenizer of bytes.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json

Token k is byte k, so the tokenizer is a byte-level BPE without merges, written as plain JSON. For a `tokens` data set
no tokenizer is written: whoever made its tokens has one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from decentral.core import config
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError
from decentral.train import gpt

BYTES = 256


def write(folder: Path, run: config.Config, layers: Sequence[nn.Module]) -> list[str]:
    """Writes the folder and gives its files' names. Raises UserError if the model is no Llama, or the disk refuses."""
    if run.model.layers is not None:
        raise UserError(f"only the built-in model can be exported as a Llama; this run's is {run.model.layers}")
    weights = {name: tensor.detach().float().contiguous() for name, tensor in gpt.to_llama(layers).items()}
    files = {"config.json": _json(llama(run)), "model.safetensors": save(weights, {"format": "pt"})}
    if run.data.kind != "tokens" and run.model.vocabulary >= BYTES:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": run.model.context,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "add_eos_token": False,
        }
        files |= {"tokenizer.json": _json(tokenizer()), "tokenizer_config.json": _json(settings)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; choose a folder that can be written") from None
    return list(files)


def llama(run: config.Config) -> dict[str, Any]:
    model = run.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.d_model // model.n_heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": model.rope_theta,  # transformers 4 reads this, 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def tokenizer() -> dict[str, Any]:
    """A tokenizer in the format of the `tokenizers` library: every byte is one token, with the byte's number."""
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": whole,
        "post_processor": None,
        "decoder": whole,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(_visible())},
            "merges": [],
        },
    }


def _visible() -> list[str]:
    """The character that stands for each byte in GPT-2's table: a printable byte for itself, others from 256 on."""
    themselves = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(BYTES) if byte not in themselves]
    return [chr(byte) if byte in themselves else chr(BYTES + others.index(byte)) for byte in range(BYTES)]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
