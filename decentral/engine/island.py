"""An island: several devices of one peer, each with a process (a rank) that holds the whole model.

Rank 0 is the peer towards the swarm: its training thread does all jobs. The other ranks only compute: they wait for
rank 0's orders, of which there is one for each step.

    order -> what rank 0 changed since the last step -> micro-batches, the mean of all gradients -> the same step on all

The ranks train data-parallel with torch's DistributedDataParallel (Li et al., arXiv 2006.15704), over NCCL between
CUDA devices and gloo between CPU processes. Gradients are averaged while the backward pass goes on and end as the same
bits on all ranks, so each rank's optimizer takes the same step and no weights travel. What changes the weights
otherwise (a merge, a donor's state, a checkpoint, a step of routes) happens on rank 0 alone, which marks it in
`Live.touched`; before the next step those tensors are copied to the other ranks.

Rank r of R takes the micro-batches r, R + r, 2 R + r and so on of this peer, so none is trained twice.

A rank that dies breaks the others' connections: they fail at once, and the launcher starts all of them again.
"""

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from decentral.core import config
from decentral.core.ids import PeerId
from decentral.data import corpora
from decentral.data.source import Reading
from decentral.engine import measure
from decentral.engine.fragment import Inner, Live, fragments_of
from decentral.engine.step import Chain, Counters, Device, ModelForward, Replica, train_step
from decentral.model import decoder

STEP_S = 600.0  # a rank for which the others wait this long within a step has hung
WAIT_S = 24 * 3600.0  # for rank 0's next order: it may be joining a swarm, and its death is noticed at once
BUCKET_BYTES = 4  # for each parameter: DistributedDataParallel's own copy of the gradients
HEADER = 3  # numbers of an order before those of the fragments: kind, learning-rate step, micro-batch number


class Order(IntEnum):
    """What rank 0 asks of the others."""

    FINISH = 0
    MEASURE = 1  # time forward and backward passes, all at once
    STEP = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, as the others see it."""

    pid: int
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the other ranks have to know of the run and the peer before they can compute."""

    run: config.Config  # rank 0's own, with the code and the data that its user has named
    peer: PeerId
    micro_batch: int  # sequences
    folder: Path | None = None  # the peer's, where a rank keeps its position in data that are streamed


class Island:
    """One rank of its island: the Ranks of engine/step.py. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """Waits until all ranks are here; the environment names them as torchrun does. Raises RuntimeError."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        limit, backend = timedelta(seconds=STEP_S), "nccl" if device.type == "cuda" else "gloo"
        store, rank, size = next(rendezvous("env://", timeout=limit))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a launcher's store may still have the last one's
        dist.init_process_group(backend, timeout=limit, store=PrefixStore(attempt, store), rank=rank, world_size=size)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        self.rank, self.size = rank, size
        self.lives: Sequence[Live] = ()  # once this rank has an assignment
        self.under_way = False  # a step has begun and not ended: after an error no other order may follow
        self._forward: AveragedForward | None = None
        self.device = device
        own = Member(os.getpid(), measure.device_name(device), measure.memory_bytes(device))
        members: list[Member] = [own] * self.size
        dist.all_gather_object(members, own, self.control)
        self.members = tuple(members)

    @property
    def memory_bytes(self) -> int:
        """Of the smallest device. Processes on the CPU share the machine's."""
        least = min(member.memory_bytes for member in self.members)
        return least if self.device.type == "cuda" else least // self.size

    # A step: Ranks

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Orders a step, on rank 0. Gives the layers as one function whose gradients will be the ranks' mean."""
        self._order(Order.MEASURE if measuring else Order.STEP, counters.lr_step, counters.micro_batches)
        self._copy_touched()
        return self.forward

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around the forward and backward pass of a micro-batch: after a step's last one gradients are averaged."""
        return nullcontext() if last else self.forward.averaged.no_sync()

    def end(self, figure: Tensor) -> Tensor:
        """Ends the step with the mean over all ranks of this scalar."""
        mean: Tensor = figure.to(self.device) / self.size
        dist.all_reduce(mean)
        self.under_way = False
        return mean

    # Rank 0

    def assign(self, assignment: Assignment, replica: Replica) -> None:
        """Makes the other ranks build their layers, and waits until they have; they begin with the weights of these."""
        dist.broadcast_object_list([assignment], group=self.control)
        self.hold(replica)

    def close(self) -> None:
        """Ends this rank's part. Rank 0 tells the others to finish, unless a step has failed, which they know."""
        if self.under_way:
            return
        if self.rank == 0:
            with suppress(RuntimeError):  # another rank is gone already
                self._finish()
        dist.destroy_process_group()

    def _finish(self) -> None:
        if self.lives:
            self._order(Order.FINISH)
        else:
            dist.broadcast_object_list([None], group=self.control)

    def _order(self, kind: Order, lr_step: int = 0, micro_batches: int = 0) -> None:
        marks = [number for live in self.lives for number in (live.steps, _marks(live))]
        self.under_way = True
        self._exchange(torch.tensor([kind, lr_step, micro_batches, *marks]))

    # The other ranks

    def assignment(self) -> Assignment | None:
        """Waits for rank 0's; None: it finishes before it has begun."""
        received: list[Assignment | None] = [None]
        dist.broadcast_object_list(received, group=self.control)
        return received[0]

    def next_step(self, counters: Counters) -> tuple[Order, ModelForward]:
        """Waits for rank 0's order, and follows its counters. Raises RuntimeError if a rank is gone."""
        numbers = self._exchange(torch.zeros(HEADER + 2 * len(self.lives), dtype=torch.int64))
        counters.lr_step, counters.micro_batches = numbers[1:HEADER]
        for live, steps, marks in zip(self.lives, numbers[HEADER::2], numbers[HEADER + 1 :: 2], strict=True):
            live.steps = steps
            live.touched = {name for at, name in enumerate(live.tensors()) if marks >> at & 1}
        order = Order(numbers[0])
        if order is not Order.FINISH:
            self._copy_touched()
        return order, self.forward

    # All

    def hold(self, replica: Replica) -> None:
        """Wraps these layers, on all ranks at once: their gradients become the mean over all ranks from now on."""
        self.lives, self._forward = replica.inner.lives, AveragedForward(replica)

    @property
    def forward(self) -> "AveragedForward":
        assert self._forward is not None, "this rank has no layers yet"
        return self._forward

    def _copy_touched(self) -> None:
        """Gives all ranks what rank 0 has touched."""
        for live in self.lives:
            for name, tensor in live.tensors().items():
                if name in live.touched and tensor.numel():
                    dist.broadcast(tensor, src=0)
            live.touched.clear()

    def _exchange(self, numbers: Tensor) -> list[int]:
        dist.broadcast(numbers, src=0, group=self.control)
        return [int(number) for number in numbers.tolist()]


