"""Whole peers in one process: real hosts, real training, real wire format; only the network is in memory."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from decentral.comm import compress
from decentral.comm.identity import Identity
from decentral.comm.loopback import Loopback, LoopbackDirectory
from decentral.core import journal
from decentral.core.ids import RunId
from decentral.core.units import Amount
from decentral.peers.book import AddressBook
from decentral.peers.host import Host, clock
from decentral.peers.node import Node, Setup
from decentral.peers.records import Profile
from decentral.train import replicas
from decentral.train.compute import Compute
from decentral.train.compute import Setup as ComputeSetup

MakeSetup = Callable[..., ComputeSetup]
ALGORITHMS = ["pull", "symmetric", "push_sum", "allreduce"]
RUN = RunId("words-3fa2c1")
LIMIT_S = 60.0  # of a whole test: a deadline against hanging, not a measurement


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return {name: Identity.load_or_create(folder / name) for name in "ABC"}


class Swarm:
    """Peers by name, on one in-memory network."""

    def __init__(self, setup_of: MakeSetup, identities: dict[str, Identity], algorithm: str) -> None:
        self.network = Loopback()
        self.identities = identities
        self.setup_of, self.algorithm = setup_of, algorithm
        self.hosts: dict[str, Host] = {}
        self.computes: dict[str, Compute] = {}

    def add(self, name: str, steps: int, contacts: str = "") -> Host:
        own = self.identities[name]
        setup = self.setup_of(own.peer, algorithm=self.algorithm, window_s=0.05)
        compute = self.computes[name] = Compute(setup)
        node = Node(
            Setup(
                config=setup.config,
                run=RUN,
                own=own,
                fragments=compute.fragments,
                layers=len(compute.layers),
                profile=Profile("cpu", 1 << 30, 1e9, 1e4),
                addresses=(),
                contacts=tuple(self.identities[contact].peer for contact in contacts),
                stop_after=Amount(steps, "steps"),
            )
        )
        lines = journal.Journal(setup.folder / "journal.jsonl", clock())
        book = AddressBook(setup.folder / "peers.json")
        transport = self.network.transport(own.peer)
        self.hosts[name] = Host(node, transport, LoopbackDirectory(self.network), compute, lines, book, clock())
        return self.hosts[name]

    def folder(self, name: str) -> Path:
        return self.computes[name].setup.folder

    def journal(self, name: str, event: str) -> list[dict[str, Any]]:
        return [line for line in journal.read(self.folder(name) / "journal.jsonl") if line["event"] == event]

    async def meets(self, host: Host, others: int) -> None:
        """Until it has trained a step and knows so many others."""
        while len(host.node.roster.live) < others or host.node.progress.step < 1:
            await asyncio.sleep(0.005)

    def spread(self) -> float:
        weights = [replicas.read(self.folder(name)) for name in self.hosts]
        return replicas.spread([found for found in weights if found is not None])


def play(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


@pytest.fixture
def swarm_of(setup_of: MakeSetup, identities: dict[str, Identity]) -> Callable[[str], Swarm]:
    return lambda algorithm: Swarm(setup_of, identities, algorithm)


async def together(swarm: Swarm, steps: int) -> None:
    """A starts; B and C join it, and are there before the first of its step lines is due."""
    first = swarm.add("A", steps)
    running = [asyncio.create_task(first.run())]
    for name in "BC":
        await swarm.meets(swarm.hosts["A"], 0)
        running.append(asyncio.create_task(swarm.add(name, steps, contacts="A").run()))
    for reason in await asyncio.gather(*running):
        assert reason == f"--stop-after {steps}steps"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_peers_train_and_exchange(swarm_of: Callable[[str], Swarm], algorithm: str) -> None:
    swarm = swarm_of(algorithm)
    play(together(swarm, 150 if algorithm == "allreduce" else 1500))
    for name, host in swarm.hosts.items():
        assert host.node.exchanges["done"] > 0, (name, host.node.exchanges)
        assert 0 < (host.node.progress.loss or 0) < 6, name
    assert swarm.spread() < 0.5


def test_a_newcomer_starts_from_its_donors_weights(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")
    play(together(swarm, 1500))
    joined = swarm.journal("C", "joined")[0]
    assert swarm.identities["A"].peer in joined["donors"]
    own = [line["loss"] for line in swarm.journal("A", "eval")]
    others = [line["loss"] for line in swarm.journal("C", "eval")]
    assert others[0] < own[0]  # C's first evaluation is of weights that A has trained


def test_a_peer_that_is_unplugged_does_not_stop_the_others(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def unplugged() -> None:
        running = {"A": asyncio.create_task(swarm.add("A", 2000).run())}
        for name in "BC":
            await swarm.meets(swarm.hosts["A"], 0)
            running[name] = asyncio.create_task(swarm.add(name, 2000, contacts="A").run())
        await swarm.meets(swarm.hosts["C"], 1)
        swarm.network.unplug(swarm.identities["C"].peer)
        await asyncio.gather(running["A"], running["B"])
        swarm.hosts["C"].stop("the test is over")
        await running["C"]

    play(unplugged())
    for name in "AB":
        assert swarm.hosts[name].node.progress.step >= 2000
        assert swarm.journal(name, "stopped")[-1]["reason"] == "--stop-after 2000steps"
        assert swarm.identities["C"].peer not in swarm.hosts[name].node.roster.live


def test_stopping_saves_and_tells_the_others(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")

    async def stopped() -> None:
        running = asyncio.create_task(swarm.add("A", 10**6).run())
        await swarm.meets(swarm.hosts["A"], 0)
        swarm.hosts["A"].stop("interrupted")
        assert await running == "interrupted"

    play(stopped())
    assert replicas.read(swarm.folder("A")) is not None
    assert swarm.journal("A", "stopped")[-1]["reason"] == "interrupted"
    (record, _), *_ = swarm.network.records.values()
    assert b"leaving" in record


def test_a_compute_thread_that_breaks_stops_the_peer_with_the_reason(swarm_of: Callable[[str], Swarm]) -> None:
    swarm = swarm_of("pull")
    host = swarm.add("A", 10**6)

    class Broken:
        def run(self, inbox: object, report: object) -> None:
            raise RuntimeError("the device is gone")

    host.compute = Broken()

    async def broken() -> None:
        assert await host.run() == "error: RuntimeError: the device is gone"

    play(broken())
