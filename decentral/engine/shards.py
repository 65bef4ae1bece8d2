"""Divide the tensors of a fragment over the ranks of an island, and move them between the ranks by fragment.

In an island that shards, no rank has a whole model. Each rank keeps its part of every vector of a fragment: on its
device theta, gradient and optimizer state (`ShardedLive`), in host memory the vectors of gossip (`HostParts`). Rank 0
gathers one vector of one fragment when gossip needs it, and scatters the result. Start reading at `Shards`.

Two threads of each rank take part. Between two steps, the training thread carries out rank 0's `Order`s. An order about
a fragment only copies a part between the device and host memory of the same rank, or adds a part to the weights. While
training goes on, parts in host memory travel between rank 0's worker thread and a thread of each other rank
(`Shards.start`), in a separate process group. A thread waits for a part that is not in host memory yet, so orders and
requests may arrive in any order.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition, Thread

import torch
from torch import Tensor
from torch import distributed as dist

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.outer_kernels import SLOW_WEIGHTS_CODEC

PART_S = 600.0  # a part that does not come to host memory within this time shows that another thread or rank has failed


class Order(IntEnum):
    """A kind of order. Rank 0 broadcasts it (`Island`); each rank's `follow` or `ShardedLive.obey` carries it out."""

    FINISH = 0
    MEASURE = 1  # all ranks together time forward and backward passes
    STEP = 2
    EVALUATE = 3  # all ranks together compute a loss without gradients
    LIFT = 4  # copy a part of a tensor from the device to host memory
    PUT = 5  # copy a part of a tensor from host memory to the device
    ADD = 6  # add a part of a correction to the weights


class Slot(IntEnum):
    """One of a fragment's vectors in host memory; each rank's host memory has that rank's part of the vector."""

    SNAPSHOT = 0  # theta at the end of a window
    CORRECTION = 1
    PHI = 2
    BASELINE = 3
    RESIDUAL = 4
    EARLIER = 5  # the residual before the close of a window that waits for its merge
    MOVED = 6  # a tensor on its way between a checkpoint and the device
    MOVED_SECOND = 7  # as MOVED, but for a tensor of AdamW's second moments, which Muon's matrices lack
    # A part put into one of these slots becomes the part in RESIDUAL, kept in fewer bytes.
    INT8_RESIDUAL = 8
    BF16_RESIDUAL = 9
    # Sums of the vectors in other slots, of which a missing one counts as zero.
    PHI_AND_RESIDUAL = 10  # phi + residual
    PHI_AND_CHANGE = 11  # phi + earlier residual - residual


# In these slots a new part replaces the old one; in other slots it waits.
RESIDUAL_SLOTS = Slot.RESIDUAL, Slot.INT8_RESIDUAL, Slot.BF16_RESIDUAL
GOSSIP_SLOTS = Slot.PHI, Slot.BASELINE, Slot.EARLIER, *RESIDUAL_SLOTS
SUM_SLOTS = {
    Slot.PHI_AND_RESIDUAL: ((Slot.RESIDUAL, 1),),
    Slot.PHI_AND_CHANGE: ((Slot.EARLIER, 1), (Slot.RESIDUAL, -1)),
}
MOVING_SLOTS = Slot.MOVED, Slot.MOVED_SECOND  # gathering removes these parts from host memory


