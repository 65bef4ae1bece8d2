"""Where tokens come from: the standard library's text, files of text, or a memory-mapped file of tokens.

`load` also opens what data/stream.py streams; the rest is about tokens that are all at hand.

A fixed share of the tokens is held out, chosen by the tokens themselves (data/source.py), so that peers with
different files hold out the same text. Micro-batch number k of a peer is a pure function of (seed, peer, k): the
position in the data is one integer, and each peer has its own random stream.

Shapes: B sequences, T positions (`context`).
"""

import codecs
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from decentral.core import choices, config, rng
from decentral.core.errors import UserError
from decentral.data import token_file
from decentral.data.data_files import left_out, visible
from decentral.data.source import MicroBatches, Reading, Runs, TrainingData, batch_of, divide
from decentral.data.token_file import Tokens

LEAST_WINDOWS = 20  # in the shortest text, each a token apart from the next
TEXT = "**/*.txt"
CHUNK_TOKENS = 1 << 24  # how many mapped tokens are read at once
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All tokens, and where windows of them that are trained on and held out begin. Targets are the inputs one on."""

    tokens: Tokens
    context: int
    train: Runs
    held_out: Runs
    warnings: list[str]  # which files are not read; a position in these data is a number, and cannot be lost

    def micro_batch(self, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: windows drawn at random from the training text."""
        return self._draw(self.train, generator, sequences)

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """A pure function of (seed, peer, number): the same number gives the same micro-batch every time."""

        def numbered(number: int, sequences: int) -> tuple[Tensor, Tensor]:
            return self.micro_batch(rng.arrays(reading.seed, "data", reading.peer, number), sequences)

        return numbered

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: the same held-out windows on every peer and every time."""
        return self._draw(self.held_out, rng.arrays(0, "held-out"), sequences)

    def _draw(self, runs: Runs, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        starts = runs.sample(generator, sequences)
        return batch_of(np.stack([self.tokens[start : start + self.context + 1] for start in starts]))


def load(data: config.DataConfig, model: config.ModelConfig) -> TrainingData:
    """This peer's data. Raises UserError when they cannot be read, are too few, or do not fit the vocabulary."""
    found: TrainingData = choices.load(data.facts.opens)(data, model)
    return found


def corpus(data: config.DataConfig, model: config.ModelConfig) -> Corpus:
    """Reads or maps all tokens. Raises UserError, as `load` does."""
    tokens, said = _read(data, model.vocabulary)
    need = LEAST_WINDOWS * (model.context + 2)
    if len(tokens) < need:
        raise UserError(f"data: {data.path or data.kind} has {len(tokens)} tokens; at least {need} are needed")
    chunks = [tokens[at : at + CHUNK_TOKENS] for at in range(0, len(tokens), CHUNK_TOKENS)]
    # a byte may have any value: the vocabulary must have all of them
    highest = config.BYTES - 1 if tokens.dtype == np.uint8 else max(int(chunk.max()) for chunk in chunks)
    if highest >= model.vocabulary:
        raise UserError(f"data: token {highest} does not fit model.vocabulary {model.vocabulary}")
    if tokens.dtype.kind == "i" and (lowest := min(int(chunk.min()) for chunk in chunks)) < 0:
        raise UserError(f"data: {data.path} has the token {lowest}; a token is at least 0")
    train, held_out = divide(tokens, data.held_out, model.context + 1)
    return Corpus(tokens, model.context, train, held_out, [said] if said else [])


def _read(data: config.DataConfig, vocabulary: int) -> tuple[Tokens, str | None]:
    """Return the tokens, and which files are not read, for the user."""
    if data.kind == "tokens":
        return token_file.mapped(data, vocabulary), None
    if data.kind == "python-stdlib":
        return _bytes_of(_stdlib_files()), None
    assert data.path is not None
    root = Path(data.path)
    try:
        found = visible(root, data.glob or TEXT) if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {data.glob!r} is no pattern below {root} ({error})") from None
    if not found or not found[0].exists():
        raise UserError(f"data: no text at {root}" + (f" that matches {data.glob or TEXT}" if root.is_dir() else ""))
    return _bytes_of(found), left_out(root, data.glob, found)


def _stdlib_files() -> list[Path]:
    """The standard library's modules, without tests, site-packages and generated tables of constants."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "encodings"}
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skip]  # to look into them takes longer than all the rest
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _bytes_of(paths: list[Path]) -> Tokens:
    """Return the bytes of all files, joined by newlines, without UTF-8 byte-order marks. Raises UserError."""
    texts = []
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror}") from None
        if text.startswith(UTF_16):
            raise UserError(f"data: {path} is UTF-16; save it as UTF-8")
        texts.append(text.removeprefix(codecs.BOM_UTF8))
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)
