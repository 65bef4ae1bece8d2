"""Run a simulated swarm: real nodes on a virtual network, which can be started, stopped, crashed and frozen.

Start reading at `SimulatedSwarm`. A member is a peer with its disk. A life of a member lasts from a start of its
process to the end of that process; a member may have several lives. All randomness comes from the run's seed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from decentral.comm.codecs import blockwise
from decentral.comm.gossip import update_rules
from decentral.comm.pipeline.activations import ActivationFormat
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.invitations import FOR_EVER, FounderKeys, Permission
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, may_train, revoked_key
from decentral.comm.wire.transport import Found
from decentral.core import jobs, rng
from decentral.core.config import Config
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.engine.fragment import fragments_of
from decentral.model import decoder
from decentral.peers.membership.records import Profile
from decentral.peers.membership.revocation_watch import COPY_S
from decentral.peers.membership.swarm_size import LEAST_TIMES, SwarmStart, SwarmTimes
from decentral.peers.runtime.clock import MOST_FINDERS, agreed_s
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.scheduler.placement import claim_span
from decentral.scheduler.placement.evaluate import SwarmPlan, pack
from decentral.scheduler.placement.move import MemoryBudget
from decentral.scheduler.placement.plans import PLAN_S
from decentral.sim.host import Connection, Observer, Pace, Respond, Training, VirtualHost
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.geography import SwarmGeography
from decentral.sim.network.network_faults import NetworkFaults
from decentral.sim.network.virtual_directory import Records
from decentral.sim.network.virtual_network import Network
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate import SurrogateWorkload
from decentral.sim.surrogate_model import NUMBERS, PlainCodecs, SurrogateModel, SyntheticCodecs
from decentral.sim.virtual_claims import EPOCH, DelayedDirectory, VirtualClock, measured, play, wait
from decentral.sim.virtual_signer import VirtualSigner

RUN = RunId("simulated-000000")
CONTACT_GUESSES = 20  # a newcomer tries this many random contacts before it searches all peers, which is slow
DIRECTORY_DELAYS = 6  # a DHT lookup takes this many times the one-way delay of a typical link
CLOCKS_COMPARED_S = 10.0
CONTACT_AGAIN_S = 5.0  # a newcomer that found no contact tries again after this time


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """Settings of a simulated swarm: the run's config, the model's fragments, and the peers' devices.

    `throttles`, `memory` and `spans` have one value per peer; if there are more peers than values, the values repeat.
    """

    config: Config
    fragments: tuple[Fragment, ...]
    pace: Pace
    throttles: tuple[float, ...] = (1.0,)  # a peer's steps take this many times as long as `pace.step_s`
    tokens_per_step: int = 1024
    memory: tuple[int, ...] = ()  # bytes that each peer may use; (): each peer holds the whole model
    spans: tuple[tuple[int, int], ...] = ()  # a peer's layers [first, last); (): each peer chooses its layers
    saved: bool = False  # whether all peers begin at once, each with a checkpoint of its layers
    moves: bool = True  # whether peers change layers because of plans or lost layers; ignored if `spans` is not empty
    unquantised: bool = False  # whether blobs are plain fp32, with which thousands of peers are simulated faster
    # Returns the real training of a peer; None: each peer has a surrogate workload.
    gradients: Callable[["SimulatedPeer"], Training] | None = None
    founder: FounderKeys | None = None
    donors: tuple[int, ...] = ()  # indices of the peers whose invitation allows them to donate state, but not to train
    planned_needs: MemoryNeeds | None = None  # bytes that fragments take, as a plan counts them; None: as peers do
    donated: tuple[Layout, ...] | None = None  # layout of each real fragment's state; None: peers send surrogate states
    times: SwarmTimes = LEAST_TIMES

    @classmethod
    def of(
        cls,
        config: Config,
        pace: Pace,
        throttles: Sequence[float],
        tokens_per_step: int,
        times: SwarmTimes = LEAST_TIMES,
    ) -> "SwarmSettings":
        """Return settings with as many fragments as the config's model has; all have the mean number of parameters."""
        real = fragments_of(config)
        mean = sum(one.parameters for one in real) // len(real)
        even = tuple(replace(one, parameters=mean, work=()) for one in real)
        return cls(config, even, pace, tuple(throttles), tokens_per_step, times=times)

    @property
    def model(self) -> claim_span.RoutedModel:
        """The sizes of fragments and activations, by which peers choose their layers, and the activations' formats."""
        forms = cache(ActivationFormat(self.config, blockwise, decoder.widths(self.config.model)).forms)
        sequences = self.tokens_per_step // self.config.model.context
        return claim_span.RoutedModel(self.fragments, sequences, self.needs.activations, forms)

    @property
    def needs(self) -> MemoryNeeds:
        """Bytes of memory that each fragment takes."""
        return self.planned_needs or memory.needs(self.config, self.fragments)

    @property
    def run(self) -> RunId:
        """Id of the run."""
        return self.founder.run if self.founder else RUN

    def throttle(self, number: int) -> float:
        """Return the factor by which steps of peer `number` take longer than at full speed."""
        return self.throttles[number % len(self.throttles)]

    def state_layouts(self) -> list[Layout]:
        """Return the layout of each fragment's state, as a donor sends it to a newcomer."""
        if self.donated is not None:
            return list(self.donated)
        mean = sum(one.parameters for one in self.fragments) / len(self.fragments)
        codecs = SyntheticCodecs(blockwise, mean / NUMBERS)
        return [update_rules.layout_of(update_rules.donated(self.config.gossip), NUMBERS, codecs)] * len(self.fragments)


