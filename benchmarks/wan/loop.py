"""The packet loop: reads packets from the peers' devices, and writes each when it is due. Compiled; calls libc itself.

One thread carries everything. It sleeps for a tick after it has moved packets, so that under load it handles what came
meanwhile at once: a packet is late by up to a tick when it comes, and again when it is due. How late packets are is
counted (`Tally`): a loop that did not get its core in time shows there, and a figure taken meanwhile is one of this
machine and not of the links.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from benchmarks.wan.links import Count, Links, receive, send
from benchmarks.wan.nat import Nat, address_at, inbound, outbound
from benchmarks.wan.packets import Packets, Stage, give_slot, next_due, pop, push, take_slot
from decentral.core.compiled import compiled, inlined
from decentral.scheduler.topology.arrays import Ints

SHORTEST_TICK_NS, LONGEST_TICK_NS = 200_000, 1_000_000
TICKS = 20  # in the shortest delay
ALONE = 1  # so few packets in a round are handled as they come: a question and its answer are not late
BATCH = 64  # packets of one device, before the others have their turn
NETWORK = 11 << 8  # peers' addresses are 11.0.x.y: public ones for libp2p, and nothing leaves these namespaces
LATE_BINS = 24  # bin b counts packets that were late by less than 2^b microseconds, and not by half of that
MONOTONIC = 1

# Functions of libc, as compiled code calls them: name(result, arguments). An address is a `uintp`.
_SIZE, _ADDRESS, _INT = types.intp, types.uintp, types.int32
_libc: Any = types.ExternalFunction  # numba has no stubs for what such a function returns
_read: Any = _libc("read", _SIZE(_INT, _ADDRESS, _ADDRESS))
_write: Any = _libc("write", _SIZE(_INT, _ADDRESS, _ADDRESS))
_poll: Any = _libc("ppoll", _INT(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS))
_sleep: Any = _libc("nanosleep", _INT(_ADDRESS, _ADDRESS))
_clock: Any = _libc("clock_gettime", _INT(_INT, _ADDRESS))


class Tally(IntEnum):
    """What the router counts of itself; the columns of Devices.tally, before the bins of lateness."""

    FULL = 0  # packets for which it had no slot
    REFUSED = 1  # by a peer's kernel
    FOREIGN = 2  # neither from nor to an address of the lab
    LATEST_NS = 3


class Devices(NamedTuple):
    """The peers' devices, and the router's own books. N peers."""

    fds_N: NDArray[np.int32]
    polls: NDArray[np.int32]  # of `struct pollfd` for each device and the control socket: fd; events and revents
    outside_N: Ints  # each peer's address as others see it
    owner_A: Ints  # by the last 16 bits of an address: the peer that has it, or -1
    tally: Ints
    tick: Ints  # one number, ns
    times: Ints  # two of `struct timespec`: now, and how long to sleep
    scratch: NDArray[np.uint8]


def devices(fds: list[int], control: int, width: int) -> Devices:
    """`control`: the loop returns when there is something to read from it."""
    polls = np.array([[fd, 1] for fd in (*fds, control)], np.int32)
    tally = np.zeros(len(Tally) + LATE_BINS, np.int64)
    owner, outside = np.full(1 << 16, -1, np.int64), np.zeros(len(fds), np.int64)
    scratch = np.zeros(width, np.uint8)
    tick, times = np.array([SHORTEST_TICK_NS]), np.zeros(4, np.int64)
    return Devices(np.array(fds, np.int32), polls.ravel(), outside, owner, tally, tick, times, scratch)


def tick_of(shortest_delay_ns: int) -> int:
    """How long the loop may sleep where this is the shortest delay of any pair."""
    return min(max(shortest_delay_ns // TICKS, SHORTEST_TICK_NS), LONGEST_TICK_NS)


_FULL, _REFUSED, _FOREIGN, _LATEST = int(Tally.FULL), int(Tally.REFUSED), int(Tally.FOREIGN), int(Tally.LATEST_NS)
_BINS = len(Tally)
_DOWNLINK, _DELIVERY = int(Stage.DOWNLINK), int(Stage.DELIVERY)
_DELIVERED, _DELIVERED_BYTES = int(Count.DELIVERED), int(Count.DELIVERED_BYTES)


@compiled
def carry(devices: Devices, links: Links, packets: Packets, nat: Nat, until: int) -> None:
    """Carries packets until that time (ns, CLOCK_MONOTONIC), or until the control socket has something to say."""
    count = len(devices.fds_N)
    moved = 0
    while True:
        now = _now(devices.times)
        moved += _hand_over(devices, links, packets, nat, now)
        if now >= until:
            return
        wait = min(next_due(packets), until) - now
        if moved > ALONE:
            _pause(devices.times, devices.tick[0])
            wait = 0
        else:
            wait = max(wait, devices.tick[0] if moved else 0)
        devices.times[2], devices.times[3] = wait // 1_000_000_000, wait % 1_000_000_000
        moved = 0
        if _poll(devices.polls.ctypes.data, count + 1, devices.times[2:].ctypes.data, 0) <= 0:
            continue
        if devices.polls[2 * count + 1] >> 16:
            return
        now = _now(devices.times)
        for peer in range(count):
            if devices.polls[2 * peer + 1] >> 16:
                moved += _take_in(devices, links, packets, nat, peer, now)


@inlined
def _take_in(devices: Devices, links: Links, packets: Packets, nat: Nat, peer: int, now: int) -> int:
    """Reads a device's packets and sends each on its way. Returns how many it read."""
    for number in range(BATCH):
        slot = take_slot(packets)
        row = packets.bytes_SW[slot] if slot >= 0 else devices.scratch
        size = _read(devices.fds_N[peer], row.ctypes.data, len(row))
        if size <= 0 or slot < 0:
            if slot >= 0:
                give_slot(packets, slot)
            if size <= 0:
                return number
            devices.tally[_FULL] += 1
            continue
        target = _route(devices, nat, peer, row[:size], now)
        due = send(links, peer, target, now, size) if target >= 0 else -1
        if due < 0:
            give_slot(packets, slot)
            continue
        packets.size_S[slot], packets.stage_S[slot] = size, _DOWNLINK
        packets.source_S[slot], packets.target_S[slot] = peer, target
        push(packets, due, slot)
    return BATCH


