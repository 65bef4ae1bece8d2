"""What training needs of data, whichever kind they are of: micro-batches of this peer's own, and the held-out ones.

Shapes: B sequences, T positions (`context`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decentral.model.decoder import MASKED

MicroBatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number, sequences) -> inputs_BT and targets_BT, int64 on the CPU. No number is asked for twice."""


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


def batch_of(windows_BT: npt.NDArray[Any], learned_BT: npt.NDArray[np.bool_] | None = None) -> tuple[Tensor, Tensor]:
    """inputs_BT and targets_BT of windows that have one position more, as each target is the next input.

    `learned_BT`: which of the windows' tokens are learned, the others being MASKED as targets; None: all.
    """
    tokens_BT = torch.from_numpy(windows_BT.astype(np.int64))
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if learned_BT is not None and not learned_BT.all():
        targets_BT = targets_BT.where(torch.from_numpy(learned_BT[:, 1:]), MASKED)
    return inputs_BT, targets_BT
