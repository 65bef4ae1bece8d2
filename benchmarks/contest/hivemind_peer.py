"""hivemind.Optimizer in the contest: `python -m benchmarks.contest.hivemind_peer SETUP`.

    batch          sequences of all peers in an epoch, hivemind's global step
    delayed        gradients are averaged and the step taken in the background
    local          use_local_updates: each peer steps by itself, and weights are averaged once an epoch
    float16        gradients, weights and the state for newcomers travel in fp16
    state_every    epochs from one averaging of weights to the next
    matchmaking_s  how long a group is looked for

Settings follow benchmarks/hivemind_peer.py, whose comments say why. hivemind takes a scheduler for the learning rate;
its warm-up counts epochs, or with local updates this peer's own steps.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression, NoCompression
from hivemind.optim.grad_averager import GradientAverager

from benchmarks.contest import trainee
from benchmarks.contest.optimizer import MuonAdamW, groups
from benchmarks.contest.trainee import Trainee

DHT_PORT = 4101
STARTUP_S = 120.0
SHUTDOWN_S = 5.0
AVERAGING_S = 15.0  # the longest that a round may take
POLL_S = 0.1


def main() -> None:
    peer = trainee.from_arguments()
    optimizer = optimizer_of(peer, connect(peer))
    print("up", flush=True)
    if peer.setup.late:
        optimizer.load_state_from_peers()
    peer.ready()
    while True:
        peer.gradient()
        began = time.time()
        peer.clip()
        waits = (optimizer.local_epoch, optimizer.downloads)
        optimizer.step()
        optimizer.zero_grad()
        if (optimizer.local_epoch, optimizer.downloads) == waits:
            peer.spent(time.time() - began)  # where an epoch ended it waited


def connect(peer: Trainee) -> hivemind.DHT:
    """Place 0 leaves its address in the folder; the others join it there."""
    file = Path(peer.setup.folder) / "hivemind-address"
    leads = (peer.setup.place, peer.setup.life) == (0, 0)
    while not leads and not file.exists():
        time.sleep(POLL_S)
    dht = hivemind.DHT(
        initial_peers=None if leads else [file.read_text()],
        host_maddrs=[f"/ip4/{peer.setup.address}/tcp/{DHT_PORT}"],
        start=True,
        startup_timeout=STARTUP_S,
    )
    if leads:
        written = file.with_suffix(".part")
        written.write_text(str(dht.get_visible_maddrs()[0]))
        os.replace(written, file)
    return dht


class CountingOptimizer(hivemind.Optimizer):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's optimizer, which also counts how often it has thrown local gradients away."""

    downloads = 0

    def load_state_from_peers(self, **kwargs: Any) -> None:
        self.downloads += 1
        super().load_state_from_peers(**kwargs)


def optimizer_of(peer: Trainee, dht: hivemind.DHT) -> CountingOptimizer:
    options, train = peer.setup.options, peer.run.train
    matching: dict[str, Any] = {
        "request_timeout": min(3.0, options["matchmaking_s"] / 2),
        "target_group_size": peer.setup.peers,
    }
    codec = Float16Compression() if options["float16"] else NoCompression()
    averaging = dict[str, Any](state_averaging_compression=codec, load_state_compression=codec)
    if not options["local"]:
        averaging |= {
            "grad_averager_factory": partial(GradientAverager, **matching),
            "grad_compression": codec,
            "offload_optimizer": True,
            "delay_optimizer_step": options["delayed"],
            "delay_grad_averaging": options["delayed"],
        }
    return CountingOptimizer(
        dht=dht,
        run_id="contest",
        batch_size_per_step=train.micro_batch,
        target_batch_size=options["batch"],
        params=groups(peer.layers, train),
        optimizer=partial(MuonAdamW, train=train),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=warm_up(peer)),
        use_local_updates=options["local"],
        matchmaking_time=options["matchmaking_s"],
        averaging_timeout=AVERAGING_S,
        average_state_every=options["state_every"],
        averager_opts=matching,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
        shutdown_timeout=SHUTDOWN_S,
        **averaging,
    )


def warm_up(peer: Trainee) -> Callable[[int], float]:
    """hivemind calls the scheduler once an epoch, so the warm-up is by epochs."""
    steps = max(1, min(peer.run.train.warmup_steps, 3))
    return lambda epoch: min(1.0, (epoch + 1) / (steps + 1))


if __name__ == "__main__":
    main()
