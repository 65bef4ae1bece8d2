"""Which layers a peer holds: all, where its memory takes them; else those that help the swarm most.

    look into the DHT  ->  choose (peers/placement.py)  ->  claim: a record that says so  ->  wait, and look again

Of two peers that choose at the same time the later claim yields. A peer that comes back keeps its layers.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from decentral.comm.identity import Identity
from decentral.comm.transport import Directory
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.peers import placement, records
from decentral.peers.placement import Holder
from decentral.peers.records import PeerRecord, Profile
from decentral.train import memory

CLAIM_S = 1.0  # for others' claims to be seen
ROUNDS = 6  # of claiming; the last choice stands
HOLDS_S = 60.0  # a claim, until the peer's own record takes its place


@dataclass(frozen=True, slots=True)
class Placed:
    """`span`: layers [first, last), or None for the whole model. `capacity`: micro-batches under way that fit."""

    span: tuple[int, int] | None
    capacity: int
    memory_bytes: int


async def choose_place(
    run: config.Config,
    name: RunId,
    own: Identity,
    directory: Directory,
    addresses: tuple[str, ...],
    memory_bytes: int,
    kept: tuple[int, int] | None,
) -> Placed:
    """Raises UserError if not even the smallest part of the model fits."""
    needs = memory.needs(run)
    count = len(needs.fragments)
    if kept is not None:
        return _keep(needs, kept, memory_bytes)
    if needs.of(0, count) <= memory_bytes:
        return Placed(None, needs.capacity(0, count, memory_bytes), memory_bytes)
    memory.check(needs, memory_bytes)
    reach = memory.reach(needs, memory_bytes)
    chosen, claimed_at = None, float("inf")
    key = records.key_of(name, own.peer, run.swarm.shards)
    for _ in range(ROUNDS):
        found = await records.look(directory, name, run.swarm.shards, time.time())
        others = _holders(needs, found, own.peer, claimed_at)
        typical = sum(one.tokens_per_s for one in others) / len(others) if others else 1.0
        choice = placement.choose(needs.fragments, others, typical, reach)
        if choice == chosen:
            break
        chosen, claimed_at = choice, time.time()
        claim = _claim(name, addresses, needs.span(choice.begin, choice.end), claimed_at)
        expires = claimed_at + HOLDS_S
        await directory.store(key, own.peer, own.seal(key, records.pack(claim), expires), expires)
        await asyncio.sleep(CLAIM_S)
    assert chosen is not None
    span = needs.span(chosen.begin, chosen.end)
    return Placed(span, needs.capacity(chosen.begin, chosen.end, memory_bytes), memory_bytes)


def _keep(needs: memory.Needs, kept: tuple[int, int], memory_bytes: int) -> Placed:
    held = placement.holder_of(needs.fragments, *kept, 0.0)
    if needs.of(held.begin, held.end) > memory_bytes:
        raise UserError(
            f"--memory {memory_bytes}: this folder's checkpoint holds layers {kept[0]} to {kept[1] - 1}, which take "
            f"{needs.of(held.begin, held.end)} bytes; give as much, or use another --state-dir"
        )
    whole = (held.begin, held.end) == (0, len(needs.fragments))
    return Placed(None if whole else kept, needs.capacity(held.begin, held.end, memory_bytes), memory_bytes)


def _holders(needs: memory.Needs, found: dict[PeerId, PeerRecord], own: PeerId, claimed_at: float) -> list[Holder]:
    """Who trains, and who claimed before us. Those that were not measured yet count as the typical one."""
    earlier = {
        peer: record
        for peer, record in found.items()
        if peer != own and (record.phase == "training" or (record.time, peer) < (claimed_at, own))
    }
    typical = _mean(record.profile.tokens_per_s for record in earlier.values()) or 1.0
    return [
        placement.holder_of(needs.fragments, one.first, one.last, one.profile.tokens_per_s or typical)
        for _, one in sorted(earlier.items())
    ]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


def _claim(name: RunId, addresses: tuple[str, ...], span: tuple[int, int], now: float) -> PeerRecord:
    return PeerRecord(name, now, addresses, Profile("", 0, 0.0, 0.0), span[0], span[1], 0, 0, 0)
