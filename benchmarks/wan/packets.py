"""Packets on their way: their bytes in slots of fixed size, and a heap of what is due when. Compiled.

Everything is allocated at the start; a packet for which there is no slot is dropped and counted (`Tally.full`). Packets
that are due at the same time come out in the order in which they went in.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.machine_code import compiled, inner
from decentral.scheduler.shared.arrays import Ints

PACKETS = 1 << 16  # on their way at once: 0.5 s of 1.5 Gb/s at 1500 bytes
NOTHING_DUE = np.iinfo(np.int64).max


class Stage(IntEnum):
    """What is due for a packet."""

    DOWNLINK = 0  # it reaches its receiver's downlink
    DELIVERY = 1


class Packets(NamedTuple):
    """The heap is ordered by (due_H, order_H); S is the number of slots, and the heap's capacity."""

    bytes_SW: NDArray[np.uint8]
    size_S: Ints
    source_S: Ints
    target_S: Ints
    stage_S: Ints
    free_S: Ints  # a stack of slots that are free
    due_H: Ints
    order_H: Ints
    slot_H: Ints
    state: Ints  # how many slots are free; how many entries the heap has; the next entry's order


_FREE, _HEAP, _ORDER = 0, 1, 2


def packets(width: int, slots: int = PACKETS) -> Packets:
    """Room for so many packets of up to `width` bytes."""
    columns = (np.zeros(slots, np.int64) for _ in range(4))
    heap = (np.zeros(slots, np.int64) for _ in range(3))
    free = np.arange(slots)[::-1].copy()
    return Packets(np.empty((slots, width), np.uint8), *columns, free, *heap, np.array([slots, 0, 0]))


@compiled
def next_due(packets: Packets) -> int:
    """When the first packet is due, or NOTHING_DUE."""
    return int(packets.due_H[0]) if packets.state[_HEAP] else NOTHING_DUE


@compiled
def take_slot(packets: Packets) -> int:
    """A free slot, or -1."""
    if packets.state[_FREE] == 0:
        return -1
    packets.state[_FREE] -= 1
    return int(packets.free_S[packets.state[_FREE]])


@compiled
def give_slot(packets: Packets, slot: int) -> None:
    packets.free_S[packets.state[_FREE]] = slot
    packets.state[_FREE] += 1


@compiled
def push(packets: Packets, due: int, slot: int) -> None:
    """Puts the packet of this slot into the heap. It has room: there are no more entries than slots."""
    order = packets.state[_ORDER]
    packets.state[_ORDER] += 1
    place = packets.state[_HEAP]
    packets.state[_HEAP] += 1
    while place:
        above = (place - 1) >> 1
        if packets.due_H[above] <= due:  # an entry that went in before comes out before
            break
        _copy(packets, above, place)
        place = above
    packets.due_H[place], packets.order_H[place], packets.slot_H[place] = due, order, slot


@compiled
def pop(packets: Packets) -> int:
    """The slot of the packet that is due first. The heap must not be empty."""
    slot = packets.slot_H[0]
    packets.state[_HEAP] -= 1
    last = packets.state[_HEAP]
    due, order = packets.due_H[last], packets.order_H[last]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= last:
            break
        if below + 1 < last and _before(packets, below + 1, packets.due_H[below], packets.order_H[below]):
            below += 1
        if not _before(packets, below, due, order):
            break
        _copy(packets, below, place)
        place = below
    packets.due_H[place], packets.order_H[place], packets.slot_H[place] = due, order, packets.slot_H[last]
    return int(slot)


@inner
def _before(packets: Packets, place: int, due: int, order: int) -> bool:
    mine = packets.due_H[place]
    return bool(mine < due or (mine == due and packets.order_H[place] < order))


@inner
def _copy(packets: Packets, source: int, target: int) -> None:
    packets.due_H[target] = packets.due_H[source]
    packets.order_H[target] = packets.order_H[source]
    packets.slot_H[target] = packets.slot_H[source]
