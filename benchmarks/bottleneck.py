"""What `model.bottleneck` costs in learning, and what it gains over thin links.

    python -m benchmarks.bottleneck loss [--channels 0,16,24] [--hidden 512,800] [--rates 3e-3] [--steps 600]
        [--seeds 0] [--json FILE]
    python -m benchmarks.bottleneck speed [--channels 0,96] [--wires bf16,int8-q4] [--json FILE]

`loss`: one process trains models of width 192, with six blocks and a byte-pair vocabulary of 4,096 tokens, on the text
of Python's standard library, AdamW, at equal tokens. They differ in the number of channels that blocks change (0: all)
and in the width of the feed-forward (`--hidden`): with 16 channels and 800, blocks have about as many parameters
as with all channels and 512. The result is the held-out loss.

`speed`: two peers hold half of a model of 100 M parameters each, over 50 Mb/s and 100 ms one way, in virtual time. Real
nodes route the micro-batches; the devices take 0.2 s for 4,096 tokens in half of the model, which bounds the swarm to
20,480 tokens/s. The result is the tokens/s that counted.
"""

import argparse
import random
import sysconfig
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overlap import WARM_UP_S, Watching
from benchmarks.trained_swarm import say
from decentral.core import config
from decentral.model import decoder
from decentral.sim.host import Pace
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

VOCABULARY = 4096
CONTEXT = 128
SEQUENCES = 8  # in a micro-batch
HELD_OUT = 16  # micro-batches
WARM_UP = 100  # steps in which the learning rate rises; afterwards it falls to a tenth, as a cosine
SMALL = {"width": 192, "depth": 6, "heads": 6, "vocabulary": VOCABULARY, "context": CONTEXT}

LARGE = ("model.width=768", "model.depth=12", "model.vocabulary=16384", "model.context=512", "train.micro_batch=8")
STEP_S = 0.4
MBIT = 1e6 / 8
UP_MBPS, ONE_WAY_S = 50.0, 0.1


@cache
def tokens() -> tuple[Tensor, Tensor]:
    """Return int64 tokens to train on, and held-out tokens: the standard library's files in a random order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    texts = [path.read_text("utf-8", "ignore") for path in files if "test" not in str(path.relative_to(root))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    random.Random(0).shuffle(texts)
    found = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    cut = len(found) * 19 // 20
    return found[:cut], found[cut:]


def batch(source: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(source) - CONTEXT - 1, (SEQUENCES, 1), generator=chance)
    drawn = source[starts + torch.arange(CONTEXT + 1)]
    return drawn[:, :-1], drawn[:, 1:]


def learned(channels: int, hidden: int, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train one model for `steps` steps and return its held-out loss."""
    model = config.ModelConfig.model_validate({**SMALL, "hidden": hidden, "bottleneck": channels or None})
    whole = nn.Sequential(*decoder.build(model, seed))
    matrices, gains = ([one for one in whole.parameters() if (one.dim() > 1) == wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - WARM_UP, rate / 10)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, 1.0, WARM_UP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [WARM_UP])
    train, held_out = tokens()
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs_BT, targets_BT = batch(train, chance)
        optimizer.zero_grad()
        decoder.loss_of(whole(inputs_BT), targets_BT).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        pairs = [batch(held_out, chance) for _ in range(HELD_OUT)]
        losses = [float(decoder.loss_of(whole(inputs_BT), targets_BT)) for inputs_BT, targets_BT in pairs]
    parameters = sum(model.layer_parameters)
    loss = round(sum(losses) / HELD_OUT, 4)
    return {"channels": channels, "hidden": hidden, "rate": rate, "seed": seed, "parameters": parameters, "loss": loss}


def speed(channels: int, wire: str, seconds: float) -> dict[str, Any]:
    """Return the tokens/s of two peers with half of the model each, in virtual time."""
    given = [f"model.bottleneck={channels}"] if channels else []
    loaded = config.load(None, [*LARGE, *given, f"routes.wire={wire}", "routes.overlap=true"])
    micro_batch = int(loaded.train.micro_batch) * loaded.model.context
    shape = SwarmSettings.of(loaded, Pace(STEP_S, job_s=1e-4), (1.0, 1.0), micro_batch)
    half = shape.fragments[len(shape.fragments) // 2].first
    shape = replace(shape, memory=(1 << 40,), spans=((0, half), (half, shape.fragments[-1].last)))
    link, watch, end = (
        TypicalLink(ONE_WAY_S, UP_MBPS * MBIT, UP_MBPS * MBIT, spread=0.0),
        Watching(),
        WARM_UP_S + seconds,
    )
    run(Scenario(shape, 2, end, 1, (), link, audited=False), observer=watch)
    rate = watch.tokens_per_s(WARM_UP_S, end)
    bound = 2 * micro_batch / STEP_S
    return {"channels": channels, "wire": wire, "tokens_per_s": round(rate), "of_bound": round(rate / bound, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="what a bottleneck costs in learning, and gains over thin links")
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("--channels", default="0,16,24", help="of the hidden values that blocks change; 0: all")
    parser.add_argument("--hidden", default="512", help="channels of the feed-forward")
    parser.add_argument("--rates", default="3e-3")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--wires", default="bf16,int8-q4")
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time")
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for channels in map(int, args.channels.split(",")):
        if args.what == "speed":
            for wire in args.wires.split(","):
                say(speed(channels, wire, args.seconds), args.json)
            continue
        for hidden, rate, seed in product(args.hidden.split(","), args.rates.split(","), args.seeds.split(",")):
            began = time.process_time()
            line = learned(channels, int(hidden), float(rate), args.steps, int(seed))
            say(line | {"processor_s": round(time.process_time() - began)}, args.json)


if __name__ == "__main__":
    main()
