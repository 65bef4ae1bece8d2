"""Divide the tensors of a fragment over the ranks of an island, and move one vector at a time between the ranks.

In an island whose ranks divide the model, no rank has all of it. On its device, each rank keeps its part of theta,
gradient and optimizer state (`ShardedLive`). The gossip state of a fragment is whole in the host memory of one rank,
the fragment's owner (`owners_of`), which does the work of that fragment's windows and merges (engine/owned_rules.py).
Start reading at `Shards`.

Two threads of each rank take part. Between two steps, the training thread carries out rank 0's `Order`s. An order about
a fragment only copies a part between the device and host memory of the same rank, or adds a part to the weights. While
training goes on, parts in host memory travel between rank 0's worker thread and a thread of each other rank
(`Shards.start`), in a separate process group. A thread waits for a part that is not in host memory yet, so orders and
requests may arrive in any sequence. An error amid an exchange ends its rank; the launcher then restarts all ranks.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition, Thread

import torch
from torch import Tensor
from torch import distributed as dist

from decentral.core.errors import ProtocolError
from decentral.core.plain_text import error_text

PART_S = 600.0  # a part that does not come to host memory within this time shows that another thread or rank has failed
# The windows that this peer and its partners publish lie on rank 0. They weigh like the gossip state of this share of
# all parameters, so rank 0 owns fewer fragments.
PUBLISHED_SHARE = 0.45


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
    """A place in host memory where each rank's part of a vector waits, between its device and the network."""

    SNAPSHOT = 0  # theta at the end of a window
    CORRECTION = 1
    # Tensors on their way between a checkpoint and the device.
    THETA = 2
    FIRST = 3  # first moments, with Muon's momenta
    SECOND = 4  # AdamW's second moments, which Muon's matrices lack


class _Request(IntEnum):
    """A kind of request that rank 0 sends to one other rank, whose thread of `Shards.start` carries it out."""

    END = 0
    SEND = 1  # the rank sends its part of a vector to another rank
    RECEIVE = 2  # the rank receives its part of a vector from another rank
    CALL = 3  # the rank works on the gossip state of a fragment that it owns


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


class HostParts:
    """This rank's parts of vectors on their way, in host memory, by fragment and slot. Thread-safe."""

    def __init__(self) -> None:
        """Begin without parts."""
        self._parts: dict[tuple[int, Slot], Tensor] = {}
        self._changed = Condition()

    def put(self, fragment: int, slot: Slot, part: Tensor) -> None:
        """Set an fp32 part, which the caller must not change afterwards, once a thread has taken the older part.

        Raises:
            RuntimeError: If no thread takes the older part within PART_S seconds.
        """
        key = fragment, slot
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._parts, PART_S):
                raise RuntimeError(f"{slot.name} of fragment {fragment} was not taken within {PART_S:.0f} s")
            self._parts[key] = part
            self._changed.notify_all()

    def take(self, fragment: int, slot: Slot) -> Tensor:
        """Wait for a part, remove it, and return it.

        Raises:
            RuntimeError: If no thread puts the part within PART_S seconds.
        """
        key = fragment, slot
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._parts, PART_S):
                raise RuntimeError(f"{slot.name} of fragment {fragment} did not come within {PART_S:.0f} s")
            part = self._parts.pop(key)
            self._changed.notify_all()
            return part


