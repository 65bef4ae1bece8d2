"""A folder that Hugging Face's transformers loads: our layers in its own class of their family, and a tokenizer.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json

Where the run's tokens are bytes, token k is byte k: the tokenizer is a byte-level BPE without merges, written as plain
JSON. Otherwise the files of the tokenizer that the run's text was read with are copied, where they are known. A head
that still has the embedding's weights, as in a folder that ties the two, is written once.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from decentral.core import config
from decentral.core.atomic_file import write_atomically
from decentral.core.config import BYTES
from decentral.core.errors import UserError, writing
from decentral.core.strict_json import JsonObject
from decentral.data.tokenizer import TOKENIZER_FILE, TOKENIZER_SETTINGS
from decentral.model import decoder, families, lora
from decentral.model.start_weights import EMBEDDING, FUSED, HEAD, INDEX, PICKLES, WHOLE

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
SHARDS = (INDEX, "model-*.safetensors", *PICKLES)
OTHERS_WEIGHTS = (*SHARDS, "adapter_*")
"""Files that programs read in the place of a folder's `model.safetensors`, or along with it."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of a config.json
MOST_NAMED = 4  # of another model's files, in an error
MAX_TOKENIZER_FILE_BYTES = 256 << 20


def write(folder: Path, run: config.Config, layers: Sequence[nn.Module], like: Path | None = None) -> list[str]:
    """Writes the folder and gives its files' names. `like`: where the tokenizer is, or the model started from.

    Adapters become a part of the weights, in `layers` too.

    Raises UserError if the model is of no family that transformers knows, the folder has files of another model, or the
    disk refuses.
    """
    if run.model.layers is not None:
        raise UserError(f"only the built-in model can be exported as a Llama; this run's is {run.model.layers}")
    refuse_mixture(folder, OTHERS_WEIGHTS)
    lora.merge(layers)
    weights = {
        name: tensor.detach().float().contiguous()
        for name, tensor in decoder.named_weights(layers, run.model.depth).items()
    }
    tied = _tie(weights)
    if run.model.options.fused:
        _fuse(weights)
    described = families.config_json(run.model, tied) | _special_tokens(like)
    files = {families.CONFIG_FILE: _json(described), WHOLE: save(weights, {"format": "pt"})}
    with writing("--out", folder, "folder"):
        files |= _tokenizer_files(run, like)
        if TOKENIZER_FILE in files:
            refuse_mixture(folder, [name for name in TOKENIZER_FILES if name not in files])
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return list(files)


def refuse_mixture(folder: Path, patterns: Iterable[str]) -> None:
    """Raise UserError if files of another model in the folder would be read in the place of an export, or with it."""
    if found := sorted(path.name for pattern in patterns for path in folder.glob(pattern)):
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        which = f"another model's files ({', '.join(found[:MOST_NAMED])}{more})"
        loaded = "which would be loaded along with these"
        raise UserError(f"--out {folder} has {which}, {loaded}; choose another folder, or remove them")


def _fuse(weights: dict[str, Tensor]) -> None:
    """Concatenate, in place, matrices that the family's files store as one."""
    for whole, (first, *others) in FUSED.items():
        for name in [name for name in weights if f".{first}." in name]:
            parts = [weights.pop(name.replace(first, part)) for part in (first, *others)]
            weights[name.replace(first, whole)] = torch.cat(parts)


def _tie(weights: dict[str, Tensor]) -> bool:
    """Remove the head if it equals the embedding; return whether it did."""
    tied = torch.equal(weights[HEAD], weights[EMBEDDING])
    if tied:
        del weights[HEAD]
    return tied


def _special_tokens(like: Path | None) -> JsonObject:
    if like is None or not (like / families.CONFIG_FILE).exists():
        return {}
    found = families.read(like)
    return {name: found[name] for name in SPECIAL_TOKENS if name in found}


def _tokenizer_files(run: config.Config, like: Path | None) -> dict[str, bytes]:
    """Raises OSError."""
    if like is not None and like.is_file():
        return {TOKENIZER_FILE: like.read_bytes()}
    present = [like / name for name in TOKENIZER_FILES if (like / name).is_file()] if like is not None else []
    found = {path.name: path.read_bytes() for path in present if path.stat().st_size <= MAX_TOKENIZER_FILE_BYTES}
    if TOKENIZER_FILE in found or not run.reads_bytes or run.model.vocabulary < BYTES:
        return found
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    return found | {TOKENIZER_FILE: _json(tokenizer()), TOKENIZER_SETTINGS: _json(settings)}


def tokenizer() -> JsonObject:
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


def _json(content: JsonObject) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
