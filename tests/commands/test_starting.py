"""What a peer says while it starts: what may take long is named when it begins, and waiting is not silent."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Hello, Refused
from decentral.comm.wire.network import SwarmDirectory
from decentral.comm.wire.transport import Answer, AskError
from decentral.commands import shared
from decentral.core import jobs
from decentral.core.config import Config, ModelConfig
from decentral.core.errors import ExitCode, UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import StepLine
from decentral.core.journal.file import Journal
from decentral.core.peer_folders import JOURNAL
from decentral.core.reasons import Reason
from decentral.engine import measure
from decentral.engine.compute import ComputeSetup
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import prepare, reach_swarm, start_peer, state
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.reach_swarm import OwnRun, SwarmAccess
from decentral.peers.startup.running_peers import RunningPeer
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.peers.startup.visit import CHECK, NobodyAnswers, say_hello
from decentral.scheduler.placement.claim_span import ClaimedSpan

NOBODY = cast(Libp2p, None)


class Wait:
    """A clock that only waiting moves on, and a peer that answers from a certain time on."""

    def __init__(self, there_at: float) -> None:
        self.now, self.there_at = 0.0, there_at

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def say_hello(
        self, join: Sequence[str], _transport: Libp2p, _run: RunId, _why: str
    ) -> tuple[list[PeerId], None]:
        if self.now < self.there_at:
            raise NobodyAnswers(f"--join {join[0]}: unreachable")
        return [PeerId("A")], None


def begun(flags: StartFlags, folder: Path) -> PeerStart:
    return PeerStart(flags, StateFolder(folder), cast(Identity, SimpleNamespace(peer=PeerId("A"))), "cpu")


def greeted(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> list[PeerId]:
    """The peers that answer one which waits for 100 s."""
    monkeypatch.setattr(reach_swarm, "time", SimpleNamespace(monotonic=lambda: wait.now))
    monkeypatch.setattr(reach_swarm, "asyncio", SimpleNamespace(sleep=wait.sleep))
    monkeypatch.setattr(reach_swarm, "say_hello", wait.say_hello)
    flags = StartFlags(join=("/ip4/192.0.2.1/tcp/1/p2p/A",), join_wait=100.0)
    return asyncio.run(reach_swarm._greet(begun(flags, Path()), NOBODY, (RunId(""), ""), None))[0]


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


def test_a_name_that_resolves_to_nothing_is_named() -> None:
    address, network = "/dns4/nohost.invalid/tcp/4001/p2p/QmA", cast(Libp2p, OtherPeer("no good addresses"))
    with pytest.raises(NobodyAnswers, match=r"QmA: nohost\.invalid resolves to no address; check the name"):
        asyncio.run(say_hello([address], network, RunId("")))


class OtherRun:
    """A transport to a peer of another run."""

    peer = PeerId("A")

    async def connect(self, _address: str) -> PeerId:
        return PeerId("B")

    async def ask(self, _to: PeerId, question: Envelope, _deadline_s: float, _blob_bytes: int) -> Answer:
        assert isinstance(question.message, Hello)
        refused = Refused(Reason.RUN, f"this peer is in gpt-77aa01, not in {question.message.run}")
        return Answer(Envelope(refused), 0.1, 0.1, 0, 0)


def test_a_folder_of_another_run_is_named_and_no_address_or_port(tmp_path: Path) -> None:
    """It advised to check the address, and whether the peer there runs."""
    address, run = "/ip4/192.0.2.1/tcp/1/p2p/QmA", (RunId("gpt-3fa2c1"), Config())
    start = begun(StartFlags(join=(address,)), tmp_path)
    with pytest.raises(UserError) as refused:
        asyncio.run(reach_swarm.reach_swarm(start, OwnRun(run, run), cast(Libp2p, OtherRun()), SwarmClock()))
    belongs = f"{tmp_path} belongs to run gpt-3fa2c1; use another --state-dir"
    assert str(refused.value) == f"--join {address}: this peer is in gpt-77aa01, not in gpt-3fa2c1; {belongs}"


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


# Models that are too large, and signals


def access_of(settings: Config, contacts: tuple[PeerId, ...] = ()) -> SwarmAccess:
    """The access of a peer that has reached a public swarm with these contacts, and has asked nothing yet."""
    network, directory = NOBODY, cast(SwarmDirectory, None)
    return SwarmAccess(RunId("r-1"), settings, contacts, network, directory, (), SwarmClock(), None)


def layers_of(settings: Config, start: PeerStart, contacts: tuple[PeerId, ...] = ()) -> ClaimedSpan:
    return asyncio.run(prepare.claim_layers(start, access_of(settings, contacts)))[1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 24 GB, and a swarm in which every peer gets the first layer."""

    async def claim(*_: object) -> ClaimedSpan:
        return ClaimedSpan((0, 1), 1, 1)

    monkeypatch.setattr(measure, "machine_bytes", lambda: 24 * 10**9)
    monkeypatch.setattr(prepare, "claim", claim)


