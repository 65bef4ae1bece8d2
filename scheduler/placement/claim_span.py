"""Choose a starting peer's layers (`claim`), and build the `StageConfig` of the stage that it computes.

All layers are chosen if they fit into the peer's memory, else those that help the swarm most:

    read records in the DHT, and ping their peers
    -> choose (scheduler/placement/span_choice.py) -> claim, by a record -> wait, and read again

If two peers choose at the same time, the peer with the later claim chooses again. A restarted peer keeps its layers.

A record outlives its peer: a peer that does not answer a ping may be dead, or briefly unreachable. So a newcomer
makes two choices: one as if only the peers that answer existed, and one as if all peers with records existed. If the
peers that answer do not hold all layers, the newcomer takes the first choice, which fills a gap. Otherwise it takes the
choice that begins at the earlier layer, since an additional peer at the first layers can begin micro-batches, while an
additional peer at later layers may have nothing to do. The published speeds of silent peers are not used.

Layers that only peers with the whole model hold are taken over later (scheduler/placement/recover.py).
"""

import statistics
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from decentral.core.layer_work import UNMEASURED, KindCosts, Shape, shape_of, share, shares_of
from decentral.core.memory_needs import MemoryNeeds, widest_span
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.swarm_size import LEAST_TIMES, SwarmTimes
from decentral.scheduler.placement import span_choice
from decentral.scheduler.placement.evaluate import FIRST
from decentral.scheduler.placement.span_choice import Holder

CLAIM_S = 1.0  # after claiming layers, a peer waits this long for the claims of others that start at the same time
CLAIM_ROUNDS = 6  # after this many rounds of choosing and claiming, a peer keeps its last claim
TRIED_S = 3.0  # a peer that does not answer a ping within this time counts as gone
MOST_TRIED = 64  # at most this many peers are pinged, half of them with the oldest records, half with the latest

Records = Mapping[PeerId, PeerRecord]


@dataclass(frozen=True, slots=True)
class SpanRequest:
    """The facts about a starting peer by which `claim` chooses the peer's layers."""

    run: config.Config
    name: RunId
    own: Signer
    addresses: tuple[str, ...]
    memory_bytes: int
    kept: tuple[int, int] | None  # layers [first, last) of the peer's checkpoint; None without a checkpoint
    originates: bool = True  # False if the peer must not begin micro-batches with data of its own
    times: SwarmTimes = LEAST_TIMES


@dataclass(frozen=True, slots=True)
class ClaimedSpan:
    """The layers that a peer has claimed."""

    span: tuple[int, int] | None  # layers [first, last); None means the whole model
    # Number of routed micro-batches that fit into memory at a time, in addition to the layers; 0: a peer with the whole
    # model computes for no other peer.
    capacity: int
    memory_bytes: int


class Clock(Protocol):
    """A clock that can also wait: `SwarmClock` in a real peer, virtual time in a simulator."""

    def now(self) -> Seconds:
        """Return unix time."""

    async def sleep(self, seconds: Seconds) -> None:
        """Wait for this time, real or virtual."""


Silent = Callable[[Records], Awaitable[Collection[PeerId]]]
"""A function that pings the peers of these records, and returns the peers that do not answer within TRIED_S."""


async def claim(
    request: SpanRequest, needs: MemoryNeeds, directory: Directory, silent: Silent, clock: Clock
) -> ClaimedSpan:
    """Choose a starting peer's layers, and claim them by a record in the DHT.

    Args:
        request: The peer, its memory, and the layers of its checkpoint.
        needs: The memory that the model's fragments take.
        directory: The DHT.
        silent: Function that pings peers and returns those that do not answer, such as `silent_peers`.
        clock: Tells the time, and waits.

    Returns:
        The chosen layers. No claim is made for the layers of a checkpoint, or for the whole model if it fits.

    Raises:
        UserError: If not even the smallest part of the model, or the checkpoint's layers, fit into memory.
    """
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
        shape = _shape(needs, found)
        others = _holders(needs, here, own.peer, claimed_at, shape)
        choice = _choose(needs, others, reach, shape)
        if gone and _hold_all(needs, others):
            among_all = _choose(needs, _holders(needs, found, own.peer, claimed_at, shape, gone), reach, shape)
            choice = min(choice, among_all, key=lambda one: one.begin)
        if choice == chosen:
            break
        chosen, claimed_at = choice, clock.now()
        key = swarm_size.key_of(request.name, own.peer, level)
        record = _record(request, needs.span(choice.begin, choice.end), claimed_at)
        expires = claimed_at + record.lifetime_s  # by then the running peer has published a newer record
        await directory.store(key, own.peer, own.seal(key, records.pack(record), expires), expires)
        await clock.sleep(CLAIM_S)
    assert chosen is not None
    span = needs.span(chosen.begin, chosen.end)
    return ClaimedSpan(span, needs.capacity(chosen.begin, chosen.end, memory_bytes), memory_bytes)


def _reach(request: SpanRequest, needs: MemoryNeeds) -> Callable[[int], int]:
    """Return a function that maps the first fragment of a span to the end of the widest span that fits into memory.

    A peer that may not begin micro-batches has nothing to do at the first layers. So it gets a span there only if no
    other span fits into its memory.
    """
    widest = widest_span(needs, request.memory_bytes)
    if request.originates or all(widest(begin) == begin for begin in range(FIRST + 1, len(needs.fragments))):
        return widest
    return lambda begin: widest(begin) if begin > FIRST else begin


def _choose(needs: MemoryNeeds, others: Sequence[Holder], reach: Callable[[int], int], shape: Shape) -> Holder:
    typical = sum(one.tokens_per_s for one in others) / len(others) if others else 1.0
    return span_choice.choose(needs.fragments, others, typical, reach, shape)


