"""Whole peers in one process, by name: real hosts, real training, real wire format; only the network is in memory."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decentral.comm.pipeline import stage
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.transport import Directory, Transport
from decentral.core import jobs
from decentral.core.ids import PeerId, RunId
from decentral.core.journal import file as journal
from decentral.core.units import Amount
from decentral.engine import memory
from decentral.engine.compute import Compute, ComputeSetup
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import Profile
from decentral.peers.membership.swarm_size import SwarmStart, SwarmTimes
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.runtime.host import Host
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.scheduler.placement.move import MemoryBudget
from tests.comm.net.loopback import Loopback, LoopbackDirectory
from tests.patient_time import PatientLoop

MakeSetup = Callable[..., ComputeSetup]
RUN = RunId("words-3fa2c1")
EVALUATED_EVERY_S = 1.0
LOOKING_OFTEN = SwarmTimes(refresh_s=0.05)  # a lookup in a directory in memory costs nothing


class Swarm:
    """Peers by name, on one in-memory network."""

    times = LOOKING_OFTEN
    gossip: Mapping[str, float] = MappingProxyType({"window_s": 0.05})

    def __init__(self, setup_of: MakeSetup, identities: dict[str, Identity], algorithm: str) -> None:
        self.loop = PatientLoop()
        self.clock = SwarmClock(steady=self.loop.time)
        self.network = Loopback(now=self.clock)
        self.identities = identities
        self.setup_of, self.algorithm = setup_of, algorithm
        self.hosts: dict[str, Host] = {}
        self.computes: dict[str, Compute] = {}

    def add(
        self, name: str, contacts: str = "", stop_after: Amount | None = None, span: tuple[int, int] | None = None
    ) -> Host:
        own = self.identities[name]
        setup = replace(self.setup_of(own.peer, algorithm=self.algorithm, **self.gossip), span=span)
        compute = self.computes[name] = Compute(setup)
        train = setup.config.train.model_copy(update={"eval_every_s": EVALUATED_EVERY_S})
        node = Node(
            NodeSetup(
                config=setup.config.model_copy(update={"train": train}),
                run=RUN,
                start=SwarmStart(times=self.times),
                own=own,
                fragments=compute.fragments,
                state_layouts=compute.gossip.state_layouts(),
                layers=compute.span.model_layers,
                profile=Profile("cpu", self.memory_budget(compute).memory_bytes, 1e9, 1e4),
                addresses=self.addresses(name),
                contacts=tuple(self.identities[contact].peer for contact in contacts),
                stop_after=stop_after,
                routes=self.routes(own.peer, compute),
                memory_budget=self.memory_budget(compute),
            )
        )
        lines = journal.Journal(setup.folder / "journal.jsonl", self.clock)
        book = AddressBook(setup.folder / "peers.json")
        self.hosts[name] = Host(node, *self.network_of(name), compute, lines, book, self.clock, wall=self.clock)
        return self.hosts[name]

    def addresses(self, name: str) -> tuple[str, ...]:
        """Where others find this peer; the network in memory needs none."""
        return ()

    def network_of(self, name: str) -> tuple[Transport, Directory]:
        return self.network.transport(self.identities[name].peer), LoopbackDirectory(self.network)

    def routes(self, peer: PeerId, compute: Compute) -> stage.StageConfig:
        held, span = compute.fragments, compute.span
        return stage.StageConfig(RUN, peer, held[0].first, held[-1].last, span.cuts, 4, 8, 1, span.forms)

    def memory_budget(self, compute: Compute) -> MemoryBudget:
        """Enough for two of the three fragments."""
        needs = memory.needs(compute.setup.config)
        most = max(needs.span_bytes(*span, needs.preferred_in_flight(2)) for span in ((0, 2), (1, 3)))
        return MemoryBudget(needs, most, compute.span.all_state_layouts())

    def folder(self, name: str) -> Path:
        return self.computes[name].setup.folder

    def journal(self, name: str, event: str) -> list[dict[str, Any]]:
        return [line for line in journal.read(self.folder(name) / "journal.jsonl") if line["event"] == event]

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            await asyncio.sleep(0.005)

    async def join(self, name: str, contacts: str, span: tuple[int, int]) -> "asyncio.Task[str]":
        """Runs a peer that holds a part of the model, and comes back when it has joined."""
        running = asyncio.create_task(self.add(name, contacts, span=span).run())
        await self.until(lambda: bool(self.journal(name, "joined")))
        return running

    async def start(self, name: str, contacts: str = "") -> "asyncio.Task[str]":
        """Runs the peer, and comes back when it has trained a step."""
        running = asyncio.create_task(self.add(name, contacts).run())
        await self.until(lambda: self.hosts[name].node.progress.step > 0)
        return running

    def all_have_exchanged(self, times: int) -> bool:
        return all(host.node.gossip.counts.outcomes["done"] >= times for host in self.hosts.values())

    def play(self, story: Coroutine[Any, Any, None]) -> None:
        """Runs the story; whatever comes of it, no compute thread is left."""

        try:
            self.loop.play(story)
        finally:
            for host in self.hosts.values():
                host.compute.submit(jobs.Finish())
