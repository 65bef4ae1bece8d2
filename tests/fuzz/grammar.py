"""Messages as a liar would make them: such as the node expects now, such with one field of any value, and any at all.

What a node expects comes from the node itself (`Known`): who is there, which executions it has, which round it is in. A
fuzzer that guessed would be refused at the door, and test nothing behind it.
"""

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar, get_args

from decentral.comm.wire import blobs, codec, messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ExecutionId, Hop, Message, Question, RoundMember, Snapshot
from decentral.comm.wire.transport import Ask
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment, Layout, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.peers.joining.fetch import PIECE_BYTES
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.link_probes import zeros
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.runtime.node import Node
from decentral.scheduler.placement import evaluate, plans
from decentral.scheduler.placement.evaluate import SwarmPlan
from decentral.sim.virtual_signer import VirtualSigner
from tests.fuzz import values
from tests.fuzz.device import FORMS, ON_REQUEST, SPARSE_WINDOW, STATE, TOKENS, WINDOW, blob_of

T = TypeVar("T")
PHASES: tuple[PeerPhase, ...] = (*(PeerPhase.TRAINING,) * 8, PeerPhase.JOINING, PeerPhase.LEAVING)  # of records
CROWD, CROWD_S = 8, 30.0  # liars that say most, and for how long
ONE_FIELD = 0.2  # share of messages with one field of any value
ANY_MESSAGE = 0.04  # share of messages that are of any kind, with any fields
LIARS_ROUND = 7
CALM = 0.97  # share of what a calm crowd says that is no lie
DAMAGED = 0.02  # share of messages whose bytes are damaged on the way

QUESTIONS: tuple[type[Message], ...] = tuple(
    kind for kind in get_args(Message) if issubclass(kind, Question) and kind is not messages.MembershipProof
)  # MembershipProof: tests/fuzz/private.py
ROUNDS = (messages.RoundQuery, messages.CollectRequest)
REFUSALS = (
    "busy",
    "not-ready",
    "nothing-newer",
    "stranger",
    "moved",
    "span",
    "gone",
    "without",
    "late",
    "expelled",
    "x",
)


@dataclasses.dataclass
class Known:
    """What a liar knows of a node, and what it may fill fields with."""

    node: Node
    chance: Random
    cuts: tuple[Fragment, ...]  # of the model
    names: tuple[PeerId, ...]  # of all liars; the first eight of `crowd` say most
    now: float = 0.0
    began: float = 0.0

    @property
    def run(self) -> RunId:
        return self.node.setup.run

    @property
    def turn(self) -> int:
        """The number of the crowds before the present one."""
        return int((self.now - self.began) / CROWD_S)

    @property
    def crowd(self) -> tuple[PeerId, ...]:
        """The liars of the present half minute: who has spoilt his own standing for good is followed by others."""
        first = self.turn * CROWD % len(self.names)
        return self.names[first : first + CROWD]

    @property
    def calm(self) -> bool:
        """Whether the present crowd lies seldom: behind some doors nobody comes who lies all the time."""
        return self.turn % 2 == 0 and self.chance.random() < CALM

    def layer(self) -> int:
        """A layer at which others' executions may begin here; now and then any at which a fragment begins or ends."""
        stage = self.node.setup.routes
        entries = [cut.first for cut in self.cuts if stage and stage.begins(cut.first)]
        if entries and self.chance.random() < 0.9:
            return self.chance.choice(entries)
        return self.chance.choice((*(cut.first for cut in self.cuts), self.cuts[-1].last))

    def span(self) -> tuple[int, int]:
        """The layers of one or several fragments; mostly of the whole model."""
        if self.chance.random() < 0.6:
            return 0, self.cuts[-1].last
        first = self.chance.randrange(len(self.cuts))
        return self.cuts[first].first, self.cuts[self.chance.randrange(first, len(self.cuts))].last

    def peer(self) -> PeerId:
        return self.chance.choice((*self.crowd, self.node.setup.own.peer, self.chance.choice(self.names)))

    def round(self) -> int:
        """Mostly the node's; where it is in none, the one in which the liars say that they are."""
        there = (self.node.rounds.number or LIARS_ROUND) if self.node.rounds else 0
        return there if self.chance.random() < 0.7 else max(0, there + self.chance.choice((1, 1, -1, 5)))

    def execution(self) -> ExecutionId:
        """One that the node has, or could have."""
        routes = self.node.routes
        there = list(routes.table.by_id)[-16:] if routes else []
        own = [execution.id for execution in list(routes.executions.values())[-4:]] if routes else []
        if (there or own) and self.chance.random() < 0.8:
            return self.chance.choice(there + own)
        return ExecutionId(self.peer(), self.chance.randrange(50), self.layer())

    def executions(self) -> tuple[ExecutionId, ...]:
        return tuple(self.execution() for _ in range(self.chance.choice((0, 1, 1, 3))))

    def member(self) -> RoundMember:
        return RoundMember(self.peer(), *self.span())

    def members(self) -> tuple[RoundMember, ...]:
        """The members of a round, as a node believes in them: sorted, mostly with the node itself."""
        found = {self.peer() for _ in range(self.chance.choice((1, 2, 3)))}
        if self.chance.random() < 0.8:
            found.add(self.node.setup.own.peer)
        return tuple(RoundMember(peer, *self.span()) for peer in sorted(found))

    def snapshot(self, fragment: int | None = None, seq: int | None = None) -> Snapshot:
        index = self.chance.randrange(len(self.cuts)) if fragment is None else fragment
        number = int(self.now * 1000) + self.chance.randrange(3) if seq is None else seq
        digest = blobs.digest(blob_of(WINDOW))
        return Snapshot(self.run, index, number, self.chance.randrange(200), self.now, WINDOW, digest)

    def asker(self, message: Message) -> PeerId | None:
        """Who may ask this, if only some may."""
        routes = self.node.routes
        if isinstance(message, messages.ForwardStatusQuery) and routes:
            there = routes.table.by_id.get(message.execution)
            return next(iter(there.askers), None) if there else None
        if isinstance(message, messages.CollectRequest) and self.node.rounds and self.node.rounds.now_in:
            return self.chance.choice([PeerId(member.peer) for member in self.node.rounds.now_in.members])
        if isinstance(message, messages.CommitDecision):
            return next((PeerId(one.origin) for one in (*message.commit, *message.abort)), None)
        return None


