"""SIGTERM, as a spot machine's notice, Kubernetes, Slurm and systemd send it: a peer saves, says goodbye, and exits 0.

The two peers start at the same time, by lines that whatever starts them again can repeat. By day
test_ps_and_stop_commands.py sends a peer its notice, and test_endings.py sees a swarm hear of a peer that leaves.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentral.comm.wire.identity import Identity
from decentral.peers.membership import records
from decentral.peers.membership.swarm_size import key_of
from decentral.peers.startup import state, visit
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.patient_time import LIMIT_S

pytestmark = [pytest.mark.swarm, pytest.mark.night]

PORT = 24817  # below those that systems give away


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peers, records.PeerRecord]]:
    """First and second have met; the second has got SIGTERM and has ended, and what it has told the swarm last."""
    peers = Peers(tmp_path_factory.mktemp("notice"))
    try:
        join = ["--join", address(peers.folder / "first"), "--join-wait", str(LIMIT_S)]
        peers.start("second", *join)
        peers.start("first", *join, *TINY)
        peers.until("an exchange", lambda: exchanged(peers, "second"))
        yield peers, asyncio.run(last_record_after_its_notice(peers))
    finally:
        peers.end()


def address(folder: Path) -> str:
    """Where the first peer will be, who has never run."""
    folder.mkdir(exist_ok=True)
    own = Identity.load_or_create(folder / "identity.key")
    state.StateFolder(folder).write_listen([f"/ip4/127.0.0.1/tcp/{PORT}"])
    return f"/ip4/127.0.0.1/tcp/{PORT}/p2p/{own.peer}"


async def last_record_after_its_notice(peers: Peers) -> records.PeerRecord:
    """End the second peer, and return its last record as a visitor reads it, who is there before."""
    (started,) = peers.lines("second", "started")
    async with visit.visit([address_of(peers)]) as seen:
        peers.processes["second"].send_signal(signal.SIGTERM)
        peers.processes["second"].wait(LIMIT_S)
        key = key_of(seen.run, started["peer"])
        found = await seen.directory.fetch(key)
        body, _ = seen.own.open(key, started["peer"], found[started["peer"]], seen.clock())
        return records.unpack(body)


@pytest.fixture
def swarm(ended: tuple[Peers, records.PeerRecord]) -> Peers:
    return ended[0]


def address_of(swarm: Peers) -> str:
    return str(swarm.lines("first", "started")[0]["addresses"][0])


def test_a_peer_that_gets_its_notice_exits_0_and_says_why(swarm: Peers) -> None:
    assert swarm.processes["second"].returncode == 0
    (stopped,) = swarm.lines("second", "stopped")
    assert stopped["reason"] == "interrupted"
    assert "unsaved" not in stopped


def test_its_checkpoint_is_of_its_last_step(swarm: Peers) -> None:
    steps = [line["step"] for line in swarm.lines("second", "step")]
    saved = [line["step"] for line in swarm.lines("second", "checkpoint")]
    assert saved[-1] >= max(steps)
    output = (swarm.folder / "second" / "output.txt").read_text()
    assert "saved in" in output


def test_it_has_told_the_swarm_that_it_leaves(ended: tuple[Peers, records.PeerRecord]) -> None:
    swarm, last_record = ended
    assert last_record.phase == "leaving"
    swarm.until("the first has dropped it", lambda: bool(swarm.lines("first", "peer_left")))