class AveragedForward:
    """A model's layers as one function, whose loss has the mean gradients of all ranks after the backward pass.

    Averaged gradients are copied back to where the parameters have them, and weights stay views of the flat vectors.
    """

    def __init__(self, replica: Replica) -> None:
        """Waits for all ranks; they get rank 0's weights."""
        self.plain = replica.forward
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of a name that torch 2.6 has not yet
            self.averaged = DistributedDataParallel(
                LossModule(replica),
                broadcast_buffers=False,  # they are constants
                find_unused_parameters=replica.run.model.layers is not None,  # a user's own layers may leave some out
            )

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.plain(tokens_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = self.averaged(tokens_BT, targets_BT)
        return loss


class LossModule(nn.Module):
    """Tokens and targets to the loss, as a module with the layers' parameters, which DistributedDataParallel wants."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.layers = nn.ModuleList(replica.layers)
        self.loss = replica.forward.loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.loss(tokens_BT, targets_BT)


@dataclass(slots=True)
class Follower:
    """The whole model on a rank that is not the first: no gossip, no routes, no checkpoint. A Replica."""

    run: config.Config
    layers: list[nn.Module]
    inner: Inner
    forward: ModelForward

    @classmethod
    def build(cls, run: config.Config, device: torch.device) -> "Follower":
        built = decoder.build(run.model, run.seed, drawn=False)  # rank 0's weights come when it is wrapped
        layers = decoder.placed(built, run, device)
        lives = [Live(cut, layers, device, run.train) for cut in fragments_of(run)]
        compiled = run.train.compile and device.type == "cuda"
        return cls(run, layers, Inner(lives, run.train), Chain(layers, compiled, run))


def follow(island: Island, assignment: Assignment, device: Device) -> Follower:
    """Carries out rank 0's orders until it finishes; gives the model as it is then.

    Raises RuntimeError if a rank is gone, and UserError if the run's data are not here.
    """
    run = assignment.run
    reading = Reading(run.seed, assignment.peer, assignment.folder, island.rank, island.size)
    micro_batches = corpora.load(run.data, run.model).micro_batches(reading)
    replica, counters = Follower.build(run, device.device), Counters()
    island.hold(replica)

    def fetch() -> tuple[Tensor, Tensor]:
        number = counters.micro_batches + island.rank
        counters.micro_batches += island.size
        return micro_batches(number, assignment.micro_batch)

    while True:
        order, forward = island.next_step(counters)
        if order is Order.FINISH:
            return replica
        if order is Order.MEASURE:
            measure.step_s(forward, run.model, device, assignment.micro_batch)
        else:
            train_step(forward, fetch, replica.inner, counters.lr_step, run.train, device)


def _marks(live: Live) -> int:
    """The touched tensors of a fragment as bits, in the order of its tensors."""
    return sum(1 << at for at, name in enumerate(live.tensors()) if name in live.touched)