def questions_for(node: Node) -> tuple[type[Message], ...]:
    """The kinds that this node answers, as far as the run's algorithm decides that."""
    others = (messages.Pull,) if node.rounds else ROUNDS
    return tuple(kind for kind in QUESTIONS if kind not in others)


def question(known: Known, kind: type[Message]) -> Envelope:
    """A question of this kind, such as the node expects, with its blob."""
    run, chance, fragment = known.run, known.chance, known.chance.randrange(len(known.cuts))
    late = chance.choice((0.0, 0.5, 5.0, 60.0))
    match kind:
        case messages.Hello:
            return Envelope(messages.Hello(chance.choice(("", run))))
        case messages.Ping:
            return Envelope(messages.Ping(chance.randrange(100)))
        case messages.Probe:
            return Envelope(messages.Probe(chance.choice((0, 100, 5000))), zeros(chance.choice((0, 100))))
        case messages.Pull:
            after = int(known.now * 1000) - chance.choice((0, 500, 60000))
            names = chance.choice(((), ("pseudo_gradient",), ("phi.0",), ("phi.2", "phi.1")))
            return Envelope(messages.Pull(run, fragment, after, known.now - late, late, chance.random() < 0.2, names))
        case messages.StateRequest:
            return Envelope(messages.StateRequest(run, fragment, chance.choice((0, 0, 3)), 100, chance.random() < 0.2))
        case messages.Offer:
            return Envelope(messages.Offer(run, known.layer(), 1))
        case messages.ForwardRequest:
            hidden = chance.choice(FORMS.entering)
            place = (run, known.peer(), chance.randrange(500), known.layer(), 1, late, 2 * late, hidden)
            return Envelope(messages.ForwardRequest(*place, known.round(), known.now - late), blob_of(hidden))
        case messages.ForwardStatusQuery:
            return Envelope(messages.ForwardStatusQuery(run, known.execution()))
        case messages.CommitDecision:
            return Envelope(messages.CommitDecision(run, known.executions(), known.executions()))
        case messages.CommitQuery:
            return Envelope(messages.CommitQuery(run, known.executions()))
        case messages.LeaseRequest:
            return Envelope(messages.LeaseRequest(run, fragment, chance.random() < 0.3))
        case messages.RecordsQuery:
            brought = chance.choice([b"", sealed_record(known, known.peer()), chance.randbytes(100)])
            short = tuple(chance.randbytes(8) for _ in range(chance.choice((0, 3))))
            number, lacking = chance.choice((0, 1, 1000)), chance.choice((None, (), short))
            return Envelope(messages.RecordsQuery(run, brought, short, number, plans=lacking))
        case messages.RoundQuery:
            return Envelope(messages.RoundQuery(run, known.round(), *known.span(), chance.random() < 0.5))
    assert kind is messages.CollectRequest, f"add a case for {kind.__name__} to `question` of tests/fuzz/grammar.py"
    index, own = chance.choice((None, fragment)), PeerId(known.node.setup.own.peer)
    origin = own if chance.random() < 0.7 else known.peer()
    return Envelope(messages.CollectRequest(run, known.round(), origin, index, late, chance.random() < 0.7))


