"""One peer that trains our model, data and batch under hivemind.Optimizer, for benchmarks/straggler.py.

It prints `address ADDR` once its DHT listens and `ready` once its optimizer is set up. Then it reads one line, the
Unix time at which all peers begin to measure, trains from that moment on, counts what falls into the
measured window after the warm-up, and writes one JSON line to --result.

Wherever there is a choice, the counts favour hivemind:
- busy: forward, backward and the emulated rest of the micro-batch, as in decentral/engine/step.py; and
  `optimizer.step()` too, unless that call ended an epoch or downloaded state, which is where hivemind waits.
- useful tokens: all but those whose gradients hivemind threw away because this peer had to download the state of
  others. Gradients that are still accumulating when the window ends count as useful.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression, NoCompression
from hivemind.optim.grad_averager import GradientAverager
from torch import Tensor, nn

from decentral.core import config, rng
from decentral.data import corpora
from decentral.engine.optimizers import BETA1, BETA2
from decentral.engine.step import Chain, Device, held_out_loss
from decentral.model import decoder

STARTUP_S = 120.0  # hivemind's own 15 s for its daemon to start is too short on a loaded machine
SHUTDOWN_S = 5.0


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)  # several peers share this machine, as in decentral.local
    torch.set_flush_denormal(True)
    run = config.load(args.config, args.set)
    model = nn.Sequential(*decoder.build(run.model, run.seed))
    corpus = corpora.corpus(run.data, run.model)
    dht = hivemind.DHT(initial_peers=args.join or None, start=True, startup_timeout=STARTUP_S)
    print("address", dht.get_visible_maddrs()[0], flush=True)
    optimizer = _optimizer(args, run, model, dht)
    print("ready", flush=True)
    window = Window(float(sys.stdin.readline()) + args.warm_up, args.seconds)
    counts = train(args, run, model, optimizer, corpus, window)
    device = Device(torch.device("cpu"), torch.float32)
    held_out = held_out_loss(Chain(list(model)), corpus.evaluation(run.eval_sequences), device, 64)
    report = asdict(counts) | {"busy_fraction": window.busy_s / window.seconds, "heldout_loss": held_out}
    args.result.write_text(json.dumps({"throttle": args.throttle} | report) + "\n")
    optimizer.shutdown()
    dht.shutdown()


@dataclass(slots=True)
class Window:
    """The interval of wall-clock time that is measured, which is the same for all peers."""

    begins: float  # Unix time
    seconds: float
    busy_s: float = 0.0

    @property
    def ends(self) -> float:
        return self.begins + self.seconds

    def add(self, began: float, ended: float) -> None:
        """Counts the part of a busy interval that lies inside the window."""
        self.busy_s += max(0.0, min(ended, self.ends) - max(began, self.begins))

    def holds(self, moment: float) -> bool:
        return self.begins <= moment < self.ends


@dataclass(slots=True)
class Counts:
    """What micro-batches that ended inside the window add up to."""

    micro_batches: int = 0
    tokens: int = 0
    useful_tokens: int = 0
    epochs: int = 0  # global steps that this peer made or fetched
    waits: int = 0  # calls of step() that ended an epoch or downloaded state
    longest_wait_s: float = 0.0
    loss_first: float = 0.0
    loss_last: float = 0.0


class Optimizer(hivemind.Optimizer):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's optimizer, which also counts how often it has thrown local gradients away."""

    downloads = 0

    def load_state_from_peers(self, **kwargs: Any) -> None:
        self.downloads += 1
        super().load_state_from_peers(**kwargs)


@dataclass(slots=True)
class Peer:
    """What one step needs, and what has been counted so far."""

    optimizer: Optimizer
    counts: Counts
    window: Window
    pending: int = 0  # tokens inside the window whose gradients accumulate now

    def step(self, tokens: int) -> None:
        """Hands the gradients to hivemind; counts the time as busy, or as a wait if there was one."""
        began, epoch, downloads = time.time(), self.optimizer.local_epoch, self.optimizer.downloads
        self.optimizer.step()
        ended, inside = time.time(), self.window.holds(began)
        self.pending += tokens if inside else 0
        if self.optimizer.local_epoch == epoch and self.optimizer.downloads == downloads:
            self.window.add(began, ended)
            return
        if self.optimizer.downloads == downloads:
            self.counts.useful_tokens += self.pending
        self.pending = 0
        if inside:
            self.counts.epochs += self.optimizer.local_epoch - epoch
            self.counts.waits += 1
            self.counts.longest_wait_s = max(self.counts.longest_wait_s, ended - began)


