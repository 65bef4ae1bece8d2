"""Which layers a peer holds: all of them if they fit into its memory, else those that help the swarm most.

    look into the DHT -> choose (peers/placement/span_choice.py) -> claim, by a record -> wait, and look again

Of two peers that choose at the same time the later claim yields. A peer that comes back keeps its layers.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decentral.comm.routes.stage import StageConfig
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.transport import Directory
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.fragments import ActivationForms
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Fragment
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.placement import span_choice
from decentral.peers.placement.span_choice import Holder
from decentral.train import memory

CLAIM_S = 1.0  # how long a peer waits to see others' claims
CLAIM_ROUNDS = 6  # after so many rounds of claiming the last choice stands


@dataclass(frozen=True, slots=True)
class SpanRequest:
    """A peer that looks for its layers, its run, and the memory that it has for the model."""

    run: config.Config
    name: RunId
    own: Signer
    addresses: tuple[str, ...]
    memory_bytes: int
    kept: tuple[int, int] | None  # the layers of its checkpoint, if it has one
    originates: bool = True  # whether it may train on data of its own


@dataclass(frozen=True, slots=True)
class ClaimedSpan:
    """The layers that a peer has claimed, and how many micro-batches under way fit beside them."""

    span: tuple[int, int] | None  # [first, last); None: the whole model
    capacity: int
    memory_bytes: int


class Clock(Protocol):
    """Unix time, and waiting; a simulator's is virtual."""

    def now(self) -> Seconds: ...

    async def sleep(self, seconds: Seconds) -> None: ...


@dataclass(frozen=True, slots=True)
class RealClock:
    """The Clock of a real peer."""

    now: Callable[[], Seconds]

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)


async def claim(request: SpanRequest, needs: MemoryNeeds, directory: Directory, clock: Clock) -> ClaimedSpan:
    """Chooses layers and claims them in the DHT. Raises UserError if not even the smallest part of the model fits."""
    memory_bytes, count = request.memory_bytes, len(needs.fragments)
    if request.kept is not None:
        return _keep(needs, request.kept, memory_bytes)
    if needs.span_bytes(0, count) <= memory_bytes:
        return ClaimedSpan(None, needs.capacity(0, count, memory_bytes), memory_bytes)
    memory.check(needs, memory_bytes)
    own, shards = request.own, request.run.swarm.shards
    reach = widest_span(needs, memory_bytes)
    chosen, claimed_at = None, float("inf")
    key = records.key_of(request.name, own.peer, shards)
    for _ in range(CLAIM_ROUNDS):
        found = await records.lookup(directory, request.name, shards, clock.now(), own.open)
        others = _holders(needs, found, own.peer, claimed_at)
        typical = sum(one.tokens_per_s for one in others) / len(others) if others else 1.0
        choice = span_choice.choose(needs.fragments, others, typical, reach)
        if choice == chosen:
            break
        chosen, claimed_at = choice, clock.now()
        record = _record(request, needs.span(choice.begin, choice.end), claimed_at)
        expires = claimed_at + request.run.swarm.record_ttl_s  # by then the node's own record has taken its place
        await directory.store(key, own.peer, own.seal(key, records.pack(record), expires), expires)
        await clock.sleep(CLAIM_S)
    assert chosen is not None
    span = needs.span(chosen.begin, chosen.end)
    return ClaimedSpan(span, needs.capacity(chosen.begin, chosen.end, memory_bytes), memory_bytes)


def _keep(needs: MemoryNeeds, kept: tuple[int, int], memory_bytes: int) -> ClaimedSpan:
    held = span_choice.holder_of(needs.fragments, *kept, 0.0)
    needed = needs.span_bytes(held.begin, held.end)
    if needed > memory_bytes:
        raise UserError(
            f"--memory {memory_bytes}: this folder's checkpoint holds layers {kept[0]} to {kept[1] - 1}, which take "
            f"{needed} bytes; give as much, or use another --state-dir"
        )
    whole = (held.begin, held.end) == (0, len(needs.fragments))
    return ClaimedSpan(None if whole else kept, needs.capacity(held.begin, held.end, memory_bytes), memory_bytes)


def _holders(needs: MemoryNeeds, found: dict[PeerId, PeerRecord], own: PeerId, claimed_at: float) -> list[Holder]:
    """The peers that train, and those that claimed before us. One that was not measured yet counts as typical."""
    earlier = {
        peer: record
        for peer, record in found.items()
        if peer != own and (record.phase == "training" or (record.time, peer) < (claimed_at, own))
    }
    typical = _mean(record.profile.tokens_per_s for record in earlier.values()) or 1.0
    return [
        span_choice.holder_of(needs.fragments, one.first, one.last, one.profile.tokens_per_s or typical)
        for _, one in sorted(earlier.items())
    ]


def _mean(values: Iterable[float]) -> float:
    """The mean of the positive values; 0 if there are none."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


def _record(request: SpanRequest, span: tuple[int, int], now: float) -> PeerRecord:
    return PeerRecord(request.name, now, request.addresses, Profile("", 0, 0.0, 0.0), span[0], span[1], 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """A model as routes see it: where it is cut, and how large the activations are that enter each layer."""

    cuts: tuple[Fragment, ...]  # the fragments of the whole model
    most_sequences: int
    activations: tuple[int, ...]  # bytes that a micro-batch keeps in each of the cuts
    forms: Callable[[int, int], ActivationForms]  # (layer, sequences) -> what enters that layer


def stage_config(request: SpanRequest, model: RoutedModel, held: Sequence[Fragment], capacity: int) -> StageConfig:
    """This peer's stage in the routes of micro-batches, with the fragments that it holds."""
    whole = len(held) == len(model.cuts)
    return StageConfig(
        run=request.name,
        peer=request.own.peer,
        first=held[0].first,
        last=held[-1].last,
        cuts=model.cuts,
        max_sequences=model.most_sequences,
        capacity=capacity,
        micro_batches_per_step=1 if whole and not request.run.synchronous else request.run.train.accumulate,
        forms=model.forms,
        activations=model.activations,
        slots=request.run.routes.slots,
        overlap=request.run.routes.overlap,
        originates=request.originates,
        synchronous=request.run.synchronous,
    )