def answer(known: Known, ask: Ask) -> Envelope:
    """An answer that the node can take for one to this question of its own."""
    run, chance = known.run, known.chance
    match ask.envelope.message:
        case messages.Hello():
            return Envelope(messages.Welcome(run, known.node.setup.config.canonical()))
        case messages.Ping(nonce):
            return Envelope(messages.Pong(nonce))
        case messages.Probe(download_bytes):
            return Envelope(messages.Probed(len(ask.envelope.blob)), zeros(download_bytes))
        case messages.Pull() as pull:
            return _pulled(known, pull)
        case messages.StateRequest(fragment=fragment, offset=offset):
            total = sum(section.size for section in STATE)
            piece = blob_of(STATE)[offset : offset + PIECE_BYTES]
            step = known.round() if known.node.rounds else chance.choice((0, 3, 3, 3, 1 << 40))
            return Envelope(messages.StateChunk(run, fragment, offset, total, step, STATE), piece)
        case messages.RecordsQuery():
            brought = tuple((peer, sealed_record(known, peer)) for peer in known.crowd[:3])
            passed_on = tuple((peer, sealed_plan(known, peer)) for peer in known.crowd[: chance.choice((0, 1, 8))])
            return Envelope(messages.PeerRecords(run, brought, chance.choice((b"", b"no list")), passed_on))
        case messages.Offer(first=first):
            return Envelope(messages.Load(run, chance.random(), chance.random(), min(first + 3, known.cuts[-1].last)))
        case messages.ForwardRequest(first=first):
            hops = (Hop(ask.to, first, known.cuts[-1].last),)
            gradient = chance.choice(FORMS.gradients)
            return Envelope(messages.BackwardResponse(run, 1.0, TOKENS, hops, gradient), blob_of(gradient))
        case messages.CommitQuery(executions=asked):
            return Envelope(messages.CommitDecision(run, asked[:2], asked[2:]))
        case messages.RoundQuery():
            return Envelope(messages.RoundStatus(run, known.round(), chance.choice(((), (), (), known.members()))))
        case messages.CollectRequest() as collect:
            return _collected(known, collect)
        case messages.ForwardStatusQuery() | messages.CommitDecision() | messages.LeaseRequest():
            return Envelope(messages.Done())
    raise NotImplementedError(f"add a case for {ask.envelope.message} to `answer` of tests/fuzz/grammar.py")


def _pulled(known: Known, pull: messages.Pull) -> Envelope:
    """The sections that are asked for, or those of the window alone."""
    seq = pull.after + 1 if pull.exact else max(pull.after + 1, int(known.now * 1000))
    layout: Layout = known.chance.choice((WINDOW, WINDOW, SPARSE_WINDOW))
    slices = tuple(section for section in ON_REQUEST if section.name in pull.sections)
    layout += slices if known.chance.random() < 0.5 else ()
    head = dataclasses.replace(known.snapshot(pull.fragment, seq), layout=layout, digest=blobs.digest(blob_of(layout)))
    return Envelope(head, blob_of(layout))


def _collected(known: Known, collect: messages.CollectRequest) -> Envelope:
    """A member's report, or its sum of a fragment's gradients."""
    round = known.node.rounds.now_in if known.node.rounds else None
    members = round.members if round else known.members()
    if collect.fragment is None:
        own = next((one for one in members if one.peer == collect.origin), known.member())
        place = next((place for place, one in enumerate(members) if one.peer == collect.origin), 0)
        through = messages.CompletedMicroBatch(known.chance.randrange(50), TOKENS, (place,), (known.cuts[-1].last,))
        held = [cut for cut in known.cuts if own.first <= cut.first and cut.last <= own.last]
        counted = known.chance.choice(((), (through,)))
        newcomers = known.chance.choice(((), (known.member(),)))
        versions = (
            tuple(known.node.rounds.versions.get(cut.index, bytes(16)) for cut in held) if known.node.rounds else ()
        )
        return Envelope(messages.RoundReport(known.run, collect.round, own, counted, 1.0, newcomers, versions))
    cut = known.cuts[collect.fragment]
    tokens = round.count.tokens.get((PeerId(collect.origin), collect.fragment), 0) if round else 0
    layout = (Section("gradient", "fp32", cut.parameters, 4 * cut.parameters),) if tokens else ()
    digest = blobs.digest(blob_of(layout))
    head = Snapshot(known.run, collect.fragment, collect.round, tokens, 0.0, layout, digest)
    return Envelope(head, blob_of(layout))


