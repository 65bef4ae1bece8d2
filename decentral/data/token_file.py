"""Map files of tokens, and read and write the description that `decentral.tokenize` puts beside them.

    words.bin         uint16 or uint32, in this machine's byte order
    words.bin.json    {"tokenizer": digest, "token_bytes": 2, "vocabulary": 8192, "tokens": 1234567}

Peers compare the digests of their tokenizers. Files that other programs wrote have no description. A `.npy` file
contains the width of its tokens. Start reading at `mapped`.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from decentral.core import config, foreign_file, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError
from decentral.data import tokenizer

MOST_DESCRIPTION_BYTES = 4096
LOOKED_AT = 1 << 20  # the first this many tokens of a file without a description show their width
AGAIN = "run python -m decentral.tokenize again"
Tokens = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a file of tokens, stored beside the file as PATH.json."""

    tokenizer: str
    token_bytes: int  # 2 or 4
    vocabulary: int  # the tokenizer's largest token id plus 1
    tokens: int

    def __post_init__(self) -> None:
        """Raise TypeError if a value from the JSON file does not have the type of its field."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                expected = "text" if field.type is str else "a whole number"
                raise TypeError(f"{field.name} is {str(value)[:40]!r}; expected {expected}")


def describe(path: Path, description: Description) -> None:
    """Write the description beside a file of tokens. Raises OSError if it cannot be written."""
    write_atomically(_beside(path), (json.dumps(asdict(description), indent=1) + "\n").encode())


def described(path: Path) -> Description | None:
    """Return the description beside a file of tokens; None if the file has no description.

    Raises:
        UserError: If the description is damaged, or the size of the file contradicts it.
    """
    beside = _beside(path)
    try:
        found = Description(**strict_json.loads(foreign_file.read_bytes(beside, MOST_DESCRIPTION_BYTES)))
        size, expected = path.stat().st_size, found.tokens * found.token_bytes
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        damaged = f"{beside} is not a description of a file of tokens ({error})"
        raise UserError(f"data: {damaged}; {AGAIN}, or remove {beside.name}") from None
    if found.token_bytes not in (2, 4) or size != expected:
        says = f"{beside} expects {found.tokens} tokens of {found.token_bytes} bytes, but {path} has {size} bytes"
        raise UserError(f"data: {says}; {AGAIN}, or remove {beside.name}")
    return found


def digest(run: config.Config) -> str | None:
    """Return the digest of the tokenizer that made this peer's file of tokens.

    Returns:
        The digest in the file's description, or the digest of the user's --tokenizer. None if the file has no
        description and the user names no tokenizer.

    Raises:
        UserError: If the user's --tokenizer is not the tokenizer of the description, or a file is unreadable.
    """
    found = described(Path(run.data.given_path()))
    if run.data.tokenizer is None:
        return found.tokenizer if found else None
    named = tokenizer.load(run.data.tokenizer).digest
    if found and found.tokenizer != named:
        other = (
            f"--tokenizer {run.data.tokenizer} is not the tokenizer that made {run.data.path} (their digests differ)"
        )
        raise UserError(f"{other}; name the tokenizer that made the file, or leave --tokenizer out")
    return named


def mapped(data: config.DataConfig, vocabulary: int) -> Tokens:
    """Return the tokens of the file as a memory map [tokens]: uint16, uint32, or the type of an `.npy` array.

    A file without a description has 4 bytes a token if every second 16-bit word at its beginning is so small that it
    can only be the upper half of a token below `vocabulary`.

    Raises:
        UserError: If the config names no file, the file cannot be mapped, its description is damaged, or it is a NumPy
            array without the suffix .npy.
    """
    path = Path(data.given_path())
    if path.suffix == ".npy":
        return _array(path)
    description = described(path)
    try:
        foreign_file.require_fit(path)
        tokens: Tokens = np.memmap(path, dtype=np.uint16, mode="r")
        if _is_wide(tokens[:LOOKED_AT], vocabulary) if description is None else description.token_bytes == 4:
            tokens = np.memmap(path, dtype=np.uint32, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"data: cannot map {path} as tokens of 2 or 4 bytes: {error}") from None
    if bytes(tokens[:3].tobytes()[:6]) == b"\x93NUMPY":
        raise UserError(f"data: {path} is an array that NumPy saved; give it a name that ends in .npy")
    return tokens


def _is_wide(words: Tokens, vocabulary: int) -> bool:
    return bool(words.any()) and int(words[1::2].max(initial=0)) <= (vocabulary - 1) >> 16


def _array(path: Path) -> Tokens:
    try:
        foreign_file.require_fit(path)
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"data: cannot map {path} as an array of NumPy: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        shape = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise UserError(f"data: {path} has {shape}; expected a one-dimensional array of integers")
    return tokens


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")
