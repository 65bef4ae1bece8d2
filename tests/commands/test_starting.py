"""What a peer says while it starts: what may take long is named when it begins, and waiting is not silent."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.transport import AskError
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import reach_swarm, start_peer
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.peers.startup.visit import CHECK, NobodyAnswers, say_hello

NOBODY = cast(Libp2p, None)


class Wait:
    """A clock that only waiting moves on, and a peer that answers from a certain time on."""

    def __init__(self, there_at: float) -> None:
        self.now, self.there_at = 0.0, there_at

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def say_hello(self, join: Sequence[str], _transport: Libp2p, _run: RunId) -> tuple[list[PeerId], None]:
        if self.now < self.there_at:
            raise NobodyAnswers(f"--join {join[0]}: unreachable")
        return [PeerId("A")], None


def begun(flags: StartFlags, folder: Path) -> PeerStart:
    return PeerStart(flags, StateFolder(folder), cast(Identity, None), "cpu")


def greeted(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> list[PeerId]:
    """The peers that answer one which waits for 100 s."""
    monkeypatch.setattr(reach_swarm, "time", SimpleNamespace(monotonic=lambda: wait.now))
    monkeypatch.setattr(reach_swarm, "asyncio", SimpleNamespace(sleep=wait.sleep))
    monkeypatch.setattr(reach_swarm, "say_hello", wait.say_hello)
    flags = StartFlags(join=("/ip4/192.0.2.1/tcp/1/p2p/A",), join_wait=100.0)
    return asyncio.run(reach_swarm._greet(begun(flags, Path()), NOBODY, None, None))[0]


def test_a_peer_that_waits_for_the_first_one_says_so_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert greeted(Wait(there_at=65.0), monkeypatch) == ["A"]
    asked, *waited = capsys.readouterr().out.splitlines()
    assert asked == "starting: asking /ip4/192.0.2.1/tcp/1/p2p/A for the run"
    said = "starting: --join /ip4/192.0.2.1/tcp/1/p2p/A: unreachable; trying for "
    assert [line.removeprefix(said).split()[0] for line in waited] == ["100", "67", "37"]


def test_a_peer_that_has_waited_long_enough_says_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Wait(there_at=1e9)
    with pytest.raises(NobodyAnswers, match=r"^--join /ip4/[^ ]*: unreachable$"):
        greeted(wait, monkeypatch)
    assert 100 <= wait.now < 120


class OtherPeer:
    """A transport to an address where a peer with another id answers, or nobody."""

    def __init__(self, detail: str) -> None:
        self.detail = detail

    async def connect(self, _address: str) -> PeerId:
        raise AskError(Reason.UNREACHABLE, self.detail)


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("another peer (QmB) answers there", "another peer (QmB) answers there; ask for the current address"),
        ("i/o timeout", f"unreachable: i/o timeout; {CHECK}"),
    ],
)
def test_a_peer_with_another_id_is_told_from_nobody(detail: str, said: str) -> None:
    with pytest.raises(NobodyAnswers) as refused:
        asyncio.run(say_hello(["/ip4/192.0.2.1/tcp/1/p2p/QmA"], cast(Libp2p, OtherPeer(detail)), RunId("")))
    assert str(refused.value) == f"--join /ip4/192.0.2.1/tcp/1/p2p/QmA: {said}"


PORT = 4001


@pytest.mark.parametrize("kept", [True, False])
def test_only_a_port_that_a_peer_chose_for_itself_is_given_up_where_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    asked: list[list[str]] = []

    async def start(_key: Path, listen: list[str], *_: object) -> Libp2p:
        asked.append(listen)
        if listen[0].endswith(f"/{PORT}"):
            raise ports.PortTaken(f"cannot listen on {listen[0]}: address already in use; {ports.TAKEN}")
        return NOBODY

    monkeypatch.setattr(Libp2p, "start", start)
    folder = StateFolder(tmp_path)
    folder.write_listen([f"/ip4/10.0.0.1/tcp/{PORT}"])
    wanted = ports.LOOPBACK if kept else f"/ip4/127.0.0.1/tcp/{PORT}"
    start_of = begun(StartFlags(peer=PeerFlags(listen=(wanted,))), tmp_path)
    started = start_peer._listen(start_of, SwarmClock())
    if not kept:
        with pytest.raises(ports.PortTaken):
            asyncio.run(started)
        return
    asyncio.run(started)
    assert asked == [[f"/ip4/127.0.0.1/tcp/{PORT}"], [ports.LOOPBACK]]
    place = f"cannot listen on /ip4/127.0.0.1/tcp/{PORT}: address already in use"
    assert start_of.warnings == [f"{place}, where this peer listened before; it listens at a free port instead"]


def test_on_windows_each_command_is_one_line_that_names_wsl() -> None:
    code = "import runpy, sys; sys.platform = 'win32'; runpy.run_module('decentral.peer', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "decentral needs Linux or macOS: on Windows, run it in WSL 2 (wsl --install)\n"
