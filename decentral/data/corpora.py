"""Define training data (`TrainingData`), and read data that are not streamed: Python's source, text, or a token file.

Start reading at `load`, which also opens streamed data (`TextStream`). All other functions read data whose tokens are
in memory or memory-mapped. Micro-batch k of a peer is a pure function of (seed, peer, k), so a peer that restarts needs
to know only k.

A fixed share of the tokens is held out. `divide` chooses it by hashes of the tokens, so that peers with different files
hold out the same text. It cuts the text after any 32 tokens whose hash is below a threshold. The tokens between two
cuts are a stretch. The signature of a stretch decides whether the stretch is held out.

Each cut depends only on the 32 tokens before it, so an inserted file shifts later tokens but leaves most cuts between
the same tokens (content-defined chunking, LBFS, Muthitacharoen et al., SOSP 2001). The signature of a stretch is the
smallest hash in the stretch (MinHash, Broder 1997). If a share s of a stretch is edited, the signature stays the same
with a probability of about 1 - s.

Shapes: B sequences, T positions (`context`).
"""

import codecs
import os
import sysconfig
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decentral.core import choices, config, foreign_file, rng
from decentral.core.errors import UserError
from decentral.data import token_file
from decentral.data.data_files import left_out, visible
from decentral.data.token_file import Tokens
from decentral.model.decoder import MASKED

MicroBatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number, sequences) -> inputs_BT and targets_BT, int64 on the CPU. The caller passes each number only once."""

Hashes = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]

LEAST_SEQUENCES = 20  # a text with fewer sequences is refused, since no part of it could be held out
TEXT = "**/*.txt"  # without data.glob, a folder's files that match this pattern are read
CHUNK_TOKENS = 1 << 24  # a file's tokens are checked in chunks of this size, so a huge file does not fill the memory
UTF8_BYTES = 1 << 22  # a text is checked in parts of this size, so that a huge one does not fill the memory
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HASHED = 32  # each hash covers this many consecutive tokens
_USUAL, _LONGEST = 4, 8  # mean and longest length of a stretch, as multiples of the shortest length
_SAMPLES = 2  # this many hashes are sampled on average from a stretch of the shortest length
BLOCK_TOKENS = 1 << 16  # tokens are hashed in blocks of this size, which fit into the cache of a core
_ALL = 1 << 32
_UNKNOWN = _ALL - 1  # a stretch gets this signature if none of its hashes was sampled
_FACTOR = 0x9E3779B1  # base of the polynomial hash: a prime near 2^32 divided by the golden ratio


@dataclass(frozen=True, slots=True)
class Reading:
    """A reader of data: a peer, or one rank of a peer. All fields but `folder` decide the order of reading."""

    seed: int
    peer: str
    folder: Path | None = None  # the reader's position in streamed data is saved here; with None it is not saved
    rank: int = 0  # index of the process among the peer's processes; no two of them read the same data
    ranks: int = 1


class TrainingData(Protocol):
    """Interface of data to train on; implemented by `Corpus` (data in memory) and `TextStream` (streamed data)."""

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user about the data. The list is complete after the call of `micro_batches`."""

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64 on the CPU: held-out sequences, the same in every call."""

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """Return the function that returns micro-batches; it continues streamed data at the reader's saved position."""


def batch_of(
    sequences_BT: npt.NDArray[np.generic], learned_BT: npt.NDArray[np.bool_] | None = None
) -> tuple[Tensor, Tensor]:
    """Return inputs_BT and targets_BT, int64 on the CPU; each target is the next input.

    Args:
        sequences_BT: Tokens of the sequences, with T + 1 positions.
        learned_BT: (B, T + 1), True if the loss counts the token; if False, the target is MASKED. None: all True.
    """
    tokens_BT = torch.from_numpy(sequences_BT.astype(np.int64))
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if learned_BT is not None and not learned_BT.all():
        targets_BT = targets_BT.where(torch.from_numpy(learned_BT[:, 1:]), MASKED)
    return inputs_BT, targets_BT


