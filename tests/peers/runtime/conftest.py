"""Peers of one process, for the tests of hosts."""

from collections.abc import Callable

import pytest

from decentral.comm.wire.identity import Identity
from decentral.peers.runtime import span_manager
from tests.peers.runtime.host_swarm import MakeSetup, Swarm


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return {name: Identity.load_or_create(folder / name) for name in "ABC"}


@pytest.fixture
def swarm_of(
    setup_of: MakeSetup, identities: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Swarm]:
    monkeypatch.setattr(span_manager, "REPLICAS", 1)  # with three peers not every layer can keep two other holders
    return lambda algorithm: Swarm(setup_of, identities, algorithm)