@pytest.mark.usefixtures("machine")
def test_a_first_peer_whose_machine_holds_only_the_embedding_is_refused(tmp_path: Path) -> None:
    """It took 15 GB, and built layers of 2e9 parameters for hours."""
    settings, start = Config(model=ModelConfig(depth=200)), begun(StartFlags(), tmp_path)
    said = r"model: 393 B parameters take 8\.6 TB, and their largest part 94\.0 GB; this machine has 24\.0 GB for them"
    with pytest.raises(UserError, match=said):
        layers_of(settings, start)
    assert layers_of(settings, start, (PeerId("A"),)).span == (0, 1)
    a_part = begun(StartFlags(peer=PeerFlags(memory=10**9)), tmp_path)
    assert layers_of(settings, a_part).span == (0, 1)


@pytest.mark.usefixtures("machine")
def test_a_model_that_no_machine_like_this_builds_is_refused_before_layers_are_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"model: building 49\.\d T parameters, 49\.2 B of them in one layer, takes"):
        layers_of(Config(model=ModelConfig(depth=1000)), begun(StartFlags(), tmp_path), (PeerId("A"),))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("contacts", "then"),
    [((), "it starts with fresh weights"), ((PeerId("B"),), "it fetches the swarm's weights")],
)
def test_a_peer_whose_checkpoint_is_lost_says_so(
    setup_of: Callable[..., ComputeSetup], contacts: tuple[PeerId, ...], then: str
) -> None:
    """It began at zero without a word."""
    setup = setup_of("A")
    start, access = begun(StartFlags(), setup.folder), access_of(setup.config, contacts)
    prepare._built(start, access, setup)
    assert start.warnings == []
    journal = Journal(setup.folder / JOURNAL, SwarmClock())
    journal.write(StepLine(step=1234, lr_step=1300, tokens=64, micro_batches=1, loss=2.5, seconds=0.1, aside={}))
    journal.close()
    compute, _ = prepare._built(start, access, setup)
    lost = f"no checkpoint in {setup.folder}, though this peer has trained 1,234 steps; {then}"
    assert start.warnings == [lost]
    compute.do(jobs.Save())
    prepare._built(start, access, setup)
    assert start.warnings == [lost]


class Network:
    """A transport that knows whether it was closed."""

    peer, closed = PeerId("A"), False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("notice", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_peer_that_builds_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: signal.Signals
) -> None:
    """asyncio only cancels a task that computes; a peer ignored SIGTERM for ten minutes."""
    network, after = Network(), []

    async def listen(*_: object) -> Network:
        return network

    async def reach(*_: object) -> SwarmAccess:
        return access_of(Config())

    async def nothing(*_: object) -> None:
        pass

    async def builds(*_: object) -> None:
        signal.raise_signal(notice)
        after.append("still builds")

    monkeypatch.setattr(start_peer, "_listen", listen)
    monkeypatch.setattr(start_peer, "reach_swarm", reach)
    monkeypatch.setattr(start_peer, "refuse_copy", nothing)
    monkeypatch.setattr(start_peer, "load", lambda _: (None, ""))
    monkeypatch.setattr(prepare, "claim_layers", builds)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tmp_path / "peer"
    try:
        flags = StartFlags(config="default", state_dir=str(folder))
        assert shared.run(lambda: asyncio.run(start_peer.start(flags, "cpu"))) == ExitCode.INTERRUPTED
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (after, network.closed, folder.exists()) == ([], True, False)


def test_on_windows_each_command_is_one_line_that_names_wsl() -> None:
    code = "import runpy, sys; sys.platform = 'win32'; runpy.run_module('decentral.peer', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "decentral needs Linux or macOS: on Windows, run it in WSL 2 (wsl --install)\n"


def test_it_is_said_which_folder_goes_on_and_how_to_go_on_with_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot, `decentral peer` without --state-dir takes a new folder beside that of the stopped peer."""
    monkeypatch.setattr(state, "running_peers", lambda: [RunningPeer(5, 0, 0.0, tmp_path / "busy")])
    run = (RunId("gpt-3fa2c1"), Config())
    for number, name in enumerate(("old", "newer", "busy")):
        (tmp_path / name).mkdir()
        StateFolder(tmp_path / name).write_run(*run)
        (tmp_path / name / JOURNAL).touch()
        os.utime(tmp_path / name / JOURNAL, (number, number))
    kept = begun(StartFlags(state_dir=str(tmp_path / "old")), tmp_path / "old")
    assert start_peer.what_begins(kept, OwnRun(run, run)) == f"going on with run gpt-3fa2c1 from {tmp_path / 'old'}"
    new = begun(StartFlags(), tmp_path / "peer-2")
    assert start_peer.what_begins(new, OwnRun(None, run)) == f"beginning a new run in {tmp_path / 'peer-2'}"
    assert kept.warnings == []
    (warning,) = new.warnings
    assert warning.endswith(
        f"go on with the stopped one instead: python -m decentral.peer --state-dir {tmp_path}/newer"
    )
    named = begun(StartFlags(state_dir=str(tmp_path / "third"), join=("ADDR",)), tmp_path / "third")
    assert start_peer.what_begins(named, OwnRun(None, None)) == f"joining a run in {tmp_path / 'third'}"
    assert named.warnings == [], "the user has named this folder"
