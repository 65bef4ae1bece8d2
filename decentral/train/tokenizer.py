"""A Hugging Face tokenizer from a file or a folder of this peer: text to tokens, and a digest that all peers share.

Read with the `tokenizers` library from `tokenizer.json`; nothing is downloaded and no code of the folder is run.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from decentral.core import strict_json
from decentral.core.errors import UserError

TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
USUAL_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
OF_ONE_TEXT = ("padding", "truncation")  # parts of a tokenizer.json that say nothing of the tokens


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Text to token numbers, and the token that stands between two documents."""

    tokenizer: Any  # tokenizers.Tokenizer
    separator: int
    size: int  # every token is below it
    digest: str

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The tokens of each text, without any that the tokenizer would put before or after it."""
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def tokens_and_offsets(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The same of one text, and [n, 2]: where each token's characters begin and end in it."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)


def load(path: str, separator: str | None = None) -> TextTokenizer:
    """The tokenizer of a folder or a file. `separator`: the token between documents; None: its end of a text.

    Raises UserError.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores train
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        save = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes one"
        raise UserError(f"--tokenizer {path}: there is no {TOKENIZER_FILE}; {save}")
    try:
        text = file.read_text()
        tokenizer = library().Tokenizer.from_str(text)
        settings = _settings(file.parent)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer {path}: {' '.join(str(error).split())[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    wanted = [separator] if separator is not None else [settings, *USUAL_SEPARATORS]
    known = [name for name in wanted if name in vocabulary]
    if not known:
        named = f"has no token {separator!r}" if separator is not None else "names no token for the end of a text"
        raise UserError(f"--tokenizer {path}: it {named}; set eos_token in {TOKENIZER_SETTINGS} beside it")
    number = vocabulary[known[0]]
    return TextTokenizer(tokenizer, number, max(vocabulary.values()) + 1, _digest(text, number))


def library() -> Any:
    """The module `tokenizers`. Raises UserError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("a tokenizer needs the package tokenizers: pip install 'decentral[hf]'") from None
    return tokenizers


def _settings(folder: Path) -> str | None:
    """The token for the end of a text that the folder names."""
    if not (folder / TOKENIZER_SETTINGS).is_file():
        return None
    found = strict_json.loads((folder / TOKENIZER_SETTINGS).read_text()).get("eos_token")
    name = found.get("content") if isinstance(found, dict) else found  # as an AddedToken, or as its text
    return name if isinstance(name, str) else None


def _digest(text: str, separator: int) -> str:
    """The same for files that differ only in their layout, or in what they do with a single text."""
    content = {key: value for key, value in json.loads(text).items() if key not in OF_ONE_TEXT}
    canonical = json.dumps([content, separator], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
