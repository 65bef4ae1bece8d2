"""torchft's DiLoCo and LocalSGD over its gloo process group: `python -m benchmarks.contest.torchft_peer SETUP`.

As torchft's own examples have it: each peer is a replica group of one process with a Manager of its own; place 0 also
runs the lighthouse, which decides on each quorum. A replica that dies is noticed by its missing heartbeats, and one
that joins takes its state over HTTP from another. All of its buckets are one, so that latency is paid once a round.

    diloco       `inner_steps`, `outer_rate`, `outer_momentum` (Nesterov); one fragment
    local_sgd    `inner_steps`; weights are averaged
"""

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.contest import trainee
from benchmarks.contest.trainee import Setup, Trainee

LIGHTHOUSE_PORT, STORE_PORT = 29510, 29520
TIMEOUT_S = 90.0  # longer than a slow peer's round: a quorum waits for all who are alive
HEARTBEATS_MS = 2000  # without one for so long a replica counts as dead
OUTSIDE_S = 60.0


def main() -> None:
    peer = trainee.from_arguments()
    setup = peer.setup
    socket.gethostname = lambda: setup.address  # by which torchft tells others where it serves its state
    manager, *served = connect(peer)
    print("up", flush=True)
    peer.ready()
    every = int(setup.options["inner_steps"])
    with algorithm(peer, manager):
        for step in itertools.count(1):
            peer.gradient()
            peer.apply(waits=step % every == 0)
    del served  # it lives as long as the peer


def connect(peer: Trainee) -> tuple[Any, Any, Any]:
    """The manager, its store, and the lighthouse where it is ours."""
    from torchft import _torchft
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    setup, timeout = peer.setup, timedelta(seconds=TIMEOUT_S)
    lighthouse = None
    if setup.place == 0:
        lighthouse = _torchft.LighthouseServer(
            bind=f"[::]:{LIGHTHOUSE_PORT}",
            min_replicas=1,
            join_timeout_ms=int(TIMEOUT_S * 1000),
            heartbeat_timeout_ms=HEARTBEATS_MS,
        )
    store = TCPStore(setup.address, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: load(peer, state),
        state_dict=lambda: {"model": peer.model.state_dict(), "optimizer": peer.optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timedelta(seconds=OUTSIDE_S),
        rank=0,
        world_size=1,
        store_addr=setup.address,
        store_port=STORE_PORT,
        lighthouse_addr=f"http://{setup.leader}:{LIGHTHOUSE_PORT}",
        replica_id=replica_id(setup),
        hostname=setup.address,
        init_sync=False,  # all weights are drawn from one seed
    )
    return manager, store, lighthouse


def replica_id(setup: Setup) -> str:
    return f"replica_{setup.life}_{setup.place}"


def load(peer: Trainee, state: dict[str, Any]) -> None:
    """Takes another replica's weights and moments; no warm-up is needed with these."""
    peer.model.load_state_dict(state["model"])
    peer.optimizer.load_state_dict(state["optimizer"])
    peer.steps = max(peer.steps, peer.run.train.warmup_steps)
    peer.note(loaded=True)


@contextmanager
def algorithm(peer: Trainee, manager: Any) -> Iterator[None]:
    """Within it torchft's hooks on the inner optimizer synchronise every so many steps."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    options = peer.setup.options
    every = int(options["inner_steps"])
    if options["algorithm"] == "local_sgd":
        context = LocalSGD(manager, peer.model, peer.optimizer, every)
    else:
        outer = outer_optimizer(peer.model, options)
        context = DiLoCo(manager, [peer.model], peer.optimizer, outer, every, use_bucketization=True)
    with context:
        yield


def outer_optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    momentum = options["outer_momentum"]
    return torch.optim.SGD(model.parameters(), lr=options["outer_rate"], momentum=momentum, nesterov=momentum > 0)


if __name__ == "__main__":
    main()
