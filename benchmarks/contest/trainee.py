"""What every contestant but ours has in common: model, data, emulated device, journal, and saved weights.

The runner starts each peer as `python -m benchmarks.contest.KIND SETUP`, SETUP being JSON. The peer says `ready`, reads
the Unix time at which all begin, and trains until it is killed. A newcomer begins at once.

A line of its journal sums up about a second: `{"t", "steps", "tokens", "loss", "busy_s"}`; busy is forward, backward
and the emulated rest of a micro-batch, as in decentral/engine/step.py, and the optimizer's own step. The weights are
saved every few seconds, within the emulated time of a micro-batch, so that this costs no contestant anything.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contest.optimizer import MuonAdamW, groups
from decentral.core import config
from decentral.data import corpora
from decentral.data.corpora import Reading
from decentral.engine.inner import rate_at
from decentral.model import decoder

LINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What one peer is told. `life`: how many have been in its place before it."""

    place: int
    life: int
    peers: int
    throttle: float
    address: str  # its own
    leader: str  # that of place 0
    folder: str
    overrides: list[str]
    options: dict[str, Any] = field(default_factory=dict)  # of the contestant
    save_s: float = 3.0

    @property
    def name(self) -> str:
        return f"{self.place}-{self.life}"

    @property
    def late(self) -> bool:
        """Whether this peer joins while the others train."""
        return self.life > 0

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class Trainee:
    """One peer's device. `gradient`, `clip` and `apply` are a step; between them the algorithms communicate."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)  # several peers share this machine, as in decentral.local
        torch.set_flush_denormal(True)  # as in decentral.peer
        self.setup, self.run = setup, config.load(None, setup.overrides)
        self.layers = decoder.build(self.run.model, self.run.seed)
        self.model = nn.Sequential(*self.layers)
        self.parameters = list(self.model.parameters())
        self.optimizer = MuonAdamW(groups(self.layers, self.run.train), self.run.train)
        reading = Reading(self.run.seed, setup.name)
        self._batches = corpora.corpus(self.run.data, self.run.model).micro_batches(reading)
        self.micro_batches, self.steps = 0, 0  # those of this peer; its optimizer's
        self._journal: IO[str] = (Path(setup.folder) / f"journal-{setup.name}.jsonl").open("a")
        self._line = {"steps": 0, "tokens": 0, "loss": 0.0, "busy_s": 0.0}
        self._line_at = self._saved_at = 0.0

    def ready(self) -> None:
        """Waits for the moment at which all begin."""
        print("ready", flush=True)
        if not self.setup.late:
            time.sleep(max(0.0, float(sys.stdin.readline()) - time.time()))
        self.note(started=True)
        self._line_at = time.time()

    def gradient(self) -> float:
        """Adds a micro-batch's gradient to the parameters'. Gives its loss. Takes as long as the device would."""
        began = time.time()
        assert isinstance(self.run.train.micro_batch, int), "the contest names its micro-batch"
        inputs_BT, targets_BT = self._batches(self.micro_batches, self.run.train.micro_batch)
        loss = decoder.loss_of(self.model(inputs_BT), targets_BT)
        torch.autograd.backward(loss)
        self.micro_batches += 1
        self._save()
        took_s = time.time() - began
        time.sleep(max(took_s, self.run.train.emulated_micro_batch_s) * self.setup.throttle - took_s)
        self._count(inputs_BT.numel(), float(loss.detach()), time.time() - began)
        return float(loss.detach())

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.run.train.clip_norm)

    def rate(self) -> float:
        """The learning rate of the next step."""
        return rate_at(self.run.train, self.steps, self.steps)

    def apply(self, waits: bool = False) -> None:
        """An optimizer's step with the present gradients, which are forgotten. One that `waits` for others, as a
        library's hooks may make it do, does not count as busy."""
        began = time.time()
        self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.spent(0.0 if waits else time.time() - began)

    def spent(self, seconds: float) -> None:
        """Counts time beside a micro-batch's as busy."""
        self._line["busy_s"] += seconds

    @torch.no_grad()
    def weights(self) -> Tensor:
        """A copy of all parameters as one vector [n]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    @torch.no_grad()
    def set_weights(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, self._parts(flat), strict=True):
            parameter.copy_(part)

    def gradients(self) -> Tensor:
        """A copy of all gradients as one vector [n]."""
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        return torch.cat([gradient.flatten() for gradient in found])

    def set_gradients(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, self._parts(flat), strict=True):
            parameter.grad = part.clone()

    def note(self, **fields: Any) -> None:
        """Writes a line."""
        self._journal.write(json.dumps({"t": time.time(), **fields}) + "\n")
        self._journal.flush()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=True)]

    def _count(self, tokens: int, loss: float, busy_s: float) -> None:
        line = self._line
        line["steps"] += 1
        line["tokens"] += tokens
        line["loss"] += loss
        line["busy_s"] += busy_s
        if time.time() - self._line_at >= LINE_S:
            self.note(**{**line, "loss": line["loss"] / line["steps"]})
            self._line = dict.fromkeys(line, 0)
            self._line_at = time.time()

    def _save(self) -> None:
        """Saves the weights, if it is time: whole or not at all."""
        if time.time() - self._saved_at < self.setup.save_s:
            return
        self._saved_at = time.time()
        path = Path(self.setup.folder) / f"{self.setup.name}-{self._saved_at:.3f}.npy"
        with path.with_suffix(".part").open("wb") as file:
            np.save(file, self.weights().numpy())
        path.with_suffix(".part").rename(path)


def from_arguments() -> Trainee:
    """The peer that the process's argument describes."""
    return Trainee(Setup(**json.loads(sys.argv[1])))