def _shape(needs: MemoryNeeds, found: Records) -> Shape:
    """Return the median of the peers' shapes: the shares of a token's time in the embedding, the blocks and the head.

    If no peer has measured its layers, the shares follow from the layers' FLOPs.
    """
    costs = [record.profile.costs for record in found.values() if record.profile.costs != UNMEASURED]
    shapes = [shape_of(needs.fragments, one) for one in costs or [UNMEASURED]]
    embedding, blocks, head = (statistics.median(one[kind] for one in shapes) for kind in range(3))
    total = embedding + blocks + head or 1.0
    return embedding / total, blocks / total, head / total


def _hold_all(needs: MemoryNeeds, holders: Sequence[Holder]) -> bool:
    held = {index for one in holders for index in range(one.begin, one.end)}
    return len(held) == len(needs.fragments)


def _keep(needs: MemoryNeeds, kept: tuple[int, int], memory_bytes: int) -> ClaimedSpan:
    held = span_choice.holder_of(needs.fragments, kept[0], kept[1], 0.0)
    needed = needs.span_bytes(held.begin, held.end)
    if needed > memory_bytes:
        raise UserError(
            f"the checkpoint in this state folder has layers {kept[0]} to {kept[1] - 1}, which take {needed} bytes; "
            f"--memory is {memory_bytes}: give at least {needed}, or use another --state-dir"
        )
    whole = (held.begin, held.end) == (0, len(needs.fragments))
    return ClaimedSpan(None if whole else kept, needs.capacity(held.begin, held.end, memory_bytes), memory_bytes)


async def silent_peers(transport: Transport, found: Records) -> set[PeerId]:
    """Ping the peers of these records over the network, and return the peers that do not answer."""

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
    """Ping the peers that train, according to their records, and return those that do not answer.

    Returns:
        The peers; None if no peer trains; () if none of them answers, since our own network may be at fault.
    """
    training = [peer for peer, record in found.items() if record.phase == PeerPhase.TRAINING and peer != own]
    by_age = sorted(training, key=lambda peer: (found[peer].time, peer))
    half = MOST_TRIED // 2
    asked = by_age if len(by_age) <= MOST_TRIED else [*by_age[:half], *by_age[-half:]]
    if not asked:
        return None
    gone = await silent({peer: found[peer] for peer in asked})
    return gone if len(gone) < len(asked) else ()


def _holders(
    needs: MemoryNeeds,
    found: Records,
    own: PeerId,
    claimed_at: float,
    shape: Shape,
    silent: Collection[PeerId] = (),
) -> list[Holder]:
    """Return the spans and speeds of the other peers that train, or that have claimed their layers before us.

    Silent peers, and peers that publish no speed, get the mean speed of the other peers. To compare the speeds, each
    peer is replaced by a device that needs as long for the peer's layers, but divides its time between embedding,
    blocks and head as `shape` says; the speed of a holder is the tokens/s of that device through the whole model.
    """
    shares = shares_of(needs.fragments, shape)
    earlier = {
        peer: record
        for peer, record in found.items()
        if peer != own
        and not record.profile.alone
        and (record.phase == PeerPhase.TRAINING or (record.time, peer) < (claimed_at, own))
    }
    speeds = {peer: 0.0 if peer in silent else record.profile.tokens_per_s for peer, record in earlier.items()}
    typical = _mean(speeds.values()) or 1.0
    holders = []
    for peer, one in sorted(earlier.items()):
        holder = span_choice.holder_of(needs.fragments, one.first, one.last, speeds[peer] or typical)
        own_share = share(needs.fragments, one.first, one.last, one.profile.costs)
        alike = sum(shares[holder.begin : holder.end]) / own_share if own_share else 1.0
        holders.append(replace(holder, tokens_per_s=holder.tokens_per_s * alike))
    return holders


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the positive values; 0.0 if there are none."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


def _record(request: SpanRequest, span: tuple[int, int], now: float) -> PeerRecord:
    unknown, renew_s = Profile("", 0, 0.0, 0.0), request.times.renew_s
    first, last = span
    return PeerRecord(request.name, now, request.addresses, unknown, first, last, 0, 0, 0, renew_s=renew_s)


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """The facts about a model that the router needs: the fragments, and the activations in and between them."""

    cuts: tuple[Fragment, ...]
    most_sequences: int
    activations: tuple[int, ...]  # bytes that a micro-batch keeps in each fragment until its backward pass
    forms: Callable[[int, int], ActivationForms]  # (layer, sequences) -> forms of the activations that enter that layer
    costs: KindCosts = UNMEASURED  # costs of the embedding, of a block and of the head on the peer's device


def stage_config(request: SpanRequest, model: RoutedModel, held: Sequence[Fragment], capacity: int) -> StageConfig:
    """Return the config of the pipeline stage that this peer computes.

    Args:
        request: The peer and its run.
        model: The model's fragments and activations.
        held: The fragments that the peer holds.
        capacity: Number of micro-batches that fit into memory at a time.
    """
    whole = len(held) == len(model.cuts)
    return StageConfig(
        run=request.name,
        peer=request.own.peer,
        first=held[0].first,
        last=held[-1].last,
        cuts=model.cuts,
        max_sequences=model.most_sequences if capacity else 0,
        capacity=capacity,
        micro_batches_per_step=1 if whole and not request.run.synchronous else request.run.train.accumulate,
        forms=model.forms,
        activations=model.activations,
        slots=request.run.routes.slots,
        overlap=request.run.routes.overlap,
        originates=request.originates,
        synchronous=request.run.synchronous,
        costs=model.costs,
    )