def record(known: Known, peer: PeerId) -> PeerRecord:
    """A peer's record as the node expects it, or one with a field of any value."""
    first, last = known.span()
    made: PeerRecord = values.maker(PeerRecord)(known.chance)
    plain = dataclasses.replace(
        made, run=known.run, time=known.now, first=first, last=last, addresses=made.addresses[:2]
    )
    if known.chance.random() < 0.85:
        phase = known.chance.choice(PHASES)
        kept = tuple((index, known.chance.randrange(9)) for index in range(known.chance.randrange(3)))
        plain = dataclasses.replace(
            plain, phase=phase, step=5, lr_step=known.chance.randrange(9), kept=kept, window_s=0.0
        )
        profile = dataclasses.replace(plain.profile, tokens_per_s=1e4, down=1e6, up=1e6, latency_s=0.01)
        plain = dataclasses.replace(plain, profile=profile, tokens=100)
    return _spoilt(plain, known.chance)


def sealed_record(known: Known, peer: PeerId) -> bytes:
    """A record that this peer has signed, as it is stored in the DHT."""
    return VirtualSigner(peer).seal(swarm_size.key(known.run, 0, 0), records.pack(record(known, peer)), known.now + 60)


def sealed_plan(known: Known, peer: PeerId) -> bytes:
    """A plan that this peer has signed, as it is stored in the DHT."""
    return VirtualSigner(peer).seal(plans.key_of(known.run), evaluate.pack(plan(known)), known.now + 60)


def plan(known: Known) -> SwarmPlan:
    """A plan of the swarm's peers, or one with a field of any value."""
    drawn = [(peer, sorted(known.chance.sample(range(len(known.cuts) + 1), 2))) for peer in _some(known)]
    spans = tuple((peer, begin, end) for peer, (begin, end) in drawn)
    made = SwarmPlan(known.run, known.now - 1, "because", spans, (known.now - 2,) * len(spans))
    return _spoilt(made, known.chance)


def _some(known: Known) -> list[PeerId]:
    return sorted({*known.chance.sample(known.names, 2), known.node.setup.own.peer})


def spoilt(known: Known, envelope: Envelope) -> Envelope:
    """The same; or with one field of any value, or another blob; or any message."""
    if known.calm:
        return envelope
    drawn = known.chance.random()
    if drawn < ANY_MESSAGE:
        kind = known.chance.choice(get_args(Message))
        return Envelope(values.maker(kind)(known.chance), known.chance.choice((b"", envelope.blob)))
    if drawn < ANY_MESSAGE + ONE_FIELD:
        return Envelope(_spoilt(envelope.message, known.chance, 1.0), envelope.blob)
    if drawn < ANY_MESSAGE + ONE_FIELD + 0.02:
        return Envelope(envelope.message, known.chance.randbytes(known.chance.choice((0, 1, 8, 40))))
    return envelope


def _spoilt(value: T, chance: Random, share: float = ONE_FIELD) -> T:
    """The dataclass, or a copy with one field of any value, at whatever depth."""
    kind: Any = type(value)
    kinds = values.fields(kind)
    if not kinds or chance.random() >= share:
        return value
    name = chance.choice(list(kinds))
    inside = getattr(value, name)
    if dataclasses.is_dataclass(inside) and chance.random() < 0.8:
        return dataclasses.replace(value, **{name: _spoilt(inside, chance, 1.0)})  # type: ignore[type-var]
    return dataclasses.replace(value, **{name: values.maker(kinds[name])(chance)})  # type: ignore[type-var]


def damaged(chance: Random, header: bytes) -> bytes:
    """The bytes of a header with some of them changed, cut off, or put in."""
    data = bytearray(header)
    for _ in range(chance.choice((1, 1, 3))):
        at = chance.randrange(len(data) + 1)
        change: Callable[[], None] = chance.choice(
            (
                lambda at=at: data.__setitem__(slice(at, at + 1), chance.randbytes(1)),
                lambda at=at: data.__delitem__(slice(at, at + chance.choice((1, 4)))),
                lambda at=at: data.__setitem__(slice(at, at), chance.randbytes(2)),
            )
        )
        change()
    return bytes(data)


def sent(chance: Random, envelope: Envelope) -> tuple[Message, int]:
    """The message as it arrives. Raises ProtocolError if its bytes are none, as comm/wire/blobs.py does."""
    try:
        header = codec.encode(envelope.message, len(envelope.blob))
    except AssertionError as error:  # a liar may send it, and blobs.py refuses to read it
        raise ProtocolError(Reason.OVERSIZE, str(error)) from None
    return codec.decode(damaged(chance, header) if chance.random() < DAMAGED else header)
