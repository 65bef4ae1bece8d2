"""python -m decentral.peer with several devices: one peer whose ranks train together, die together and come back."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decentral.commands import peer
from decentral.core import config, rank_place
from decentral.core.choices import OPTIMIZERS
from decentral.core.errors import UserError
from decentral.core.rank_place import Place, Split
from decentral.engine import compile_caches, launch, measure, memory
from decentral.engine.island import Island, Member
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.peers.startup import start_peer
from decentral.peers.startup.flags import StartFlags
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.patient_time import LIMIT_S

TWO = ["--device", "cpu,cpu"]
SAVING_OFTEN = ["--set", "swarm.checkpoint_every_s=1", "--set", "gossip.core_share=1"]  # and exchanging often


# Devices


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))


def under_torchrun(ranks: int) -> Place:
    return Place(rank=0, local_rank=0, local_size=ranks, restarts=0)


@pytest.mark.usefixtures("two_gpus")
def test_one_device_is_named_for_each_rank() -> None:
    assert measure.devices("cuda:0,cuda:1", None) == ["cuda:0", "cuda:1"]
    assert measure.devices("cuda:1", None) == ["cuda:1"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("cuda:0,cpu", "one type"),
        ("cuda:0,cuda:0", "names a device twice"),
        ("cuda,cuda:0", "names a device twice"),
        ("cuda:1,cuda:2", "this machine has only cuda:0 to cuda:1"),
        ("cpu,", "--device expects"),
    ],
)
def test_devices_that_make_no_peer(wanted: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure.devices(wanted, None)


@pytest.mark.usefixtures("two_gpus")
def test_under_torchrun_each_rank_has_the_gpu_of_its_number() -> None:
    assert measure.devices("auto", under_torchrun(2)) == ["cuda:0", "cuda:1"]
    assert measure.devices("cuda:1,cuda:0", under_torchrun(2)) == ["cuda:1", "cuda:0"]
    assert measure.devices("cpu", under_torchrun(3)) == ["cpu"] * 3


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("wanted", "ranks"), [("cuda:0", 2), ("cuda:0,cuda:1", 3), ("auto", 3)])
def test_under_torchrun_each_rank_needs_a_device(wanted: str, ranks: int) -> None:
    with pytest.raises(UserError, match="--device"):
        measure.devices(wanted, under_torchrun(ranks))


def test_a_process_that_no_launcher_started_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place.here() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Place.here() is None
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert Place.here() == Place(rank=1, local_rank=1, local_size=2, restarts=0)


def test_under_torchrun_only_rank_0_says_what_is_wrong(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 0, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    assert peer.main(["--device", "cpu"]) == 2
    assert "needs --state-dir" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        peer.main(["--device", "cpu"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == ""


def test_rank_0_downloads_only_when_the_ranks_have_connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They wait ten minutes for each other to connect, which a large download exceeds."""
    done: list[str] = []
    ranks = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 0, "RANK": 0, rank_place.ATTEMPT: 0}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))

    def connected(device: str, throttle: float, place: Place, lead: Callable[[object], None]) -> None:
        done.append("connected")
        lead(None)

    def downloaded(flags: StartFlags) -> StartFlags:
        done.append("downloaded")
        return flags

    async def started(flags: StartFlags, device: str, island: object, again: bool) -> None:
        done.append("started")

    monkeypatch.setattr(compile_caches, "keep_in", lambda folder: None)
    monkeypatch.setattr(launch, "rank", connected)
    monkeypatch.setattr(peer, "_downloaded", downloaded)
    monkeypatch.setattr(start_peer, "start", started)
    assert peer.main(["--device", "cpu", "--state-dir", str(tmp_path)]) == 0
    assert done == ["connected", "downloaded", "started"]


def test_only_torchrun_tells_a_rank_to_leave_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.notices() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    monkeypatch.setenv(rank_place.ATTEMPT, "0")
    assert launch.notices() == (signal.SIGINT, signal.SIGHUP)


# Dividing the model


RUN = config.load(None, ["model.width=256", "model.depth=8"])
COPY_BYTES = memory.needs(RUN).span_bytes(0, len(memory.needs(RUN).fragments)) + 4 * sum(decoder.parameters(RUN.model))


class FourRanks(Island):
    """Four ranks that never connect."""

    def __init__(self, memory_bytes: int) -> None:
        self.rank, self.size, self.split, self.device = 0, 4, Split.COPIES, torch.device("cpu")
        self.members = (Member(1, "CPU", memory_bytes),) * 4


def chosen(memory_bytes: int, split: Split = Split.AUTO, run: config.Config = RUN) -> tuple[Split, int]:
    device = Device(torch.device("cpu"), torch.float32, ranks=FourRanks(4 * memory_bytes))
    return launch.choose_parts(None, run, None, device, split)


def test_each_rank_has_the_whole_model_if_it_fits_and_else_a_part() -> None:
    assert chosen(COPY_BYTES)[0] is Split.COPIES
    assert chosen(COPY_BYTES - 1) == (Split.PARTS, COPY_BYTES - 1)


