"""What thin links and overlapping steps cost in learning: one model in three stages, in one process, at equal tokens.

    python -m benchmarks.stale_wire wire [--steps 600] [--seeds 0,1,2] [--json FILE]
    python -m benchmarks.stale_wire overlap [--under-way 4] [--steps 600] [--seeds 0,1,2]

`wire`: hidden values and their gradients go through a codec at both cuts, as they do between two peers, and every
gradient is exact for what was received. `overlap`: so many micro-batches are between the first stage's forward pass and
its backward pass, and a step follows each backward pass, as with `routes.overlap`: gradients are stale by up to
`--under-way` - 1 steps in the first stage, by none in the last. Weights change under a pass that waits, as they do at a
peer (decentral/train/stage_runner.py).

Every run begins with the same weights and sees the same micro-batches, at the default optimizer and learning rate; the
loss is of 128 held-out sequences. Printed is each seed's loss, and the mean of the quotients with the first line's.
"""

import argparse
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from decentral.core import config, rng
from decentral.train import compress, data, gpt
from decentral.train.inner import Inner, Live, fragments, rate_at
from decentral.train.rotated_codes import transform
from decentral.train.rotation_kernels import HALF_STEP, SIGNS, TILE
from decentral.train.step import Chain, Device, held_out_loss

HELD_OUT = 128  # sequences
RUN = config.load(
    None, ["model.depth=4", "model.width=128", "model.context=64", "train.micro_batch=8", "train.warmup_steps=50"]
)
CUTS = (0, 2, 4, 6)  # stages hold layers [CUTS[i], CUTS[i + 1])

Code = Callable[[Tensor], Tensor]
"""What the other side reads of hidden_BTD, or of its gradient."""


def coded(codec: str) -> Code:
    def code(values: Tensor) -> Tensor:
        return compress.decode(codec, compress.encode(codec, values.flatten()), values.numel()).view_as(values)

    return code


def dithered(bits: int) -> Code:
    """The rotated code with stochastic rounding: unbiased, within the outermost levels, and twice the error."""
    chance, highest, signs = torch.Generator().manual_seed(0), 2**bits - 1, torch.from_numpy(SIGNS)

    def code(values: Tensor) -> Tensor:
        rotated = transform(values.reshape(-1, TILE) * signs / TILE)
        step = 2 * rotated.abs().mean(dim=1, keepdim=True) * float(HALF_STEP[bits]) + 1e-30
        noise = torch.rand(rotated.shape, generator=chance)
        places = torch.floor(rotated / step - 0.5 + noise).clamp(-(highest + 1) / 2, (highest - 1) / 2)
        return (transform((places + 0.5) * step) * signs).view_as(values)

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


class Pipeline:
    """The model in stages, each with its fragments' optimizers."""

    def __init__(self, run: config.Config, seed: int, wire: Wire) -> None:
        self.run, self.wire = run, wire
        self.layers: list[nn.Module] = list(gpt.build(run.model, seed))
        cuts = fragments(gpt.parameters(run.model), run.gossip.fragment_parameters)
        self.lives = [Live(cut, self.layers, torch.device("cpu"), run.train, range(len(self.layers))) for cut in cuts]
        self.inner = Inner(self.lives, run.train)

    def through(self, stage: int, entering: Tensor) -> Tensor:
        """hidden_BTD that leaves a stage which is not the last."""
        for layer in self.layers[CUTS[stage] : CUTS[stage + 1]]:
            entering = layer(entering)
        return entering

    def received(self, leaving_BTD: Tensor) -> Tensor:
        """What the next stage takes for its input."""
        return self.wire.forward(leaving_BTD.detach()).requires_grad_()

    def loss(self, entering_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD = entering_BTD
        for layer in self.layers[CUTS[-2] : -1]:
            hidden_BTD = layer(hidden_BTD)
        return gpt.last_loss(self.run, self.layers[-1], hidden_BTD, targets_BT)

    def back(self, leaving_BTD: Tensor, input_BTD: Tensor) -> None:
        """The backward pass of the stage whose output went on as `input_BTD`, which has its gradient."""
        assert input_BTD.grad is not None
        torch.autograd.backward([leaving_BTD], [self.wire.backward(input_BTD.grad)])

    def step(self) -> None:
        self.inner.clip()
        self.inner.step(rate_at(self.run.train, self.inner.steps, self.inner.steps), 1)
        self.inner.zero_grad()


def trained(run: config.Config, seed: int, wire: Wire, under_way: int, steps: int) -> float:
    """The held-out loss after so many steps of one micro-batch each."""
    corpus, sequences = data.corpus(run.data, run.model), run.train.micro_batch
    assert isinstance(sequences, int)
    pipeline, chance = Pipeline(run, seed, wire), rng.arrays(seed, "stale wire")
    first: deque[tuple[Tensor, Tensor, Tensor]] = deque()  # leaving stage 0, entering stage 1, targets
    second: deque[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]] = deque()  # both stages, targets
    later = under_way // 2  # micro-batches that wait between the first and the second stage
    for _ in range(steps + under_way - 1):
        inputs_BT, targets_BT = corpus.micro_batch(chance, sequences)
        leaving_BTD = pipeline.through(0, inputs_BT)
        first.append((leaving_BTD, pipeline.received(leaving_BTD), targets_BT))
        if len(first) > later:
            leaving_BTD, input_BTD, targets_BT = first.popleft()
            onwards_BTD = pipeline.through(1, input_BTD)
            second.append(((leaving_BTD, input_BTD), (onwards_BTD, pipeline.received(onwards_BTD)), targets_BT))
        if len(first) + len(second) == under_way:
            zero, one, targets_BT = second.popleft()
            torch.autograd.backward([pipeline.loss(one[1], targets_BT)])
            pipeline.back(*one)
            pipeline.back(*zero)
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
    parser.add_argument("--only", help="the wires with these names, separated by semicolons")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds, rows = [int(seed) for seed in args.seeds.split(",")], []
    exact: list[float] = []
    wires = args.only.split(";") if args.only else list(WIRES)
    cases = (
        [(name, 1) for name in wires] if args.what == "wire" else [("fp32", int(k)) for k in args.under_way.split(",")]
    )
    for name, under_way in cases:
        losses = [trained(RUN, seed, WIRES[name], under_way, args.steps) for seed in seeds]
        exact = exact or losses
        rows.append(report(name if args.what == "wire" else f"{under_way} under way", losses, exact))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
