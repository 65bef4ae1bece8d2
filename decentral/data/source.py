"""What training needs of data, whichever kind they are of: micro-batches of this peer's own, and the held-out ones.

Shapes: B sequences, T positions (`context`).

`divide` chooses which tokens are held out by the tokens themselves, so that peers with different files choose the same:

    tokens -> cuts where the 32 tokens before hash to a small number -> stretches -> their signatures -> held out or not

Each cut depends only on the 32 tokens before it, so an inserted file shifts later tokens but leaves most cuts between
the same tokens (content-defined chunking, LBFS, Muthitacharoen et al., SOSP 2001). A stretch's signature is the
smallest hash in it (MinHash, Broder 1997): a stretch of which a share s was edited keeps its signature with a
probability of about 1 - s.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decentral.model.decoder import MASKED

MicroBatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number, sequences) -> inputs_BT and targets_BT, int64 on the CPU. No number is asked for twice."""

Hashes = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]

_WINDOW = 32  # tokens that a hash is of
_USUAL, _LONGEST = 4, 8  # of a stretch, in units of the shortest
_SAMPLES = 2  # hashes in a stretch of the shortest length from which the signature is chosen
BLOCK_TOKENS = 1 << 16  # hashed at once: what fits into a core's cache
_ALL = 1 << 32  # a hash is below it
_UNKNOWN = _ALL - 1  # the signature of a stretch that has no sample
_FACTOR = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads: a peer's own order follows from it. `folder`: where its position is kept."""

    seed: int
    peer: str
    folder: Path | None = None
    rank: int = 0  # of an island: each rank reads parts of its own
    ranks: int = 1


class TrainingData(Protocol):
    """Data: data/corpora.py has those in memory, data/stream.py those that are streamed."""

    @property
    def warnings(self) -> list[str]:
        """What the user is told of the data once their reading has begun."""

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: held out on every peer, the same ones every time."""

    def micro_batches(self, reading: Reading) -> MicroBatches:
        """The micro-batches of one peer, on one of its devices."""


def batch_of(
    windows_BT: npt.NDArray[np.generic], learned_BT: npt.NDArray[np.bool_] | None = None
) -> tuple[Tensor, Tensor]:
    """inputs_BT and targets_BT of windows that have one position more, as each target is the next input.

    `learned_BT`: which of the windows' tokens are learned, the others being MASKED as targets; None: all.
    """
    tokens_BT = torch.from_numpy(windows_BT.astype(np.int64))
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if learned_BT is not None and not learned_BT.all():
        targets_BT = targets_BT.where(torch.from_numpy(learned_BT[:, 1:]), MASKED)
    return inputs_BT, targets_BT


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of tokens in which a window may begin: run r at `starts[r]` and behind it, up to `counts[r]` places."""

    starts: Positions
    counts: Positions
    ends: Positions  # sums of the counts up to each run's own

    @classmethod
    def of(cls, starts: Positions, counts: Positions) -> "Runs":
        """Return the runs that begin at `starts` and have `counts` places each."""
        return cls(starts, counts, np.cumsum(counts))

    def sample(self, generator: np.random.Generator, windows: int) -> Positions:
        """Return `windows` start positions [windows], int64, sampled uniformly with replacement from all runs."""
        drawn = generator.integers(self.ends[-1], size=windows)
        run = np.searchsorted(self.ends, drawn, side="right")
        return self.starts[run] + drawn - self.ends[run] + self.counts[run]


def divide(tokens: npt.NDArray[np.generic], share: float, window: int) -> tuple[Runs, Runs]:
    """Return where windows to train on may begin, and where held-out windows may begin.

    At least one stretch is held out and one trained on, so a short text may hold out more than `share`.

    Args:
        tokens: All of them; at least 20 (`window` + 1).
        share: Of the stretches, how many are held out; exclusive of 0 and 1.
        window: Tokens of a window.

    Returns:
        The training runs and the held-out runs. No window of one has a token of the other.
    """
    starts, signatures = _stretches(tokens, window + 1)
    chosen = _mixed(~signatures)  # another number than the one by which hashes were sampled
    held = (chosen < share * _ALL) & (signatures != _UNKNOWN)
    held[chosen.argmin()] |= not held.any()
    held[chosen.argmax()] &= not held.all()
    begins = np.flatnonzero(np.diff(held, prepend=not held[0]))  # where held-out stretches follow others, or reverse
    run_starts, kinds = starts[begins], held[begins]
    counts = np.diff(run_starts, append=len(tokens)) - window + 1
    train, out = (Runs.of(run_starts[kinds == kind], counts[kinds == kind]) for kind in (False, True))
    return train, out


def _stretches(tokens: npt.NDArray[np.generic], shortest: int) -> tuple[Positions, Hashes]:
    """Return the start of each stretch, and its signature."""
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
    """Return possible cuts, and a sample of all hashes: their places and values."""
    cuts, places, values = [], [], []
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        before = min(begin, _WINDOW - 1)
        hashes = _hashes(tokens[begin - before : begin + BLOCK_TOKENS].astype(np.uint32))[_WINDOW - 1 :]
        first = begin - before + _WINDOW  # behind the window of the first hash
        cuts.append(first + np.flatnonzero(hashes < _ALL // ((_USUAL - 1) * shortest)))
        sampled = np.flatnonzero(_mixed(hashes) < min(_UNKNOWN, _SAMPLES * _ALL // shortest))
        places.append(first - 1 + sampled)
        values.append(hashes[sampled])
    return np.concatenate(cuts), np.concatenate(places), np.concatenate(values)


def _hashes(tokens: Hashes) -> Hashes:
    """Return a 32-bit hash of each token together with the 31 before it."""
    hashes, factor = _mixed(tokens + np.uint32(1)), _FACTOR
    for width in (1, 2, 4, 8, 16):
        longer = hashes.copy()
        longer[width:] += hashes[:-width] * np.uint32(factor)
        hashes, factor = longer, factor * factor % _ALL
    return _mixed(hashes)


def _mixed(numbers: Hashes) -> Hashes:
    """Mix the bits of 32-bit numbers, one to one (the finaliser of MurmurHash3)."""
    mixed = numbers ^ (numbers >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
