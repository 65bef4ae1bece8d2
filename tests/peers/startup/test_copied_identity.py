"""A peer whose identity runs elsewhere does not start; one that was killed, or is its own record's, starts at once."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.swarm_size import key
from decentral.peers.startup.copied_identity import refuse_copy
from tests.patient_time import PatientLoop

RUN = RunId("gpt-3fa2c1")
KEY = key(RUN, 0, 0)
HERE = "/ip4/127.0.0.1/tcp/0"
HOUR_S = 3600.0


class Swarm:
    """What a peer that starts knows of its swarm: its own record in the DHT, if there is one, and its addresses."""

    def __init__(self, own: Identity, recorded: tuple[str, ...], here: tuple[str, ...], phase: PeerPhase) -> None:
        record = PeerRecord(RUN, time.time(), recorded, Profile("cpu", 1, 1.0, 1.0), 0, 3, 0, 0, 0, phase=phase)
        self.found = {own.peer: own.seal(KEY, records.pack(record), time.time() + HOUR_S)} if recorded else {}
        self.access: Any = SimpleNamespace(run=RUN, config=Config(), directory=self, addresses=here, clock=time.time)

    async def fetch(self, key: str) -> Mapping[PeerId, bytes]:
        return self.found if key == KEY else {}


def copied(folder: Path) -> tuple[Path, Path]:
    """Two copies of one key."""
    first, second = folder / "first", folder / "second"
    Identity.load_or_create(first)
    second.write_bytes(first.read_bytes())
    return first, second


@pytest.mark.swarm
@pytest.mark.parametrize("by", ["record", "--join"])
def test_a_copy_does_not_start_while_the_original_runs_and_starts_once_it_has_stopped(tmp_path: Path, by: str) -> None:
    first, second = copied(tmp_path)
    own = Identity.load_or_create(second)

    async def story() -> None:
        original, copy = await asyncio.gather(Libp2p.start(first, [HERE], []), Libp2p.start(second, [HERE], []))
        there, here = await original.addresses(), await copy.addresses()
        swarm = Swarm(own, there if by == "record" else (), here, PeerPhase.TRAINING)
        named = there if by == "--join" else ()
        try:
            with pytest.raises(UserError, match="a peer with the identity in this --state-dir already runs at /ip4"):
                await refuse_copy(swarm.access, own, copy, named)
            await original.close()
            await refuse_copy(swarm.access, own, copy, named)
        finally:
            await original.close()
            await copy.close()

    PatientLoop().play(story())


@pytest.mark.swarm
def test_a_peer_that_a_router_leads_back_to_itself_is_no_copy(tmp_path: Path) -> None:
    """Its record names an address that its start does not know yet, such as one that a router maps to it."""
    own = Identity.load_or_create(tmp_path / "key")

    async def story() -> None:
        peer = await Libp2p.start(tmp_path / "key", [HERE], [])
        try:
            await refuse_copy(Swarm(own, await peer.addresses(), (), PeerPhase.TRAINING).access, own, peer, ())
        finally:
            await peer.close()

    PatientLoop().play(story())


@pytest.mark.parametrize(
    ("recorded", "phase"),
    [
        (("/ip4/192.0.2.2/tcp/4001",), PeerPhase.TRAINING),  # killed, and started again where it was
        (("/ip4/192.0.2.9/tcp/4001",), PeerPhase.LEAVING),
        (("/ip4/192.0.2.9/tcp/4001/p2p/QmRelay/p2p-circuit",), PeerPhase.TRAINING),
        ((), PeerPhase.TRAINING),
    ],
)
def test_a_start_asks_nobody_where_no_record_names_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: tuple[str, ...], phase: PeerPhase
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a second daemon was started")

    monkeypatch.setattr(Libp2p, "start", asked)
    own = Identity.load_or_create(tmp_path / "key")
    swarm = Swarm(own, recorded, ("/ip4/192.0.2.2/tcp/4001", "/ip4/127.0.0.1/tcp/4001"), phase)
    unused: Any = None
    asyncio.run(refuse_copy(swarm.access, own, unused, ["/ip4/192.0.2.3/tcp/1/p2p/QmOther"]))


def test_a_helper_that_does_not_start_only_skips_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    async def start(*of: Any, only_dials: bool) -> None:
        asked.append((of[1], of[3], only_dials))
        raise UserError("the libp2p daemon did not start")

    monkeypatch.setattr(Libp2p, "start", start)
    own = Identity.load_or_create(tmp_path / "key")
    swarm = Swarm(own, ("/ip4/192.0.2.9/tcp/4001",), (), PeerPhase.TRAINING)
    unused: Any = None
    asyncio.run(refuse_copy(swarm.access, own, unused, ()))
    assert asked == [([HERE], swarm.access.clock, True)]
