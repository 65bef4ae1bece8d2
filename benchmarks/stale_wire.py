"""What thin links and overlapping steps cost in learning: one model in three stages, in one process, at equal tokens.

    python -m benchmarks.stale_wire wire [--steps 600] [--seeds 0,1,2] [--json FILE]
    python -m benchmarks.stale_wire overlap [--under-way 1,4] [--rates 4e-3] [--steps 600] [--seeds 0,1,2] [--stale]

`wire`: hidden values and their gradients go through a codec at both cuts, as they do between two peers, and every
gradient is exact for what was received. `overlap`: so many micro-batches are between the first stage's forward pass and
its backward pass, and a step follows each backward pass, as with `routes.overlap`: gradients are stale by up to
`--under-way` - 1 steps in the first stage, by none in the last. Both passes run at the weights that the backward pass
is likely to find (decentral/engine/look_ahead.py); with `--stale` each runs at those of its own time.

Every run begins with the same weights and sees the same micro-batches, with the default optimizer; the loss is of 128
held-out sequences. Printed is each seed's loss, and the mean of the quotients with the first line's.
"""

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import rotated_codes
from benchmarks.rotated_codes import HALF_STEP, SIGNS, TILE, transform
from decentral.comm.codecs import blockwise
from decentral.core import config, rng
from decentral.data import corpora
from decentral.engine.fragment import Live, fragments
from decentral.engine.inner import Inner, rate_at
from decentral.engine.look_ahead import LookAhead, WeightsAhead
from decentral.engine.step import Chain, Device, held_out_loss
from decentral.model import decoder

HELD_OUT = 128  # sequences
SETTINGS = ["model.depth=4", "model.width=128", "model.context=64", "train.micro_batch=8", "train.warmup_steps=50"]
RUN = config.load(None, SETTINGS)
ROTATED = {"h4": 4, "h3": 3}  # bits of a level
CUTS = (0, 2, 4, 6)  # stages hold layers [CUTS[i], CUTS[i + 1])

Code = Callable[[Tensor], Tensor]
"""What the other side reads of hidden_BTD, or of its gradient."""


def coded(codec: str) -> Code:
    def code(values: Tensor) -> Tensor:
        if codec in ROTATED:
            return rotated_codes.read(ROTATED[codec], values.flatten()).view_as(values)
        return blockwise.decode(codec, blockwise.encode(codec, values.flatten()), values.numel()).view_as(values)

    return code


def dithered(bits: int) -> Code:
    """The rotated code with stochastic rounding: unbiased, within the outermost levels, and twice the error."""
    chance, highest = torch.Generator().manual_seed(0), 2**bits - 1

    def code(values: Tensor) -> Tensor:
        rotated = transform(values.reshape(-1, TILE) * SIGNS / TILE)
        step = 2 * rotated.abs().mean(dim=1, keepdim=True) * float(HALF_STEP[bits]) + 1e-30
        noise = torch.rand(rotated.shape, generator=chance)
        places = torch.floor(rotated / step - 0.5 + noise).clamp(-(highest + 1) / 2, (highest - 1) / 2)
        return (transform((places + 0.5) * step) * SIGNS).view_as(values)

    return code


@dataclass(frozen=True, slots=True)
class Wire:
    """The codes of what goes forward, and of gradients."""

    forward: Code
    backward: Code


WIRES = {
    "fp32": Wire(lambda values: values, lambda values: values),
    **{name: Wire(coded(name), coded(name)) for name in ("bf16", "int8", "h4", "h3", "q4")},
    **{f"{name}, forward alone": Wire(coded(name), lambda values: values) for name in ("h4", "h3")},
    **{f"{name}, gradients alone": Wire(lambda values: values, coded(name)) for name in ("h4", "h3")},
    "int8, gradients q4": Wire(coded("int8"), coded("q4")),
    "q4, gradients int8": Wire(coded("q4"), coded("int8")),
    "h4, gradients int8": Wire(coded("h4"), coded("int8")),
    "h3, gradients int8": Wire(coded("h3"), coded("int8")),
    "h4, gradients dithered": Wire(coded("h4"), dithered(4)),
    "h3, gradients dithered": Wire(coded("h3"), dithered(3)),
}


@dataclass(frozen=True, slots=True)
class Passed:
    """A micro-batch between its passes through a stage."""

    leaving_BTD: Tensor
    input_BTD: Tensor  # what the next stage has received, which gets its gradient there
    ahead: WeightsAhead | None  # what it is computed with, with look-ahead


