"""Which layers a peer holds: all of them if they fit into its memory, else those that help the swarm most.

    look into the DHT, and ask who of those is still there
    -> choose (scheduler/placement/span_choice.py) -> claim, by a record -> wait, and look again

Of two peers that choose at the same time the later claim yields. A peer that comes back keeps its layers.

A record outlives its peer, and who does not answer may be dead, or back in a moment. So a newcomer chooses twice: among
all whose records it finds, and among those that answer. Where these hold all layers it takes the earlier of the two
spans: a peer too many there begins micro-batches, while one too many at later layers has nothing to do, and what is
left to whole-model peers alone is taken from them later (scheduler/placement/recover.py). Else it fills the gap.
The speeds of those that are silent do not count.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError, Directory, Transport
from decentral.core import config
from decentral.core.at_once import at_once
from decentral.core.errors import UserError
from decentral.core.fragments import ActivationForms, Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.membership.swarm_size import LEAST_TIMES, SwarmTimes
from decentral.scheduler.placement import span_choice
from decentral.scheduler.placement.evaluate import FIRST
from decentral.scheduler.placement.span_choice import Holder

CLAIM_S = 1.0  # how long a peer waits to see others' claims
CLAIM_ROUNDS = 6  # after so many rounds of claiming the last choice stands
TRIED_S = 3.0  # how long a peer that is asked whether it is there may take
MOST_TRIED = 64  # half of them with the oldest records, and half with the latest

Records = Mapping[PeerId, PeerRecord]


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
    times: SwarmTimes = LEAST_TIMES


@dataclass(frozen=True, slots=True)
class ClaimedSpan:
    """The layers that a peer has claimed, and how many micro-batches under way fit beside them."""

    span: tuple[int, int] | None  # [first, last); None: the whole model
    capacity: int
    memory_bytes: int


class Clock(Protocol):
    """Unix time, and waiting: `SwarmClock` of a real peer; a simulator's is virtual."""

    def now(self) -> Seconds: ...

    async def sleep(self, seconds: Seconds) -> None: ...


Silent = Callable[[Records], Awaitable[Collection[PeerId]]]
"""Asks these peers whether they are there, and gives those that do not answer within TRIED_S."""


async def claim(
    request: SpanRequest, needs: MemoryNeeds, directory: Directory, silent: Silent, clock: Clock
) -> ClaimedSpan:
    """Chooses layers and claims them in the DHT. Raises UserError if not even the smallest part of the model fits."""
    memory_bytes, count = request.memory_bytes, len(needs.fragments)
    if request.kept is not None:
        return _keep(needs, request.kept, memory_bytes)
    if needs.span_bytes(0, count) <= memory_bytes:
        return ClaimedSpan(None, needs.capacity(0, count, memory_bytes), memory_bytes)
    memory.check(needs, memory_bytes)
    own = request.own
    reach = _reach(request, needs)
    chosen, claimed_at, gone = None, float("inf"), None
    for _ in range(CLAIM_ROUNDS):
        level, found = await records.look(directory, request.name, own, clock.now())
        if gone is None:
            gone = await _gone(found, own.peer, silent)
        here = {peer: record for peer, record in found.items() if peer not in (gone or ())}
        others = _holders(needs, here, own.peer, claimed_at)
        choice = _choose(needs, others, reach)
        if gone and _hold_all(needs, others):
            among_all = _choose(needs, _holders(needs, found, own.peer, claimed_at, gone), reach)
            choice = min(choice, among_all, key=lambda one: one.begin)
        if choice == chosen:
            break
        chosen, claimed_at = choice, clock.now()
        key = swarm_size.key_of(request.name, own.peer, level)
        record = _record(request, needs.span(choice.begin, choice.end), claimed_at)
        expires = claimed_at + record.lifetime_s  # by then the node's own record has taken its place
        await directory.store(key, own.peer, own.seal(key, records.pack(record), expires), expires)
        await clock.sleep(CLAIM_S)
    assert chosen is not None
    span = needs.span(chosen.begin, chosen.end)
    return ClaimedSpan(span, needs.capacity(chosen.begin, chosen.end, memory_bytes), memory_bytes)


