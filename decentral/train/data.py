"""Where tokens come from: the standard library's text, files of text, or a memory-mapped file of tokens.

`load` also opens what train/text_stream.py streams; the rest is about tokens that are all at hand.

The tokens are cut into stretches of 16 Ki, and a fixed share of the stretches is held out, chosen by their number, so
that every peer holds out the same ones. Micro-batch number k of a peer is a pure function of (seed, peer, k): the
position in the data is one integer, and each peer has its own random stream.

Shapes: B sequences, T positions (`context`).
"""

import os
import sysconfig
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from decentral.core import config, rng
from decentral.core.errors import UserError
from decentral.train.data_source import MicroBatches, Reading, TrainingData, batch_of
from decentral.train.text_stream import TextStream

STRETCH_TOKENS = 16 * 1024
TEXT = "**/*.txt"
CHUNK_TOKENS = 1 << 24  # how many mapped tokens are read at once
Tokens = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Corpus:
    """All tokens, and the stretches of them that are trained on and held out. Targets are the inputs one token on."""

    tokens: Tokens
    context: int
    train: npt.NDArray[np.int64]  # where each stretch begins that is trained on
    held_out: npt.NDArray[np.int64]  # where each stretch begins that is held out
    stretch: int  # tokens of a stretch

    def micro_batch(self, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: windows drawn at random from the training stretches."""
        return self._draw(self.train, generator, sequences)

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """A pure function of (seed, peer, number): the same number gives the same micro-batch every time."""

        def numbered(number: int, sequences: int) -> tuple[Tensor, Tensor]:
            return self.micro_batch(rng.arrays(reading.seed, "data", reading.peer, number), sequences)

        return numbered

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: the same held-out windows on every peer and every time."""
        return self._draw(self.held_out, rng.arrays(0, "held-out"), sequences)

    def _draw(
        self, stretches: npt.NDArray[np.int64], generator: np.random.Generator, sequences: int
    ) -> tuple[Tensor, Tensor]:
        starts = stretches[generator.integers(len(stretches), size=sequences)]
        starts = starts + generator.integers(self.stretch - self.context, size=sequences)
        return batch_of(np.stack([self.tokens[start : start + self.context + 1] for start in starts]))


def load(data: config.DataConfig, model: config.ModelConfig) -> TrainingData:
    """This peer's data. Raises UserError when they cannot be read, are too few, or do not fit the vocabulary."""
    return TextStream(data, model) if data.kind == "huggingface" else corpus(data, model)


def corpus(data: config.DataConfig, model: config.ModelConfig) -> Corpus:
    """Reads or maps all tokens. Raises UserError, as `load` does."""
    tokens = _read(data)
    stretch = min(STRETCH_TOKENS, len(tokens) // 20)
    if stretch <= model.context + 1:
        need = 20 * (model.context + 2)
        raise UserError(f"data: {data.path or data.kind} has {len(tokens)} tokens; at least {need} are needed")
    chunks = range(0, len(tokens), CHUNK_TOKENS)  # a byte may have any value: the vocabulary must have all of them
    highest = 255 if tokens.dtype == np.uint8 else max(int(tokens[at : at + CHUNK_TOKENS].max()) for at in chunks)
    if highest >= model.vocabulary:
        raise UserError(f"data: token {highest} does not fit model.vocabulary {model.vocabulary}")
    starts = np.arange(len(tokens) // stretch, dtype=np.int64) * stretch
    held = _held_out(len(starts), data.held_out)
    return Corpus(tokens, model.context, starts[~held], starts[held], stretch)


def _held_out(stretches: int, share: float) -> npt.NDArray[np.bool_]:
    """Which stretches are held out: this share of them as nearly as it can be, spread evenly, and at least one of each
    kind. All peers agree on them, so they follow from whole numbers."""
    part = Fraction(share).limit_denominator(1_000_000)
    marks = [number * part.numerator // part.denominator for number in range(stretches + 1)]
    held = np.diff(marks).astype(bool)
    held[-1] |= not held.any()
    held[0] &= not held.all()
    return held


def _read(data: config.DataConfig) -> Tokens:
    if data.kind == "tokens":
        return _map(data)
    if data.kind == "python-stdlib":
        return _bytes_of(_stdlib_files())
    assert data.path is not None
    root = Path(data.path)
    try:
        found = sorted(path for path in root.glob(data.glob or TEXT) if path.is_file()) if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {data.glob!r} is no pattern below {root} ({error})") from None
    if not found or not found[0].exists():
        raise UserError(f"data: no text at {root}" + (f" that matches {data.glob or TEXT}" if root.is_dir() else ""))
    return _bytes_of(found)


def _map(data: config.DataConfig) -> Tokens:
    assert data.path is not None
    dtype = np.uint16 if data.token_bytes == 2 else np.uint32
    try:
        return np.memmap(data.path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"data: cannot map {data.path} as {dtype.__name__}: {error}") from None


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
    try:
        return np.frombuffer(b"\n".join(path.read_bytes() for path in paths), dtype=np.uint8)
    except OSError as error:
        raise UserError(f"data: cannot read {error.filename}: {error.strerror}") from None
