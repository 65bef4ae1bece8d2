"""An island: several devices of one peer, each with a process (a rank) that holds the whole model.

Start reading at `follow`. Rank 0 is the peer that the swarm sees: its training thread does all jobs. The other ranks
only compute: before each step they wait for an order from rank 0.

    order -> copy what rank 0 changed -> micro-batches, mean of all ranks' gradients -> the same step on all ranks

The ranks train data-parallel with torch's DistributedDataParallel (Li et al., arXiv 2006.15704), over NCCL between
CUDA devices and gloo between CPU processes. Averaged gradients are bit-identical on all ranks, so each rank's optimizer
takes the same step and weights need not be sent. Other changes of the weights (a merge, state from another peer, a
checkpoint, a step of routed training) happen on rank 0 only. Rank 0 marks the changed tensors in `Live.touched`, and
copies them to the other ranks before the next step.

Rank r of R takes the micro-batches r, R + r, 2 R + r, ... of this peer, so no two ranks train the same micro-batch. If
a rank dies, the other ranks lose their connections to it and fail as well; the launcher then restarts all ranks.
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
from decentral.engine import accelerator, measure
from decentral.engine.fragment import Inner, Live, fragments_of
from decentral.engine.step import Chain, Counters, Device, ModelForward, Replica, train_step
from decentral.model import decoder

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # of torch.distributed, by types of devices; gloo for all others
STEP_S = 600.0  # if ranks wait this long for another rank within a step, it counts as hung
WAIT_S = 24 * 3600.0  # a rank fails if rank 0 gives no order for this long; rank 0 may take hours to join a swarm
BUCKET_BYTES = 4  # per parameter, for the copy of the gradients that DistributedDataParallel makes
HEADER = 3  # an order is kind, learning-rate step, number of micro-batches, then two numbers for each fragment


class Order(IntEnum):
    """A kind of order. Rank 0 broadcasts an order, and all ranks carry it out together."""

    FINISH = 0
    MEASURE = 1  # all ranks together time forward and backward passes
    STEP = 2


@dataclass(frozen=True, slots=True)
class Member:
    """The process and the device of one rank; when the ranks connect, they exchange these values."""

    pid: int
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The run and the peer to compute for. Rank 0 sends both to the other ranks, which then build the model."""

    run: config.Config
    peer: PeerId
    micro_batch: int
    folder: Path | None = None  # each rank's position in streamed data is saved here; with None it is not saved


class Island:
    """One rank's connection to the other ranks of its island; it implements `Ranks`. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """Connect to all other ranks, wait for them, and exchange `members`.

        Rank, size and address come from the environment variables that torchrun sets.

        Raises:
            RuntimeError: If not all ranks connect within STEP_S seconds.
        """
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
        limit, backend = timedelta(seconds=STEP_S), BACKENDS.get(device.type, "gloo")
        store, rank, size = next(rendezvous("env://", timeout=limit))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart must not read keys of older attempts
        dist.init_process_group(backend, timeout=limit, store=PrefixStore(attempt, store), rank=rank, world_size=size)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        self.rank, self.size = rank, size
        self.lives: Sequence[Live] = ()
        self.under_way = False  # True while a step runs, and for ever after a failed step
        self._forward: AveragedForward | None = None
        self.device = device
        own = Member(os.getpid(), measure.device_name(device), measure.memory_bytes(device))
        members: list[Member] = [own] * self.size
        dist.all_gather_object(members, own, self.control)
        self.members = tuple(members)

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory that each rank may use: the smallest GPU's memory, or an equal share of the host's."""
        least = min(member.memory_bytes for member in self.members)
        return least // self.size if self.device.type == "cpu" else least

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Order all ranks to step or to measure, and copy rank 0's changed tensors to them. Only rank 0 calls this.

        Returns:
            The model as a function whose gradients are the mean over all ranks.
        """
        self._order(Order.MEASURE if measuring else Order.STEP, counters.lr_step, counters.micro_batches)
        self._copy_touched()
        return self.forward

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's passes. Gradients are averaged over ranks only if `last` is True."""
        return nullcontext() if last else self.forward.averaged.no_sync()

    def end(self, figures: Tensor) -> Tensor:
        """End the step, and return the mean of figures, such as the loss, over all ranks. All ranks must call this."""
        mean: Tensor = figures.to(self.device) / self.size
        dist.all_reduce(mean)
        self.under_way = False
        return mean

    def assign(self, assignment: Assignment, replica: Replica) -> None:
        """Make the other ranks build the model and copy the weights of `replica` to them. Only rank 0 calls this."""
        dist.broadcast_object_list([assignment], group=self.control)
        self.hold(replica)

    def close(self) -> None:
        """Leave the island. On rank 0, first order the other ranks to finish.

        After a failed step this does nothing, since all ranks have failed in that step.
        """
        if self.under_way:
            return
        if self.rank == 0:
            with suppress(RuntimeError):
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

    def assignment(self) -> Assignment | None:
        """Wait for rank 0's assignment and return it; None if rank 0 ends first. Ranks other than 0 call this."""
        received: list[Assignment | None] = [None]
        dist.broadcast_object_list(received, group=self.control)
        return received[0]

    def next_step(self, counters: Counters) -> tuple[Order, ModelForward]:
        """Wait for rank 0's next order, and copy rank 0's counters and changed tensors. Ranks other than 0 call this.

        Args:
            counters: This rank's counters, changed in place.

        Returns:
            The order, and the model as a function whose gradients are the mean over all ranks.

        Raises:
            RuntimeError: If another rank has died, or rank 0 gives no order for WAIT_S seconds.
        """
        numbers = self._exchange(torch.zeros(HEADER + 2 * len(self.lives), dtype=torch.int64))
        counters.lr_step, counters.micro_batches = numbers[1:HEADER]
        for live, steps, marks in zip(self.lives, numbers[HEADER::2], numbers[HEADER + 1 :: 2], strict=True):
            live.steps = steps
            live.touched = {name for at, name in enumerate(live.tensors()) if marks >> at & 1}
        order = Order(numbers[0])
        if order is not Order.FINISH:
            self._copy_touched()
        return order, self.forward

    def hold(self, replica: Replica) -> None:
        """Wrap the model to average gradients, and copy rank 0's weights to all ranks. All ranks must call this."""
        self.lives, self._forward = replica.inner.lives, AveragedForward(replica)

    @property
    def forward(self) -> "AveragedForward":
        """The model as a function whose gradients are the mean over all ranks."""
        assert self._forward is not None, "this rank has no layers yet"
        return self._forward

    def _copy_touched(self) -> None:
        """Copy the tensors in `Live.touched` from rank 0 to all ranks."""
        for live in self.lives:
            for name, tensor in live.tensors().items():
                if name in live.touched and tensor.numel():
                    dist.broadcast(tensor, src=0)
            live.touched.clear()

    def _exchange(self, numbers: Tensor) -> list[int]:
        dist.broadcast(numbers, src=0, group=self.control)
        return [int(number) for number in numbers.tolist()]


