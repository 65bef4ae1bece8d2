"""Drives a node in virtual time: the same effects as in peers/runtime/host.py, carried out on an agenda.

A training thread is a row of step edges. Jobs wait for the next edge and are done there, in order, and each takes its
time; a peer that waits for jobs (a newcomer, allreduce) does them at once. The steps until the next edge at which
something happens are made together, so that a peer which only trains costs nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, assert_never

from decentral.comm.net.fair_shares import QuestionShares
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.transport import (
    Announce,
    Answer,
    Ask,
    Asked,
    AskError,
    AskFailed,
    Found,
    Lookup,
    Reply,
)
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import NO_TIME, TimeSpent
from decentral.core.units import Seconds
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.job_runner import time_kind
from decentral.peers.membership.address_book import ADDRESSES_KEPT
from decentral.peers.membership.revocation_watch import Exclude, MembershipOver
from decentral.peers.membership.roster import Learn
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.evaluate import EvaluatePlans, evaluate_plans
from decentral.sim.network.agenda import Agenda, Timer
from decentral.sim.network.virtual_directory import Records
from decentral.sim.network.virtual_network import Network, Port
from decentral.sim.network.virtual_uplink import VirtualUplink

EVALUATION_S = 1.0  # how long the evaluation of plans takes
EARLY_S = 1e-6  # the rounding error of adding and taking away the clock's epoch
Respond = Callable[[Envelope], None]


class Training(Protocol):
    """A JobRunner that steps when it is told to: Trained in sim/real_training.py, SurrogateWorkload in
    sim/surrogate.py."""

    restored: bool  # whether it goes on from a checkpoint

    @property
    def waits(self) -> bool: ...

    @property
    def lr_step(self) -> int: ...

    @property
    def gossip(self) -> FragmentGossip: ...

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        """Takes so many steps at once, on which so much time was spent, jobs before them included."""
        ...

    def do(self, job: jobs.Job) -> jobs.Outcome: ...

    def work(self, job: jobs.Job) -> float:
        """The job's share of a micro-batch's computing through the whole model; asked before it is done."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """One peer's end of the network and of the directory."""

    network: Network
    records: Records
    lookup_s: Seconds  # how long a record takes to the directory or from there
    address_book: dict[PeerId, None]  # on its disk: the peers that it has learned of
    falsified: Callable[[PeerId, Respond], Respond]  # what a Byzantine peer does to its answer to this asker