AnswerFilter = Callable[[SimulatedPeer, PeerId, Envelope], Envelope]
"""Takes a Byzantine peer, the peer that asks it, and the honest answer; returns the answer that is sent instead."""

JournalLine = Callable[[PeerId, Seconds, Log], None]


class SimulatedSwarm:
    """State of a simulated swarm: its members, the network between them, the DHT, and the agenda of virtual time."""

    def __init__(
        self, settings: SwarmSettings, seed: int, geography: SwarmGeography, observer: Observer | None = None
    ) -> None:
        """Prepare a swarm without members, at virtual time 0."""
        self.settings, self.seed, self.geography = settings, seed, geography
        self.observer = observer  # None by default, because an observer doubles the cost of an event
        self.agenda = Agenda()
        self.network_faults = NetworkFaults(self.agenda, rng.stream(seed, "sky"))
        self.network = Network(self.agenda, geography, self.network_faults)
        self.records = Records(self.agenda, rng.stream(seed, "records"), self.network_faults, epoch=EPOCH)
        self.members: list[SimulatedPeer] = []
        self.started: list[SimulatedPeer] = []  # in the order of their first starts
        self.by_peer: dict[PeerId, SimulatedPeer] = {}
        self._journals: list[JournalLine] = []
        self._filter_answer: AnswerFilter = lambda member, asker, envelope: envelope
        self.model = settings.model
        self._revoked = frozenset[bytes]()
        self._state_layouts = settings.state_layouts()
        self._needs = settings.needs
        self._chance = rng.stream(seed, "swarm")
        self._chance_of_finders = rng.stream(seed, "finders")

    @property
    def living(self) -> list[SimulatedPeer]:
        """Members whose process runs, frozen ones included."""
        return [member for member in self.members if member.alive]

    def observe(self, observer: Observer) -> None:
        """Pass events and jobs of peers that start from now on to `observer`, which replaces an earlier observer."""
        self.observer = observer

    def listen(self, journal: JournalLine) -> None:
        """Call `journal` with each line of the peers' journals from now on."""
        self._journals.append(journal)

    def falsify(self, filter_answer: AnswerFilter) -> None:
        """From now on, pass each answer of a Byzantine peer through `filter_answer` before it is sent."""
        self._filter_answer = filter_answer

    def add(self) -> SimulatedPeer:
        """Add a member without starting it, and return the member."""
        number = len(self.members)
        peer, founder, holding = PeerId(f"sim{number:05d}"), self.settings.founder, None
        if founder:
            may = Permission.DONATE if number in self.settings.donors else Permission.TRAIN
            holding = founder.invite(peer, FOR_EVER, may, rng.stream(self.seed, "invitation", number).randbytes)
        member = SimulatedPeer(number, peer, holding=holding)
        self.members.append(member)
        self.by_peer[member.peer] = member
        self.geography.add(member.peer, number)
        return member

    def start(self, member: SimulatedPeer) -> None:
        """Start or restart a member; do nothing if the member runs, is starting, or has lost its disk.

        A newcomer to a running swarm starts only once it finds a training peer as its contact.
        """
        if member.alive or member.claiming or member.wiped:
            return
        alone = member.has_run or self.settings.saved or not any(one.has_run for one in self.started)
        contacts = self._contacts(member) if member.has_run or not self.settings.saved else ()
        if not (contacts or alone):
            self.agenda.after(CONTACT_AGAIN_S, lambda: self.start(member))
            return
        if not member.lives:
            self.started.append(member)
        member.begin_life(contacts)
        self.records.ahead_s[member.peer] = member.read_clock(self.by_peer[contact] for contact in contacts)
        begin = self._claim_span if self.settings.memory else self._begin_life
        begin(member, contacts)

    def _claim_span(self, member: SimulatedPeer, contacts: tuple[PeerId, ...]) -> None:
        """Let a member choose its layers as a real peer does (claim_span.py), then begin its life."""
        member.choose_layers()
        life = member.lives
        directory = DelayedDirectory(self.records, member.peer, _lookup_s(self.geography))
        request, clock = self._span_request(member), VirtualClock(self.agenda, member)

        def claimed(found: claim_span.ClaimedSpan) -> None:
            if member.claiming and member.lives == life:
                self._begin_life(member, contacts, found)

        async def silent(found: claim_span.Records) -> list[PeerId]:
            gone = [peer for peer in found if not _answers(member, self.by_peer[peer], self.network_faults)]
            await wait(claim_span.TRIED_S if gone else _lookup_s(self.geography))
            return gone

        play(self.agenda, claim_span.claim(request, self._needs, directory, silent, clock), claimed)

    def _span_request(self, member: SimulatedPeer) -> claim_span.SpanRequest:
        memory_bytes = self.settings.memory[member.number % len(self.settings.memory)]
        spans = self.settings.spans
        saved = member.disk.checkpoint
        kept = saved.span if saved is not None else spans[member.number % len(spans)] if spans else None
        private = _private(member, self.clock(member))
        trains = may_train(private, member.peer)
        own, run = _signer(member, private), self.settings.run
        return claim_span.SpanRequest(
            self.settings.config, run, own, (), memory_bytes, kept, trains, self.settings.times
        )

    def _begin_life(
        self, member: SimulatedPeer, contacts: tuple[PeerId, ...], claimed: claim_span.ClaimedSpan | None = None
    ) -> None:
        member.layers_chosen((claimed.span if claimed else None) or (0, self.settings.fragments[-1].last))
        training = self._training(member)
        node = Node(self._setup(member, training, contacts, claimed))
        lookup_s, falsified = _lookup_s(self.geography), partial(self._falsified, member)
        connection = Connection(self.network, self.records, lookup_s, member.address_book, falsified)
        pace = replace(self.settings.pace, step_s=self._step_s(member))
        clock, chance = self.clock(member), rng.stream(self.seed, "steps", member.number, member.lives)
        journal = partial(self._write_line, member)
        member.run(VirtualHost(node, connection, training, pace, clock, chance, self.observer, journal))

    def crash(self, member: SimulatedPeer) -> None:
        """Kill a member's process, as `kill -9` does: no other peer gets a notice."""
        if host := member.cease():
            host.end("crashed")
            self.network.unplug(member.peer)
        if not self.living:
            self.records.clear()

    def leave(self, member: SimulatedPeer) -> None:
        """Stop a member, as Ctrl-C does: it says goodbye and saves a checkpoint."""
        if host := member.cease():
            host.stop("interrupted")
            host.training.do(jobs.Save())
            self.network.unplug(member.peer)

    def revoke(self, member: SimulatedPeer) -> None:
        """Revoke a member's invitation, as `decentral.invite --revoke` does if it reaches only one other member.

        The list of revocations is also stored in the DHT. Do nothing in a public swarm, or if no other member trains.
        """
        founder = self.settings.founder
        told = [one for one in self.living if one.training and not one.byzantine and one is not member]
        if founder is None or member.holding is None or not told or told[0].host is None:
            return
        self._revoked |= {member.holding.invitation.id}
        packed = founder.revoke(len(self._revoked), self._revoked).packed
        self._publish(told[0].host, revoked_key(self.settings.run), packed, COPY_S)

    def propose(self, member: SimulatedPeer) -> None:
        """Let a member propose that each peer keeps its layers; do nothing if it takes part in no plans."""
        if not member.training or member.host is None or (spans := member.host.node.span_manager) is None:
            return
        held = {one.peer: one.host.node.setup.held for one in self.living if one.training and one.host}
        planned = tuple((peer, span.start, span.stop) for peer, span in held.items())
        now = member.host.clock()
        plan = SwarmPlan(self.settings.run, now, "all stay", planned, (now,) * len(planned))
        self._publish(member.host, spans.swarm_plans.key, pack(plan), PLAN_S)

    def _publish(self, host: VirtualHost, key: str, body: bytes, lifetime_s: Seconds) -> None:
        """Sign a record as a host's peer, store the record in the DHT, and let the peer itself find it at once."""
        expires = host.clock() + lifetime_s
        value = host.node.setup.own.seal(key, body, expires)
        self.records.store(host.peer, key, host.peer, value, expires)
        host.deliver(Found(key, {host.peer: value}))

    def freeze(self, member: SimulatedPeer) -> None:
        """Stop a member's process, as SIGSTOP does; do nothing if the process does not run."""
        if host := member.life:
            host.freeze()

    def thaw(self, member: SimulatedPeer) -> None:
        """Let a frozen process continue."""
        if host := member.life:
            host.thaw()

    def clock(self, member: SimulatedPeer) -> Callable[[], Seconds]:
        """Return the member's clock: a function that returns Unix time plus the error of the member's clock."""
        return VirtualClock(self.agenda, member).now

    def jump_clock(self, member: SimulatedPeer, seconds: Seconds) -> None:
        """Move the clock of a member's machine by `seconds`; from the first jump on, peers compare their clocks."""
        if not any(other.machine_s for other in self.members):
            self.agenda.after(CLOCKS_COMPARED_S, self._compare_clocks)
        member.jump_clock(seconds)

    def _compare_clocks(self) -> None:
        """Restart each peer that lost others because its clock differs. A real peer asks its user to restart it."""
        self.agenda.after(CLOCKS_COMPARED_S, self._compare_clocks)
        for member in self.living:
            if member.training and not member.frozen and member.host and (other_time := self._of_another_time(member)):
                member.meet(other_time)
                self.crash(member)
                self.start(member)

    def _of_another_time(self, member: SimulatedPeer) -> list[PeerId]:
        """Return the peers whose clocks would change the member's clock in a restart; [] if they would not change it.

        As in peers/startup/lost_peers.py, the member asks the peers in its address book, and some of the peers whose
        DHT nodes are connected to the member's node.
        """
        assert member.host is not None
        live = member.host.node.roster.live
        contacts = {one.peer: self._contacts(one) for one in self.living}
        strangers = [peer for peer in _connected(member.peer, contacts) if peer not in live]
        met = self._chance_of_finders.sample(strangers, min(MOST_FINDERS, len(strangers)))
        found = [one for peer in dict.fromkeys([*contacts[member.peer], *met]) if (one := self.by_peer[peer]).training]
        ahead_s = {one.peer: one.clock_s - member.clock_s for one in found}
        lost_apart = any(agreed_s([apart_s]) for peer, apart_s in ahead_s.items() if peer not in live)
        return list(ahead_s) if lost_apart and agreed_s(list(ahead_s.values())) else []

    def _write_line(self, member: SimulatedPeer, peer: PeerId, t: Seconds, line: Log) -> None:
        for written in member.written(line):
            for take in self._journals:
                take(peer, t, written)

    def _falsified(self, member: SimulatedPeer, asker: PeerId, respond: Respond) -> Respond:
        if not member.byzantine:
            return respond
        return lambda answer: respond(self._filter_answer(member, asker, answer) if member.byzantine else answer)

    def _contacts(self, member: SimulatedPeer) -> tuple[PeerId, ...]:
        """Return the reachable peers of the member's address book; for a newcomer, at most one training peer."""
        book = member.address_book
        known = [self.by_peer[peer] for peer in book] if member.has_run else self._training_contact()
        return tuple(other.peer for other in known if _answers(member, other, self.network_faults))

    def _training_contact(self) -> list[SimulatedPeer]:
        """Return a random peer that trains, in a list; [] if there is none."""
        for _ in range(CONTACT_GUESSES if self.started else 0):
            if (guess := self._chance.choice(self.started)).training:
                return [guess]
        there = [other for other in self.started if other.training]
        return [self._chance.choice(there)] if there else []

    def _training(self, member: SimulatedPeer) -> Training:
        settings = self.settings
        if settings.gradients is not None:
            return settings.gradients(member)
        codecs = PlainCodecs(blockwise) if settings.unquantised else blockwise
        chance = rng.arrays(self.seed, "noise", member.number, member.lives)
        model = SurrogateModel(settings.config, settings.fragments, codecs, settings.tokens_per_step, self.model.forms)
        workload = SurrogateWorkload(model, member.peer, member.span, chance, member.disk)
        if settings.saved and not workload.restored:
            workload.do(jobs.Save())
            return self._training(member)
        return workload

    def _step_s(self, member: SimulatedPeer) -> Seconds:
        return self.settings.pace.step_s * self.settings.throttle(member.number)

    def _setup(
        self,
        member: SimulatedPeer,
        training: Training,
        contacts: tuple[PeerId, ...],
        claimed: claim_span.ClaimedSpan | None,
    ) -> NodeSetup:
        settings, private = self.settings, _private(member, self.clock(member))
        memory_bytes = claimed.memory_bytes if claimed else 1 << 34
        speed, region = settings.tokens_per_step / self._step_s(member), self.geography.region(member.peer)
        alone = claimed is not None and not claimed.capacity
        profile = Profile("simulated", memory_bytes, 1e12, speed, region=region, alone=alone)
        first, last = member.span
        held = [one for one in settings.fragments if first <= one.first and one.last <= last]
        routes = None
        if claimed:
            routes = claim_span.stage_config(self._span_request(member), self.model, held, claimed.capacity)
        surrogate = training if isinstance(training, SurrogateWorkload) else None
        moves = claimed and settings.moves and not settings.spans and surrogate
        return NodeSetup(
            config=settings.config,
            run=self.settings.run,
            own=_signer(member, private),
            private=private,
            fragments=held,
            state_layouts=[self._state_layouts[one.index] for one in held],
            layers=settings.fragments[-1].last,
            profile=profile,
            addresses=(),
            contacts=contacts,
            restored_step=training.lr_step if training.restored else None,
            routes=routes,
            memory_budget=MemoryBudget(self._needs, memory_bytes, tuple(self._state_layouts)) if moves else None,
            retained=surrogate.retained_states() if surrogate else (),
            secret=rng.seed_of(self.seed, "secret", member.number, member.lives),
            start=SwarmStart(measured(self.records, settings.run, member.peer), settings.times),
        )