def _reach(request: SpanRequest, needs: MemoryNeeds) -> Callable[[int], int]:
    """The end of the widest span that fits, by its begin. Who only donates begins no micro-batches, and has nothing to
    do at the first layers: it takes them only where its memory is too small for all others."""
    widest = widest_span(needs, request.memory_bytes)
    if request.originates or all(widest(begin) == begin for begin in range(FIRST + 1, len(needs.fragments))):
        return widest
    return lambda begin: widest(begin) if begin > FIRST else begin


def _choose(needs: MemoryNeeds, others: Sequence[Holder], reach: Callable[[int], int]) -> Holder:
    typical = sum(one.tokens_per_s for one in others) / len(others) if others else 1.0
    return span_choice.choose(needs.fragments, others, typical, reach)


def _hold_all(needs: MemoryNeeds, holders: Sequence[Holder]) -> bool:
    held = {index for one in holders for index in range(one.begin, one.end)}
    return len(held) == len(needs.fragments)


def _keep(needs: MemoryNeeds, kept: tuple[int, int], memory_bytes: int) -> ClaimedSpan:
    held = span_choice.holder_of(needs.fragments, kept[0], kept[1], 0.0)
    needed = needs.span_bytes(held.begin, held.end)
    if needed > memory_bytes:
        raise UserError(
            f"--memory {memory_bytes}: this folder's checkpoint holds layers {kept[0]} to {kept[1] - 1}, which take "
            f"{needed} bytes; give as much, or use another --state-dir"
        )
    whole = (held.begin, held.end) == (0, len(needs.fragments))
    return ClaimedSpan(None if whole else kept, needs.capacity(held.begin, held.end, memory_bytes), memory_bytes)


async def silent_peers(transport: Transport, found: Records) -> set[PeerId]:
    """Silent, of a real peer."""

    async def is_silent(peer: PeerId) -> bool:
        transport.learn(peer, found[peer].addresses)
        try:
            await transport.ask(peer, Envelope(Ping(0)), TRIED_S, 0)
        except AskError as error:
            return error.reason in (Reason.DEADLINE, Reason.UNREACHABLE)
        return False

    are_silent = await at_once(map(is_silent, found))
    return {peer for peer, is_so in zip(found, are_silent, strict=True) if is_so}


async def _gone(found: Records, own: PeerId, silent: Silent) -> Collection[PeerId] | None:
    """The peers that train by their records, and are not there any more; None: nobody could be asked.

    Who hears nobody at all cannot tell.
    """
    training = [peer for peer, record in found.items() if record.phase == "training" and peer != own]
    by_age = sorted(training, key=lambda peer: (found[peer].time, peer))
    half = MOST_TRIED // 2
    asked = by_age if len(by_age) <= MOST_TRIED else [*by_age[:half], *by_age[-half:]]
    if not asked:
        return None
    gone = await silent({peer: found[peer] for peer in asked})
    return gone if len(gone) < len(asked) else ()


def _holders(
    needs: MemoryNeeds, found: Records, own: PeerId, claimed_at: float, silent: Collection[PeerId] = ()
) -> list[Holder]:
    """The peers that train, and those that claimed before us. One that was not measured yet counts as typical, and so
    does a silent one."""
    earlier = {
        peer: record
        for peer, record in found.items()
        if peer != own and (record.phase == "training" or (record.time, peer) < (claimed_at, own))
    }
    speeds = {peer: 0.0 if peer in silent else record.profile.tokens_per_s for peer, record in earlier.items()}
    typical = _mean(speeds.values()) or 1.0
    return [
        span_choice.holder_of(needs.fragments, one.first, one.last, speeds[peer] or typical)
        for peer, one in sorted(earlier.items())
    ]


def _mean(values: Iterable[float]) -> float:
    """The mean of the positive values; 0 if there are none."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


def _record(request: SpanRequest, span: tuple[int, int], now: float) -> PeerRecord:
    unknown, renew_s = Profile("", 0, 0.0, 0.0), request.times.renew_s
    first, last = span
    return PeerRecord(request.name, now, request.addresses, unknown, first, last, 0, 0, 0, renew_s=renew_s)


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
