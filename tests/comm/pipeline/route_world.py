"""Peers with routes in virtual time: links with a delay, devices that take time, kills, and questions that get lost.

A seed or a test decides all that happens; nothing here looks at a clock. `Device` pretends to compute; a test that
wants real gradients gives peers a real one with the same `do`.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from decentral.comm.pipeline.ledger import GradientLedger
from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.messages import CommitDecision
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Reply
from decentral.core import jobs
from decentral.core.fragments import ActivationForms, Fragment, Layout, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.layer_work import share
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import NO_TIME, TimeSpent
from tests.comm.pipeline.one_form import one_form

RUN = RunId("run")
TOKENS = 8  # of a sequence
NEVER = float("inf")
DETECT_S = 1.0  # until the others know that a peer is dead


def layout(layer: int, sequences: int) -> Layout:
    return Section("hidden", "fp32", 4, 16), Section("targets", "u16", 2, 4)


def forms(layer: int, sequences: int) -> ActivationForms:
    return one_form(layout(layer, sequences))


class Computing(Protocol):
    def do(self, job: Any) -> Any: ...


@dataclass
class Device:
    """Does jobs as a compute thread would, without numbers. `taken`: the executions in each step that was taken."""

    number: int = 0
    executions: list[int] = field(default_factory=list)
    sealed: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by slot
    held: set[int] = field(default_factory=set)
    taken: list[tuple[int, ...]] = field(default_factory=list)
    end: int = 0  # of the model

    def do(self, job: Any) -> Any:
        match job:
            case jobs.Draw(local_id):
                self.number += 1
                self.held.add(local_id)
                return jobs.ForwardDone(local_id, self.number, 1, TOKENS, layout(0, 1), bytes(20))
            case jobs.Forward(local_id, _, last):
                if last == self.end:
                    self.executions.append(local_id)
                    return jobs.BackwardDone(local_id, TOKENS, 1.0, layout(0, 1)[:1], bytes(16))
                self.held.add(local_id)
                return jobs.ForwardDone(local_id, 0, 1, TOKENS, layout(0, 1), bytes(20))
            case jobs.Backward(local_id):
                assert local_id in self.held, "a backward pass without its forward pass"
                self.held.discard(local_id)
                self.executions.append(local_id)
                return jobs.BackwardDone(local_id, TOKENS, 0.0, layout(0, 1)[:1], bytes(16))
            case jobs.Forget(tokens):
                self.held -= set(tokens)
                return jobs.Forgotten()
            case jobs.Seal(ready, then, slot):
                sealed, self.executions = tuple(self.executions), []
                if then is None or set(ready) != set(sealed):
                    self.sealed[slot] = sealed
                    return jobs.Sealed(sealed, slot)
                self.taken.append(sealed)
                return jobs.Stepped(len(self.taken), 0, then.tokens, then.loss, NO_TIME, then.micro_batches, sealed)
            case jobs.Apply(slot=slot):
                self.taken.append(self.sealed.pop(slot))
                return jobs.Stepped(len(self.taken), 0, job.tokens, job.loss, NO_TIME, job.micro_batches)
            case jobs.Drop():
                return jobs.Forgotten()
            case jobs.Undo():
                self.executions.remove(job.local_id)
                return jobs.Undone(job.local_id, True)
        raise AssertionError(job)


@dataclass
class Peer:
    name: PeerId
    routes: Router
    device: Computing
    seconds: float  # of a micro-batch through the whole model
    free_at: float = 0.0  # when its device has done all it was given
    busy_s: float = 0.0
    since_step_s: float = 0.0  # computed since the last step was taken
    lines: list[dict[str, Any]] = field(default_factory=list)
    alive: bool = True
    frozen: bool = False  # it is not alive, and nobody can tell


class World:
    """`delay_s`: latency in one direction between any two peers. `loses(now, ask)`: whether a question is lost."""

    def __init__(self, cuts: Sequence[Fragment], delay_s: float = 0.01) -> None:
        self.cuts, self.delay_s = tuple(cuts), delay_s
        self.now = 0.0
        self.peers: dict[PeerId, Peer] = {}
        self.loses: Callable[[float, Ask], bool] = lambda now, ask: False
        self._events: list[tuple[float, int, PeerId, object]] = []
        self._order = 0
        self._requests: dict[int, tuple[PeerId, PeerId, Ask]] = {}  # asker, asked
        self._asked_at: dict[int, float] = {}
        self.gone: list[Peer] = []

    def add(
        self,
        name: str,
        first: int,
        last: int,
        seconds: float = 0.1,
        device: Computing | None = None,
        forms: Callable[[int, int], ActivationForms] = forms,
        capacity: int = 16,
        per_step: int = 1,
        overlap: bool = True,
        slots: int = 1,
        activations: tuple[int, ...] = (),
        chance: Random | None = None,
    ) -> Peer:
        peer = PeerId(name)
        of_swarm = RUN, peer, first, last, self.cuts, 64
        stage = StageConfig(*of_swarm, capacity, per_step, forms, activations, slots if overlap else 1, overlap)
        routes = Router(stage, View(self, peer), GradientLedger(per_step, stage.slots), chance)
        device = device or Device(end=self.cuts[-1].last)
        self.peers[peer] = Peer(peer, routes, device, seconds)
        return self.peers[peer]

    def start(self) -> None:
        for peer in self.peers.values():
            peer.routes.start()
        for peer in list(self.peers.values()):
            self._handle(peer, Woke())

    def kill(self, name: str) -> None:
        """The peer's questions and answers end; peers that waited for it see the cut."""
        victim = self.peers[PeerId(name)]
        victim.alive = False
        for number, (_, to, _) in list(self._requests.items()):
            if to == victim.name:
                self._fail(number, "cut")
        self._at(self.now + DETECT_S, victim.name, "detected")

    def freeze(self, name: str, known_after_s: float) -> None:
        """The peer does and says nothing any more, and no stream is cut. After a while the others' rosters drop it."""
        victim = self.peers[PeerId(name)]
        victim.alive, victim.frozen = False, True
        self._at(self.now + known_after_s, victim.name, "dropped")

    def forget_what_was_for(self, name: str) -> None:
        """The peer was restarted: jobs, answers and questions of its life before are lost."""
        self._events = [event for event in self._events if event[2] != name or isinstance(event[3], _Deadline)]
        heapq.heapify(self._events)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            wishes = [(p.routes.wake_at, name) for name, p in self.peers.items() if p.alive]
            wake_at, sleeper = min(((at, name) for at, name in wishes if at is not None), default=(NEVER, ""))
            at = self._events[0][0] if self._events else NEVER
            if min(at, wake_at) > end:
                break
            if wake_at < at:
                self.now = max(self.now, wake_at)
                self._handle(self.peers[PeerId(sleeper)], Woke())
            else:
                self.now, _, name, event = heapq.heappop(self._events)
                self._deliver(name, event)
        self.now = end

    def lines(self) -> list[list[dict[str, Any]]]:
        return [peer.lines for peer in (*self.peers.values(), *self.gone)]

    # What happens

    def _deliver(self, name: PeerId, event: Any) -> None:
        peer = self.peers.get(name)
        if isinstance(event, _Deadline):
            self._fail(event.number, "deadline")
        elif event == "detected":
            self.gone.append(self.peers.pop(name))
        elif event == "dropped":
            self.gone.append(self.peers.pop(name))
            for other in self.peers.values():
                for effect in other.routes.look_for_lost(self.peers.__contains__, self.now):
                    self._perform(other, effect)
        elif peer is not None and peer.alive:
            self._handle(peer, event)

    def _handle(self, peer: Peer, event: Any) -> None:
        for effect in peer.routes.handle(event, self.now):
            self._perform(peer, effect)

    def _perform(self, peer: Peer, effect: Effect) -> None:
        match effect:
            case Ask():
                self._ask(peer, effect)
            case Reply(request, envelope):
                asked = self._requests.pop(request, None)
                if asked is not None:
                    asker, _, ask = asked
                    seconds = self.now + self.delay_s - self._asked_at.pop(request)
                    self._at(
                        self.now + self.delay_s, asker, Answered(ask.tag, peer.name, envelope, seconds, seconds, 0, 0)
                    )
            case Log(event):
                peer.lines.append(JOURNAL_LINES.line(self.now, event))
            case _:
                self._compute(peer, effect)

    def _compute(self, peer: Peer, job: Any) -> None:
        passes = {jobs.Draw: 1 / 3, jobs.Forward: 1 / 3, jobs.Backward: 2 / 3, jobs.Undo: 1.0}.get(type(job), 0.0)
        execution = peer.routes.executions.get(getattr(job, "local_id", -1))
        if isinstance(job, jobs.Forward) and job.last == self.cuts[-1].last:
            passes = 1.0
        part = share(self.cuts, execution.id.first, execution.last) if execution is not None else 0.0
        took = passes * part * peer.seconds
        peer.free_at = max(peer.free_at, self.now) + took
        peer.busy_s += took
        peer.since_step_s += took
        outcome = peer.device.do(job)
        if isinstance(outcome, jobs.Stepped):
            outcome, peer.since_step_s = replace(outcome, spent=TimeSpent(training=peer.since_step_s)), 0.0
        self._at(peer.free_at, peer.name, outcome)

    def _ask(self, peer: Peer, ask: Ask) -> None:
        self._order += 1
        number = self._order
        self._requests[number] = (peer.name, ask.to, ask)
        self._asked_at[number] = self.now
        self._at(self.now + ask.deadline_s, peer.name, _Deadline(number))
        to = self.peers.get(ask.to)
        if to is None or (not to.alive and not to.frozen):
            self._fail(number, "unreachable")
        elif not self.loses(self.now, ask):
            self._at(self.now + self.delay_s, ask.to, Asked(number, peer.name, ask.envelope))

    def _fail(self, number: int, reason: str) -> None:
        if number in self._requests:
            asker, to, ask = self._requests.pop(number)
            seconds = self.now + self.delay_s - self._asked_at.pop(number)
            self._at(self.now + self.delay_s, asker, AskFailed(ask.tag, to, reason, seconds))

    def _at(self, time: float, name: PeerId, event: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, name, event))


@dataclass(frozen=True)
class _Deadline:
    number: int


@dataclass
class View:
    world: World
    own: PeerId
    weights: RoutingWeights = field(default_factory=RoutingWeights)
    usual_speed: float = 0.0

    def successors(self, layer: int) -> Sequence[PeerId]:
        return [
            name
            for name, peer in sorted(self.world.peers.items())
            if name != self.own and peer.routes.stage.first <= layer < peer.routes.stage.last
        ]

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        stage = self.world.peers[peer].routes.stage
        return stage.first, stage.last, 1.0

    def there_and_back_s(self, peer: PeerId | None, sent: int, received: int) -> float:
        return 0.0

    def is_thin(self) -> bool:
        return False


def cuts_of(parameters: Sequence[int]) -> list[Fragment]:
    """One layer each."""
    return [Fragment(index, index, index + 1, count) for index, count in enumerate(parameters)]


def is_decision(ask: Ask) -> bool:
    return isinstance(ask.envelope.message, CommitDecision)


__all__ = ["Device", "World", "cuts_of", "is_decision", "layout"]