@inlined
def _route(devices: Devices, nat: Nat, peer: int, packet: NDArray[np.uint8], now: int) -> int:
    """The receiver of this packet, whose sender's address becomes the outside one; -1 for one that goes nowhere."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return -1  # IPv6: what a kernel says to its neighbours
    target = -1
    if packet[16] << 8 | packet[17] == NETWORK:
        target = devices.owner_A[np.int64(packet[18]) << 8 | packet[19]]
    if nat.inside_N[peer]:
        if target >= 0 and not outbound(nat, peer, packet, devices.outside_N[peer], now):
            target = -1
    elif address_at(packet, 12) != devices.outside_N[peer]:
        target = -1
    if target < 0 or target == peer:
        devices.tally[_FOREIGN] += 1
        return -1
    return int(target)


@inlined
def _hand_over(devices: Devices, links: Links, packets: Packets, nat: Nat, now: int) -> int:
    """Does what is due. Returns for how many packets."""
    done = 0
    while next_due(packets) <= now:
        due = next_due(packets)
        slot = pop(packets)
        done += 1
        _note_late(devices.tally, now - due)
        source, target, size = packets.source_S[slot], packets.target_S[slot], packets.size_S[slot]
        if packets.stage_S[slot] == _DOWNLINK:
            through = receive(links, source, target, due, size)
            if through > now:
                packets.stage_S[slot] = _DELIVERY
                push(packets, through, slot)
                continue
            if through < 0:
                give_slot(packets, slot)
                continue
        row = packets.bytes_SW[slot]
        if not nat.inside_N[target] or inbound(nat, target, row[:size], now):
            if _write(devices.fds_N[target], row.ctypes.data, size) == size:
                links.counts_PC[source * len(devices.fds_N) + target, _DELIVERED] += 1
                links.counts_PC[source * len(devices.fds_N) + target, _DELIVERED_BYTES] += size
            else:
                devices.tally[_REFUSED] += 1
        give_slot(packets, slot)
    return done


@inlined
def _note_late(tally: Ints, late: int) -> None:
    tally[_LATEST] = max(tally[_LATEST], late)
    microseconds, bin_ = late // 1000, 0
    while microseconds and bin_ < LATE_BINS - 1:
        microseconds >>= 1
        bin_ += 1
    tally[_BINS + bin_] += 1


@inlined
def _now(times: Ints) -> int:
    _clock(MONOTONIC, times.ctypes.data)
    return int(times[0] * 1_000_000_000 + times[1])


@inlined
def _pause(times: Ints, duration: int) -> None:
    times[2], times[3] = 0, duration
    _sleep(times[2:].ctypes.data, 0)
