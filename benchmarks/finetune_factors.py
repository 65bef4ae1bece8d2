"""What to average of adapters: both factors, one of them, one at a time, or their product. Three peers, virtual time.

    python -m benchmarks.finetune_base FOLDER
    python -m benchmarks.finetune_factors FOLDER --methods both,B --rates 3e-3,1e-2 --seeds 0 --json factors.jsonl

The peers adapt the folder's base to C++, of which each has other headers. Each takes `--window` steps, then all take
the mean, at once and in fp32, so that nothing but the question matters. All methods end on a window's end.

    alone       no exchange
    sync        the mean gradient at each step: what one process does with three times the batch
    both        the means of both factors
    B           A stays as it was drawn, so that the mean of B is exact (FFA-LoRA, arXiv 2403.12313)
    alternate   A and B are trained in turns, a window each, so that each mean is exact (RoLoRA, arXiv 2409.02346)
    product     the mean of the products B A, cut to the rank by its singular values: the best of that rank
    residual    the means of both factors, and what the mean of the products has more goes into the frozen weights,
                which have to travel then (FedEx-LoRA, arXiv 2410.09432)
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.bare_loop import FastestOnCpu
from benchmarks.finetune_base import CPU, PEER_HEADERS
from decentral.core import config, rng
from decentral.data import corpora
from decentral.engine.optimizers import BETA1, BETA2
from decentral.engine.step import Chain, held_out_loss
from decentral.model import decoder
from decentral.model.lora import AdaptedLinear

METHODS = ("alone", "sync", "both", "B", "alternate", "product", "residual")
EVALUATED = 64  # held-out sequences of each peer
WARM_UP = 20  # steps


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the table."""

    method: str
    rate: float
    seed: int
    window: int
    steps: int
    optimizer: str
    weight_decay: float


class Replica:
    """One peer: the adapted model, its optimizer, and its text."""

    def __init__(self, run: config.Config, task: Task, folder: Path, number: int) -> None:
        keys = {"kind": "tokens", "path": str(folder / f"peer-{number}.bin")}
        self.corpus = corpora.corpus(run.data.model_copy(update=keys), run.model)
        self.layers = decoder.build(run.model, task.seed)
        self.forward = Chain(self.layers, run=run)
        self.draw = rng.arrays(task.seed, "factors", number)
        modules = (module for layer in self.layers for module in layer.modules())
        self.adapted = [module for module in modules if isinstance(module, AdaptedLinear)]
        weights = [one for pair in self.adapted for one in (pair.lora_A.weight, pair.lora_B.weight)]
        decay = task.weight_decay
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Muon(weights, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            if task.optimizer == "muon"
            else torch.optim.AdamW(weights, betas=(BETA1, BETA2), weight_decay=decay, fused=True)
        )
        self.weights, self.clip_norm = weights, run.train.clip_norm

    def backward(self, sequences: int) -> float:
        inputs_BT, targets_BT = self.corpus.micro_batch(self.draw, sequences)
        loss = self.forward.loss(inputs_BT, targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self.weights, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with FastestOnCpu():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, trains_A: bool, trains_B: bool) -> None:
        """Which factors are trained from now on. One without a gradient is not decayed, either."""
        for one in self.adapted:
            one.lora_A.weight.requires_grad_(trains_A)
            one.lora_B.weight.requires_grad_(trains_B)


def play(task: Task, folder: Path, rank: int, sequences: int) -> dict[str, float]:
    """The held-out loss of the mean model over all peers' text, and how far the factors' means are off."""
    model = [f"model.from={folder / 'base'}", "model.context=64", f"model.lora.rank={rank}"]
    tokens = ["data.kind=tokens", f"data.path={folder / 'all.bin'}"]
    run = config.load(None, [*model, *tokens, "train.micro_batch=8"])
    replicas = [Replica(run, task, folder, number) for number in range(len(PEER_HEADERS))]
    off = 0.0
    for step in range(task.steps):
        turn = "AB"[(step // task.window + 1) % 2] if task.method == "alternate" else ""
        for replica in replicas:
            replica.train(turn != "B" and task.method != "B", turn != "A")
            replica.backward(sequences)
        if task.method == "sync":
            _share_gradients(replicas)
        rate = task.rate * min(1.0, (step + 1) / WARM_UP) * (1 - 0.9 * step / task.steps)
        for replica in replicas:
            replica.step(rate)
        if (step + 1) % task.window == 0 and task.method != "alone":
            off = _exchange(task.method, [replica.adapted for replica in replicas])
    different = replicas if task.method == "alone" else replicas[:1]
    losses = [_loss(replica.forward, replicas) for replica in different]
    return {"loss": sum(losses) / len(losses), "off": off}


def _loss(forward: Chain, replicas: Sequence[Replica]) -> float:
    found = [held_out_loss(forward, one.corpus.evaluation(EVALUATED), CPU, 16) for one in replicas]
    return sum(found) / len(found)


def _share_gradients(replicas: Sequence[Replica]) -> None:
    for same in zip(*(replica.weights for replica in replicas), strict=True):
        mean = torch.stack([one.grad for one in same if one.grad is not None]).mean(dim=0)
        for one in same:
            one.grad = mean.clone()


@torch.no_grad()
def _exchange(method: str, replicas: Sequence[Sequence[AdaptedLinear]]) -> float:
    """Takes the mean. Gives the distance between the products' mean and the product of the means, over the length of
    the former."""
    apart, length = 0.0, 0.0
    for same in zip(*replicas, strict=True):
        As, Bs = ([getattr(one, name).weight for one in same] for name in ("lora_A", "lora_B"))
        A, B = torch.stack(As).mean(dim=0), torch.stack(Bs).mean(dim=0)
        mean = torch.stack([b @ a for a, b in zip(As, Bs, strict=True)]).mean(dim=0)
        apart, length = apart + float((mean - B @ A).square().sum()), length + float(mean.square().sum())
        if method == "residual":
            same[0].weight += same[0].scale * (mean - B @ A)
            for one in same[1:]:
                one.weight.copy_(same[0].weight)
        if method == "product":
            A, B = _cut(mean, len(A))
        for one in same:
            one.lora_A.weight.copy_(A)
            one.lora_B.weight.copy_(B)
    return (apart / length) ** 0.5 if length else 0.0


def _cut(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors, of equal lengths, of the closest matrix of this rank (Eckart & Young, 1936)."""
    left, values, right = torch.linalg.svd(product, full_matrices=False)
    root = values[:rank].sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    methods, seeds = args.methods.split(","), [int(seed) for seed in args.seeds.split(",")]
    rates = [float(rate) for rate in args.rates.split(",")]
    for method, rate, seed in itertools.product(methods, rates, seeds):
        yield Task(method, rate, seed, args.window, args.steps, args.optimizer, args.weight_decay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rates", default="3e-3,1e-2")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--window", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="of a peer's micro-batch")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for task in tasks(args):
        began = time.monotonic()
        found = play(task, args.folder, args.rank, args.sequences)
        line = {name: getattr(task, name) for name in Task.__slots__} | found
        line["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(line), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
