"""A Hugging Face tokenizer from a file or a folder of this peer: text to tokens, and a digest that all peers share.

Read with the `tokenizers` library from `tokenizer.json`; nothing is downloaded and no code of the folder is run. Which
tokens begin and end a text, the files beside it say, as transformers reads them.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.model.families import CONFIG_FILE

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_FILE, GENERATION_FILE = "special_tokens_map.json", "generation_config.json"
MAX_SETTINGS_BYTES = 16 << 20  # a vocabulary's added tokens may stand among them
USUAL_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
OF_ONE_TEXT = ("padding", "truncation")  # parts of a tokenizer.json that say nothing of the tokens


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Text to token numbers, and the tokens that stand around a document."""

    tokenizer: "tokenizers.Tokenizer"
    separator: int  # between two documents
    size: int  # every token is below it
    digest: str
    before: tuple[int, ...] = ()  # what it puts before a document, such as a token for the beginning
    ends: frozenset[int] = frozenset()  # with each of these a generated text ends

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the tokens of each text, without the special tokens in `before`."""
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def tokens_and_offsets(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return the tokens [n] of one text, and the characters [n, 2] at which each begins and ends."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)


def load(path: str, separator: str | None = None) -> TextTokenizer:
    """The tokenizer of a folder or a file. `separator`: the token between documents; None: its end of a text.

    Raises UserError.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores train
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    if not Path(path).exists():
        raise UserError(f"--tokenizer {path}: nothing is there; name the folder or the file of the tokenizer")
    if not file.is_file():
        save = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes one"
        raise UserError(f"--tokenizer {path}: there is no {TOKENIZER_FILE}; {save}")
    try:
        text = file.read_text()
        tokenizer = library().Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer {path}: {' '.join(str(error).split())[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    named = separator if separator is not None else special_tokens(file.parent).get("eos_token")
    known = [name for name in (USUAL_SEPARATORS if named is None else [named]) if name in vocabulary]
    if not known:
        said = "names no token for the end of a text" if named is None else f"has no token {named!r}"
        raise UserError(f"--tokenizer {path}: it {said}; set eos_token in {TOKENIZER_SETTINGS} beside it")
    number, size = vocabulary[known[0]], max(vocabulary.values()) + 1
    ends = ends_of(file.parent) | {number}
    return TextTokenizer(tokenizer, number, size, _digest(text, number), _before(tokenizer, known[0]), ends)


def library() -> ModuleType:
    """The module `tokenizers`. Raises UserError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("a tokenizer needs the package tokenizers: pip install 'decentral[hf]'") from None
    return tokenizers


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the folder's special tokens, such as `eos_token`, by their roles. Raises UserError."""
    found = settings(folder / TOKENIZER_SETTINGS)
    if "added_tokens_decoder" not in found:  # transformers reads the older file where the newer one has no such field
        found = found | settings(folder / SPECIAL_TOKENS_FILE)
    texts = {role: one.get("content") if isinstance(one, dict) else one for role, one in found.items()}
    return {role: text for role, text in texts.items() if role.endswith("_token") and isinstance(text, str)}


def ends_of(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text, as the model's files in this folder say; maybe none. Raises UserError."""
    found: set[int] = set()
    for name in (CONFIG_FILE, GENERATION_FILE):
        ends = settings(folder / name).get("eos_token_id")
        found |= {one for one in (ends if isinstance(ends, list) else [ends]) if type(one) is int}
    return frozenset(found)


def settings(file: Path) -> JsonObject:
    """Return the fields of a JSON file beside a tokenizer, none if it is not there. Raises UserError."""
    try:
        if not file.is_file():
            return {}
        if file.stat().st_size > MAX_SETTINGS_BYTES:
            raise UserError(f"{file} is larger than {MAX_SETTINGS_BYTES} bytes; is it a tokenizer's or a model's?")
        found = strict_json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} must be an object; it is a {type(found).__name__}")
    return found


def _before(tokenizer: "tokenizers.Tokenizer", text: str) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer adds at the start of a text, found by encoding `text`."""
    found = tokenizer.encode(text, add_special_tokens=True)
    marked = zip(found.ids, found.special_tokens_mask, strict=True)
    return tuple(token for token, _ in itertools.takewhile(itemgetter(1), marked))


def _digest(text: str, separator: int) -> str:
    """The same for files that differ only in their layout, or in what they do with a single text."""
    content = {key: value for key, value in json.loads(text).items() if key not in OF_ONE_TEXT}
    canonical = json.dumps([content, separator], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
