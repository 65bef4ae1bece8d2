"""Packets on their way: their bytes in slots of fixed size, and a heap of what is due when. Compiled.

Everything is allocated at the start; a packet for which there is no slot is dropped and counted (`Tally.full`). Packets
that are due at the same time come out in the order in which they went in.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled
from decentral.scheduler.topology.arrays import Ints

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
    size, source, target, stage, due, order, slot = (np.zeros(slots, np.int64) for _ in range(7))
    free = np.arange(slots)[::-1].copy()
    state = np.array([slots, 0, 0])
    return Packets(np.empty((slots, width), np.uint8), size, source, target, stage, free, due, order, slot, state)


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
    due_H, order_H, slot_H, state = packets.due_H, packets.order_H, packets.slot_H, packets.state
    order, place = state[_ORDER], state[_HEAP]
    state[_ORDER] += 1
    state[_HEAP] += 1
    while place:
        above = (place - 1) >> 1
        if due_H[above] <= due:  # an entry that went in before comes out before
            break
        due_H[place], order_H[place], slot_H[place] = due_H[above], order_H[above], slot_H[above]
        place = above
    due_H[place], order_H[place], slot_H[place] = due, order, slot


@compiled
def pop(packets: Packets) -> int:
    """The slot of the packet that is due first. The heap must not be empty."""
    due_H, order_H, slot_H, state = packets.due_H, packets.order_H, packets.slot_H, packets.state
    first = slot_H[0]
    state[_HEAP] -= 1
    last = state[_HEAP]
    due, order, slot = due_H[last], order_H[last], slot_H[last]
    place, below = 0, 1
    while below < last:
        if below + 1 < last:
            left, right = due_H[below], due_H[below + 1]
            if right < left or (right == left and order_H[below + 1] < order_H[below]):
                below += 1
        if due < due_H[below] or (due == due_H[below] and order < order_H[below]):
            break
        due_H[place], order_H[place], slot_H[place] = due_H[below], order_H[below], slot_H[below]
        place, below = below, 2 * below + 1
    due_H[place], order_H[place], slot_H[place] = due, order, slot
    return int(first)
