"""Load a Hugging Face tokenizer from a local file or folder, and compute a digest with which peers compare tokenizers.

Start reading at `load`. It reads `tokenizer.json` with the `tokenizers` library, downloads nothing and runs no code of
the folder. Like `transformers`, it finds the tokens that begin and end a text in other files of the folder.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.plain_text import error_text
from decentral.core.strict_json import JsonObject
from decentral.data import library_trial
from decentral.model.families import CONFIG_FILE

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_FILE, GENERATION_FILE = "special_tokens_map.json", "generation_config.json"
MAX_TOKENIZER_FILE_BYTES = 256 << 20  # a tokenizer's file with more bytes is neither read nor copied
MAX_SETTINGS_BYTES = 16 << 20  # largest size of a settings file, which may list thousands of added tokens
# If the tokenizer's folder names no eos_token, the separator is the first of these that is in the vocabulary.
USUAL_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
USUAL_TEXT = "A text, with 1 number.\n"  # a child process encodes and decodes this text to test a tokenizer
OF_ONE_TEXT = ("padding", "truncation")  # keys of tokenizer.json that the digest ignores, since `load` disables both
_TRIED: set[tuple[bytes, tuple[str, ...]]] = set()  # trials that succeeded: (digest of a file, encoded texts)


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer, and the special tokens that stand before, between and after documents."""

    tokenizer: "tokenizers.Tokenizer"
    separator: int
    size: int
    digest: str  # two tokenizers with the same digest give the same tokens and the same separator
    before: tuple[int, ...] = ()  # special tokens that the tokenizer puts before each text, such as begin-of-text
    ends: frozenset[int] = frozenset()

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the tokens of each text, without `before`. Raises UserError if a text cannot be encoded."""
        with library_doing("encode a text"):
            found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def tokens_and_offsets(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return the tokens [n] of a text without `before`, and the character indices [n, 2] of their begin and end.

        Raises:
            UserError: If the text cannot be encoded, such as without an unknown token.
        """
        with library_doing("encode this text"):
            found = self.tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)


def load(path: str, separator: str | None = None) -> TextTokenizer:
    """Return the tokenizer of a folder or a file.

    Args:
        path: A folder with a tokenizer.json, or the path of such a file.
        separator: Text of the token between documents. If None, it is the folder's `eos_token`; if the folder has no
            `eos_token`, it is the first of USUAL_SEPARATORS in the vocabulary.

    Raises:
        UserError: If the tokenizer cannot be read, or its vocabulary has no token for `separator`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library's threads would take cores from training
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    if not Path(path).exists():
        raise UserError(f"--tokenizer {path}: no such file or folder; name the folder or the file of the tokenizer")
    if not file.is_file():
        save = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes one"
        raise UserError(f"--tokenizer {path}: there is no {TOKENIZER_FILE}; {save}")
    tokenizers = library()
    named = separator if separator is not None else special_tokens(file.parent).get("eos_token")
    try:
        text = tried_text(file, (USUAL_TEXT, *(USUAL_SEPARATORS if named is None else [named])))
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise UserError(f"--tokenizer {path} cannot be loaded ({error_text(error)})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    known = [name for name in (USUAL_SEPARATORS if named is None else [named]) if name in vocabulary]
    if not known:
        said = "names no end-of-text token" if named is None else f"has no token {named!r}"
        remedy = f"set eos_token in {TOKENIZER_SETTINGS} beside {TOKENIZER_FILE}"
        raise UserError(f"--tokenizer {path}: the tokenizer {said}; {remedy}")
    number, size = vocabulary[known[0]], max(vocabulary.values()) + 1
    ends = ends_of(file.parent) | {number}
    return TextTokenizer(tokenizer, number, size, _digest(text, number), _before(tokenizer, known[0]), ends)


@contextmanager
def library_doing(what: str) -> Iterator[None]:
    """Turn an error of the library, which does `what` in the block, such as "encode this text", into one line.

    Raises:
        UserError: If the block raises any Exception, such as for a word without a token.
    """
    try:
        yield
    except Exception as error:
        remedy = "use one that has an unknown token"
        raise UserError(f"the tokenizer cannot {what} ({error_text(error)}); {remedy}") from None


def tried_text(file: Path, texts: Sequence[str] = (USUAL_TEXT,)) -> str:
    """Return the text of a tokenizer.json after a child process has loaded it without a crash.

    For the same content and the same `texts`, the child process runs only once.

    Args:
        file: The path.
        texts: Texts that the child encodes.

    Raises:
        Exception: If the file cannot be read; TrialFailed if the child process cannot load it.
    """
    data = foreign_file.read_bytes(file, MAX_TOKENIZER_FILE_BYTES)
    trial = hashlib.blake2b(data, digest_size=16).digest(), tuple(texts)
    if trial not in _TRIED:
        library_trial.tried("tokenizers", texts, data, len(data))
        _TRIED.add(trial)
    return data.decode()


def library() -> ModuleType:
    """Return the module `tokenizers`. Raises UserError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("a tokenizer needs the package tokenizers: pip install 'decentral[hf]'") from None
    return tokenizers


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the folder's special tokens by role, such as {"eos_token": "</s>"}.

    Raises:
        UserError: If a settings file of the folder cannot be read.
    """
    found = settings(folder / TOKENIZER_SETTINGS)
    if "added_tokens_decoder" not in found:  # transformers reads this second file in the same case
        found = found | settings(folder / SPECIAL_TOKENS_FILE)
    texts = {role: one.get("content") if isinstance(one, dict) else one for role, one in found.items()}
    return {role: text for role, text in texts.items() if role.endswith("_token") and isinstance(text, str)}


def ends_of(folder: Path) -> frozenset[int]:
    """Return the tokens that end a generated text according to the model's config files in a folder; may be empty.

    Raises:
        UserError: If one of the files exists but cannot be read.
    """
    found: set[int] = set()
    for name in (CONFIG_FILE, GENERATION_FILE):
        ends = settings(folder / name).get("eos_token_id")
        found |= {one for one in (ends if isinstance(ends, list) else [ends]) if type(one) is int}
    return frozenset(found)


def settings(file: Path) -> JsonObject:
    """Return the fields of a JSON settings file beside a tokenizer; an empty dictionary if the file does not exist.

    Raises:
        UserError: If the file cannot be read, is larger than MAX_SETTINGS_BYTES, or is not a JSON object.
    """
    try:
        found = strict_json.loads(foreign_file.read_text(file, MAX_SETTINGS_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error_text(error)})") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} must be a JSON object; it is a {type(found).__name__}")
    return found


def _before(tokenizer: "tokenizers.Tokenizer", text: str) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer adds before a text. The function encodes `text` to find them."""
    with library_doing("encode this text"):
        found = tokenizer.encode(text, add_special_tokens=True)
    marked = zip(found.ids, found.special_tokens_mask, strict=True)
    return tuple(token for token, _ in itertools.takewhile(itemgetter(1), marked))


def _digest(text: str, separator: int) -> str:
    """Return a digest of a tokenizer.json and the separator. White space, key order and OF_ONE_TEXT do not matter."""
    content = {key: value for key, value in json.loads(text).items() if key not in OF_ONE_TEXT}
    canonical = json.dumps([content, separator], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