class Stage:
    """Layers whose steps do not wait for backward passes."""

    def __init__(self, layers: Sequence[nn.Module], lives: Sequence[Live], wire: Wire, look_ahead: bool) -> None:
        self.layers, self.wire, self.lives = layers, wire, lives
        self.ahead = LookAhead(lives) if look_ahead else None

    def forward(self, entering: Tensor) -> Passed:
        """Of tokens_BT or hidden_BTD."""
        lives = self.lives
        ahead = self.ahead.weights(lives[0].fragment.first, lives[-1].fragment.last) if self.ahead else None
        leaving_BTD = entering
        with self._at(ahead):
            for layer in self.layers:
                leaving_BTD = layer(leaving_BTD)
        received_BTD = self.wire.forward(leaving_BTD.detach()).requires_grad_()
        return Passed(leaving_BTD, received_BTD, ahead)

    def backward(self, passed: Passed) -> None:
        assert passed.input_BTD.grad is not None
        with self._at(passed.ahead):
            torch.autograd.backward([passed.leaving_BTD], [self.wire.backward(passed.input_BTD.grad)])
        if self.ahead and passed.ahead:
            self.ahead.came_back(passed.ahead)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within it all fragments of the stage take their step."""
        if self.ahead is None:
            yield
            return
        with ExitStack() as stack:
            for index in range(len(self.lives)):
                stack.enter_context(self.ahead.during_step(index))
            yield

    def _at(self, ahead: WeightsAhead | None) -> AbstractContextManager[None]:
        return self.ahead.at(ahead) if self.ahead and ahead else nullcontext()


class Pipeline:
    """The model in stages, each with its fragments' optimizers."""

    def __init__(self, run: config.Config, seed: int, wire: Wire, look_ahead: bool) -> None:
        self.run = run
        self.layers: list[nn.Module] = list(decoder.build(run.model, seed))
        cuts = fragments(decoder.parameters(run.model), run.gossip.fragment_parameters)
        lives = [Live(cut, self.layers, torch.device("cpu"), run.train, range(len(self.layers))) for cut in cuts]
        self.inner = Inner(lives, run.train)
        self.stages = [
            Stage(
                self.layers[first:last],
                [live for live in lives if first <= live.fragment.first < last],
                wire,
                look_ahead,
            )
            for first, last in pairwise(CUTS[:-1])
        ]

    def loss(self, entering_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD = entering_BTD
        for layer in self.layers[CUTS[-2] : -1]:
            hidden_BTD = layer(hidden_BTD)
        return decoder.last_loss(self.run, self.layers[-1], hidden_BTD, targets_BT)

    def step(self) -> None:
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(stage.stepping())
            self.inner.clip()
            self.inner.step_all(rate_at(self.run.train, self.inner.steps, self.inner.steps), 1)
        self.inner.zero_grad()


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    wire: str = "fp32"
    under_way: int = 1
    look_ahead: bool = False
    rate: float | None = None  # None: the default


def trained(case: Case, seed: int, steps: int) -> float:
    """The held-out loss after so many steps of one micro-batch each."""
    run = RUN if case.rate is None else config.load(None, [*SETTINGS, f"train.learning_rate={case.rate}"])
    corpus, sequences = corpora.corpus(run.data, run.model), run.train.micro_batch
    assert isinstance(sequences, int)
    pipeline, chance = Pipeline(run, seed, WIRES[case.wire], case.look_ahead), rng.arrays(seed, "stale wire")
    zero, one = pipeline.stages
    first: deque[tuple[Passed, Tensor]] = deque()  # between the first and the second stage, with the targets
    second: deque[tuple[Passed, Passed, Tensor]] = deque()  # between the second and the last one
    later = case.under_way // 2  # micro-batches that wait between the first and the second stage
    for _ in range(steps + case.under_way - 1):
        inputs_BT, targets_BT = corpus.micro_batch(chance, sequences)
        first.append((zero.forward(inputs_BT), targets_BT))
        if len(first) > later:
            passed, targets_BT = first.popleft()
            second.append((passed, one.forward(passed.input_BTD), targets_BT))
        if len(first) + len(second) == case.under_way:
            passed, onwards, targets_BT = second.popleft()
            torch.autograd.backward([pipeline.loss(onwards.input_BTD, targets_BT)])
            one.backward(onwards)
            zero.backward(passed)
            pipeline.step()
    whole = Chain(pipeline.layers, run=run)
    return held_out_loss(whole, corpus.evaluation(HELD_OUT), Device(torch.device("cpu"), torch.float32), 32)


def report(name: str, losses: Sequence[float], exact: Sequence[float]) -> dict[str, Any]:
    over = [loss / best for loss, best in zip(losses, exact, strict=True)]
    row = {"run": name, "losses": [round(loss, 4) for loss in losses], "over_the_first": round(mean(over), 4)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wire", "overlap"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--under-way", default="1,2,4")
    parser.add_argument("--rates", help="learning rates, for each of --under-way; the default one without it")
    parser.add_argument("--stale", action="store_true", help="forward passes at the present weights")
    parser.add_argument("--only", help="the wires with these names, separated by semicolons")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds, rows = [int(seed) for seed in args.seeds.split(",")], []
    rates = [float(rate) for rate in args.rates.split(",")] if args.rates else [None]
    exact: list[float] = []
    if args.what == "wire":
        cases = [Case(name, name) for name in (args.only.split(";") if args.only else WIRES)]
    else:
        numbers = [int(number) for number in args.under_way.split(",")]
        ahead = not args.stale
        cases = [
            Case(f"{n} under way, rate {rate or 'default'}", under_way=n, look_ahead=ahead and n > 1, rate=rate)
            for n in numbers
            for rate in rates
        ]
    for case in cases:
        losses = [trained(case, seed, args.steps) for seed in seeds]
        exact = exact or losses
        rows.append(report(case.name, losses, exact))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
