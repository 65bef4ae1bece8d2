"""A plain torch training loop of the same model: what the peers of benchmarks/sizes.py are compared with.

    python -m benchmarks.bare_loop [CONFIG] [--set key=value]... [--device cpu] [--warm-up 5] [--seconds 20] [--wait]

It has the config's model, data, micro-batch, dtype, optimizer, clipping and learning rate, as a careful user would
write them (fused AdamW, Muon's products in fp32 on a CPU, denormals flushed, gradients set to None, no value read back
from the device in a step), and nothing else: no peers, no checkpoints, no evaluation. It prints `training` after its
first step, and at the end one line of JSON. With `--wait` the interval begins at the Unix time that comes on stdin, so
that loops are measured side by side.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from benchmarks.processes import resident_bytes
from decentral.core import config, rng
from decentral.core.choices import OPTIMIZERS
from decentral.data import corpora
from decentral.engine import measure
from decentral.engine.inner import rate_at
from decentral.engine.muon import product_dtype
from decentral.engine.optimizers import BETA1, BETA2
from decentral.model import decoder

UNKNOWN_S = 1e9  # from now: while nobody has said when the interval begins
SYNC_S = 1.0  # between two waits for a GPU's queue of work to run dry, as only then it is known which step has ended

# torch's own version of each optimizer, other than AdamW, of the blocks' matrices (core/choices.py)
OF_MATRICES = {"muon": partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")}

Mark = tuple[float, int]  # a Unix time, and how many steps had ended then


def main() -> None:
    args = _arguments()
    run = config.load(args.config, args.set)
    if run.train.micro_batch == "auto":
        raise SystemExit("a bare loop needs a train.micro_batch that is a number")
    interval = [time.time() + args.warm_up, args.seconds] if not args.wait else [time.time() + UNKNOWN_S, args.seconds]
    if args.wait:
        threading.Thread(target=_read_beginning, args=(interval,), daemon=True).start()
    torch.set_flush_denormal(True)
    device = measure.choose(args.device)
    layers = decoder.build(run.model, run.seed)
    model = nn.Sequential(*layers).to(device.device)
    forward = torch.compile(model) if run.train.compile and device.device.type == "cuda" else model
    marks = train(run, forward, model, device.device, device.dtype, interval)
    print(json.dumps(_report(run, marks, interval[0], args.seconds)), flush=True)


def train(
    run: config.Config,
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    interval: Sequence[float],
) -> list[Mark]:
    """Trains until the interval is over. Returns when steps ended."""
    marks: list[Mark] = []
    loop = steps(run, forward, model, device, dtype)
    taken = 0
    while time.time() < interval[0] + interval[1]:
        next(loop)
        taken += 1
        if device.type == "cpu" or not marks or time.time() - marks[-1][0] >= SYNC_S:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks.append((time.time(), taken))
        if taken == 1:
            print("training", flush=True)
    return marks


def steps(
    run: config.Config,
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[int]:
    """Yield the tokens of each training step once it is in the device's queue; the loop never ends by itself."""
    corpus, draw = corpora.corpus(run.data, run.model), rng.arrays(run.seed, "bare loop")
    optimizers, schedules = _optimizers(model, run.train)
    while True:
        for _ in range(run.train.accumulate):
            inputs_BT, targets_BT = corpus.micro_batch(draw, int(run.train.micro_batch))
            inputs_BT, targets_BT = inputs_BT.to(device, non_blocking=True), targets_BT.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                logits_BTV = forward(inputs_BT)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
            (loss / run.train.accumulate).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), run.train.clip_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            with FastestOnCpu() if device.type == "cpu" else nullcontext():
                optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        yield int(run.train.micro_batch) * run.train.accumulate * run.model.context


def _optimizers(
    model: nn.Module, train: config.TrainConfig
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
    """AdamW for all parameters, or another optimizer for the blocks' matrices; with their schedules."""
    inner = OF_MATRICES[train.optimizer] if OPTIMIZERS[train.optimizer].stretch else None
    blocks = [p for layer in list(model.children())[1:-1] for p in layer.parameters() if p.ndim == 2] if inner else []
    known = {id(p) for p in blocks}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = train.peak_rate
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=(BETA1, BETA2), fused=True)]
    if inner:
        optimizers.append(inner(blocks, lr=rate, weight_decay=train.weight_decay))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: rate_at(train, step, step) / rate) for one in optimizers
    ]
    return optimizers, schedules


class FastestOnCpu(BaseTorchFunctionMode):
    """A context in which torch.optim.Muon multiplies in this CPU's faster dtype, fp32 or bf16, not always in bf16."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the function; for a conversion to bf16, return a copy in the faster dtype."""
        if func is Tensor.bfloat16:
            return args[0].to(product_dtype(args[0]), copy=True)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _read_beginning(interval: list[float]) -> None:
    interval[0] = float(sys.stdin.readline())


def _report(run: config.Config, marks: Sequence[Mark], begins: float, seconds: float) -> dict[str, float]:
    """The rate between the first and the last mark within the interval, and the memory at the end."""
    within = [mark for mark in marks if begins <= mark[0] <= begins + seconds]
    tokens = int(run.train.micro_batch) * run.train.accumulate * run.model.context
    steps = within[-1][1] - within[0][1] if within else 0
    rate = tokens * steps / (within[-1][0] - within[0][0]) if steps else 0.0
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "tokens_per_s": rate,
        "steps": steps,
        "resident_bytes": resident_bytes(os.getpid()),
        "device_bytes": device,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before the interval")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--wait", action="store_true", help="the interval begins at the Unix time that stdin gives")
    return parser.parse_args()


if __name__ == "__main__":
    main()
