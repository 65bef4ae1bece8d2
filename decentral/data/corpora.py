"""Open a peer's training data, and read data that are not streamed: Python's own source, text files, or a token file.

Start reading at `load`, which also opens streamed data (`TextStream`). All other functions read data whose tokens are
in memory or memory-mapped. A fixed share of the tokens is held out. `source.divide` chooses it by content, so that
peers with different files hold out the same text. Micro-batch k of a peer is a pure function of (seed, peer, k), so a
peer that restarts needs to know only k.

Shapes: B sequences, T positions (`context`).
"""

import codecs
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from decentral.core import choices, config, foreign_file, rng
from decentral.core.errors import UserError
from decentral.data import token_file
from decentral.data.data_files import left_out, visible
from decentral.data.source import MicroBatches, Reading, Runs, TrainingData, batch_of, divide
from decentral.data.token_file import Tokens

LEAST_WINDOWS = 20  # a text with fewer windows (training sequences) is refused, since no part of it could be held out
TEXT = "**/*.txt"  # without data.glob, a folder's files that match this pattern are read
CHUNK_TOKENS = 1 << 24  # a file's tokens are checked in chunks of this size, so a huge file does not fill the memory
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokens of a text, and the positions at which training windows and held-out windows may begin."""

    tokens: Tokens
    context: int
    train: Runs
    held_out: Runs
    warnings: list[str]

    def micro_batch(self, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64 on the CPU: windows sampled at random from the training text."""
        return self._draw(self.train, generator, sequences)

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """Return a function that samples micro-batch `number`, with (seed, peer, number) as the random seed."""

        def numbered(number: int, sequences: int) -> tuple[Tensor, Tensor]:
            return self.micro_batch(rng.arrays(reading.seed, "data", reading.peer, number), sequences)

        return numbered

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64 on the CPU: held-out windows, the same in every call."""
        return self._draw(self.held_out, rng.arrays(0, "held-out"), sequences)

    def _draw(self, runs: Runs, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        starts = runs.sample(generator, sequences)
        return batch_of(np.stack([self.tokens[start : start + self.context + 1] for start in starts]))


def load(data: config.DataConfig, model: config.ModelConfig) -> TrainingData:
    """Open the training data that the section `data` names, in memory or streamed, and return them.

    Raises:
        UserError: If the data cannot be read, are too few, or have tokens outside the model's vocabulary.
    """
    found: TrainingData = choices.load(data.facts.opens)(data, model)
    return found


def corpus(data: config.DataConfig, model: config.ModelConfig) -> Corpus:
    """Read or map all tokens of the data, divide them into training and held-out text, and return both.

    Raises:
        UserError: If the data cannot be read, have fewer than LEAST_WINDOWS * (`context` + 2) tokens, or have a token
            outside the vocabulary.
    """
    tokens, said = _read(data, model.vocabulary)
    need = LEAST_WINDOWS * (model.context + 2)
    if len(tokens) < need:
        few = f"{data.path or data.kind} has {len(tokens)} tokens; at least {need} are needed"
        raise UserError(f"data: {few}; give more text, or lower model.context")
    chunks = [tokens[at : at + CHUNK_TOKENS] for at in range(0, len(tokens), CHUNK_TOKENS)]
    # Other peers' files may contain any byte, so the vocabulary must have all 256 bytes.
    highest = config.BYTES - 1 if tokens.dtype == np.uint8 else max(int(chunk.max()) for chunk in chunks)
    if highest >= model.vocabulary:
        fits = f"set it to at least {highest + 1}"
        raise UserError(f"data: token {highest} does not fit model.vocabulary {model.vocabulary}; {fits}")
    if tokens.dtype.kind == "i" and (lowest := min(int(chunk.min()) for chunk in chunks)) < 0:
        raise UserError(f"data: {data.path} has the token {lowest}; a token is at least 0")
    train, held_out = divide(tokens, data.held_out, model.context + 1)
    return Corpus(tokens, model.context, train, held_out, [said] if said else [])


def _read(data: config.DataConfig, vocabulary: int) -> tuple[Tokens, str | None]:
    """Return the data's tokens, and a warning about unread files of the folder, or None if all files are read."""
    if data.kind == "tokens":
        return token_file.mapped(data, vocabulary), None
    if data.kind == "python-stdlib":
        return _bytes_of(_stdlib_files()), None
    root = Path(data.given_path())
    try:
        found = visible(root, data.glob or TEXT) if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {data.glob!r} is not a valid pattern in {root} ({error})") from None
    if not found or not found[0].exists():
        raise UserError(f"data: no text at {root}" + (f" that matches {data.glob or TEXT}" if root.is_dir() else ""))
    return _bytes_of(found), left_out(root, data.glob, found)


def _stdlib_files() -> list[Path]:
    """Return the standard library's modules, without tests, site-packages and generated tables of constants."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "encodings"}
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _bytes_of(paths: list[Path]) -> Tokens:
    """Return the bytes of all files, joined by newlines, without UTF-8 byte-order marks.

    Raises:
        UserError: If a file cannot be read, or is UTF-16.
    """
    texts = []
    for path in paths:
        try:
            with foreign_file.opened(path) as file:
                text = file.read()
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror}") from None
        if text.startswith(UTF_16):
            raise UserError(f"data: {path} is UTF-16; save it as UTF-8")
        texts.append(text.removeprefix(codecs.BOM_UTF8))
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)
