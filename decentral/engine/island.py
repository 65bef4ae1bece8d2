"""An island: several devices of one peer, each with a process (a rank) that holds the whole model or a part of it.

Start reading at `follow`. Rank 0 is the peer that the swarm sees: its training thread does all jobs. The other ranks
only compute: before each step they wait for an order from rank 0.

    order -> copy what rank 0 changed -> micro-batches, mean of all ranks' gradients -> the same step on all ranks

The ranks train data-parallel, over NCCL between CUDA devices and gloo between CPU processes. If a model does not fit
into each device, each rank has only a part of every parameter (engine/sharded.py). Otherwise each rank has the whole
model, and torch's DistributedDataParallel (Li et al., arXiv 2006.15704) averages the gradients. Averaged gradients are
then bit-identical on all ranks, so each rank's optimizer takes the same step and weights need not be sent. Other
changes of the weights (a merge, state from another peer, a checkpoint, a step of routed training) happen on rank 0
only. Rank 0 marks the tensors in `Live.changed_tensors`, and copies them to the other ranks before the next step.

Rank r of R takes the micro-batches r, R + r, 2 R + r, ... of this peer, so no two ranks train the same micro-batch. If
a rank dies, the other ranks lose their connections to it and fail as well; the launcher then restarts all ranks.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.outer_kernels import OuterKernels, TorchKernels
from decentral.comm.gossip.update_rules import RuleTools
from decentral.core import config
from decentral.core.choices import ALGORITHMS, load
from decentral.core.ids import PeerId
from decentral.core.rank_place import Split
from decentral.data import corpora
from decentral.data.corpora import Reading
from decentral.engine import accelerator, measure
from decentral.engine.fragment import Live, fragments_of
from decentral.engine.inner import Inner
from decentral.engine.shards import Order, Shards
from decentral.engine.step import (
    Batch,
    BuiltReplica,
    Chain,
    Counters,
    Device,
    LossModule,
    ModelForward,
    Replica,
    flushed_denormals,
    held_out_part,
    train_step,
)
from decentral.model import decoder

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # torch's device type -> backend of torch.distributed; other types use gloo
STEP_S = 600.0  # a rank for which the others wait this long within a step counts as hung, and all ranks fail
WAIT_S = 24 * 3600.0  # a rank fails if rank 0 gives no order for this long; rank 0 may take hours to join a swarm
BUCKET_BYTES = 4  # DistributedDataParallel's copy of the gradients takes this many bytes per parameter
HEADER = 3  # an order begins with this many numbers: its kind and two arguments; then come two for each fragment


@dataclass(frozen=True, slots=True)
class Member:
    """The process and the device of one rank; when the ranks connect, they exchange these values."""

    pid: int
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What rank 0 tells the other ranks about the run and the peer. Each rank then builds the model or its part."""

    run: config.Config
    peer: PeerId
    micro_batch: int
    split: Split = Split.COPIES
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
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # so that no key of an older attempt is read
        dist.init_process_group(backend, timeout=limit, store=PrefixStore(attempt, store), rank=rank, world_size=size)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        self.rank, self.size, self.shards = rank, size, Shards(rank, size, beside)
        self.split = Split.COPIES
        self.assigned = False  # whether rank 0 has sent the run to the other ranks
        self.lives: Sequence[Live] = ()
        self.under_way = False  # True while a step runs, and forever after a failed step
        self._forward: ModelForward | None = None
        self.device = device
        own = Member(os.getpid(), measure.device_name(device), measure.memory_bytes(device))
        members: list[Member] = [own] * self.size
        dist.all_gather_object(members, own, self.control)
        self.members = tuple(members)

    @property
    def sharded(self) -> bool:
        """Whether each rank has only a part of the model."""
        return self.split is not Split.COPIES

    @property
    def readers(self) -> int:
        """The number of ranks that have micro-batches of their own."""
        return 1 if self.split is Split.TENSOR else self.size

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory that each rank may use: the smallest GPU's memory, or an equal share of the host's."""
        least = min(member.memory_bytes for member in self.members)
        return least // self.size if self.device.type == "cpu" else least

    def begin(self, replica: Replica, counters: Counters, measuring: bool = False) -> ModelForward:
        """Tell all ranks to take a step or, if `measuring`, to time passes; copy rank 0's changed tensors to them.

        Only rank 0 calls this.

        Returns:
            The model as a function whose gradients are the mean over all ranks.
        """
        self._order(Order.MEASURE if measuring else Order.STEP, counters.lr_step, counters.micro_batches)
        self._copy_touched()
        return self.forward

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's passes. Gradients are averaged over ranks only if `last` is True."""
        averaged = self._forward.averaged if isinstance(self._forward, AveragedForward) else None
        return nullcontext() if last or averaged is None else averaged.no_sync()

    def end(self, figures: Tensor) -> Tensor:
        """End the step; return the mean of `figures`, such as the loss, over all ranks. All ranks must call this."""
        mean: Tensor = figures.to(self.device) / self.size
        dist.all_reduce(mean)
        self.under_way = False
        return mean

    def evaluating(self, replica: Replica, part: Batch) -> ModelForward:
        """Return the model as a function for one loss without gradients.

        If each rank has only a part of the model, this orders the other ranks to compute the loss with the caller.

        Args:
            replica: The model.
            part: The sequences of which the caller computes the loss next.
        """
        if not self.sharded:
            return replica.forward
        self._order(Order.EVALUATE, part[0].shape[0], part[0].shape[1])
        self._send(part)
        self.under_way = False
        return self.forward

    def shared(self, batch: Batch) -> Batch:
        """Return a micro-batch of rank 0, and give it to the other ranks if they have none of their own."""
        if self.readers == 1:
            self._send(batch)
        return batch

    def _send(self, batch: Batch) -> None:
        dist.broadcast(torch.stack(batch), src=0, group=self.control)

    def tell(self, order: Order, fragment: int, what: int) -> None:
        """Order all other ranks to work on a part of a fragment. `what`: the index of a tensor of the fragment."""
        self._order(order, fragment, what)
        self.under_way = False

    def decide(self, split: Split) -> None:
        """Set how the ranks will divide the model. Rank 0 calls this before it builds the model."""
        self.split = split

    def assign(self, assignment: Assignment) -> None:
        """Make the other ranks build the model. Only rank 0 calls this."""
        self.assigned = True
        dist.broadcast_object_list([assignment], group=self.control)

    def close(self) -> None:
        """Leave the island. On rank 0, first order the other ranks to finish.

        After a failed step this does nothing, since all ranks have failed in that step.
        """
        if self.under_way:
            return
        if self.rank == 0:
            with suppress(RuntimeError):
                self._finish()
        if self.sharded and self.lives:
            self.shards.end()
        dist.destroy_process_group()

    def _finish(self) -> None:
        if self.lives:
            self._order(Order.FINISH)
        elif not self.assigned:
            dist.broadcast_object_list([None], group=self.control)

    def _order(self, kind: Order, first: int = 0, second: int = 0) -> None:
        if self.under_way:  # the other ranks still wait within that step, for up to STEP_S
            raise RuntimeError("a step has failed on this rank, so the other ranks take no more orders")
        marks = [number for live in self.lives for number in (live.steps, _marks(live))]
        self.under_way = True
        self._exchange(torch.tensor([kind, first, second, *marks]))

    def assignment(self) -> Assignment | None:
        """Wait for rank 0's assignment and return it; None if rank 0 ends first. Ranks other than 0 call this."""
        received: list[Assignment | None] = [None]
        dist.broadcast_object_list(received, group=self.control)
        if received[0] is not None:
            self.split = received[0].split
        return received[0]

    def next_order(self, counters: Counters) -> tuple[Order, int, int]:
        """Wait for rank 0's next order, and copy rank 0's counts and changed tensors. Ranks other than 0 call this.

        Args:
            counters: This rank's counters, changed in place by an order to step.

        Returns:
            The order and its two numbers.

        Raises:
            RuntimeError: If another rank has died, or rank 0 gives no order for WAIT_S seconds.
        """
        numbers = self._exchange(torch.zeros(HEADER + 2 * len(self.lives), dtype=torch.int64))
        order, first, second = Order(numbers[0]), numbers[1], numbers[2]
        if order is Order.STEP:
            counters.lr_step, counters.micro_batches = first, second
        for live, steps, marks in zip(self.lives, numbers[HEADER::2], numbers[HEADER + 1 :: 2], strict=True):
            live.steps = steps
            live.changed_tensors = {name for at, name in enumerate(live.tensors()) if marks >> at & 1}
        if order in (Order.STEP, Order.MEASURE):
            self._copy_touched()
        return order, first, second

    def batch(self, sequences: int, positions: int) -> Batch:
        """Return the sequences that rank 0 sends to all ranks. Ranks other than 0 call this."""
        batch_2BT = torch.empty(2, sequences, positions, dtype=torch.int64)
        dist.broadcast(batch_2BT, src=0, group=self.control)
        return batch_2BT[0], batch_2BT[1]

    def wrap(self, replica: Replica) -> None:
        """Wrap the model to average gradients, and copy rank 0's weights to all ranks. All ranks must call this.

        If each rank has only a part of the model, do nothing: `sharded.build` has called `take` already.
        """
        if not self.sharded:
            self.take(replica.inner.lives, AveragedForward(replica))

    def take(self, lives: Sequence[Live], forward: ModelForward) -> None:
        """Set the fragments and the model to which later orders refer."""
        self.lives, self._forward = lives, forward

    @property
    def forward(self) -> ModelForward:
        """The model as a function whose gradients are the mean over all ranks."""
        assert self._forward is not None, "this rank has no layers yet"
        return self._forward

    def _copy_touched(self) -> None:
        """Copy the tensors in `Live.changed_tensors` from rank 0 to all ranks."""
        for live in self.lives:
            for name, tensor in live.tensors().items():
                if name in live.changed_tensors and tensor.numel():
                    dist.broadcast(tensor, src=0)
            live.changed_tensors.clear()

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
                LossModule(replica.layers, replica.forward),
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


