"""What must hold whatever goes wrong, checked while it goes.

    whole        what is merged is, byte for byte, what its partner published, or a whole section of it
    once         nobody merges the same window of a partner twice, restarts from a checkpoint included
    baseline     after a close the baseline is the live weights: no progress is left to be counted again
    fresh        nothing is taken for a merge that was published longer ago than `max_age_s`, clocks aside
    mass         push-sum: a peer weighs what it had, less what it gave away, plus what came; nothing comes to two
    bounded      questions open at a peer, its own ones, its jobs and held answers have limits, and all end in time
    never waits  a peer that trains is never longer without a step than its device needs, but for others' work
    holds state  nobody starts from nothing while a peer that trains can be reached
    together     after the last fault replicas come together again: no further apart than a few windows' noise
    drift        pull: all corrections together have moved the mean of the replicas by a bounded amount
    roster       some time after the last fault everybody knows exactly who is there (where the roster is not sharded)

What must hold of micro-batches that travel: sim/route_audit.py.

A violation names the seed, the time, and what the peers concerned did last.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decentral.algorithms.pull import PullRule
from decentral.algorithms.push_sum import PushSumRule
from decentral.comm.gossip.pull import ENOUGH_PERIODS, PullExchange
from decentral.comm.gossip.snapshots import MAX_WAITING_PULLS
from decentral.comm.net.streams import MAX_STREAMS, READ_S, WRITE_S
from decentral.core import jobs
from decentral.core.algorithms import algorithm
from decentral.core.ids import PeerId
from decentral.core.machine import Effect, Log
from decentral.core.units import Seconds
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.route_audit import RouteAudit
from decentral.sim.surrogate_model import STEP_NOISE
from decentral.sim.swarm import SimulatedPeer, SimulatedSwarm
from decentral.sim.virtual_host import VirtualHost

CHECK_S = 1.0
PUBLISHED = 512  # blobs and sections of a peer's fragment that are remembered
LATEST = 12  # events of a peer that a violation shows
MOST_QUESTIONS = 64  # of a peer's own, under way
MOST_OPEN = 2 * MAX_STREAMS  # those that are being refused as busy are open for a moment too
MOST_JOBS = 256
LONGEST_QUESTION_S = 75.0 + 60.0  # patience, and the longest deadline
LONGEST_ANSWER_S = READ_S + 90.0 + WRITE_S + 1.0  # routes here are shorter than the protocol's longest
STEP_STALLED_S = 5.0  # beyond a step, its jobs and the reporting interval
MASS_ERROR = 1e-3  # of a weight, from rounding
DRIFT = 2.0  # distances from the optimum at the start; 1.7 was the most in 300 seeds, where two of six lie at once
APART = 30.0  # windows' noise: replicas further apart than this have lost each other
SLACK_S = 1.0


Window = tuple[int, int]
"""Which life of its peer it is of, and its number."""

Publication = tuple[Window, Seconds]
"""A blob's window, and when it was closed. A peer that made no step publishes the same blob in several windows."""


class Violation(Exception):
    """Something that must hold did not."""

    def __init__(self, rule: str, detail: str, at: Seconds, latest: Sequence[str]) -> None:
        super().__init__(f"{rule}: {detail}, at {at:.2f} s of virtual time")
        self.rule, self.detail, self.at, self.latest = rule, detail, at, list(latest)


@dataclass(slots=True)
class Account:
    """What one member has merged, as its weights have it: a restart from a checkpoint goes back to the saved one."""

    merged: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # newest by partner and fragment
    absorbed: set[tuple[PeerId, int, Window]] = field(default_factory=set)
    saved: "Account | None" = None
    stepped_at: Seconds = 0.0
    latest: deque[tuple[Seconds, object]] = field(default_factory=lambda: deque(maxlen=LATEST))
    closed: dict[int, Tensor] = field(default_factory=dict)  # pull: each fragment's baseline at its last close
    weights: dict[int, float] = field(default_factory=dict)  # push-sum: what each fragment has to weigh
    wrong: dict[int, float] = field(default_factory=dict)  # what fragments had to weigh that did not, last time


