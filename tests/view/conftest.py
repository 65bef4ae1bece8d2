"""A whole peer of one process, whose figures people look at."""

from collections.abc import Callable

import pytest

from decentral.comm.wire.identity import Identity
from tests.peers.runtime.host_swarm import MakeSetup, Swarm


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return {name: Identity.load_or_create(folder / name) for name in "AB"}


@pytest.fixture
def swarm(setup_of: MakeSetup, identities: dict[str, Identity]) -> Swarm:
    return Swarm(setup_of, identities, "pull")


@pytest.fixture
def played(swarm: Swarm) -> Callable[[], Swarm]:
    """Two peers that have exchanged, and have stopped."""

    async def together() -> None:
        running = [await swarm.start("A"), await swarm.start("B", contacts="A")]
        await swarm.until(lambda: swarm.all_have_exchanged(2))
        for host in swarm.hosts.values():
            host.stop("enough")
        for one in running:
            await one

    def play() -> Swarm:
        swarm.play(together())
        return swarm

    return play