@dataclass(frozen=True, slots=True)
class _Refused:
    """The answer of an owner that raised ProtocolError."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Vector:
    """Announces the vector that its sender sends next."""

    elements: int
    dtype: torch.dtype


def _like(vector: Tensor) -> _Vector:
    return _Vector(vector.numel(), vector.dtype)


@contextmanager
def _or_end(rank: int) -> Iterator[None]:
    """End this process at an error other than a refusal: other ranks would wait for the rest of an exchange."""
    try:
        yield
    except ProtocolError:
        raise
    except Exception as error:
        print(f"error: rank {rank} ends: {error_text(error, None)}", file=sys.stderr, flush=True)
        os._exit(1)


class Shards:
    """The parts of vectors on their way, and the owners of fragments.

    Only one thread of rank 0 may call it at a time; on other ranks, only the thread of `start`.

    The attribute `host` has this rank's parts, and `divisions` the division of each fragment's vectors: that of theta,
    and that of AdamW's second moments.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup) -> None:
        """Begin without fragments. `group`: a gloo group of all ranks that nothing else uses."""
        self.rank, self.ranks, self.group = rank, ranks, group
        self.host = HostParts()
        self.divisions: list[tuple[Division, Division]] = []
        self._owned: object = None
        self._thread = Thread(target=self._serve_all, name="shards", daemon=True)

    def division(self, fragment: int, slot: Slot) -> Division:
        """Return the division of the fragment's vectors in this slot."""
        return self.divisions[fragment][slot is Slot.SECOND]

    def own(self, owned: object) -> None:
        """Set the object whose methods do this rank's work on the fragments that it owns. Call it before `start`."""
        self._owned = owned

    def owner_of(self, fragment: int) -> int:
        """Return the rank that owns a fragment."""
        return owners_of([theta.elements for theta, _ in self.divisions], self.ranks)[fragment]

    def gather(self, fragment: int, slot: Slot) -> Tensor:
        """Return a fragment's whole vector in this slot, taken from all ranks: a new fp32 vector in host memory.

        On a rank other than 0, an owner calls it during a `call`, and rank 0 makes the others send (`feed`).
        """
        division = self.division(fragment, slot)
        with _or_end(self.rank):
            whole = torch.empty(division.elements)
            if not self.rank:
                self._ask_others(_Request.SEND, fragment, slot, self.rank)
            for rank in range(self.ranks):
                if rank == self.rank:
                    division.fill(whole, rank, self.host.take(fragment, slot))
                else:
                    division.fill(whole, rank, self.receive(division.part_elements(rank), rank))
        return whole

    def feed(self, fragment: int, slot: Slot) -> None:
        """Send all parts of a vector to the fragment's owner, another rank, which gathers them. Rank 0 calls this."""
        owner = self.owner_of(fragment)
        self._ask_others(_Request.SEND, fragment, slot, owner)
        self.send(self.host.take(fragment, slot), owner)

    def scatter(self, fragment: int, slot: Slot, whole: Tensor) -> None:
        """Give each rank its part of the fp32 vector `whole` in host memory, as the new content of the slot.

        On a rank other than 0, an owner calls it during a `call`, and rank 0 makes the others receive (`spread`).
        """
        division = self.division(fragment, slot)
        with _or_end(self.rank):
            if not self.rank:
                self._ask_others(_Request.RECEIVE, fragment, slot, self.rank)
            for rank in range(self.ranks):
                if rank != self.rank:
                    self.send(division.taken(whole, rank), rank)
            self.host.put(fragment, slot, division.taken(whole, self.rank))

    def spread(self, fragment: int, slot: Slot) -> None:
        """Receive rank 0's part of a vector from its owner, another rank, and let the others receive theirs."""
        owner = self.owner_of(fragment)
        self._ask_others(_Request.RECEIVE, fragment, slot, owner)
        self.host.put(fragment, slot, self.receive(self.division(fragment, slot).part_elements(0), owner))

    def send(self, vector: Tensor, rank: int) -> None:
        """Send a vector to another rank, which receives it."""
        dist.send(vector, rank, self.group)

    def receive(self, elements: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vector [elements] that another rank sends."""
        vector = torch.empty(elements, dtype=dtype)
        dist.recv(vector, rank, self.group)
        return vector

    def call(
        self,
        fragment: int,
        request: Callable[..., object],
        vectors: Sequence[Tensor],
        meanwhile: Callable[[], None],
    ) -> object:
        """Let a fragment's owner do some work, and return the result. Only rank 0 calls this.

        Args:
            fragment: The fragment.
            request: A method of the object that `own` has set, as a function that can be pickled. It gets that object,
                the fragment and, if there are any, `vectors`.
            vectors: Vectors in host memory.
            meanwhile: If another rank is the owner: sends or receives the parts that the work gathers or scatters.

        Raises:
            ProtocolError: If the owner refuses a window.
        """
        owner = self.owner_of(fragment)
        if owner == self.rank:
            return self._work(fragment, request, vectors)
        with _or_end(self.rank):
            self._ask(owner, _Request.CALL, fragment)
            dist.send_object_list([(request, [_like(one) for one in vectors])], owner, self.group)
            for one in vectors:
                self.send(one, owner)
            meanwhile()
            answer: list[object] = [None]
            dist.recv_object_list(answer, owner, self.group)
            match answer[0]:
                case _Refused(reason, detail):
                    raise ProtocolError(reason, detail)
                case _Vector(elements, dtype):
                    return self.receive(elements, owner, dtype)
            return answer[0]

    def start(self) -> None:
        """On ranks other than 0, begin to carry out the requests of rank 0, on a thread of their own."""
        if self.rank:
            self._thread.start()

    def end(self) -> None:
        """End the threads that `start` has begun. All ranks call this, before the group is destroyed."""
        if self.rank:
            self._thread.join(PART_S)
        else:
            self._ask_others(_Request.END, 0, Slot.SNAPSHOT, 0)

    def _serve_all(self) -> None:
        """Carry out the requests of rank 0 until it sends END. Any error ends this process."""
        message = torch.zeros(4, dtype=torch.int64)
        with _or_end(self.rank):
            while True:
                dist.recv(message, 0, self.group)
                kind, fragment, slot, to = message.tolist()
                if kind == _Request.END:
                    return
                self._serve(_Request(kind), fragment, Slot(slot), to)

    def _serve(self, kind: _Request, fragment: int, slot: Slot, rank: int) -> None:
        match kind:
            case _Request.SEND:
                self.send(self.host.take(fragment, slot), rank)
            case _Request.RECEIVE:
                elements = self.division(fragment, slot).part_elements(self.rank)
                self.host.put(fragment, slot, self.receive(elements, rank))
            case _Request.CALL:
                answer = self._answered(fragment)
                vector = answer if isinstance(answer, Tensor) else None
                dist.send_object_list([answer if vector is None else _like(vector)], 0, self.group)
                if vector is not None:
                    self.send(vector, 0)

    def _answered(self, fragment: int) -> object:
        """Do the work that rank 0 has sent, and return the result, which may be a refusal."""
        asked: list[tuple[Callable[..., object], list[_Vector]]] = [(print, [])]  # overwritten by what comes
        dist.recv_object_list(asked, 0, self.group)
        ((request, likes),) = asked
        try:
            return self._work(fragment, request, [self.receive(like.elements, 0, like.dtype) for like in likes])
        except ProtocolError as error:
            return _Refused(error.reason, error.detail)

    def _work(self, fragment: int, request: Callable[..., object], vectors: Sequence[Tensor]) -> object:
        return request(self._owned, fragment, vectors=vectors) if vectors else request(self._owned, fragment)

    def _ask_others(self, kind: _Request, fragment: int, slot: Slot, rank: int) -> None:
        """Send a request to all ranks but rank 0 and the rank `rank`, with which they exchange a part."""
        for other in range(1, self.ranks):
            if other != rank:
                self._ask(other, kind, fragment, slot, rank)

    def _ask(self, other: int, kind: _Request, fragment: int, slot: Slot = Slot.SNAPSHOT, rank: int = 0) -> None:
        dist.send(torch.tensor([kind, fragment, slot, rank]), other, self.group)


def owners_of(elements: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each fragment, so that the ranks have gossip state for about as many parameters.

    Rank 0 begins with PUBLISHED_SHARE of all parameters.

    Args:
        elements: The number of parameters of each fragment.
        ranks: The number of ranks.
    """
    loads, found = [PUBLISHED_SHARE * sum(elements), *([0.0] * (ranks - 1))], []
    for count in elements:
        owner = loads.index(min(loads))
        loads[owner] += count
        found.append(owner)
    return found


class MatrixExchange:
    """Gathers whole matrices from the ranks' parts, and sends parts back.

    Each matrix is whole on one rank only, which computes with it: matrix i on rank i modulo the number of ranks.
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
