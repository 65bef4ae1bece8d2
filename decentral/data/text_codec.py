"""How a model's tokens are text: each is a byte, or a Hugging Face tokenizer (data/tokenizer.py) knows them.

A decoder takes one token after another and gives the text that has become whole; half a character waits for its rest.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from decentral.core import strict_json
from decentral.core.config import BYTES, Config
from decentral.core.errors import UserError
from decentral.data import conversations, tokenizer
from decentral.data.tokenizer import TOKENIZER_FILE, TextTokenizer
from decentral.model import huggingface

TextDecoder = Callable[[int], str]
"""Takes the next token, and gives the text that it completes."""


class TextCodec(Protocol):
    """Text to tokens, and back token by token."""

    @property
    def size(self) -> int:
        """Every token is below it."""

    @property
    def start(self) -> int:
        """The token before a text of which nothing is there yet."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens with each of which a text ends; none: texts have no end."""

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""

    def decoder(self) -> TextDecoder:
        """A new decoder."""


class ByteCodec:
    """Token k is byte k of UTF-8, and a file that was trained on begins after a line end (data/corpora.py)."""

    size, start, ends = BYTES, ord("\n"), frozenset[int]()

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decoder(self) -> TextDecoder:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: utf8.decode(bytes((token,)))


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """A Hugging Face tokenizer. `special`: it puts before a text what it is made to, as before what is trained on."""

    tokenizer: TextTokenizer
    special: bool = True

    @property
    def size(self) -> int:
        return self.tokenizer.size

    @property
    def start(self) -> int:
        return self.tokenizer.separator

    @property
    def ends(self) -> frozenset[int]:
        return self.tokenizer.ends

    def encode(self, text: str) -> list[int]:
        ids: Sequence[int] = self.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        return [*(self.tokenizer.before if self.special else ()), *ids]

    def decoder(self) -> TextDecoder:
        library, stream = self.tokenizer.tokenizer, tokenizer.library().decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(library, token) or ""


def of_run(run: Config, path: str | None) -> TextCodec:
    """The codec of a run's text. `path`: the user's tokenizer; None: that of the run's own config.

    Raises UserError if the run's tokens are not bytes and there is no tokenizer, or it is another one than the run's.
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
        raise UserError(f"--tokenizer {found}: this run's tokenizer, or the token between its texts, is another")
    return TokenizerCodec(known)


def of_folder(folder: Path, path: str | None) -> TextCodec:
    """The codec of a Hugging Face model's folder, where `path` names no other tokenizer. Raises UserError."""
    if path is None and _is_of_bytes(folder / TOKENIZER_FILE):
        return ByteCodec()
    known = tokenizer.load(path or str(folder))
    return TokenizerCodec(replace(known, ends=known.ends | tokenizer.ends_of(folder)))


def _is_of_bytes(file: Path) -> bool:
    """Whether that is the tokenizer of bytes that export writes."""
    written = huggingface.tokenizer()
    try:
        return file.stat().st_size < 1 << 16 and strict_json.loads(file.read_text()) == written
    except (OSError, ValueError):
        return False