@dataclass(frozen=True, slots=True)
class Runs:
    """The positions at which a sequence may begin, as intervals: `counts[i]` positions from `starts[i]` on."""

    starts: Positions
    counts: Positions
    ends: Positions

    @classmethod
    def of(cls, starts: Positions, counts: Positions) -> "Runs":
        """Return the intervals that begin at `starts` and have `counts` positions."""
        return cls(starts, counts, np.cumsum(counts))

    def sample(self, generator: np.random.Generator, sequences: int) -> Positions:
        """Return start positions [sequences], int64, sampled uniformly with replacement from all intervals."""
        drawn = generator.integers(self.ends[-1], size=sequences)
        run = np.searchsorted(self.ends, drawn, side="right")
        return self.starts[run] + drawn - self.ends[run] + self.counts[run]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokens of a text, and the positions at which training sequences and held-out sequences may begin."""

    tokens: Tokens
    context: int
    train: Runs
    held_out: Runs
    warnings: list[str]

    def micro_batch(self, generator: np.random.Generator, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64 on the CPU: sequences sampled at random from the training text."""
        return self._draw(self.train, generator, sequences)

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """Return a function that samples micro-batch `number`, with (seed, peer, number) as the random seed."""

        def numbered(number: int, sequences: int) -> tuple[Tensor, Tensor]:
            return self.micro_batch(rng.arrays(reading.seed, "data", reading.peer, number), sequences)

        return numbered

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT, int64 on the CPU: held-out sequences, the same in every call."""
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
        UserError: If the data cannot be read, have fewer than LEAST_SEQUENCES * (`context` + 2) tokens, or have a token
            outside the vocabulary.
    """
    tokens, said = _read(data, model.vocabulary)
    need = LEAST_SEQUENCES * (model.context + 2)
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
    return Corpus(tokens, model.context, train, held_out, said)


def _read(data: config.DataConfig, vocabulary: int) -> tuple[Tokens, list[str]]:
    """Return the data's tokens, and warnings about unread files of the folder and about files that are not UTF-8."""
    if data.kind == "tokens":
        return token_file.mapped(data, vocabulary), []
    if data.kind == "python-stdlib":
        return _bytes_of(_texts(_stdlib_files())), []
    root = Path(data.given_path())
    if not root.exists():
        raise UserError(f"data: {root} does not exist; give --data PATH, the file or folder with the text")
    try:
        found = visible(root, data.glob or TEXT) if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {data.glob!r} is not a valid pattern in {root} ({error})") from None
    if not found:
        raise UserError(f"data: no text at {root} that matches {data.glob or TEXT}")
    texts = _texts(found)
    said = left_out(root, data.glob, found), _not_utf8(texts)
    return _bytes_of(texts), [one for one in said if one]


