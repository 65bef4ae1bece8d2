"""What a packet meets on its way: its sender's uplink, the path of the pair, its receiver's downlink. Compiled.

A rate is a clock that says when the last byte that was accepted has left: a packet departs at max(its arrival, clock)
+ bytes / rate. One that would wait longer than QUEUE_NS is dropped (tail drop). The path then loses a share of the
packets, by a generator of its own for each pair, and delays the rest. Times are nanoseconds, rates nanoseconds per byte
(0: unlimited); N is the number of peers, and the pair from a to b has the number a * N + b. Sizes are those of IP
packets, so TCP's payload at 1500 bytes is at most 0.965 of a rate.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled, inlined
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

QUEUE_NS = 250_000_000  # the longest that a packet may wait before a link
DROPPED = -1


class Count(IntEnum):
    """Columns of Links.counts: what happened to the packets from one peer to another."""

    OFFERED_BYTES = 0
    OFFERED = 1
    DELIVERED_BYTES = 2
    DELIVERED = 3
    CUT = 4  # dropped by a partition
    UPLINK_FULL = 5
    PATH_FULL = 6
    DOWNLINK_FULL = 7
    LOST = 8  # by chance
    LONGEST_WAIT_NS = 9  # in any one queue


class Links(NamedTuple):
    """The links as they are now, with their clocks. What changes while it runs is written into these arrays."""

    up_N: Floats  # ns per byte
    down_N: Floats
    path_P: Floats  # of pairs, as all that follows but the clocks of peers
    delay_P: Ints
    loss_P: Floats  # a share
    open_P: Flags
    up_free_N: Ints  # when the last accepted byte has left
    down_free_N: Ints
    path_free_P: Ints
    chance_P: NDArray[np.uint64]  # states of the generators that decide on loss
    counts_PC: Ints


def unlimited(peers: int, seed: int) -> Links:
    """Links without any limit, delay or loss between so many peers."""
    pairs = peers * peers
    return Links(
        up_N=np.zeros(peers),
        down_N=np.zeros(peers),
        path_P=np.zeros(pairs),
        delay_P=np.zeros(pairs, np.int64),
        loss_P=np.zeros(pairs),
        open_P=np.ones(pairs, np.bool_),
        up_free_N=np.zeros(peers, np.int64),
        down_free_N=np.zeros(peers, np.int64),
        path_free_P=np.zeros(pairs, np.int64),
        chance_P=np.random.default_rng(seed).integers(1, 2**63, pairs, dtype=np.uint64),
        counts_PC=np.zeros((pairs, len(Count)), np.int64),
    )


# Numba takes members of an IntEnum for constants only by value, hence these names.
_OFFERED_BYTES, _OFFERED = int(Count.OFFERED_BYTES), int(Count.OFFERED)
_CUT, _LOST, _WAIT = int(Count.CUT), int(Count.LOST), int(Count.LONGEST_WAIT_NS)
_UPLINK_FULL, _PATH_FULL, _DOWNLINK_FULL = int(Count.UPLINK_FULL), int(Count.PATH_FULL), int(Count.DOWNLINK_FULL)


@compiled
def depart(free: Ints, rate: Floats, index: int, arrives: int, size: int) -> int:
    """When a packet that arrives then has left this link; DROPPED if its queue is full."""
    begins = max(arrives, free[index])
    if begins - arrives > QUEUE_NS:
        return DROPPED
    free[index] = begins + int(size * rate[index] + 0.5)
    return int(free[index])


@compiled
def send(links: Links, source: int, target: int, now: int, size: int) -> int:
    """When this packet reaches its receiver's downlink; DROPPED if it does not."""
    pair = source * len(links.up_N) + target
    count = links.counts_PC[pair]
    count[_OFFERED_BYTES] += size
    count[_OFFERED] += 1
    if not links.open_P[pair]:
        count[_CUT] += 1
        return DROPPED
    sent = depart(links.up_free_N, links.up_N, source, now, size)
    if sent < 0:
        count[_UPLINK_FULL] += 1
        return DROPPED
    left = depart(links.path_free_P, links.path_P, pair, sent, size)
    if left < 0:
        count[_PATH_FULL] += 1
        return DROPPED
    count[_WAIT] = max(count[_WAIT], sent - now, left - sent)
    if links.loss_P[pair] > 0.0 and _draw(links.chance_P, pair) < links.loss_P[pair]:
        count[_LOST] += 1
        return DROPPED
    return int(left + links.delay_P[pair])


@compiled
def receive(links: Links, source: int, target: int, now: int, size: int) -> int:
    """When this packet, which has reached its receiver's downlink, is through it; DROPPED if it is not let in."""
    count = links.counts_PC[source * len(links.up_N) + target]
    through = depart(links.down_free_N, links.down_N, target, now, size)
    if through < 0:
        count[_DOWNLINK_FULL] += 1
    else:
        count[_WAIT] = max(count[_WAIT], through - now)
    return through


@inlined
def _draw(states: NDArray[np.uint64], index: int) -> float:
    """A number from 0 to 1 (xorshift64*, Vigna, arXiv 1402.6246)."""
    word = states[index]
    word ^= word >> np.uint64(12)
    word ^= word << np.uint64(25)
    word ^= word >> np.uint64(27)
    states[index] = word
    return float((word * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0
