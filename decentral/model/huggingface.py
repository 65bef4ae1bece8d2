"""Export a model as a folder that Hugging Face's transformers loads: its weights, its config, and a tokenizer.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json

Start reading at `write`. If the run's tokens are bytes, token k is byte k: the tokenizer is a byte-level BPE without
merges. Otherwise the files of the run's tokenizer are copied, if the caller gives their path. If the head equals the
embedding, only the embedding is written, as transformers does for models with tied embeddings.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from decentral.core import config, foreign_file
from decentral.core.atomic_file import write_together
from decentral.core.config import BYTES
from decentral.core.errors import UserError, writing
from decentral.core.strict_json import JsonObject
from decentral.data.tokenizer import MAX_TOKENIZER_FILE_BYTES, TOKENIZER_FILE, TOKENIZER_SETTINGS
from decentral.model import bottleneck, decoder, families, lora
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
"""Patterns of files that programs read instead of a folder's `model.safetensors`, or along with it."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_NAMED = 4


def write(folder: Path, run: config.Config, layers: Sequence[nn.Module], like: Path | None = None) -> list[str]:
    """Write the model's folder, and return the names of the files written.

    Args:
        folder: The folder to write; created if it does not exist.
        run: The run's config.
        layers: All layers of the model, changed in place: adapters are merged into their weights.
        like: Path of the tokenizer to copy: its folder or file, or the pretrained model's folder; None: no path is
            known.

    Raises:
        UserError: If the model is a user's own (`model.layers`), the folder has files of another model, or a file
            cannot be written.
    """
    if run.model.layers is not None:
        raise UserError(f"only the built-in model can be exported; this run's model is your own, {run.model.layers}")
    refuse_mixture(folder, OTHERS_WEIGHTS)
    lora.merge(layers)
    weights = {
        name: tensor.detach().float().contiguous()
        for name, tensor in decoder.named_weights(layers, run.model.depth).items()
    }
    bottleneck.fold(run.model, weights)
    tied = _tie(weights)
    if run.model.options.fused:
        _fuse(weights)
    described = families.config_json(run.model, tied) | _special_tokens(like)
    files = {families.CONFIG_FILE: _json(described), WHOLE: save(weights, {"format": "pt"})}
    files |= _tokenizer_files(run, like)
    with writing("--out", folder, "folder"):
        if TOKENIZER_FILE in files:
            refuse_mixture(folder, [name for name in TOKENIZER_FILES if name not in files])
        write_together(folder, files)
    return list(files)


def refuse_mixture(folder: Path, patterns: Iterable[str]) -> None:
    """Raise UserError if the folder for an export has files of another model, since programs would read them too.

    Args:
        folder: The folder of the export.
        patterns: Glob patterns of such files.
    """
    if found := sorted(path.name for pattern in patterns for path in folder.glob(pattern)):
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        names = f"{', '.join(found[:MOST_NAMED])}{more}"
        raise UserError(
            f"--out {folder} has another model's files ({names}), which programs would load together with the export; "
            "choose another folder, or remove them"
        )


def _fuse(weights: dict[str, Tensor]) -> None:
    """Concatenate, in `weights`, the matrices that the family's files store as one matrix."""
    for whole, (first, *others) in FUSED.items():
        for name in [name for name in weights if f".{first}." in name]:
            parts = [weights.pop(name.replace(first, part)) for part in (first, *others)]
            weights[name.replace(first, whole)] = torch.cat(parts)


def _tie(weights: dict[str, Tensor]) -> bool:
    """Return whether the head equals the embedding; if so, remove the head from `weights`."""
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
    """Return the tokenizer's files by name: those of `like` or, if a run on bytes has none, those of a byte tokenizer.

    Raises UserError if a file cannot be read.
    """
    paths = {name: like / name for name in TOKENIZER_FILES} if like is not None else {}
    if like is not None and not like.is_dir():
        paths = {TOKENIZER_FILE: like}
    found: dict[str, bytes] = {}
    for name, path in paths.items():
        try:
            if path.exists():
                found[name] = foreign_file.read_bytes(path, MAX_TOKENIZER_FILE_BYTES)
        except OSError as error:
            raise UserError(f"--tokenizer {path} cannot be read ({error.strerror}); name another one") from None
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
    """Return the tokenizer.json whose token k is byte k, in the format of the `tokenizers` library."""
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
    """Return GPT-2's character for each byte: the byte's own if printable, else the next unused one from 256 on."""
    themselves = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(BYTES) if byte not in themselves]
    return [chr(byte) if byte in themselves else chr(BYTES + others.index(byte)) for byte in range(BYTES)]


def _json(content: JsonObject) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