def test_ranks_have_parts_or_compute_together_where_the_user_says_so() -> None:
    assert chosen(COPY_BYTES, Split.PARTS)[0] is Split.PARTS
    assert chosen(COPY_BYTES, Split.TENSOR)[0] is Split.TENSOR


@pytest.mark.parametrize(
    ("split", "keys", "said"),
    [
        (Split.COPIES, [], "holds the whole model"),
        (Split.AUTO, ["gossip.algorithm=allreduce"], "with gossip.algorithm allreduce each device"),
        (Split.PARTS, ["gossip.algorithm=allreduce"], "use --split copies"),
        (Split.TENSOR, ["model.bottleneck=6"], "6 bottleneck channels cannot be divided equally over 4 devices"),
        (Split.TENSOR, ["model.heads=2"], "2 heads, 2 kv_heads cannot be divided equally over 4 devices"),
    ],
)
def test_what_cannot_be_divided_is_said(split: Split, keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        chosen(COPY_BYTES // 2, split, config.load(None, ["model.width=256", "model.depth=8", *keys]))


def test_devices_do_not_divide_a_model_whose_optimizer_has_no_divided_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "muon", replace(OPTIMIZERS["muon"], sharded=""))
    with pytest.raises(UserError, match=r"with train\.optimizer muon each device of a peer holds the whole model"):
        chosen(COPY_BYTES // 2)


def test_a_model_whose_parts_do_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="a part of the model on each of 4 devices takes"):
        chosen(COPY_BYTES // 8)


def test_dividing_needs_several_devices(capfd: pytest.CaptureFixture[str]) -> None:
    assert peer.main(["--device", "cpu", "--split", "parts"]) == 2
    said = capfd.readouterr().err
    assert "--split parts is for several devices" in said
    assert "or give --split auto for one device" in said  # the state folder may have kept the flag


# As processes


@pytest.mark.swarm
@pytest.mark.night
def test_what_rank_0_cannot_use_is_said_once_and_starts_nothing_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decentral.peer", "--listen", "/ip4/127.0.0.1/tcp/0", "--device", "cpu,cpu"]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path / "peer"), *TINY, "--set", "gossip.algorithm=synchronous"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: gossip.algorithm synchronous")


@pytest.mark.swarm
@pytest.mark.night
@pytest.mark.parametrize(
    ("alone", "island"),
    [([], ["--split", "copies"]), (TWO, ["--split", "parts"]), ([*TWO, "--split", "parts"], ["--split", "tensor"])],
    ids=["copies beside one process", "parts beside copies", "tensor beside parts"],
)
def test_two_ranks_are_one_peer_of_a_swarm_and_come_back_when_one_is_killed(
    peers: Peers, alone: list[str], island: list[str]
) -> None:
    peers.start("a", *TINY, *SAVING_OFTEN, "--set", "model.heads=2", *alone)
    peers.until("a trains", lambda: bool(peers.lines("a", "step")))
    address = peers.lines("a", "started")[0]["addresses"][0]
    peers.start("island", "--join", address, *TWO, *island)
    peers.until("both exchange", lambda: exchanged(peers, "a") and exchanged(peers, "island"))
    peers.until("the island has trained", lambda: bool(peers.lines("island", "step")))
    peers.until("the island has saved", lambda: bool(peers.lines("island", "checkpoint")))
    (started,) = peers.lines("island", "started")
    assert started["device"].startswith("2 x ")
    step = peers.lines("island", "step")[-1]
    assert step["micro_batches"] % 2 == 0 or "tensor" in island

    saved = peers.lines("island", "checkpoint")[-1]["step"]
    (formed,) = peers.lines("island", "island")
    os.kill(formed["ranks"][1]["pid"], signal.SIGKILL)
    peers.until("the island is back", lambda: len(peers.lines("island", "started")) == 2)
    again = peers.lines("island", "started")[1]
    assert (again["peer"], again["run"]) == (started["peer"], started["run"])
    peers.until("it exchanges again", lambda: exchanged(peers, "island", again["t"]))
    assert not {one["pid"] for one in formed["ranks"]} & {
        one["pid"] for one in peers.lines("island", "island")[1]["ranks"]
    }
    peers.until("it trains again", lambda: peers.lines("island", "step")[-1]["t"] > again["t"])
    assert next(line["step"] for line in peers.lines("island", "step") if line["t"] > again["t"]) > saved
    assert any(step["t"] < line["t"] < again["t"] for line in peers.lines("a", "step"))
    assert len(peers.lines("a", "started")) == 1

    ranks = [one["pid"] for one in peers.lines("island", "island")[1]["ranks"]]
    peers.end()
    assert {name: process.returncode for name, process in peers.processes.items()} == {"a": 0, "island": 0}
    assert peers.lines("island", "stopped")[-1]["reason"] == "interrupted"
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