def train(
    args: argparse.Namespace,
    run: config.Config,
    model: nn.Sequential,
    optimizer: Optimizer,
    corpus: corpora.Corpus,
    window: Window,
) -> Counts:
    """Trains until the window ends: fetch, forward, backward, the rest of the emulated time, step."""
    peer = Peer(optimizer, Counts(), window)
    time.sleep(max(0.0, window.begins - args.warm_up - time.time()))
    losses: list[float] = []
    for inputs_BT, targets_BT in _batches(corpus, run, args.index):
        began = time.time()
        if began >= window.ends:
            break
        optimizer.zero_grad()
        loss = decoder.loss_of(model(inputs_BT), targets_BT)
        torch.autograd.backward(loss)
        took_s = time.time() - began
        time.sleep(max(took_s, run.train.emulated_micro_batch_s) * args.throttle - took_s)
        window.add(began, time.time())
        if window.holds(time.time()):
            peer.counts.micro_batches += 1
            peer.counts.tokens += inputs_BT.numel()
        peer.step(inputs_BT.numel())
        losses.append(float(loss))
    peer.counts.useful_tokens += peer.pending
    peer.counts.loss_first, peer.counts.loss_last = losses[0], losses[-1]
    return peer.counts


def _batches(corpus: corpora.Corpus, run: config.Config, index: int) -> Iterator[tuple[Tensor, Tensor]]:
    assert isinstance(run.train.micro_batch, int), "the benchmark names its micro-batch"
    generator = rng.arrays(run.seed, "hivemind", index)
    while True:
        yield corpus.micro_batch(generator, run.train.micro_batch)


def _optimizer(args: argparse.Namespace, run: config.Config, model: nn.Sequential, dht: hivemind.DHT) -> Optimizer:
    """An optimizer as hivemind's configuration guide says, tuned for a small local run where the guide leaves a choice.

    The averagers' own options have two traps: `averager_opts` reaches only the averager of states, so that the
    one of gradients needs a factory; and `request_timeout` (3 s) must stay below the matchmaking time. The 8-bit codecs
    raise TypeError on numpy >= 2.4; fp16 works. With local updates there are no averaged gradients: each peer takes its
    own steps, and weights are averaged once an epoch, in the background.
    """
    matching: dict[str, Any] = {"request_timeout": min(3.0, args.matchmaking_s / 2)}
    if args.full_groups:
        matching["target_group_size"] = args.peers  # a full group need not wait for the matchmaking time
    codec = Float16Compression() if args.float16 else NoCompression()
    own: dict[str, Any] = {"use_local_updates": True}
    if args.mode != "local":
        own = {
            "offload_optimizer": True,
            "delay_optimizer_step": args.mode == "delayed",
            "delay_grad_averaging": args.mode == "delayed",
            "grad_averager_factory": partial(GradientAverager, **matching),
            "grad_compression": codec,
        }
    return Optimizer(
        dht=dht,
        run_id="straggler",
        batch_size_per_step=run.train.micro_batch,
        target_batch_size=args.target_batch,
        params=model.parameters(),
        optimizer=_adamw(run.train),
        matchmaking_time=args.matchmaking_s,
        averaging_timeout=args.averaging_timeout_s,
        average_state_every=args.state_every,
        state_averaging_compression=codec,
        load_state_compression=codec,
        averager_opts=matching,
        # The default, 3 s, is longer than an epoch here: peers would notice its end too late.
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
        shutdown_timeout=SHUTDOWN_S,
        verbose=args.verbose,
        **own,
    )


def _adamw(train: config.TrainConfig) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=train.peak_rate, betas=(BETA1, BETA2), weight_decay=train.weight_decay)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--throttle", type=float, default=1.0)
    parser.add_argument("--mode", choices=["sync", "delayed", "local"], default="sync")
    parser.add_argument("--float16", action="store_true", help="gradients and weights travel in fp16")
    parser.add_argument("--target-batch", type=int, default=512, help="sequences in a global step")
    parser.add_argument("--matchmaking-s", type=float, default=1.5)
    parser.add_argument("--state-every", type=int, default=1, help="epochs from one averaging of states to the next")
    parser.add_argument("--averaging-timeout-s", type=float, default=10.0)
    parser.add_argument("--full-groups", action="store_true", help="begin averaging once all peers are there")
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
