"""What nobody can beat by better communication: the contest's devices over links that cost nothing.

    python -m benchmarks.contest.free_links [--scenarios household/equal,household/unequal] [--rates 8e-3,16e-3]
        [--seeds 0,1,2] [--target 1.968] [--seconds 40]

One process takes all peers' micro-batches. In each step of the fastest device the gradients of all that are done are
averaged, and one step of the contest's optimizer is taken with the mean. Time is counted and not waited for, so neither
root nor a quiet machine is needed. Each line has the seconds until the held-out loss is at the target, and the loss at
the end. It is a bound for exact gradients with this optimizer: local steps, outer momentum and other rates of moving
averages are other optimizers, and could do better.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.contest import figures, scenarios
from benchmarks.contest.contestants import MODEL, STEP_S
from benchmarks.contest.evaluate import AT_ONCE_SEQUENCES, SEQUENCES
from benchmarks.contest.figures import Point
from benchmarks.contest.optimizer import MuonAdamW, groups
from benchmarks.contest.runner import GRID_S
from decentral.core import config
from decentral.data import corpora
from decentral.data.corpora import Reading
from decentral.engine.inner import rate_at
from decentral.engine.step import Chain, Device, held_out_loss
from decentral.model import decoder


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    for name in args.scenarios:
        throttles = scenarios.scenario(name).throttles
        for rate in args.rates:
            curves = [trained(throttles, rate, seed, args.seconds) for seed in args.seeds]
            reach = figures.spread([figures.time_to_loss(curve, args.target) for curve in curves])
            ends = [round(curve[-1].loss, 3) for curve in curves]
            print(json.dumps({"scenario": name, "rate": rate, "seconds": reach._asdict(), "loss": ends}), flush=True)


def trained(throttles: Sequence[float], rate: float, seed: int, seconds: float) -> list[Point]:
    """The curve of one run. `throttles`: how many times slower than the fastest each device is, whole numbers."""
    run = config.load(None, [*MODEL, f"seed={seed}", f"train.learning_rate={rate}"])
    layers = decoder.build(run.model, run.seed)
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    optimizer = MuonAdamW(groups(layers, run.train), run.train)
    corpus = corpora.corpus(run.data, run.model)
    drawn = [corpus.micro_batches(Reading(run.seed, f"{place}-0")) for place in range(len(throttles))]
    held_out, cpu = corpus.evaluation(SEQUENCES), Device(torch.device("cpu"), torch.float32)
    assert isinstance(run.train.micro_batch, int), "the contest names its micro-batch"
    curve, tokens, last = list[Point](), 0, round(seconds / STEP_S)
    for step in range(1, last + 1):
        ready = [place for place, slower in enumerate(throttles) if step % round(slower) == 0]
        for place in ready:
            inputs_BT, targets_BT = drawn[place](step // round(throttles[place]) - 1, run.train.micro_batch)
            torch.autograd.backward(decoder.loss_of(model(inputs_BT), targets_BT))
            tokens += inputs_BT.numel()
        for parameter in parameters:
            assert parameter.grad is not None, "every parameter takes part"
            parameter.grad /= len(ready)
        nn.utils.clip_grad_norm_(parameters, run.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(run.train, step - 1, step - 1)
        optimizer.step()
        optimizer.zero_grad()
        if step * STEP_S >= (len(curve) + 1) * GRID_S or step == last:
            curve.append(Point(step * STEP_S, tokens, held_out_loss(Chain(layers), held_out, cpu, AT_ONCE_SEQUENCES)))
    return curve


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(one) for one in text.split(",")]

    parser = argparse.ArgumentParser(description="the contest's devices over links that cost nothing")
    parser.add_argument("--scenarios", type=lambda text: text.split(","), default=list(scenarios.QUICK[:2]))
    parser.add_argument("--rates", type=numbers, default=[4e-3, 8e-3, 16e-3, 32e-3, 64e-3])
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=1.968, help="held-out loss")
    parser.add_argument("--seconds", type=float, default=40.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
