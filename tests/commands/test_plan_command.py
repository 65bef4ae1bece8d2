"""python -m decentral.plan as a user runs it: files, a live swarm over libp2p, and one clear line for what is wrong."""

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from decentral import plan
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Welcome
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord, Profile

RUN = "gpt-3fa2c1"
QUICK = ["--seconds", "0.2"]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the command says before it exits 2."""
    assert plan.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_a_shipped_topology_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["data-centre", "--json", *QUICK]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["objective"] == "sync"
    assert shown["cost"]["total"] == pytest.approx(3.4398, abs=1e-4)
    assert shown["baselines"]
    assert shown["reason"]


def test_a_table_and_a_paragraph_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["ten-cities", "--model", "default", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "Tokyo" in out
    assert "purely data-parallel" in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "give either a TOPOLOGY"),
        (["spot", "--join", "x"], "give either a TOPOLOGY"),
        (["spot", "--seconds", "soon"], "expected seconds above 0; got soon"),
        (["spot", "--solver", "magic"], "--solver magic"),
        (["spot", "--holders", "0"], "--holders expects at least 1"),
        (["nowhere"], "no file nowhere"),
        (["--join", "127.0.0.1:4001"], "--join expects an address such as"),
    ],
)
def test_what_is_wrong_is_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert line in refusal(capsys, *flags)


# A live swarm


class Swarm:
    """One libp2p peer in a thread: welcomes who asks, and stores the signed records of as many peers as are wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.wait(self._start())

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def _start(self) -> None:
        Identity.load_or_create(self.folder / "key")
        self.transport = await Libp2p.start(self.folder / "key", ["/ip4/127.0.0.1/tcp/0"], [])
        (self.address,) = await self.transport.addresses()
        await self.transport.serve(welcome, lambda _message: 0)
        self.directory = await self.transport.directory([f"{RUN}/peers"], [])

    async def announce(self, name: str, region: str) -> None:
        own, key, expires = Identity.load_or_create(self.folder / name), f"{RUN}/peers", time.time() + 60.0
        profile = Profile("cpu", 8 * 10**9, 1e10, 500.0, region=region)
        record = PeerRecord(RUN, time.time(), (), profile, 0, 6, 0, 0, 0, phase="training")
        assert await self.directory.store(key, own.peer, own.seal(key, records.pack(record), expires), expires)


async def welcome(_sender: PeerId, _question: Envelope) -> Envelope:
    return Envelope(Welcome(RUN, config.Config().canonical()))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    yield swarm
    swarm.wait(swarm.transport.close())
    swarm.loop.call_soon_threadsafe(swarm.loop.stop)


@pytest.mark.swarm
def test_a_live_swarm_of_one_is_too_small_and_one_of_two_is_planned_for_its_own_model(
    swarm: Swarm, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm.wait(swarm.announce("one", "here"))
    assert "that swarm has 1 peer; a plan needs at least 2" in refusal(capsys, "--join", swarm.address)
    swarm.wait(swarm.announce("two", "there"))
    assert plan.main(["--join", swarm.address, "--json", *QUICK]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["objective"] == "throughput"
    assert set(shown["spans"]) == {Identity.load_or_create(swarm.folder / name).peer for name in ("one", "two")}
    assert shown["throughput"]["bound"] == pytest.approx(1000.0)


@pytest.mark.swarm
def test_an_address_where_nobody_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nobody = Identity.load_or_create(tmp_path / "nobody.key").peer
    said = refusal(capsys, "--join", f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}")
    assert "unreachable" in said
    assert said.endswith("check the address, that the peer there runs, and its port")