def _stdlib_files() -> list[Path]:
    """Return the standard library's modules, without tests, site-packages and generated tables of constants."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "encodings"}
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _texts(paths: list[Path]) -> dict[Path, bytes]:
    """Return the bytes of each file, without a UTF-8 byte-order mark.

    Raises:
        UserError: If a file cannot be read, or is UTF-16.
    """
    texts = {}
    for path in paths:
        try:
            with foreign_file.opened(path) as file:
                text = file.read()
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror}") from None
        if text.startswith(UTF_16):
            raise UserError(f"data: {path} is UTF-16; save it as UTF-8")
        texts[path] = text.removeprefix(codecs.BOM_UTF8)
    return texts


def _bytes_of(texts: dict[Path, bytes]) -> Tokens:
    """Return the bytes of all files, joined by newlines."""
    return np.frombuffer(b"\n".join(texts.values()), dtype=np.uint8)


def _not_utf8(texts: dict[Path, bytes]) -> str | None:
    """Return a warning about the files that are not UTF-8, on whose bytes the model trains as they are; else None."""
    found = [path for path, text in texts.items() if not _is_utf8(text)]
    if not found:
        return None
    which = f"{found[0]} is not UTF-8" if len(found) == 1 else f"{len(found)} files, such as {found[0]}, are not UTF-8"
    remedy = "save text of another encoding as UTF-8, and leave out what is no text"
    return f"data: {which}; the model learns the bytes as they are; {remedy}"


def _is_utf8(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(text), UTF8_BYTES):
            decoder.decode(text[begin : begin + UTF8_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def divide(tokens: npt.NDArray[np.generic], share: float, length: int) -> tuple[Runs, Runs]:
    """Return the positions at which training sequences may begin, and those at which held-out sequences may begin.

    At least one stretch of the text is held out and at least one is not. So more than `share` of a short text may be
    held out.

    Args:
        tokens: All tokens of the text, at least 20 * (`length` + 1).
        share: Expected share of the stretches to hold out, between 0 and 1, both exclusive.
        length: Length of a sequence in tokens.

    Returns:
        The positions for training and for held-out sequences. No token is in both a training and a held-out sequence.
    """
    starts, signatures = _stretches(tokens, length + 1)
    chosen = _mixed(~signatures)  # `~` because `_candidates` samples only hashes whose `_mixed` is small
    held = (chosen < share * _ALL) & (signatures != _UNKNOWN)
    held[chosen.argmin()] |= not held.any()
    held[chosen.argmax()] &= not held.all()
    begins = np.flatnonzero(np.diff(held, prepend=not held[0]))  # indices at which `held` changes
    run_starts, kinds = starts[begins], held[begins]
    counts = np.diff(run_starts, append=len(tokens)) - length + 1
    train, out = (Runs.of(run_starts[kinds == kind], counts[kinds == kind]) for kind in (False, True))
    return train, out


def _stretches(tokens: npt.NDArray[np.generic], shortest: int) -> tuple[Positions, Hashes]:
    """Cut the tokens into stretches of at least `shortest` tokens; return each stretch's start and signature."""
    cuts, places, values = _candidates(tokens, shortest)
    starts, found, view = [0], 0, cuts.data
    while starts[-1] + 2 * shortest <= len(tokens):
        found = bisect_left(view, starts[-1] + shortest, found)
        longest = starts[-1] + _LONGEST * shortest
        cut = min(view[found], longest) if found < len(cuts) else longest
        if cut + shortest > len(tokens):
            break
        starts.append(cut)
    begins = np.array(starts, np.int64)
    signatures = np.full(len(begins), _UNKNOWN, np.uint32)
    np.minimum.at(signatures, np.searchsorted(begins, places, side="right") - 1, values)
    return begins, signatures


def _candidates(tokens: npt.NDArray[np.generic], shortest: int) -> tuple[Positions, Positions, Hashes]:
    """Return the positions of possible cuts, and a sample of all hashes: their positions and their values."""
    cuts, places, values = [], [], []
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        before = min(begin, _HASHED - 1)
        hashes = _hashes(tokens[begin - before : begin + BLOCK_TOKENS].astype(np.uint32))[_HASHED - 1 :]
        first = begin - before + _HASHED
        cuts.append(first + np.flatnonzero(hashes < _ALL // ((_USUAL - 1) * shortest)))
        sampled = np.flatnonzero(_mixed(hashes) < min(_UNKNOWN, _SAMPLES * _ALL // shortest))
        places.append(first - 1 + sampled)
        values.append(hashes[sampled])
    return np.concatenate(cuts), np.concatenate(places), np.concatenate(values)


def _hashes(tokens: Hashes) -> Hashes:
    """Return a 32-bit hash of each token and the 31 tokens before it."""
    hashes, factor = _mixed(tokens + np.uint32(1)), _FACTOR
    for width in (1, 2, 4, 8, 16):
        longer = hashes.copy()
        longer[width:] += hashes[:-width] * np.uint32(factor)
        hashes, factor = longer, factor * factor % _ALL
    return _mixed(hashes)


def _mixed(numbers: Hashes) -> Hashes:
    """Return 32-bit numbers with their bits mixed, one to one (the finaliser of MurmurHash3)."""
    mixed = numbers ^ (numbers >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