class AveragedForward:
    """A model as one function. A backward pass from its `loss` averages the gradients over all ranks.

    Each parameter's `grad` then has the mean. The parameters stay views of the fragments' flat vectors.
    """

    def __init__(self, replica: Replica) -> None:
        """Wrap the model, wait until all ranks have wrapped the model, and copy rank 0's weights to all ranks."""
        self.plain = replica.forward
        # Torch 2.13 deprecates `broadcast_buffers`, but torch 2.9 lacks its successor `forward_sync_buffers`.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.averaged = DistributedDataParallel(
                LossModule(replica),
                broadcast_buffers=False,  # buffers never change, so they need no copies
                find_unused_parameters=replica.run.model.layers is not None,  # user models may leave parameters unused
            )

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV. A backward pass from the logits does not average gradients; use `loss` for that."""
        return self.plain(tokens_BT)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""
        loss: Tensor = self.averaged(tokens_BT, targets_BT)
        return loss


class LossModule(nn.Module):
    """The model and its loss as one module, as DistributedDataParallel needs them to average the gradients."""

    def __init__(self, replica: Replica) -> None:
        """Register the parameters of the replica's layers; `forward` computes the replica's loss."""
        super().__init__()
        self.layers = nn.ModuleList(replica.layers)
        self.loss = replica.forward.loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar."""
        return self.loss(tokens_BT, targets_BT)


@dataclass(slots=True)
class Follower:
    """The whole model on a rank other than 0, without gossip or checkpoints; it implements `Replica`."""

    run: config.Config
    layers: list[nn.Module]
    inner: Inner
    forward: ModelForward

    @classmethod
    def build(cls, run: config.Config, device: torch.device) -> "Follower":
        """Build the model on a device with uninitialised weights; `Island.hold` then copies rank 0's weights."""
        built = decoder.build(run.model, run.seed, drawn=False)
        layers = decoder.placed(built, run, device)
        lives = [Live(cut, layers, device, run.train) for cut in fragments_of(run)]
        compiled = run.train.compile and not accelerator.compile_failure(device)
        return cls(run, layers, Inner(lives, run.train), Chain(layers, compiled, run))


def follow(island: Island, assignment: Assignment, device: Device) -> Follower:
    """Carry out the orders of rank 0 until it finishes, and return the trained model.

    Args:
        island: This rank of the island.
        assignment: The run and the peer, from rank 0.
        device: This rank's device.

    Raises:
        RuntimeError: If another rank dies or hangs, or the device fails.
        UserError: If the run's data cannot be read on this machine.
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
    """Return a bit mask of changed tensors: bit k is 1 if the k-th tensor of `live.tensors` is in `live.touched`."""
    return sum(1 << at for at, name in enumerate(live.tensors()) if name in live.touched)
