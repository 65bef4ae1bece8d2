"""Encode text as a model's tokens, and decode tokens: bytes, or the tokens of a Hugging Face tokenizer.

Start reading at `of_run` and `of_folder`. A decoder is called with one token at a time. It returns the characters that
are complete, and stores the bytes of an incomplete character until later tokens complete the character.
"""

import codecs
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from decentral.core import foreign_file, strict_json
from decentral.core.config import BYTES, Config
from decentral.core.errors import UserError
from decentral.data import conversations, tokenizer
from decentral.data.tokenizer import TOKENIZER_FILE, TextTokenizer
from decentral.model import huggingface

MOST_BYTE_TOKENIZER_BYTES = 1 << 16  # a larger tokenizer.json is not the byte tokenizer, which has 7 kB

TextDecoder = Callable[[int], str]
"""A function that takes the next token of a text, and returns the characters that this token completes."""


class TextCodec(Protocol):
    """Interface that encodes text as tokens and decodes tokens; implemented by `ByteCodec` and `TokenizerCodec`."""

    @property
    def size(self) -> int:
        """The largest token id plus 1."""

    @property
    def start(self) -> int:
        """The token with which generation begins if the prompt is empty."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generated text; empty if no token ends a text."""

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens. Raise UserError if it cannot be encoded."""

    def decoder(self) -> TextDecoder:
        """Return a new decoder for one text."""


class ByteCodec:
    """The codec of a model whose tokens are the bytes of UTF-8 text."""

    size, start, ends = BYTES, ord("\n"), frozenset[int]()

    def encode(self, text: str) -> list[int]:
        """Return the text's UTF-8 bytes, with "?" for each lone surrogate."""
        return list(text.encode(errors="replace"))

    def decoder(self) -> TextDecoder:
        """Return a new decoder for one text, which replaces invalid bytes by U+FFFD."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: utf8.decode(bytes((token,)))


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """The codec of a Hugging Face tokenizer."""

    tokenizer: TextTokenizer
    special: bool = True  # whether `encode` puts the tokenizer's special tokens before each text

    @property
    def size(self) -> int:
        """The largest token id plus 1."""
        return self.tokenizer.size

    @property
    def start(self) -> int:
        """The token that separates documents, with which generation begins if the prompt is empty."""
        return self.tokenizer.separator

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generated text."""
        return self.tokenizer.ends

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens, after the tokenizer's leading special tokens if `special` is set.

        Raises:
            UserError: If the text cannot be encoded, such as without an unknown token.
        """
        ids, _ = self.tokenizer.tokens_and_offsets(text)
        return [*(self.tokenizer.before if self.special else ()), *ids.tolist()]

    def decoder(self) -> TextDecoder:
        """Return a new decoder for one text, without special tokens. It raises UserError if the library fails."""
        library, stream = self.tokenizer.tokenizer, tokenizer.library().decoders.DecodeStream(skip_special_tokens=True)

        def step(token: int) -> str:
            with tokenizer.library_doing(f"decode token {token}"):
                text: str = stream.step(library, token) or ""
            return text

        return step


def of_run(run: Config, path: str | None) -> TextCodec:
    """Return the codec of a run's text.

    Args:
        run: The run's config.
        path: The user's --tokenizer; None: the tokenizer of the config.

    Raises:
        UserError: If the run's tokens are bytes and `path` is set. If the run's tokens are not bytes, and the tokenizer
            is missing, cannot be read, or differs from the run's tokenizer.
    """
    if run.reads_bytes:
        if path is not None:
            raise UserError("--tokenizer: this run's tokens are bytes; leave the flag out")
        return ByteCodec()
    found = path or run.tokenizer
    if found is None:
        raise UserError("this run's tokens are not bytes: name the tokenizer that made them with --tokenizer PATH")
    known = tokenizer.load(found)
    if run.data.tokenizer_digest not in (None, conversations.digest(run.data, found, known.digest)):
        differs = "the tokenizer, or its token between texts, differs from this run's"
        raise UserError(f"--tokenizer {found}: {differs}; name a copy of the run's tokenizer")
    return TokenizerCodec(known)


def of_folder(folder: Path, path: str | None) -> TextCodec:
    """Return the codec of a Hugging Face model's folder.

    Args:
        folder: The model's folder.
        path: A tokenizer to use instead of the tokenizer in the folder; None: the tokenizer in the folder.

    Raises:
        UserError: If the tokenizer cannot be read.
    """
    if path is None and _is_of_bytes(folder / TOKENIZER_FILE):
        return ByteCodec()
    known = tokenizer.load(path or str(folder))
    return TokenizerCodec(replace(known, ends=known.ends | tokenizer.ends_of(folder)))


def _is_of_bytes(file: Path) -> bool:
    """Return whether a file is the byte tokenizer that `decentral export` writes."""
    written = huggingface.tokenizer()
    try:
        return bool(strict_json.loads(foreign_file.read_text(file, MOST_BYTE_TOKENIZER_BYTES)) == written)
    except (OSError, ValueError):
        return False
