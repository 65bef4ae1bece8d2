"""The simulated swarm: real nodes on a virtual network, and everything that can be done to them.

A member is a peer with its disk: it may live several times. Whatever chance decides comes from the seed.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import msgpack
import torch

from decentral import claim_span
from decentral.comm.net.virtual_directory import Records, VirtualDirectory
from decentral.comm.net.virtual_network import Network, Port
from decentral.comm.wire import compress
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message
from decentral.comm.wire.transport import Announce, Answer, Ask, AskError
from decentral.core import jobs, rng
from decentral.core.agenda import Agenda
from decentral.core.config import Config
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.membership.records import Profile
from decentral.peers.node.node import Node, NodePhase
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_move import MemoryBudget
from decentral.sim.geography import Earth
from decentral.sim.network_faults import NetworkFaults
from decentral.sim.surrogate import SurrogateDisk, SurrogateWorkload
from decentral.sim.surrogate_model import NUMBERS, PlainCodecs, SurrogateModel, SyntheticCodecs
from decentral.sim.virtual_claims import FarDirectory, VirtualClock, play
from decentral.sim.virtual_host import Pace, Respond, Training, VirtualHost, Watch
from decentral.train import gpt, memory, update_rules
from decentral.train.activations import ActivationFormat
from decentral.train.inner import fragments_of

RUN = RunId("simulated-000000")
EPOCH = 1_700_000_000.0  # unix time at the agenda's zero
GUESSES = 20
DIRECTORY_DELAYS = 6  # a look into the DHT takes so many delays of a link
CONTACT_AGAIN_S = 5.0  # a newcomer whose contact does not answer asks the next one after so long


@dataclass(frozen=True, slots=True)
class VirtualSigner:
    """Signs with a digest instead of RSA: a thousand times cheaper, and as hard to forge for a simulated fault."""

    peer: PeerId

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        record: bytes = msgpack.packb([body, expires, _seal(key, self.peer, body, expires)])
        return record

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        body, expires = _opened(key, peer, record)
        if not now < expires:
            raise ProtocolError(Reason.EXPIRED, f"{now - expires:.0f} s ago")
        return body, expires


@lru_cache(maxsize=1 << 14)
def _opened(key: str, peer: PeerId, record: bytes) -> tuple[bytes, float]:
    """Many peers read the same record: what one has found out holds for all."""
    try:
        body, expires, seal = msgpack.unpackb(record)
    except Exception as error:  # msgpack raises a dozen kinds for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if seal != _seal(key, peer, body, expires):
        raise ProtocolError(Reason.SIGNATURE, "not the peer's")
    return body, expires


def _seal(key: str, peer: PeerId, body: bytes, expires: float) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=f"{key} {peer} {expires!r}".encode()[-64:]).digest()


@dataclass(frozen=True, slots=True)
class Shape:
    """The swarm that is simulated."""

    config: Config
    fragments: tuple[jobs.Fragment, ...]
    pace: Pace
    throttles: tuple[float, ...] = (1.0,)  # of the peers, in turn
    tokens_per_step: int = 1024
    memory: tuple[int, ...] = ()  # bytes for the model, of the peers in turn; (): each takes all of it
    spans: tuple[tuple[int, int], ...] = ()  # layers of the peers in turn, instead of those that they would choose
    moves: bool = True  # peers that hold spans change them, by plans and to cover lost layers; not those of `spans`
    plain: bool = False  # nothing is quantised: for thousands of peers
    gradients: Callable[["SimulatedPeer"], Training] | None = None  # real ones instead of a surrogate's
    donated: tuple[jobs.Layout, ...] | None = None  # a fragment's state as newcomers get it, if it is a real one

    @classmethod
    def of(cls, config: Config, pace: Pace, throttles: Sequence[float], tokens_per_step: int) -> "Shape":
        """With fragments as many, and together as large, as those of the run's model."""
        real = fragments_of(config)
        mean = sum(one.parameters for one in real) // len(real)
        even = tuple(replace(one, parameters=mean) for one in real)
        return cls(config, even, pace, tuple(throttles), tokens_per_step)

    @property
    def model(self) -> claim_span.RoutedModel:
        layout = cache(ActivationFormat(self.config, compress, gpt.widths(self.config.model)).layout)
        kept = memory.needs(self.config, self.fragments).activations
        return claim_span.RoutedModel(self.fragments, self.tokens_per_step // self.config.model.context, kept, layout)

    def state_layouts(self) -> list[jobs.Layout]:
        if self.donated is not None:
            return list(self.donated)
        rule = update_rules.rule(self.config.gossip, torch.zeros(NUMBERS), PeerId(""))
        codecs = SyntheticCodecs(compress, self.fragments[0].parameters / NUMBERS)
        return [update_rules.layout_of(rule.donated, NUMBERS, codecs) for _ in self.fragments]


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """A peer, its disk, and its present life if it has one."""

    number: int
    peer: PeerId
    host: VirtualHost | None = None
    port: Port | None = None
    disk: SurrogateDisk = field(default_factory=SurrogateDisk)
    span: tuple[int, int] | None = None  # layers with which its present life began
    placing: bool = False  # it looks for its layers
    has_run: bool = False  # its disk knows the run: a restart needs no contact
    book: tuple[PeerId, ...] = ()
    lives: int = 0
    skew_s: Seconds = 0.0
    liar: str = ""  # how it lies, if it does
    stretched: float = 1.0

    @property
    def alive(self) -> bool:
        return self.host is not None and self.host.ended is None

    @property
    def training(self) -> bool:
        return self.alive and self.host is not None and self.host.node.phase is NodePhase.TRAINING


Tamper = Callable[[SimulatedPeer, PeerId, Envelope], Envelope]


class SimulatedSwarm:
    """Members by number, the network between them, and time."""

    def __init__(self, shape: Shape, seed: int, earth: Earth, watch: Watch) -> None:
        self.shape, self.seed, self.earth, self.watch = shape, seed, earth, watch
        self.agenda = Agenda()
        self.sky = NetworkFaults(self.agenda, rng.stream(seed, "sky"))
        self.network = Network(self.agenda, earth, self.sky)
        self.records = Records(self.agenda, rng.stream(seed, "records"), self.sky, epoch=EPOCH)
        self.members: list[SimulatedPeer] = []
        self.started: list[SimulatedPeer] = []  # in the order of their first start
        self.by_peer: dict[PeerId, SimulatedPeer] = {}
        self.journal: Callable[[PeerId, Seconds, Log], None] = lambda peer, t, line: None
        self.tamper: Tamper = lambda member, asker, envelope: envelope
        self._state_layouts = shape.state_layouts()
        self.model = shape.model
        self._needs = memory.needs(shape.config, shape.fragments)
        self._chance = rng.stream(seed, "swarm")

    # Lives

    def add(self) -> SimulatedPeer:
        """A new member, not yet alive."""
        number = len(self.members)
        member = SimulatedPeer(number, PeerId(f"sim{number:05d}"))
        self.members.append(member)
        self.by_peer[member.peer] = member
        self.earth.place(member.peer, number)
        return member

    def start(self, member: SimulatedPeer) -> None:
        """Starts or restarts it; a newcomer needs somebody to say hello to."""
        if member.alive or member.placing:
            return
        contacts = self._contacts(member)
        if not contacts and not member.has_run and any(other is not member and other.has_run for other in self.started):
            self.agenda.after(CONTACT_AGAIN_S, lambda: self.start(member))
            return
        if not member.lives:
            self.started.append(member)
        member.has_run = True
        member.lives += 1
        if not self.shape.memory:
            self._live(member, contacts, None)
            return
        member.placing, life = True, member.lives
        wish = self._wish(member)
        look_s = DIRECTORY_DELAYS * self.earth.wires.delay_s
        directory = FarDirectory(VirtualDirectory(self.records, member.peer), look_s)

        def placed(found: claim_span.Placed) -> None:
            if member.placing and member.lives == life:
                member.placing = False
                self._live(member, contacts, found)

        play(
            self.agenda,
            claim_span.choose_place(wish, self._needs, directory, VirtualClock(self.clock(member))),
            placed,
        )

    def _wish(self, member: SimulatedPeer) -> claim_span.Wish:
        room = self.shape.memory[member.number % len(self.shape.memory)]
        spans = self.shape.spans
        saved = member.disk.checkpoint
        kept = saved.span if saved is not None else spans[member.number % len(spans)] if spans else None
        return claim_span.Wish(self.shape.config, RUN, VirtualSigner(member.peer), (), room, kept)

    def _live(self, member: SimulatedPeer, contacts: tuple[PeerId, ...], placed: claim_span.Placed | None) -> None:
        layers = (0, self.shape.fragments[-1].last)
        member.span = (placed.span if placed else None) or layers
        training = self._training(member)
        node = Node(self._setup(member, training, contacts, placed))
        member.port = self.network.plug(member.peer)
        wire = MemberWire(self, member, member.port)
        pace = replace(self.shape.pace, step_s=self._step_s(member))
        chance = rng.stream(self.seed, "steps", member.number, member.lives)
        member.host = VirtualHost(
            node, wire, training, pace, self.agenda, self.clock(member), chance, self.watch, self.journal
        )
        member.host.engine.stretched = member.stretched
        member.host.start()

    def crash(self, member: SimulatedPeer, keep_disk: bool = True) -> None:
        """kill -9: nothing is told to anybody."""
        member.placing = False
        if not member.alive or member.host is None:
            return
        self._keep(member, keep_disk)
        member.host.end("crashed")
        self.network.unplug(member.peer)

    def leave(self, member: SimulatedPeer) -> None:
        """Ctrl-C."""
        member.placing = False
        if not member.alive or member.host is None:
            return
        member.host.stop("interrupted")
        member.host.training.do(jobs.Save())
        self._keep(member, True)
        self.network.unplug(member.peer)

    def freeze(self, member: SimulatedPeer) -> None:
        if member.alive and member.host is not None and member.port is not None:
            member.port.frozen = True
            member.host.freeze()

    def thaw(self, member: SimulatedPeer) -> None:
        if member.alive and member.host is not None and member.port is not None and member.port.frozen:
            member.host.thaw()
            self.network.thaw(member.port)

    def slow_down(self, member: SimulatedPeer, times: float) -> None:
        member.stretched = times
        if member.alive and member.host is not None:
            member.host.engine.set_speed(times)

    def clock(self, member: SimulatedPeer) -> Callable[[], Seconds]:
        return lambda: EPOCH + self.agenda.now + member.skew_s

    @property
    def living(self) -> list[SimulatedPeer]:
        return [member for member in self.members if member.alive]

    # Parts

    def _contacts(self, member: SimulatedPeer) -> tuple[PeerId, ...]:
        """Whom it can connect to now: those in its address book, or for a newcomer anybody that trains."""
        cut_off_at = self.sky.cut_off_at
        if member.has_run:
            known = [self.by_peer[peer] for peer in member.book]
        else:
            known = self._someone()
        return tuple(
            other.peer
            for other in known
            if other.alive and not (other.port and other.port.frozen)
            if cut_off_at(member.peer, other.peer) is None and cut_off_at(other.peer, member.peer) is None
        )

    def _someone(self) -> list[SimulatedPeer]:
        """Anybody that trains; in a large swarm the first few that come to mind, before all are asked."""
        for _ in range(GUESSES if self.started else 0):
            guess = self._chance.choice(self.started)
            if guess.training:
                return [guess]
        there = [other for other in self.started if other.training]
        return [self._chance.choice(there)] if there else []

    def _training(self, member: SimulatedPeer) -> Training:
        if self.shape.gradients is not None:
            return self.shape.gradients(member)
        chance = rng.arrays(self.seed, "noise", member.number, member.lives)
        shape = self.shape
        codecs = PlainCodecs(compress) if shape.plain else compress
        assert member.span is not None
        model = SurrogateModel(shape.config, shape.fragments, codecs, shape.tokens_per_step, self.model.layout)
        return SurrogateWorkload(model, member.peer, member.span, chance, member.disk)

    def _step_s(self, member: SimulatedPeer) -> Seconds:
        return self.shape.pace.step_s * self.shape.throttles[member.number % len(self.shape.throttles)]

    def _setup(
        self, member: SimulatedPeer, training: Training, contacts: tuple[PeerId, ...], placed: claim_span.Placed | None
    ) -> NodeSetup:
        config, wish = self.shape.config, self._wish(member) if placed else None
        restored = training.lr_step if training.restored else None
        memory_bytes = placed.memory_bytes if placed else 1 << 34
        profile = Profile("simulated", memory_bytes, 1e12, self.shape.tokens_per_step / self._step_s(member))
        assert member.span is not None
        first, last = member.span
        held = [one for one in self.shape.fragments if first <= one.first and one.last <= last]
        routes = claim_span.stage_config(wish, self.model, held, placed.capacity) if wish and placed else None
        moves = (
            placed is not None and self.shape.moves and not self.shape.spans and isinstance(training, SurrogateWorkload)
        )
        return NodeSetup(
            config=config,
            run=RUN,
            own=VirtualSigner(member.peer),
            fragments=held,
            state_layouts=[self._state_layouts[one.index] for one in held],
            layers=self.shape.fragments[-1].last,
            profile=profile,
            addresses=(),
            contacts=contacts,
            restored_step=restored,
            routes=routes,
            memory_budget=MemoryBudget(self._needs, memory_bytes, tuple(self._state_layouts)) if moves else None,
            retained=training.retained_states() if isinstance(training, SurrogateWorkload) else (),
        )

    def _keep(self, member: SimulatedPeer, keep_disk: bool) -> None:
        assert member.host is not None
        member.book = tuple(sorted(member.host.node.roster.live)) or member.book
        if not keep_disk:
            member.disk, member.has_run = SurrogateDisk(), False


@dataclass(slots=True)
class MemberWire:
    """A member's end of the network and of the directory."""

    swarm: SimulatedSwarm
    member: SimulatedPeer
    port: Port
    _lookups: int = field(default=0)

    def ask(self, ask: Ask, done: Callable[[Answer | AskError], None]) -> None:
        self.swarm.network.ask(self.port, ask.to, ask.envelope, ask.deadline_s, ask.max_blob_bytes, done)

    def serve(self, serve: Callable[[PeerId, Envelope, Respond], None], bound: Callable[[Message], int]) -> None:
        def tampering(sender: PeerId, envelope: Envelope, respond: Respond) -> None:
            if not self.member.liar:
                serve(sender, envelope, respond)
                return
            serve(sender, envelope, lambda answer: respond(self.swarm.tamper(self.member, sender, answer)))

        self.port.serve, self.port.bound = tampering, bound

    def store(self, record: Announce) -> None:
        """It is on its way, whatever becomes of the peer: the last word of one that leaves is heard."""
        records, peer = self.swarm.records, self.member.peer

        def arrive() -> None:
            records.store(peer, record.key, record.subkey, record.value, record.expires)

        self._later(arrive)

    def fetch(self, key: str, done: Callable[[dict[str, bytes]], None]) -> None:
        def look() -> None:
            if self.member.port is self.port and self.member.alive:
                done(self.swarm.records.fetch(self.member.peer, key))

        self._later(look)

    def _later(self, action: Callable[[], None]) -> None:
        self.swarm.agenda.after(DIRECTORY_DELAYS * self.swarm.earth.wires.delay_s, action)
