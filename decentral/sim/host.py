"""Run one peer's node in virtual time, as peers/runtime/host.py runs a node in real time.

Start reading at `VirtualHost`, which carries out the node's effects. `Engine` simulates the training thread: jobs wait
until the present step ends, and then run one after the other. While a peer takes no steps (for example because it is
still joining), a job begins at once. All steps between two events are computed together, so that a peer that only
trains needs little computing time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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

EVALUATION_S = 1.0
COPIED_SHARE = 0.1  # share of a checkpoint's time for copying states, while training waits; the rest runs beside it
EARLY_S = 1e-6  # Unix times are so large that rounding may let a timer fire early by this much
Respond = Callable[[Envelope], None]


class Training(Protocol):
    """Interface of a peer's training, which takes steps and does jobs: `Trained` or `SurrogateWorkload`."""

    restored: bool

    @property
    def waits(self) -> bool:
        """Whether the peer trains only in jobs. If False, `Engine` takes steps while no job is queued."""

    @property
    def lr_step(self) -> int:
        """Number of the present step in the learning-rate schedule."""

    @property
    def gossip(self) -> FragmentGossip:
        """Gossip state of the fragments that the peer holds."""

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        """Take `count` steps at once, and return their outcome, which reports `spent` as the time spent."""

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Do a job and return its outcome."""

    def work(self, job: jobs.Job) -> float:
        """Return a job's amount of computation, as a multiple of one micro-batch through the whole model."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One peer's access to the simulated network and DHT; an input of `VirtualHost`."""

    network: Network
    records: Records
    lookup_s: Seconds
    address_book: dict[PeerId, None]
    falsified: Callable[[PeerId, Respond], Respond]


class Observer(Protocol):
    """Interface of an observer of all peers' events and jobs, such as the audit. An exception here ends the run."""

    def handled(self, host: "VirtualHost", event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Observe an event that a node has handled (Stop if the peer leaves), before its effects are carried out."""

    def done(self, host: "VirtualHost", job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Observe a job that a peer has done and its outcome, before the peer's node handles the outcome."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Simulated speed of a device.

    A micro-batch through all layers of the model takes `step_s`, and through some layers a proportional time.
    """

    step_s: Seconds
    noise: float = 0.0  # relative standard deviation of the duration of a step
    job_s: Seconds = 0.001  # a job takes this time, in addition to the times for its computation and its bytes
    job_bytes: float = 1e9  # bytes/s at which a job encodes, decodes or writes
    report_s: Seconds = 10.0  # the steps of about this time are reported together, if no job comes between them
    steps_at_once: int = 1 << 30  # at most this many steps are computed in one call; 1 if a real model is trained


class Reporter(Protocol):
    """Interface of the receiver of an `Engine`'s outcomes; implemented by `VirtualHost`."""

    def report(self, job: jobs.Job | None, outcome: jobs.Outcome) -> None:
        """Receive the outcome of a job that has ended. If `job` is None, it is the outcome of a series of steps."""


@dataclass(slots=True)
class Engine:
    """A peer's training thread and background worker, simulated in virtual time."""

    agenda: Agenda
    training: Training
    pace: Pace
    chance: Random
    reporter: Reporter = field(repr=False, compare=False)
    inbox: list[jobs.Job] = field(default_factory=list)
    spent: TimeSpent = NO_TIME
    began: Seconds | None = None  # start of the steps that are not reported yet, or None if the peer takes no steps
    stretched: float = 1.0  # at present a step takes this many times `pace.step_s`
    frozen: bool = False
    last_computed: Seconds | None = None
    slowest: float = 1.0  # the largest value that `stretched` has had
    doing: bool = False  # True from the computation of a job until its outcome is reported
    _step_s: Seconds = 0.0  # duration of each step since `began`, with noise
    _beside_until: Seconds = 0.0  # when the background worker will be idle
    _timer: Timer | None = None

    def put(self, job: jobs.Job) -> None:
        """Queue a job after the present step and earlier jobs, but give EncodeSections to the background worker."""
        if isinstance(job, jobs.EncodeSections) and not self.frozen:
            self._encode(job)
            return
        self.inbox.append(job)
        if len(self.inbox) > 1 or self.frozen or self.doing:
            return
        self._at(self.agenda.now if self.began is None else self._edge(self.began), self._work)

    def halt(self) -> None:
        """Begin no more steps and jobs. Called when the process ends or freezes, and when the job Finish begins."""
        self.frozen = True
        self._cancel()

    def freeze(self) -> None:
        """Report the completed steps, discard the unfinished step, and begin no step or job until `thaw`."""
        self._make_steps()
        self.halt()
        self.began = None

    def thaw(self) -> None:
        """Resume after `freeze`: begin the first queued job or, without jobs, a new step."""
        self.frozen = False
        self._go_on()

    def set_speed(self, stretched: float) -> None:
        """Make each step take `stretched` times `self.pace.step_s`, and begin the present step again."""
        self._make_steps()
        self.stretched, self.slowest = stretched, max(self.slowest, stretched)
        if self.began is not None:
            self._go_on()

    def _edge(self, began: Seconds) -> Seconds:
        """Return when the present step ends; `began` is the time at which the present series of steps began."""
        now = self.agenda.now
        done = int((now - began) / self._step_s + 1e-9)
        return began + max(1, done + (began + done * self._step_s < now - 1e-9)) * self._step_s

    def _work(self) -> None:
        """Report the completed steps, then begin the next queued job or more steps; called when a step ends."""
        self._make_steps()
        if not self.inbox:
            self._go_on()
            return
        if self._beside_until > self.agenda.now:
            self._at(self._beside_until, self._work)
            return
        job = self.inbox.pop(0)
        if isinstance(job, jobs.Finish):
            self.halt()
            return
        part = self.training.work(job)
        computing_s = part * self._drawn_step_s() if part else 0.0
        outcome = self.training.do(job)
        handled_s = _handled_bytes(job, outcome) / self.pace.job_bytes
        beside_s = handled_s * (1 - COPIED_SHARE) if isinstance(outcome, jobs.Saved) else 0.0
        job_s = computing_s + self.pace.job_s + handled_s - beside_s
        self.spent += TimeSpent.by_kind({time_kind(job): job_s}) + TimeSpent(beside=beside_s)
        if computing_s or isinstance(outcome, jobs.Stepped):
            self.last_computed = self.agenda.now + job_s
        if isinstance(outcome, jobs.Stepped):
            outcome, self.spent = replace(outcome, spent=self.spent), NO_TIME
        self.began, self.doing = None, True
        self._cancel()
        if beside_s:
            self.agenda.after(job_s + beside_s, lambda: self.reporter.report(job, outcome))
        self.agenda.after(job_s, lambda: self._done(job, None if beside_s else outcome))

    def _encode(self, job: jobs.EncodeSections) -> None:
        """Do a job in the background worker while training continues, like the worker thread of engine/threads.py."""
        outcome = self.training.do(job)
        job_s = self.pace.job_s + _handled_bytes(job, outcome) / self.pace.job_bytes
        self.spent += TimeSpent(beside=job_s)
        self._beside_until = max(self.agenda.now, self._beside_until) + job_s
        self.agenda.at(self._beside_until, lambda: self.reporter.report(job, outcome))

    def _done(self, job: jobs.Job, outcome: jobs.Outcome | None) -> None:
        """Report a job's outcome (None: the worker reports it later), and begin the next job."""
        if outcome is not None:
            self.reporter.report(job, outcome)
        self.doing = False
        self._go_on()

    def _drawn_step_s(self) -> Seconds:
        noise = max(0.1, 1 + self.chance.gauss(0.0, self.pace.noise)) if self.pace.noise else 1.0
        return self.pace.step_s * self.stretched * noise

    def _go_on(self) -> None:
        """Begin the next queued job or, without jobs, the next steps; do nothing while frozen or doing a job."""
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
    """A peer's process from its start to its end (one life of the peer): node, engine, network port and timer."""

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
        """Create the host of `node`; `clock` returns the peer's Unix time, `journal` receives its journal's lines."""
        self.node, self.connection, self.training, self.clock = node, connection, training, clock
        self.agenda, self.peer = connection.network.agenda, node.setup.own.peer
        uplink, private = VirtualUplink(self.agenda, node.meter.pace), node.setup.private
        shares = QuestionShares(node.answers.knows, private)
        node.meter.follow(partial(connection.network.links.take_sent, self.peer))
        self.port = Port(self.peer, uplink, self._serve, node.answers.blob_bound, shares, private)
        self.engine = Engine(self.agenda, training, pace, chance, self)
        self.observer, self.journal = observer, journal
        self.ended: str | None = None
        self._requests: dict[int, Respond] = {}
        self._last_request = 0
        self._timer: Timer | None = None
        self._wake_at: Seconds = 0.0
        # While the process is frozen: its waiting events with their virtual times; else None.
        self._frozen: deque[tuple[Seconds, PeerEvent]] | None = None

    def start(self) -> None:
        """Connect to the network, let the node begin, and carry out its first effects."""
        self.connection.network.plug(self.port)
        self._carry_all(Woke(), self.node.begin(self.clock()))

    def stop(self, reason: str) -> None:
        """Let the node announce that it leaves for this reason, then end the process. Do nothing if it has ended."""
        if self.ended is None:
            self._carry_all(Stop(reason), self.node.leave(reason, self.clock()))
            self.end(reason)

    def end(self, reason: str) -> None:
        """End the process at once, and store the reason; later events and outcomes are dropped."""
        self.ended = reason
        self.engine.halt()
        self._disarm()

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does: events and messages wait until `thaw`."""
        self.port.freeze()
        if self._frozen is not None:
            return
        self._frozen = deque()
        self.engine.freeze()
        self._disarm()

    def thaw(self) -> None:
        """Let a frozen process continue; events and messages that waited are handled first."""
        if not self.port.frozen:
            return
        events, self._frozen = self._frozen or deque(), None
        self.engine.thaw()
        for at, event in events:
            late_s = self.agenda.now - at
            self.deliver(event.reported(late_s) if isinstance(event, jobs.WindowClosed) else event)
        self._arm()
        self.port.thaw()

    def deliver(self, event: PeerEvent) -> None:
        """Let the node handle an event, and carry out the effects.

        While the process is frozen, the event is queued instead; after the end of the process, it is dropped.
        """
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
        """Pass an outcome to the node; the observer sees it first, unless it is an outcome of steps (`job` is None)."""
        if self.ended is not None:
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
        """Store a record in the DHT, even after the process has ended: a leaving peer announces that it leaves."""
        self.connection.records.store(self.peer, record.key, record.subkey, record.value, record.expires)

    def _look_up(self, key: str) -> None:
        if self.ended is None:
            self.deliver(Found(key, self.connection.records.fetch(self.peer, key)))

    def _arm(self) -> None:
        """Let the timer fire at the node's next wake-up or earlier; set no timer while frozen or after the end."""
        wake_at = None if self.ended is not None or self._frozen is not None else self.node.wake_at
        if wake_at is not None and self._timer is not None and self._wake_at <= wake_at:
            return  # an early wake-up costs less than a new timer after every event
        self._disarm()
        if wake_at is not None:
            self._wake_at = wake_at
            self._timer = self.agenda.after(max(0.0, wake_at - self.clock()), self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _handled_bytes(job: jobs.Job, outcome: jobs.Outcome) -> int:
    """Return the number of bytes that a job encodes, decodes or writes."""
    match job, outcome:
        case jobs.Merge(contributions=parts), _:
            return sum(len(part.blob) for part in parts)
        case jobs.RetainCopy(blob=blob), _:
            return len(blob)
        case jobs.ImportState(blobs=blobs) | jobs.ChangeSpan(blobs=blobs), _:
            return sum(len(blob) for _, _, blob in blobs)
        case _, jobs.WindowClosed(blob=blob) | jobs.SectionsEncoded(blob=blob) | jobs.StateExported(blob=blob):
            return len(blob)
        case _, jobs.Saved(bytes=size):
            return size
    return 0
