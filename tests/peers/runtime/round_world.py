"""Synchronous peers with real gradients in virtual time: real nodes, hosts and compute, on a virtual network.

The tests kill, freeze and cut off peers. They compare them with `alone`: one process that takes the same micro-batches,
with decentral/engine/step.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from decentral.comm.pipeline import stage
from decentral.comm.rounds.round import Rounds
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.data.corpora import Reading
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import train_step
from decentral.model import decoder
from decentral.peers.membership.records import Profile
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.peers.runtime.setup import NodeSetup
from decentral.scheduler.placement.claim_span import ClaimedSpan
from decentral.sim.host import Pace, Training, VirtualHost
from decentral.sim.network.geography import SwarmGeography, TypicalLink
from decentral.sim.real_training import Trained
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import RUN, SimulatedSwarm, SwarmSettings
from decentral.sim.virtual_signer import VirtualSigner
from tests.sim.network.next_action import next_at

Span = tuple[int, int] | None  # None: the whole model
Batches = list[tuple[str, int]]  # origin peer and number
Make = Callable[[PeerId], ComputeSetup]


class World(SimulatedSwarm):
    """Peers by number, each with its span, and what their compute threads did."""

    def __init__(self, make: Make, spans: Sequence[Span], delay_s: Seconds = 0.01, job_s: Seconds = 0.001) -> None:
        shape = SwarmSettings.of(make(PeerId("probe")).config, Pace(step_s=job_s, job_s=job_s), (1.0,), 64)
        super().__init__(shape, 0, SwarmGeography(0, TypicalLink(delay_s=delay_s, up=1e8, down=1e8)), self)
        self.make, self.spans = make, spans
        self.computes: dict[int, Compute] = {}
        self.lines: dict[PeerId, list[dict[str, Any]]] = {}
        self.losses: dict[PeerId, dict[int, float]] = {}  # of each round
        self.settings = replace(shape, gradients=self._train)
        self.listen(self._line)
        for _ in spans:
            self.add()

    # What the swarm asks for

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None: ...

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        assert not isinstance(outcome, jobs.JobFailed | jobs.SaveFailed), outcome
        if isinstance(job, jobs.Advance):
            assert isinstance(outcome, jobs.Stepped)
            self.losses.setdefault(host.peer, {})[job.round] = outcome.loss

    def _line(self, peer: PeerId, t: Seconds, line: Log) -> None:
        self.lines.setdefault(peer, []).append(JOURNAL_LINES.line(self.agenda.now, line.event))

    def _train(self, member: SimulatedPeer) -> Training:
        setup = self.make(member.peer)
        setup = replace(setup, span=self.spans[member.number])
        compute = self.computes[member.number] = Trained(setup, Random(member.number))
        compute.resume()
        return compute

    def _setup(
        self, member: SimulatedPeer, training: Training, contacts: tuple[PeerId, ...], placed: ClaimedSpan | None
    ) -> NodeSetup:
        assert isinstance(training, Trained)
        compute = training
        held, run = compute.fragments, compute.setup.config
        place = (RUN, member.peer, held[0].first, held[-1].last, compute.span.cuts, 8, 8, run.train.accumulate)
        return NodeSetup(
            config=run,
            run=RUN,
            own=VirtualSigner(member.peer),
            fragments=held,
            state_layouts=compute.gossip.state_layouts(),
            layers=compute.span.model_layers,
            profile=Profile("cpu", 1 << 30, 1e9, 1e4),
            addresses=(),
            contacts=contacts,
            restored_step=compute.lr_step if training.restored else None,
            routes=stage.StageConfig(*place, compute.span.forms, synchronous=True),
            versions=compute.counters.versions,
        )

    # What tests ask for

    def start_all(self, apart_s: Seconds = 2.0) -> None:
        for member in self.members:
            self.start(member)
            self.agenda.run(self.agenda.now + apart_s)

    def rounds(self, number: int) -> Rounds:
        host = self.members[number].host
        assert host is not None
        assert host.node.rounds is not None
        return host.node.rounds

    def until_round(self, number: int, at_most_s: Seconds = 600.0) -> None:
        """Runs until all living peers are in that round or a later one."""
        end = self.agenda.now + at_most_s
        while any(self.rounds(member.number).number < number for member in self.living):
            due = next_at(self.agenda)
            assert due is not None
            assert due < end, [self.rounds(member.number).number for member in self.living]
            self.agenda.run(due)

    def of(self, number: int, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines[self.members[number].peer] if line["event"] == event]

    def drawn(self) -> dict[int, Batches]:
        """The micro-batches of each round, as their origin peers counted them."""
        found: dict[int, Batches] = {}
        for lines in self.lines.values():
            for line in (line for line in lines if line["event"] == "counted"):
                of = [(origin, number) for origin, number, first, _, _ in line["of"] if first == 0]
                found.setdefault(line["round"], []).extend(of)
        return found

    def carried(self, round: int) -> dict[PeerId, list[list[Any]]]:
        """The executions that each peer counted in that round."""
        return {
            peer: [
                execution
                for line in lines
                if line["event"] == "counted" and line["round"] == round
                for execution in line["of"]
            ]
            for peer, lines in self.lines.items()
        }

    def routes_taken(self) -> set[tuple[tuple[str, int], ...]]:
        """The routes of all micro-batches: each stage's peer, and the layer up to which it took them."""
        executions: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for peer, lines in self.lines.items():
            for line in (line for line in lines if line["event"] == "counted"):
                for origin, number, _, last, _ in line["of"]:
                    executions.setdefault((origin, number), []).append((last, peer))
        return {tuple((peer, last) for last, peer in sorted(route)) for route in executions.values()}

    def weights(self, number: int) -> dict[int, Tensor]:
        return {live.fragment.index: live.theta.clone() for live in self.computes[number].span.inner.lives}


def alone(setup: ComputeSetup, rounds: Sequence[Batches]) -> list[float]:
    """The losses of one process that takes a step with each of these, as decentral/engine/step.py does."""
    compute = Compute(setup)
    losses = []
    for batches in rounds:
        fetched, train = _fetched(setup, compute.sequences, batches), setup.config.train
        report = train_step(compute.span.forward, fetched, compute.span.inner, compute.lr_step, train, setup.device)
        compute.counters.lr_step += 1
        losses.append(report.loss)
    return losses


def gradients(setup: ComputeSetup, weights: dict[int, Tensor], batches: Batches) -> tuple[dict[int, Tensor], float]:
    """The gradients by fragment of one process with these weights, of the mean loss over all tokens; and that loss."""
    compute = Compute(setup)
    for live in compute.span.inner.lives:
        live.theta.copy_(weights[live.fragment.index])
    fetched = _fetched(setup, compute.sequences, batches)
    inputs_BT, targets_BT = (torch.cat(part) for part in zip(*fetched, strict=True))
    compute.span.inner.zero_grad()
    loss = decoder.loss_of(compute.span.forward(inputs_BT), targets_BT)
    loss.backward()  # type: ignore[no-untyped-call]
    return {live.fragment.index: live.grad for live in compute.span.inner.lives}, float(loss.detach())


def _fetched(setup: ComputeSetup, sequences: int, batches: Batches) -> list[tuple[Tensor, Tensor]]:
    """These micro-batches, by their origin peers and numbers."""
    seed, corpus = setup.config.seed, setup.corpus
    return [corpus.micro_batches(Reading(seed, origin))(number, sequences) for origin, number in batches]


def equal(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    """Whether two peers hold a fragment both, and the same bits of every such fragment."""
    both = one.keys() & other.keys()
    return bool(both) and all(torch.equal(one[index], other[index]) for index in both)