@dataclass(slots=True)
class InvariantAudit:
    """A Watch. `swarm` and `storm` are set once they are there."""

    max_age_s: Seconds
    swarm: SimulatedSwarm | None = None
    storm: FaultInjector | None = None
    published: dict[tuple[PeerId, int], dict[bytes, list[Publication]]] = field(default_factory=dict)
    accounts: dict[PeerId, Account] = field(default_factory=dict)
    taken: dict[tuple[PeerId, int, Window], PeerId] = field(default_factory=dict)  # pushes, and who has their mass
    weighed_at: Seconds = 0.0
    checks: int = 0
    farthest: float = 0.0  # of the replicas at the end, in windows' noise
    drift: dict[int, Tensor] = field(default_factory=dict)  # sum of all corrections, by fragment
    routes: RouteAudit = field(init=False)
    network_trouble_at: Seconds = -1e9  # last moment at which somebody could not be reached though alive

    def __post_init__(self) -> None:
        self.routes = RouteAudit(self._violated)

    # Watch

    def handled(self, host: VirtualHost, event: object, effects: list[Effect]) -> None:
        account = self.accounts.setdefault(host.peer, Account())
        if not isinstance(event, jobs.Stepped):
            account.latest.append((host.agenda.now, event))
        for effect in effects:
            match effect:
                case Log("joined"):
                    self._joined(host, effect)
                case Log("counted" | "uncounted"):
                    self.routes.logged(host, self._life(host.peer), effect)
                case jobs.Merge(fragment, _, contributions):
                    self._to_be_merged(host, fragment, contributions)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        self.checks += 1
        match job, outcome:
            case jobs.CloseWindow(), jobs.WindowClosed():
                self._closed(host, outcome)
            case jobs.Merge(fragment, _, contributions), jobs.Merged(used=used):
                for one in contributions:
                    if one.peer in used:
                        self._merged(host, fragment, one)
                self._corrected(host, fragment)
            case jobs.Absorb(fragment, contribution), jobs.Absorbed(accepted=True):
                self._absorbed(host, fragment, contribution)
            case jobs.Seal() | jobs.Apply(), jobs.Stepped() if host.ended is None:
                self.routes.stepped(host, self._life(host.peer))
            case jobs.ChangeSpan(), jobs.SpanChanged(accepted=True):
                self._moved(host)
            case _, jobs.Saved():
                account = self.accounts[host.peer]
                account.saved = Account(dict(account.merged), set(account.absorbed))

    # Rules, event by event

    def _closed(self, host: VirtualHost, closed: jobs.WindowClosed) -> None:
        held = self.published.setdefault((host.peer, closed.fragment), {})
        for blob in _as_asked(closed):
            mark = _fingerprint(blob)
            windows = held.pop(mark, [])[-PUBLISHED:]  # the newest comes last, though its blob is as old as another's
            held[mark] = [*windows, ((self._life(host.peer), closed.seq), host.agenda.now)]
        while len(held) > PUBLISHED:
            del held[next(iter(held))]
        mixed = host.training.gossip.of(closed.fragment)
        if isinstance(mixed.rule, PushSumRule):
            weights = self.accounts[host.peer].weights
            weights[closed.fragment] = weights.get(closed.fragment, 1.0) - _weight(closed.layout, closed.blob)
        if isinstance(mixed.rule, PullRule) and not torch.equal(mixed.rule.slow.baseline, mixed.live.theta):
            self._violated("baseline", "progress that was published is still in the baseline", host)
        if isinstance(mixed.rule, PullRule):
            self.accounts[host.peer].closed[closed.fragment] = mixed.rule.slow.baseline.clone()

    def _corrected(self, host: VirtualHost, fragment: int) -> None:
        """What a merge moved, and so what it moved the mean of all: the baseline has it, and nothing else since."""
        closed = self.accounts[host.peer].closed.pop(fragment, None)
        rule = host.training.gossip.of(fragment).rule
        if closed is not None and isinstance(rule, PullRule):
            moved = rule.slow.baseline - closed
            self.drift[fragment] = self.drift.get(fragment, torch.zeros_like(moved)) + moved

    def _merged(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        found = self.published.get((one.peer, fragment), {}).get(_fingerprint(one.blob))
        if found is None:
            if not self._has_forged(one.peer):
                self._violated("whole", f"{one.peer} never published what was merged of fragment {fragment}", host)
            return
        account = self.accounts[host.peer]
        last = account.merged.get((one.peer, fragment), (0, 0))
        newer = [window for window, _ in found if window > last]
        if not newer:
            self._violated("once", f"window {found[-1][0]} of {one.peer}, fragment {fragment}, was merged again", host)
        account.merged[one.peer, fragment] = newer[0]

    def _to_be_merged(self, host: VirtualHost, fragment: int, contributions: Sequence[jobs.Contribution]) -> None:
        """How old they are when they are taken; a process that is stopped after that cannot help what it finds."""
        exchange = host.node.gossip.running.get(fragment)
        if not isinstance(exchange, PullExchange) or exchange.blocking:
            return  # a round is as old as its slowest peer, and the two sides of a swap merge it both or not at all
        period_s = host.node.selection.period_s(exchange.size)
        limit_s = self.max_age_s + ENOUGH_PERIODS * period_s + self._skew_s() + SLACK_S + self._slowest_step_s(host)
        for one in contributions:
            found = self.published.get((one.peer, fragment), {}).get(_fingerprint(one.blob))
            if found is not None and host.agenda.now - found[-1][1] > limit_s:
                age_s = host.agenda.now - found[-1][1]
                self._violated("fresh", f"window {found[-1][0]} of {one.peer} was {age_s:.0f} s old", host)

    def _absorbed(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        found = self.published.get((one.peer, fragment), {}).get(_fingerprint(one.blob))
        if found is None:
            if not self._has_forged(one.peer):
                self._violated("whole", f"{one.peer} never pushed what was added to fragment {fragment}", host)
            return
        account, names = self.accounts[host.peer], [(one.peer, fragment, window) for window, _ in found]
        left = [name for name in names if name not in account.absorbed and self.taken.get(name) in (None, host.peer)]
        name = [*names, *left][-1]  # windows without a step between them look alike
        if name in account.absorbed:
            self._violated("once", f"push {name[-1]} of {one.peer} was added again", host)
        account.absorbed.add(name)
        owner = self.taken.setdefault(name, host.peer)
        if owner != host.peer:
            self._violated("mass", f"push {name[-1]} of {one.peer} went to {owner} and to {host.peer}", host)
        account.weights[fragment] = account.weights.get(fragment, 1.0) + _weight(one.layout, one.blob)

    def _joined(self, host: VirtualHost, line: Log) -> None:
        assert self.swarm is not None
        self.accounts[host.peer].stepped_at = host.agenda.now
        self._weighed(host)
        restored = host.node.setup.restored_step is not None
        if restored:
            saved = self.accounts[host.peer].saved or Account()
            self.accounts[host.peer].merged = {} if line.fields["donors"] else dict(saved.merged)
        if line.fields["donors"] or restored or host.agenda.now < self.network_trouble_at + 60:
            return
        others = [one for one in self.swarm.members if one.training and one.peer != host.peer and not one.liar]
        long_there = [
            one
            for one in others
            if one.host and (one.host.node.progress.joined_at or 0) < host.clock() - 60
            if {*one.host.node.setup.fragments} & {*host.node.setup.fragments}
        ]
        if long_there:
            self._violated("holds state", f"started from nothing while {long_there[0].peer} trains", host)

    def _moved(self, host: VirtualHost) -> None:
        """What it gained begins with a donor's state, as a newcomer's does, though it may have held it before."""
        account, before = self.accounts[host.peer], {one.index for one in host.node.setup.fragments}
        gained = {mixed.live.fragment.index for mixed in host.training.gossip.fragments} - before
        account.merged = {name: window for name, window in account.merged.items() if name[1] not in gained}
        account.absorbed = {name for name in account.absorbed if name[1] not in gained}
        account.weights = {index: weight for index, weight in account.weights.items() if index not in gained}

    def _weighed(self, host: VirtualHost) -> None:
        """A new life: it weighs what its checkpoint says, and what only its last life had taken is nobody's."""
        account = self.accounts[host.peer]
        account.weights = _weights(host)
        self.taken = {push: owner for push, owner in self.taken.items() if owner != host.peer}

    # Rules, now and then

    def check(self) -> None:
        """Every CHECK_S of virtual time."""
        assert self.swarm is not None
        sky, now = self.swarm.sky, self.swarm.agenda.now
        frozen = any(member.alive and member.port and member.port.frozen for member in self.swarm.members)
        if sky.sides or sky.one_way or sky.loss or sky.dirty or self.swarm.records.late_s or frozen:
            self.network_trouble_at = now
        for member in self.swarm.living:
            self._check_member(member, now)
        if self.swarm.shape.memory:
            fragments = self.swarm.shape.fragments
            self.routes.check(self.swarm.living, fragments, self.network_trouble_at == now, now)
        if self.swarm.shape.config.gossip.algorithm == "push_sum" and now > self.weighed_at + CHECK_S / 2:
            self.weighed_at = now
            self._check_mass()

    def _check_member(self, member: SimulatedPeer, now: Seconds) -> None:
        host, port = member.host, member.port
        assert host is not None
        assert port is not None
        if port.frozen:
            self.accounts[member.peer].stepped_at = now
            return
        if len(port.open) > MOST_OPEN or len(port.asked) > MOST_QUESTIONS or len(host.engine.inbox) > MOST_JOBS:
            sizes = f"{len(port.open)} open, {len(port.asked)} asked, {len(host.engine.inbox)} jobs"
            self._violated("bounded", f"{member.peer}: {sizes}", host)
        oldest = min(port.open.values(), default=now)
        if now - oldest > LONGEST_ANSWER_S:
            self._violated("bounded", f"a question has been open at {member.peer} for {now - oldest:.0f} s", host)
        written = [now - question.writing for question in port.open if question.writing is not None]
        if written and max(written) > WRITE_S + SLACK_S:
            self._violated("bounded", f"{member.peer} has been writing an answer for {max(written):.0f} s", host)
        asked = min((question.began for question in port.asked), default=now)
        if now - asked > LONGEST_QUESTION_S:
            self._violated("bounded", f"{member.peer} has waited {now - asked:.0f} s for an answer", host)
        for exchange in host.node.gossip.running.values():
            held = len(exchange.published.waiting) if isinstance(exchange, PullExchange) else 0
            if held > MAX_WAITING_PULLS:
                self._violated("bounded", f"{held} answers are held at {member.peer}", host)
        waits = self.swarm is not None and algorithm(self.swarm.shape.config.gossip.algorithm).blocking
        longest = self._slowest_step_s(host) + host.engine.pace.report_s + STEP_STALLED_S
        waits = waits or not host.node.setup.whole  # for others' micro-batches
        if member.training and not waits and now - self._stepped_at(member) > longest:
            self._violated("never waits", f"{member.peer} has made no step for {longest:.0f} s", host)

    def _stepped_at(self, member: SimulatedPeer) -> Seconds:
        assert member.host is not None
        account = self.accounts[member.peer]
        if member.host.engine.last_computed is not None:
            account.stepped_at = max(account.stepped_at, member.host.engine.last_computed)
        return account.stepped_at

    def _slowest_step_s(self, host: VirtualHost) -> Seconds:
        engine = host.engine
        return 2 * engine.pace.step_s * max(engine.stretched, engine.slowest)

    def _check_mass(self) -> None:
        """What stays wrong from one check to the next: between a job and its report the two differ."""
        assert self.swarm is not None
        for member in self.swarm.living:
            assert member.host is not None
            if not member.training or (member.port is not None and member.port.frozen):
                continue
            account, wrong = self.accounts[member.peer], dict[int, float]()
            for fragment, weight in _weights(member.host).items():
                due = account.weights.get(fragment, 1.0)
                if weight <= 0 or abs(weight - due) > MASS_ERROR * max(weight, due):
                    wrong[fragment] = due
                    if account.wrong.get(fragment) == due:
                        self._violated("mass", f"{member.peer} weighs {weight:g} instead of {due:g}", member.host)
            account.wrong = wrong

    # Rules at the end

    def finish(self, settled: bool) -> None:
        """`settled`: long enough after the last fault."""
        assert self.swarm is not None
        self.check()
        undisturbed = self.storm is None or not self.storm.last_at
        self.routes.finish(self.swarm.shape.fragments[-1].last, self.swarm.agenda.now, undisturbed)
        if not settled:
            return
        living = [member for member in self.swarm.living if member.training]
        if self.swarm.shape.config.swarm.shards == 1:
            self._check_rosters(living)
        self._check_together(living)
        self._check_drift(living)

    def mean_drift(self, living: Sequence[SimulatedPeer]) -> float:
        """How far all corrections together have moved the mean, in distances from the optimum at the start."""
        holders = Counter(
            mixed.live.fragment.index for one in living if one.host for mixed in one.host.training.gossip.fragments
        )
        moved = [float(drift.square().mean().sqrt()) / max(1, holders[index]) for index, drift in self.drift.items()]
        return max(moved, default=0.0)

    def _check_drift(self, living: Sequence[SimulatedPeer]) -> None:
        drift = self.mean_drift(living)
        if drift > DRIFT:
            self._violated(
                "drift", f"corrections have moved the mean by {drift:.2f}", living[0].host if living else None
            )

    def _check_rosters(self, living: Sequence[SimulatedPeer]) -> None:
        there = {member.peer for member in living}
        for member in living:
            assert member.host is not None
            known = set(member.host.node.roster.live)
            if known != there - {member.peer}:
                wrong = sorted(known ^ (there - {member.peer}))
                self._violated("roster", f"{member.peer} is wrong about {', '.join(wrong)}", member.host)

    def _check_together(self, living: Sequence[SimulatedPeer]) -> None:
        for member, apart in distances(living).items():
            assert self.swarm is not None
            window_s = self.swarm.shape.config.gossip.window_s
            steps = max(1.0, window_s / self.swarm.shape.pace.step_s)
            noise = apart / (STEP_NOISE * steps**0.5)
            self.farthest = max(self.farthest, noise)
            if noise > APART and len(living) > 1:
                peer = self.swarm.by_peer[member]
                self._violated("together", f"{member} is {noise:.0f} windows' noise from the others", peer.host)

    # Helpers

    def _has_forged(self, peer: PeerId) -> bool:
        """Whether it may have sent what it never published, under a digest that is right."""
        lies = self.storm.liars.get(peer, set()) if self.storm is not None else set()
        return bool(lies & {"nan", "scaled"})

    def _life(self, peer: PeerId) -> int:
        assert self.swarm is not None
        return self.swarm.by_peer[peer].lives

    def _skew_s(self) -> Seconds:
        assert self.swarm is not None
        return 2 * max(abs(member.skew_s) for member in self.swarm.members)

    def _violated(self, rule: str, detail: str, host: VirtualHost | None) -> None:
        assert self.swarm is not None
        latest = self.accounts[host.peer].latest if host is not None else ()
        lines = [f"{at:9.3f} {_short(event)}" for at, event in latest]
        raise Violation(rule, detail, self.swarm.agenda.now, lines)


def distances(living: Sequence[SimulatedPeer]) -> dict[PeerId, float]:
    """Of each replica from the mean of all that hold the same: root mean square over the numbers."""
    weights: dict[int, dict[PeerId, Tensor]] = {}
    for member in living:
        for mixed in member.host.training.gossip.fragments if member.host is not None else ():
            weights.setdefault(mixed.live.fragment.index, {})[member.peer] = mixed.live.theta
    squares: dict[PeerId, list[Tensor]] = {}
    for held in weights.values():
        mean = torch.stack(list(held.values())).mean(dim=0)
        for peer, theta in held.items():
            squares.setdefault(peer, []).append((theta - mean).square())
    return {peer: float(torch.cat(parts).mean().sqrt()) for peer, parts in squares.items()}


def weights_of(host: VirtualHost) -> Tensor:
    return torch.cat([mixed.live.theta for mixed in host.training.gossip.fragments])


def _weights(host: VirtualHost) -> dict[int, float]:
    """Of each fragment, in push-sum; else one."""
    rules = {mixed.live.fragment.index: mixed.rule for mixed in host.training.gossip.fragments}
    return {index: float(rule.weight) if isinstance(rule, PushSumRule) else 1.0 for index, rule in rules.items()}


def _weight(layout: jobs.Layout, blob: bytes) -> float:
    """What a push weighs."""
    start = 0
    for section in layout:
        if section.name == "weight":
            return float(np.frombuffer(memoryview(blob[start : start + section.size]), dtype=np.float32)[0])
        start += section.size
    raise AssertionError("a push without a weight")


def _fingerprint(blob: bytes) -> bytes:
    """Not the protocol's own digest: the audit must not believe what it audits."""
    return hashlib.sha256(memoryview(blob)).digest()


def _as_asked(closed: jobs.WindowClosed) -> list[bytes]:
    """The blob as a whole, and each of its sections: what a partner may get."""
    parts, start = [closed.blob], 0
    for section in closed.layout:
        parts.append(closed.blob[start : start + section.size])
        start += section.size
    return parts


def _short(event: object) -> str:
    text = repr(event)
    return text if len(text) < 160 else text[:157] + "..."