class Observer(Protocol):
    """Sees everything that a peer does; Stop where it is told to end. It may raise."""

    def handled(self, host: "VirtualHost", event: PeerEvent | Stop, effects: list[PeerEffect]) -> None: ...

    def done(self, host: "VirtualHost", job: jobs.Job, outcome: jobs.Outcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a device is: the seconds of a step with its noise, and of jobs by the bytes that they handle.

    A micro-batch through the whole model takes as long as a step; each peer of a route computes its part of it.
    """

    step_s: Seconds
    noise: float = 0.0  # standard deviation of a step's duration, as a share of it
    job_s: Seconds = 0.001
    job_bytes: float = 1e9  # bytes/s that encoding, decoding and writing handle
    report_s: Seconds = 10.0  # steps are reported at least this often
    steps_at_once: int = 1 << 30  # real gradients are made one by one


class Reporter(Protocol):
    def report(self, job: jobs.Job | None, outcome: jobs.Outcome) -> None:
        """Take the outcome of a job, or of steps."""


@dataclass(slots=True)
class Engine:
    """A training thread in virtual time."""

    agenda: Agenda
    training: Training
    pace: Pace
    chance: Random
    reporter: Reporter = field(repr=False, compare=False)
    inbox: list[jobs.Job] = field(default_factory=list)
    spent: TimeSpent = NO_TIME  # since the last report of steps
    began: Seconds | None = None  # when the present steps began; None: it is idle
    stretched: float = 1.0  # how much slower than its pace it is at present
    frozen: bool = False
    last_computed: Seconds | None = None  # when it last took a step or computed a part of a micro-batch
    slowest: float = 1.0  # the largest `stretched` so far
    doing: bool = False  # whether a job is being done: it has changed the state, and nothing has reported it yet
    _step_s: Seconds = 0.0  # how long each of the present steps takes
    _beside_until: Seconds = 0.0  # when the worker has done what it has to do
    _timer: Timer | None = None

    def put(self, job: jobs.Job) -> None:
        if isinstance(job, jobs.EncodeSections) and not self.frozen:
            self._encode(job)
            return
        self.inbox.append(job)
        if len(self.inbox) > 1 or self.frozen or self.doing:
            return
        self._at(self.agenda.now if self.began is None else self._edge(self.began), self._work)

    def halt(self) -> None:
        """The process is gone."""
        self.frozen = True
        self._cancel()

    def freeze(self) -> None:
        self._make_steps()
        self.halt()
        self.began = None

    def thaw(self) -> None:
        self.frozen = False
        self._go_on()

    def set_speed(self, stretched: float) -> None:
        """The new speed holds from the step after the present one."""
        self._make_steps()
        self.stretched, self.slowest = stretched, max(self.slowest, stretched)
        if self.began is not None:
            self._go_on()

    def _edge(self, began: Seconds) -> Seconds:
        """The end of the present step, of those that began then."""
        now = self.agenda.now
        done = int((now - began) / self._step_s + 1e-9)
        return began + max(1, done + (began + done * self._step_s < now - 1e-9)) * self._step_s

    def _work(self) -> None:
        """At a step edge: report the steps, do what is in the queue, one by one, go on."""
        self._make_steps()
        if not self.inbox:
            self._go_on()
            return
        if self._beside_until > self.agenda.now:  # jobs of a fragment are done one after another
            self._at(self._beside_until, self._work)
            return
        job = self.inbox.pop(0)
        if isinstance(job, jobs.Finish):
            self.halt()
            return
        part = self.training.work(job)
        computing_s = part * self._drawn_step_s() if part else 0.0
        outcome = self.training.do(job)
        job_s = computing_s + self.pace.job_s + _handled_bytes(job, outcome) / self.pace.job_bytes
        self.spent += TimeSpent.by_kind({time_kind(job): job_s})
        if computing_s or isinstance(outcome, jobs.Stepped):
            self.last_computed = self.agenda.now + job_s
        if isinstance(outcome, jobs.Stepped):
            outcome, self.spent = replace(outcome, spent=self.spent), NO_TIME
        self.began, self.doing = None, True
        self._cancel()
        self.agenda.after(job_s, lambda: self._done(job, outcome))

    def _encode(self, job: jobs.EncodeSections) -> None:
        """The worker does this while training goes on: it needs no step edge (engine/threads.py)."""
        outcome = self.training.do(job)
        job_s = self.pace.job_s + _handled_bytes(job, outcome) / self.pace.job_bytes
        self.spent += TimeSpent(beside=job_s)
        self._beside_until = max(self.agenda.now, self._beside_until) + job_s
        self.agenda.at(self._beside_until, lambda: self.reporter.report(job, outcome))

    def _done(self, job: jobs.Job, outcome: jobs.Outcome) -> None:
        self.reporter.report(job, outcome)
        self.doing = False
        self._go_on()

    def _drawn_step_s(self) -> Seconds:
        noise = max(0.1, 1 + self.chance.gauss(0.0, self.pace.noise)) if self.pace.noise else 1.0
        return self.pace.step_s * self.stretched * noise

    def _go_on(self) -> None:
        """Starts the next steps, unless there is something to wait for or to do."""
        if self.frozen or self.doing:
            return
        now = self.agenda.now
        if self.inbox:
            self._at(now, self._work)
        elif not self.training.waits:
            self.began, self._step_s = now, self._drawn_step_s()
            count = max(1, min(self.pace.steps_at_once, round(self.pace.report_s / self._step_s)))
            self._at(now + count * self._step_s, self._work)

    def _make_steps(self) -> None:
        if self.began is not None and (count := int((self.agenda.now - self.began) / self._step_s + 1e-6)):
            self.last_computed = self.agenda.now
            spent = self.spent + TimeSpent(training=count * self._step_s)
            self.began, self.spent = self.began + count * self._step_s, NO_TIME
            self.reporter.report(None, self.training.take_steps(count, spent))

    def _at(self, when: Seconds, action: Callable[[], None]) -> None:
        self._cancel()
        self._timer = self.agenda.at(when, action)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class VirtualHost:
    """One peer's life, from its start to its end."""

    def __init__(
        self,
        node: Node,
        connection: Connection,
        training: Training,
        pace: Pace,
        clock: Callable[[], Seconds],
        chance: Random,
        observer: Observer | None,
        journal: Callable[[PeerId, Seconds, Log], None],
    ) -> None:
        self.node, self.connection, self.training, self.clock = node, connection, training, clock
        self.agenda, self.peer = connection.network.agenda, node.setup.own.peer
        uplink, private = VirtualUplink(self.agenda, node.meter.pace), node.setup.private
        shares = QuestionShares(node.answers.knows, private)
        self.port = Port(self.peer, uplink, self._serve, node.answers.blob_bound, shares, private)
        self.engine = Engine(self.agenda, training, pace, chance, self)
        self.observer, self.journal = observer, journal
        self.ended: str | None = None
        self._requests: dict[int, Respond] = {}
        self._last_request = 0
        self._timer: Timer | None = None
        self._wake_at: Seconds = 0.0  # when the timer wakes the node
        self._frozen: deque[tuple[Seconds, PeerEvent]] | None = (
            None  # what came while the process was stopped, and when
        )

    def start(self) -> None:
        self.connection.network.plug(self.port)
        self._carry_all(Woke(), self.node.begin(self.clock()))

    def stop(self, reason: str) -> None:
        """Save and leave."""
        if self.ended is None:
            self._carry_all(Stop(reason), self.node.leave(reason, self.clock()))
            self.end(reason)

    def end(self, reason: str) -> None:
        """The process is gone, whether it left or crashed."""
        self.ended = reason
        self.engine.halt()
        self._disarm()

    def freeze(self) -> None:
        """Stops the process. What comes to one that is stopped already still waits."""
        self.port.freeze()
        if self._frozen is not None:
            return
        self._frozen = deque()
        self.engine.freeze()
        self._disarm()

    def thaw(self) -> None:
        if not self.port.frozen:
            return
        events, self._frozen = self._frozen or deque(), None
        self.engine.thaw()
        for at, event in events:
            late_s = self.agenda.now - at
            self.deliver(event.reported(late_s) if isinstance(event, jobs.WindowClosed) else event)
        self._arm()
        self.port.thaw()

    # Events

    def deliver(self, event: PeerEvent) -> None:
        if self.ended is not None:
            return
        if self._frozen is None:
            self.port.uplink.catch_up()
            self._carry_all(event, self.node.handle(event, self.clock()))
            self.port.uplink.follow_rate()
        else:
            self._frozen.append((self.agenda.now, event))

    def _serve(self, sender: PeerId, envelope: Envelope, respond: Respond) -> None:
        self._last_request += 1
        self._requests[self._last_request] = self.connection.falsified(sender, respond)
        self.deliver(Asked(self._last_request, sender, envelope))

    def report(self, job: jobs.Job | None, outcome: jobs.Outcome) -> None:
        if self.ended is not None:  # what the worker was encoding died with it
            return
        if job is not None and self.observer is not None:
            self.observer.done(self, job, outcome)
        self.deliver(outcome)

    def _wake(self) -> None:
        self._timer = None
        wake_at = self.node.wake_at
        if wake_at is not None and wake_at <= self.clock() + EARLY_S:
            self.deliver(Woke())
        else:
            self._arm()

    # Effects

    def _carry_all(self, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        if self.observer is not None:
            self.observer.handled(self, event, effects)
        for effect in effects:
            self._carry(effect)
        self._arm()

    def _carry(self, effect: PeerEffect) -> None:
        match effect:
            case Log():
                self.journal(self.peer, self.clock(), effect)
            case Learn(peer):
                keep_latest(self.connection.address_book, peer, None, ADDRESSES_KEPT)
            case Ask():
                self._ask(effect)
            case Reply(request, envelope):
                if respond := self._requests.pop(request, None):
                    respond(envelope)
            case Announce():
                self.agenda.after(self.connection.lookup_s, lambda: self._announce(effect))
            case Lookup(key):
                self.agenda.after(self.connection.lookup_s, lambda: self._look_up(key))
            case Exclude(peers):
                for peer in peers:
                    self.connection.network.drop(self.port, peer)
            case EvaluatePlans():
                self.agenda.after(EVALUATION_S, lambda: self.deliver(evaluate_plans(effect)))
            case Stop(reason) | MembershipOver(reason):
                self.agenda.after(0.0, lambda: self.stop(reason))
            case _:
                if not isinstance(effect, jobs.Job):
                    assert_never(effect)
                self.engine.put(effect)

    def _ask(self, ask: Ask) -> None:
        began = self.agenda.now

        def hear(outcome: Answer | AskError) -> None:
            if isinstance(outcome, AskError):
                self.deliver(AskFailed(ask.tag, ask.to, outcome.reason, self.agenda.now - began))
            else:
                self.deliver(outcome.to(ask))

        self.connection.network.ask(self.port, ask, hear)

    def _announce(self, record: Announce) -> None:
        """The record is on its way whatever becomes of the peer: the last one of a peer that leaves is heard."""
        self.connection.records.store(self.peer, record.key, record.subkey, record.value, record.expires)

    def _look_up(self, key: str) -> None:
        if self.ended is None:
            self.deliver(Found(key, self.connection.records.fetch(self.peer, key)))

    def _arm(self) -> None:
        """Keeps one timer, for the next time at which the node wants to wake."""
        wake_at = None if self.ended is not None or self._frozen is not None else self.node.wake_at
        if wake_at is not None and self._timer is not None and self._wake_at <= wake_at:
            return  # it wakes early and looks again, which is cheaper than a new timer after every event
        self._disarm()
        if wake_at is not None:
            self._wake_at = wake_at
            self._timer = self.agenda.after(max(0.0, wake_at - self.clock()), self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _handled_bytes(job: jobs.Job, outcome: jobs.Outcome) -> int:
    """The bytes that a job handles."""
    match job, outcome:
        case jobs.Merge(contributions=parts), _:
            return sum(len(part.blob) for part in parts)
        case jobs.ImportState(blobs=blobs) | jobs.ChangeSpan(blobs=blobs), _:
            return sum(len(blob) for _, _, blob in blobs)
        case _, jobs.WindowClosed(blob=blob) | jobs.SectionsEncoded(blob=blob) | jobs.StateExported(blob=blob):
            return len(blob)
        case _, jobs.Saved(bytes=size):
            return size
    return 0