def build_whole(run: config.Config, device: torch.device) -> BuiltReplica:
    """Build the whole model on a device with uninitialised weights; `Island.wrap` then copies rank 0's weights."""
    layers = decoder.placed(decoder.build(run.model, run.seed, drawn=False), run, device)
    lives = [Live(cut, layers, device, run.train) for cut in fragments_of(run)]
    compiled = run.train.compile and not accelerator.compile_failure(device)
    return BuiltReplica(run, layers, Inner(lives, run.train), Chain(layers, compiled, run))


@flushed_denormals()
def follow(island: Island, assignment: Assignment, device: Device, kernels: OuterKernels | None = None) -> BuiltReplica:
    """Carry out the orders of rank 0 until it finishes, and return the trained model.

    Args:
        island: This rank of the island.
        assignment: The run and the peer, from rank 0.
        device: This rank's device.
        kernels: Compute the gossip of the fragments that this rank owns; None means plain torch.

    Raises:
        RuntimeError: If another rank dies or hangs, or the device fails.
        UserError: If the run's data cannot be read on this machine.
    """
    from decentral.engine import sharded  # imported here, since it loads DTensor (60 MB), for islands only

    run = assignment.run
    if island.sharded:
        tools = RuleTools(blockwise, kernels or TorchKernels(blockwise), optimizer=run.train.optimizer)
        rules = load(ALGORITHMS[run.gossip.algorithm].sharded).rules
        island.shards.own(rules(run.gossip, assignment.peer, tools, island.shards))
    replica = sharded.build(run, device.device, island) if island.sharded else build_whole(run, device.device)
    island.wrap(replica)
    counters = Counters()

    fetch = _fetch_of(island, assignment, counters)

    while True:
        order, first, second = island.next_order(counters)
        match order:
            case Order.FINISH:
                return replica
            case Order.MEASURE:
                measure.step_s(island.forward, run.model, device, assignment.micro_batch)
            case Order.STEP:
                batches = [fetch() for _ in range(run.train.accumulate)]
                train_step(island.forward, batches, replica.inner, counters.lr_step, run.train, device)
            case Order.EVALUATE:
                held_out_part(island.forward, island.batch(first, second), device)
            case _:
                live = replica.inner.lives[first]
                assert isinstance(live, sharded.ShardedLive), "only parts of fragments get such orders"
                live.obey(order, second)


def _fetch_of(island: Island, assignment: Assignment, counters: Counters) -> Callable[[], Batch]:
    """Return the function that returns this rank's next micro-batch, or rank 0's if only rank 0 reads data."""
    run, sequences = assignment.run, assignment.micro_batch
    if island.readers == 1:
        return lambda: island.batch(sequences, run.model.context)
    reading = Reading(run.seed, assignment.peer, assignment.folder, island.rank, island.size)
    micro_batches = corpora.load(run.data, run.model).micro_batches(reading)

    def fetch() -> Batch:
        number = counters.micro_batches + island.rank
        counters.micro_batches += island.size
        return micro_batches(number, sequences)

    return fetch


def _marks(live: Live) -> int:
    """Return a bit mask: bit k is 1 if the k-th tensor of `live.tensors` is in `live.changed_tensors`."""
    return sum(1 << at for at, name in enumerate(live.tensors()) if name in live.changed_tensors)
