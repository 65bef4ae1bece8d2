"""A plain torch training loop of the same model: what the peers of benchmarks/sizes.py are compared with.

    python -m benchmarks.bare_loop [CONFIG] [--set key=value]... [--device cpu] [--warm-up 5] [--seconds 20] [--wait]

It has the config's model, data, micro-batch, dtype, optimizer, clipping and learning rate, as a careful user would
write them (fused AdamW, gradients set to None, no value read back from the device in a step), and nothing else: no
peers, no checkpoints, no evaluation. It prints `training` after its first step, and at the end one line of JSON. With
`--wait` the interval begins at the Unix time that comes on stdin, so that loops and peers can be measured side by side.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decentral.core import config, rng
from decentral.train import data, gpt, measure

STARTS_S = 1e9  # after this the interval has no beginning yet


def main() -> None:
    args = _arguments()
    run = config.load(args.config, args.set)
    assert isinstance(run.train.micro_batch, int), "a bare loop needs a train.micro_batch that is a number"
    interval = [time.time() + args.warm_up, args.seconds] if not args.wait else [STARTS_S + time.time(), args.seconds]
    if args.wait:
        threading.Thread(target=_read_beginning, args=(interval,), daemon=True).start()
    device = measure.choose(args.device, run.train.dtype, 1.0, 0.0)
    layers = gpt.build(run.model, run.seed)
    model = nn.Sequential(*layers).to(device.device)
    forward = torch.compile(model) if run.train.compile and device.device.type == "cuda" else model
    ends = train(run, forward, model, device.device, device.dtype, interval)
    print(json.dumps(_report(run, ends, interval[0], args.seconds)), flush=True)


def train(
    run: config.Config,
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    interval: Sequence[float],
) -> list[float]:
    """Trains until the interval is over. Returns the Unix times at which steps ended."""
    corpus, draw = data.load(run.data, run.model), rng.arrays(run.seed, "bare loop")
    optimizers, schedules = _optimizers(model, run.train)
    ends: list[float] = []
    while time.time() < interval[0] + interval[1]:
        for _ in range(run.train.accumulate):
            inputs_BT, targets_BT = corpus.micro_batch(draw, run.train.micro_batch)  # type: ignore[arg-type]
            inputs_BT, targets_BT = inputs_BT.to(device, non_blocking=True), targets_BT.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                logits_BTV = forward(inputs_BT)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
            (loss / run.train.accumulate).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), run.train.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        ends.append(_now(device, len(ends)))
        if len(ends) == 1:
            print("training", flush=True)
    return ends


def _optimizers(
    model: nn.Module, train: config.TrainConfig
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
    """AdamW for all parameters, or Muon for the blocks' matrices and AdamW for the others; with their schedules."""
    muon = getattr(train, "optimizer", "adamw") == "muon"
    blocks = [p for layer in list(model.children())[1:-1] for p in layer.parameters() if p.ndim == 2] if muon else []
    known = {id(p) for p in blocks}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = train.peak_rate
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=rate, betas=(train.beta1, train.beta2), fused=True)
    ]
    if blocks:
        optimizers.append(
            torch.optim.Muon(blocks, lr=rate, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _share(train, step)) for one in optimizers]
    return optimizers, schedules


def _share(train: config.TrainConfig, step: int) -> float:
    """The part of the learning rate that this step has."""
    warm = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.total_steps is None:
        return warm
    left = max(0.0, 1 - max(0, step - train.warmup_steps) / max(1, train.total_steps - train.warmup_steps))
    return warm * (train.final_rate + (1 - train.final_rate) * left)


def _now(device: torch.device, step: int) -> float:
    """The time. On CUDA steps are queued ahead, so now and then the queue must run dry for the time to be a step's."""
    if device.type == "cuda" and step % 16 == 0:
        torch.cuda.synchronize(device)
    return time.time()


def _read_beginning(interval: list[float]) -> None:
    interval[0] = float(sys.stdin.readline())


def _report(run: config.Config, ends: Sequence[float], begins: float, seconds: float) -> dict[str, float]:
    """The rate between the first and the last end of a step within the interval, and the memory at the end."""
    within = [at for at in ends if begins <= at <= begins + seconds]
    assert isinstance(run.train.micro_batch, int)
    tokens = run.train.micro_batch * run.train.accumulate * run.model.context
    rate = tokens * (len(within) - 1) / (within[-1] - within[0]) if len(within) > 1 else 0.0
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"tokens_per_s": rate, "steps": len(within), "resident_bytes": resident, "device_bytes": device}


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
