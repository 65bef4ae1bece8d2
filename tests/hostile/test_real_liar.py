"""One of five peers lies in all its windows and floods the others, over real libp2p: they refuse it, and learn."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.transport import Directory, Transport
from decentral.core.jobs import Stepped
from decentral.core.reasons import Reason
from decentral.core.units import Amount
from decentral.peers.membership import swarm_size
from decentral.peers.membership.swarm_size import SwarmTimes
from decentral.peers.runtime.host import Host
from decentral.serving import replicas
from tests.hostile.liar import LyingLibp2p, lying
from tests.peers.runtime.host_swarm import RUN, MakeSetup, Swarm

HONEST, LIAR = "ABCD", "E"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
STEPS = 100  # of each honest peer
STEP_S = 0.05
MET = 6  # windows of the liar that each of them has pulled and looked at
REFUSED = 3  # of those, at least
EXCHANGED = 20  # windows that each of them has merged: what their average has learned does not hang on their speed


class RealSwarm(Swarm):
    """Peers of one process, each with a libp2p daemon of its own; all know the first one."""

    honest = HONEST
    times = SwarmTimes(refresh_s=1.0)
    gossip: Mapping[str, float] = MappingProxyType({"window_s": 0.25, "start_window_s": 0.25, "core_share": 1.0})

    def __init__(self, setup_of: MakeSetup, folder: Path) -> None:
        identities = {name: Identity.load_or_create(folder / f"{name}.key") for name in self.honest + LIAR}
        super().__init__(setup_of, identities, "pull")
        self.keys = folder
        self.transports: dict[str, Libp2p] = {}
        self.directories: dict[str, Directory] = {}
        self.places: dict[str, tuple[str, ...]] = {}

    def add(
        self, name: str, contacts: str = "", stop_after: Amount | None = None, span: tuple[int, int] | None = None
    ) -> Host:
        """Add a peer whose step takes STEP_S of the loop's time: five peers leave it time for what they say."""
        host, compute = super().add(name, contacts, stop_after, span), self.computes[name]
        step = compute.step

        def paced() -> Stepped:
            ends, found = self.loop.time() + STEP_S, step()
            while self.loop.time() < ends:
                time.sleep(STEP_S / 10)
            return found

        compute.step = paced  # type: ignore[method-assign]
        return host

    def addresses(self, name: str) -> tuple[str, ...]:
        return self.places[name]

    def network_of(self, name: str) -> tuple[Transport, Directory]:
        return self.transports[name], self.directories[name]

    async def connect(self, lie: str, floods: bool = True) -> None:
        kinds = {name: lying(lie, floods) if name == LIAR else Libp2p for name in self.identities}
        started = (kind.start(self.keys / f"{name}.key", LISTEN, (), self.clock) for name, kind in kinds.items())
        self.transports = dict(zip(kinds, await asyncio.gather(*started), strict=True))
        for name, transport in self.transports.items():
            self.places[name] = await transport.addresses()
            known = [] if name == "A" else [await transport.connect(self.places["A"][0])]
            self.directories[name] = await transport.directory(
                [swarm_size.key_of(RUN, self.identities[name].peer)], known
            )

    async def close(self) -> None:
        await asyncio.gather(*(transport.close() for transport in self.transports.values()))

    def met(self, name: str) -> list[str]:
        """What this peer's merges made of the liar's windows: why they were refused, or nothing."""
        liar = self.identities[LIAR].peer
        lines = [line for line in self.journal(name, "exchange") if line["partner"] == liar]
        return [line["reason"] for line in lines if line["outcome"] == "done" or line["reason"] == Reason.OPPOSED]

    def liar(self) -> LyingLibp2p:
        found = self.transports[LIAR]
        assert isinstance(found, LyingLibp2p)
        return found


@pytest.fixture
def swarm(setup_of: MakeSetup, tmp_path: Path) -> RealSwarm:
    return RealSwarm(setup_of, tmp_path)


def play(swarm: RealSwarm, lie: str) -> None:
    async def story() -> None:
        await swarm.connect(lie)
        try:
            running = [await swarm.start("A")]
            running += [await swarm.start(name, contacts="A") for name in HONEST[1:] + LIAR]
            honest = [swarm.hosts[name].node for name in HONEST]
            await swarm.until(lambda: all(node.progress.step >= STEPS for node in honest))
            await swarm.until(lambda: all(len(swarm.met(name)) >= MET for name in HONEST))
            await swarm.until(lambda: all(node.gossip.counts.outcomes["done"] >= EXCHANGED for node in honest))
            for host in swarm.hosts.values():
                host.stop("enough")
            assert await asyncio.gather(*running) == ["enough"] * len(running)
        finally:
            await swarm.close()

    swarm.play(story())


@pytest.mark.night
@pytest.mark.swarm
def test_a_liar_that_floods_is_refused_by_reason_and_the_others_learn(swarm: RealSwarm) -> None:
    play(swarm, "flipped")
    weights = [replicas.read(swarm.folder(name)) for name in HONEST]
    run = swarm.computes["A"].setup.config
    assert replicas.held_out_loss(run, replicas.average([one for one in weights if one])) < 2.0
    assert all(count > 10 for count in swarm.liar().flooded.values())
    for name in HONEST:
        assert swarm.met(name).count(Reason.OPPOSED) >= REFUSED
    assert not [line for name in HONEST for line in swarm.journal(name, "error")]
