"""Held-out losses of what a run has saved, after it, so that this costs no contestant anything.

At each moment of a grid, the last weights that each peer saved until then count, if it still lived. Two things a user
may keep are evaluated for all contestants alike: the mean of all peers' weights, and those of the first peer.
What a user would keep is the better of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decentral.core import config
from decentral.data import corpora
from decentral.engine.step import Chain, Device, held_out_loss
from decentral.model import decoder
from decentral.serving import replicas

AT_ONCE_SEQUENCES = 64
FIRST = "0-0"  # the peer that is never killed
SEQUENCES = 256  # held-out ones


Killed = Mapping[str, float]
"""When (Unix time) each peer that was killed was killed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The weights of one peer at a moment (Unix time). `path`: a file of numpy's, or the folder of a checkpoint."""

    peer: str  # PLACE-LIFE
    at: float
    path: Path


@dataclass(frozen=True, slots=True)
class Losses:
    """Held-out losses at a moment, in nats per token; `peers`: how many are in the mean."""

    mean: float
    first: float | None
    peers: int

    @property
    def kept(self) -> float:
        return self.mean if self.first is None else min(self.mean, self.first)


def saved_in(folder: Path) -> list[Saved]:
    """All weights that were saved in this folder, as `PLACE-LIFE-TIME.npy`, or as a folder with a checkpoint,
    `PLACE-LIFE-TIME.kept`."""
    found = []
    for path in [*folder.glob("*.npy"), *folder.glob("*.kept")]:
        place, life, at = path.stem.split("-")
        found.append(Saved(f"{place}-{life}", float(at), path))
    return sorted(found, key=lambda one: one.at)


class Evaluation:
    """Of runs of one config: the model and the held-out text are loaded once."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.run = config.load(None, overrides)
        self.layers = decoder.build(self.run.model, self.run.seed)
        self.parameters = list(nn.Sequential(*self.layers).parameters())
        self.batch = corpora.corpus(self.run.data, self.run.model).evaluation(SEQUENCES)

    def losses(self, saved: Sequence[Saved], moments: Sequence[float], killed: Killed) -> list[Losses | None]:
        """At each of these moments (Unix time); None where nobody has saved anything yet."""
        return [self._at(latest(saved, moment, killed)) for moment in moments]

    def smoothed(self, saved: Sequence[Saved], moments: Sequence[float], killed: Killed) -> float | None:
        """The loss of the mean over these moments of the mean over all peers: everybody may average their own past."""
        found = [self._mean(latest(saved, moment, killed)) for moment in moments]
        means = [mean for mean in found if mean is not None]
        return self._loss(torch.stack(means).mean(dim=0)) if means else None

    def _at(self, found: Mapping[str, Saved]) -> Losses | None:
        mean = self._mean(found)
        if mean is None:
            return None
        first = self._mean({name: one for name, one in found.items() if name == FIRST})
        mean_loss = self._loss(mean)
        if len(found) == 1 and first is not None:
            return Losses(mean_loss, mean_loss, 1)
        return Losses(mean_loss, None if first is None else self._loss(first), len(found))

    def _mean(self, found: Mapping[str, Saved]) -> Tensor | None:
        """The mean of all parameters [n], in the model's order; each layer's over those that hold it. None: nobody."""
        paths = [one.path for one in found.values()]
        if not paths:
            return None
        if paths[0].suffix == ".npy":
            return torch.stack([torch.from_numpy(np.load(path)) for path in paths]).mean(dim=0)
        read = [weights for path in paths if (weights := replicas.read(path)) is not None]
        weights = replicas.average(read)
        if replicas.missing(self.run, weights):
            return None
        layers = replicas.layers_with(self.run, weights)
        return torch.cat([p.detach().flatten() for layer in layers for p in layer.parameters()])

    @torch.no_grad()
    def _loss(self, vector: Tensor) -> float:
        parts = torch.split(vector, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))
        cpu = Device(torch.device("cpu"), torch.float32)
        return held_out_loss(Chain(self.layers), self.batch, cpu, AT_ONCE_SEQUENCES)


def latest(saved: Sequence[Saved], moment: float, killed: Killed) -> dict[str, Saved]:
    """The last weights of each peer that lives at this moment."""
    return {one.peer: one for one in saved if one.at <= moment < killed.get(one.peer, float("inf"))}