class _Request(IntEnum):
    """A kind of request that rank 0 sends to another rank, about that rank's parts in host memory."""

    END = 0
    SEND = 1
    RECEIVE = 2
    RENAME = 3
    ADD = 4
    DROP = 5


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a parameter over the ranks: by torch.chunk along `dim`, or whole on each rank if that is None."""

    shape: torch.Size
    dim: int | None

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a rank's part of the parameter `whole`, as a view."""
        if self.dim is None:
            return whole
        length = self.shape[self.dim]
        each = -(-length // ranks)
        begin = min(rank * each, length)
        return whole.narrow(self.dim, begin, min(each, length - begin))


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a vector of several parameters, one after another: a rank has its part of each parameter."""

    cuts: tuple[Cut, ...]
    ranks: int

    @property
    def elements(self) -> int:
        """The number of elements of the whole vector."""
        return sum(cut.shape.numel() for cut in self.cuts)

    def parts(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Return a rank's part of each parameter, as views of the whole vector [elements]."""
        sizes = [cut.shape.numel() for cut in self.cuts]
        pieces = zip(self.cuts, torch.split(whole, sizes), strict=True)
        return [cut.part(piece.view(cut.shape), rank, self.ranks) for cut, piece in pieces]

    def part_elements(self, rank: int) -> int:
        """Return the number of elements of a rank's part."""
        return sum(one.numel() for one in self.parts(torch.empty(self.elements, device="meta"), rank))

    def taken(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of a rank's part of the whole vector, as one vector."""
        return torch.cat([whole[:0], *(one.flatten() for one in self.parts(whole, rank))])

    def fill(self, whole: Tensor, rank: int, part: Tensor) -> None:
        """Copy a rank's part, one vector, to its positions in the whole vector."""
        places = self.parts(whole, rank)
        for place, piece in zip(places, torch.split(part, [one.numel() for one in places]), strict=True):
            place.copy_(piece.view(place.shape))


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of a vector in int8, with its number of elements."""

    blob: bytes
    elements: int

    def float(self) -> Tensor:
        """Return the part as fp32."""
        return blockwise.decode(SLOW_WEIGHTS_CODEC, self.blob, self.elements)


class HostParts:
    """This rank's parts of vectors in host memory, by fragment and slot. Thread-safe."""

    def __init__(self) -> None:
        """Begin without parts."""
        self._parts: dict[tuple[int, Slot], Tensor | Encoded] = {}
        self._changed = Condition()

    def put(self, fragment: int, slot: Slot, part: Tensor) -> None:
        """Set an fp32 part, which the caller must not change afterwards.

        In GOSSIP_SLOTS it replaces an older part. In other slots, wait until a thread has taken the older part.

        Raises:
            RuntimeError: If no thread takes the older part within PART_S seconds.
        """
        with self._changed:
            if slot not in GOSSIP_SLOTS and not self._changed.wait_for(
                lambda: (fragment, slot) not in self._parts, PART_S
            ):
                raise RuntimeError(f"{slot.name} of fragment {fragment} was not taken within {PART_S:.0f} s")
            stored: Tensor | Encoded = part
            if slot is Slot.INT8_RESIDUAL:
                stored = Encoded(blockwise.encode(SLOW_WEIGHTS_CODEC, part), part.numel())
            elif slot is Slot.BF16_RESIDUAL:
                stored = part.bfloat16()
            self._parts[fragment, Slot.RESIDUAL if slot in RESIDUAL_SLOTS else slot] = stored
            self._changed.notify_all()

    def get(self, fragment: int, slot: Slot, take: bool) -> Tensor:
        """Wait for a part, and return it as fp32; with `take`, remove it, so that a new part can be put there.

        A slot in SUM_SLOTS gives a new vector, the sum of this rank's parts.

        Raises:
            RuntimeError: If no thread puts the part within PART_S seconds.
        """
        key = fragment, slot
        with self._changed:
            if slot in SUM_SLOTS:
                total = self._parts[fragment, Slot.PHI].float().clone()
                for one, sign in SUM_SLOTS[slot]:
                    if (fragment, one) in self._parts:
                        total.add_(self._parts[fragment, one].float(), alpha=sign)
                return total
            if not self._changed.wait_for(lambda: key in self._parts, PART_S):
                raise RuntimeError(f"{slot.name} of fragment {fragment} did not come within {PART_S:.0f} s")
            part = self._parts[key]
            if take:
                del self._parts[key]
                self._changed.notify_all()
            return part.float()

    def rename(self, fragment: int, slot: Slot, to: Slot) -> None:
        """Move the part in `slot`, as it is stored, to the slot `to`. One of GOSSIP_SLOTS may be empty, then `to` is.

        Raises:
            RuntimeError: If no thread puts a part into another slot within PART_S seconds.
        """
        with self._changed:
            if slot not in GOSSIP_SLOTS:
                self.put(fragment, to, self.get(fragment, slot, take=True))
            elif (part := self._parts.pop((fragment, slot), None)) is not None:
                self._parts[fragment, to] = part
            else:
                self._parts.pop((fragment, to), None)

    def drop(self, fragment: int, slot: Slot) -> None:
        """Remove a part, if it is there."""
        with self._changed:
            self._parts.pop((fragment, slot), None)
            self._changed.notify_all()


class Shards:
    """The parts of all fragments' vectors in host memory of all ranks. Only one thread of rank 0 may call it at a time.

    The attribute `host` has this rank's parts, and `divisions` the division of each fragment's vectors: that of theta,
    and that of AdamW's second moments.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup) -> None:
        """Begin without fragments. `group`: a gloo group of all ranks that nothing else uses."""
        self.rank, self.ranks, self.group = rank, ranks, group
        self.host = HostParts()
        self.divisions: list[tuple[Division, Division]] = []
        self._thread = Thread(target=self._serve_all, name="shards", daemon=True)

    def division(self, fragment: int, slot: Slot) -> Division:
        """Return the division of the fragment's vectors in this slot."""
        return self.divisions[fragment][slot is Slot.MOVED_SECOND]

    def gather(self, fragment: int, slot: Slot) -> Tensor:
        """Return a fragment's whole vector in this slot, gathered from all ranks: a new fp32 vector in host memory."""
        division = self.division(fragment, slot)
        whole = torch.empty(division.elements)
        for rank in range(1, self.ranks):
            self._ask(rank, _Request.SEND, fragment, slot)
        division.fill(whole, 0, self.host.get(fragment, slot, take=slot in MOVING_SLOTS))
        for rank in range(1, self.ranks):
            part = torch.empty(division.part_elements(rank))
            dist.recv(part, rank, self.group)
            division.fill(whole, rank, part)
        return whole

    def scatter(self, fragment: int, slot: Slot, whole: Tensor) -> None:
        """Give each rank its part of the fp32 vector `whole` in host memory, as the new content of the slot."""
        division = self.division(fragment, slot)
        for rank in range(1, self.ranks):
            self._ask(rank, _Request.RECEIVE, fragment, slot)
            dist.send(division.taken(whole, rank), rank, self.group)
        self.host.put(fragment, slot, division.taken(whole, 0))

    def rename(self, fragment: int, slot: Slot, to: Slot) -> None:
        """Move the parts in `slot` to the slot `to` (`HostParts.rename`). Nothing travels between ranks."""
        self._everywhere(_Request.RENAME, fragment, slot, to)

    def add(self, fragment: int, slot: Slot, to: Slot) -> None:
        """Remove the parts in `slot`, and add them to those in the slot `to`. Nothing travels between ranks."""
        self._everywhere(_Request.ADD, fragment, slot, to)

    def drop(self, fragment: int, slot: Slot) -> None:
        """Remove the parts in `slot`, if they are there. Nothing travels between ranks."""
        self._everywhere(_Request.DROP, fragment, slot, slot)

    def start(self) -> None:
        """On ranks other than 0, begin to carry out the requests of rank 0, on a thread of their own."""
        if self.rank:
            self._thread.start()

    def end(self) -> None:
        """End the threads that `start` has begun. All ranks call this, before the group is destroyed."""
        if self.rank:
            self._thread.join(PART_S)
        for rank in range(1, 1 if self.rank else self.ranks):
            self._ask(rank, _Request.END, 0, Slot.SNAPSHOT)

    def _serve_all(self) -> None:
        """Carry out the requests of rank 0 until it sends END or the connection to it is lost."""
        message = torch.zeros(4, dtype=torch.int64)
        with suppress(RuntimeError):  # rank 0 is gone, which the training thread notices too
            while True:
                dist.recv(message, 0, self.group)
                kind, fragment, slot, to = message.tolist()
                if kind == _Request.END:
                    return
                self._serve(_Request(kind), fragment, Slot(slot), Slot(to))

    def _serve(self, kind: _Request, fragment: int, slot: Slot, to: Slot) -> None:
        match kind:
            case _Request.SEND:
                dist.send(self.host.get(fragment, slot, take=slot in MOVING_SLOTS), 0, self.group)
            case _Request.RECEIVE:
                part = torch.empty(self.division(fragment, slot).part_elements(self.rank))
                dist.recv(part, 0, self.group)
                self.host.put(fragment, slot, part)
            case _:
                self._within(kind, fragment, slot, to)

    def _within(self, kind: _Request, fragment: int, slot: Slot, to: Slot) -> None:
        """Carry out a request that moves nothing between ranks."""
        if kind is _Request.DROP:
            self.host.drop(fragment, slot)
        elif kind is _Request.RENAME:
            self.host.rename(fragment, slot, to)
        else:
            part = self.host.get(fragment, slot, take=True)
            self.host.put(fragment, to, self.host.get(fragment, to, take=True).add_(part))

    def _everywhere(self, kind: _Request, fragment: int, slot: Slot, to: Slot) -> None:
        for rank in range(1, self.ranks):
            self._ask(rank, kind, fragment, slot, to)
        self._within(kind, fragment, slot, to)

    def _ask(self, rank: int, kind: _Request, fragment: int, slot: Slot, to: Slot = Slot.SNAPSHOT) -> None:
        dist.send(torch.tensor([kind, fragment, slot, to]), rank, self.group)


class MatrixExchange:
    """Gathers whole matrices from the ranks' parts, and sends parts back.

    Each matrix is whole on one rank only, its owner: matrix i belongs to rank i modulo the number of ranks.
    """

    def __init__(self, cuts: Sequence[Cut], rank: int, ranks: int) -> None:
        """Set the division of each matrix. All ranks must call `whole` and `parts` together, in the same order."""
        self.rank, self.ranks, self.count = rank, ranks, len(cuts)
        self.owned = [Division(tuple(cuts[owner::ranks]), ranks) for owner in range(ranks)]

    def whole(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices that this rank owns. `parts`: this rank's part of each matrix."""
        own = self.owned[self.rank]
        send = [parts[owner :: self.ranks] for owner in range(self.ranks)]
        received = self._exchanged(send, [own.part_elements(rank) for rank in range(self.ranks)], parts[0])
        flat = parts[0].new_empty(own.elements)
        for rank, part in enumerate(received):
            own.fill(flat, rank, part)
        sizes = [cut.shape.numel() for cut in own.cuts]
        return [one.view(cut.shape) for one, cut in zip(torch.split(flat, sizes), own.cuts, strict=True)]

    def parts(self, matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of each matrix, received from the matrices' owners.

        Args:
            matrices: The whole matrices that this rank owns.
            like: A tensor with the shape of this rank's part, for each matrix.
        """
        cuts = self.owned[self.rank].cuts
        send = [
            [cut.part(one, rank, self.ranks) for cut, one in zip(cuts, matrices, strict=True)]
            for rank in range(self.ranks)
        ]
        received = self._exchanged(send, [one.part_elements(self.rank) for one in self.owned], like[0])
        found = list(like)
        for owner, part in enumerate(received):
            mine = like[owner :: self.ranks]
            pieces = torch.split(part, [one.numel() for one in mine])
            found[owner :: self.ranks] = [piece.view(one.shape) for piece, one in zip(pieces, mine, strict=True)]
        return found

    def _exchanged(self, send: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Send some tensors to each rank, and return the vector that each rank sends to this rank.

        `sizes` has the number of elements of each vector that arrives. `like` has the dtype and device of all.
        """
        sent = torch.cat([like.new_empty(0), *(one.flatten() for group in send for one in group)])
        received = like.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, list(sizes), [sum(one.numel() for one in group) for group in send])
        return list(torch.split(received, list(sizes)))