def _lookup_s(geography: SwarmGeography) -> Seconds:
    """Return the duration of a lookup in the DHT."""
    return DIRECTORY_DELAYS * geography.link.delay_s


def _connected(own: PeerId, contacts: Mapping[PeerId, Collection[PeerId]]) -> list[PeerId]:
    """Return the peers whose DHT nodes are connected to the node of `own`, directly or through other peers."""
    connected, added = {own}, [own]
    while added:
        known = {peer for one in added for peer in contacts.get(one, ())}
        finders = {one for one, theirs in contacts.items() if not connected.isdisjoint(theirs)}
        added = sorted((known | finders) - connected)
        connected.update(added)
    return sorted(connected - {own})


def _answers(asker: SimulatedPeer, other: SimulatedPeer, network: NetworkFaults) -> bool:
    """Return whether `other` runs, is not frozen, and exchanges packets with `asker` in both directions."""
    if not other.alive or other.frozen:
        return False
    there, back = network.cut_off_at(asker.peer, other.peer), network.cut_off_at(other.peer, asker.peer)
    return there is None and back is None


def _private(member: SimulatedPeer, clock: Callable[[], Seconds]) -> PrivateSwarm | None:
    """Return the member's invitation and list of revocations as a PrivateSwarm; None if the swarm is public."""
    return PrivateSwarm(member.peer, member.holding, clock, member.revocations) if member.holding else None


def _signer(member: SimulatedPeer, private: PrivateSwarm | None) -> Signer:
    return MemberSigner(VirtualSigner(member.peer), private) if private else VirtualSigner(member.peer, shares=True)
