"""python -m decentral.peer where the user makes a mistake: exit 2, and one line on stderr that says what to do."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import peer, shared
from decentral.core import config
from decentral.core.ids import RunId
from decentral.core.own_inputs import OwnInputs
from decentral.peers.startup import start_peer
from decentral.peers.startup.flags import StartFlags
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.state import PeerFlags, StateFolder
from tests.commands.played_swarm import PlayedSwarm
from tests.commands.refusals import JOIN, LOOPBACK, SOMEBODY, refusal
from tests.patient_time import LIMIT_S

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "peer"


@pytest.fixture
def nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails if it goes on to load torch or libp2p."""

    def too_late(*_: object) -> NoReturn:
        raise AssertionError("the flags were not checked first")

    monkeypatch.setattr(shared, "loading", too_late)


# Flags


@pytest.mark.parametrize("factor", ["0", "0.5", "-3", "1e9"])
def test_a_throttle_out_of_bounds(folder: Path, factor: str) -> None:
    assert "--throttle expects a factor of 1 to 10000" in refusal(folder, "--throttle", factor)


def test_a_throttle_that_is_no_number(folder: Path) -> None:
    for text in ("fast", "nan"):
        assert f"--throttle: expected a number such as 1.5; got {text!r}" in refusal(folder, "--throttle", text)


@pytest.mark.parametrize("amount", ["soon", "10", "-5s", "0steps", "5 hours"])
def test_a_stop_after_that_is_no_amount(folder: Path, amount: str) -> None:
    said = refusal(folder, f"--stop-after={amount}")
    assert said == f"--stop-after expects 90s, 15m, 2h, 1d, 500steps or 2Mtokens; got {amount!r}"


def test_an_unknown_flag(folder: Path) -> None:
    assert "--speed" in refusal(folder, "--speed")


def test_wrong_flags_leave_no_folder_behind(folder: Path) -> None:
    refusal(folder, "--throttle", "0")
    assert not folder.exists()


@pytest.mark.parametrize("region", ["r" * 129, "two\nlines", "\x1b[2J", "[red]"])
def test_a_region_that_would_make_this_peer_invisible(folder: Path, region: str) -> None:
    said = refusal(folder, "--region", region)
    assert said.startswith("--region expects up to 128 printable characters")
    assert said.isprintable()


@pytest.mark.parametrize("flag", ["--announce", "--listen"])
@pytest.mark.parametrize("addresses", [["/ip4/203.0.113.7/tcp/4001"] * 17, ["/dns4/" + "a" * 300]])
def test_addresses_that_would_make_this_peer_invisible(folder: Path, flag: str, addresses: list[str]) -> None:
    said = refusal(folder, *(part for address in addresses for part in (flag, address)))
    assert said.startswith(f"{flag} expects at most 16 addresses of at most 256 characters")


# The state folder


def test_a_page_whose_port_is_taken_is_refused_before_the_folder_is_claimed(folder: Path) -> None:
    StateFolder(folder).path.mkdir()
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.Config())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(folder, "--dashboard", at)
    assert said == f"the page: {at} cannot be used (Address already in use); choose another port"
    assert [one.name for one in folder.iterdir()] == ["run.json"]


def test_a_state_folder_that_another_process_uses(folder: Path) -> None:
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remedy = f"choose another folder, or end it with: decentral stop {folder}"
        assert refusal(folder, "default") == f"--state-dir {folder} is in use by another peer; {remedy}"
        StateFolder(folder).write_flags(PeerFlags(name="ann"))
        assert refusal(folder, "default") == f"--state-dir {folder} is in use by peer ann; {remedy}"


def test_a_state_folder_that_is_a_file(folder: Path) -> None:
    folder.write_text("not a folder")
    assert refusal(folder) == f"--state-dir {folder} is a file; name a folder"


def test_a_damaged_identity(folder: Path) -> None:
    folder.mkdir()
    (folder / "identity.key").write_bytes(b"garbage")
    assert "move it away to get a new identity" in refusal(folder, "default")


def test_a_folder_that_is_not_there_begins_nothing_unless_the_line_says_what(folder: Path) -> None:
    beside = folder.parent / "peer-1"
    beside.mkdir()
    StateFolder(beside).write_run(RunId("gpt-3fa2c1"), config.Config())
    said = refusal(folder, "--throttle", "2")
    assert said.startswith(f"--state-dir {folder} does not exist (peers beside it: peer-1); to resume a peer,")
    assert not folder.exists()
    inside = refusal(folder.parent, "small")
    expected = "--state-dir expects the folder of one peer"
    assert inside == f"{expected}; {folder.parent} holds folders of peers: name one: peer-1"


@pytest.mark.swarm
def test_a_first_start_that_fails_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets as far as the data, so that its identity, its run and the founder's keys are made."""
    monkeypatch.chdir(folder.parent)
    refusal(Path("swarm") / "peer-1", "--private", "--set", "data.kind=text", "--data", "gone")
    assert list(folder.parent.iterdir()) == []


@pytest.mark.swarm
def test_a_start_that_fails_settles_no_flag(folder: Path) -> None:
    folder.mkdir()
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.Config())
    StateFolder(folder).write_flags(PeerFlags(region="lab"))
    assert "smallest part of this model" in refusal(folder, "--region", "home", "--memory", "1KB")
    assert StateFolder(folder).read_flags() == PeerFlags(region="lab")


def test_a_peer_comes_back_with_the_flags_of_its_folder_and_one_that_is_given_again_wins(folder: Path) -> None:
    listen, announce = ["/ip4/127.0.0.1/tcp/0", "/ip4/10.0.0.1/tcp/4001"], ["/ip4/203.0.113.7/tcp/4001"]
    line = [*(part for one in listen for part in ("--listen", one)), "--announce", announce[0], "--region", "lab"]
    line += ["--device", "cpu,cpu", "--throttle", "3", "--memory", "2GB", "--metrics", "9100", "--plain"]
    folder.mkdir()
    first = peer.parse(["--state-dir", str(folder), *line])
    StateFolder(folder).write_flags(first.peer)
    again = peer.parse(["--state-dir", str(folder)])
    assert again.peer == first.peer
    assert not again.plain
    other = peer.parse(["--state-dir", str(folder), "--listen", "/ip4/0.0.0.0/tcp/4002", "--throttle", "1"]).peer
    assert (other.listen, other.throttle, other.region) == (("/ip4/0.0.0.0/tcp/4002",), 1.0, "lab")


@pytest.mark.parametrize("content", ["[]", '{"throttle": "fast"}', '{"listen": 7}', "{"])
def test_flags_that_cannot_be_read_are_not_taken_for_none(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "flags.json").write_text(content)
    assert "flags.json is damaged; remove it, and repeat the flags of this peer" in refusal(folder, "small")


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize("flags", [["small"], ["--set", "seed=2"]])
def test_a_state_folder_whose_run_is_settled(folder: Path, flags: list[str]) -> None:
    folder.mkdir()
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.Config())
    said = refusal(folder, *flags)
    assert "belongs to run gpt-3fa2c1" in said
    assert "leave CONFIG and --set out" in said


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--private", "--join", JOIN], "--private begins a new swarm; leave it out"),
        (["--invite", "ann.invite", "small"], "--invite is for an existing swarm: give --join ADDR"),
    ],
)
def test_flags_that_contradict_each_other(folder: Path, flags: list[str], said: str) -> None:
    assert refusal(folder, *flags).startswith(said)


def test_the_digests_of_a_run_s_files_are_no_difference(folder: Path) -> None:
    """The first peer puts them into the config, and a supervisor repeats the line without them."""
    line = ("data.kind=huggingface", "data.path=rows.jsonl", "data.tokenizer=mine", "model.vocabulary=512")
    begun = config.load("small", line)
    sealed = begun.model_copy(update={"data": begun.data.model_copy(update={"tokenizer_digest": "0" * 32})})
    StartFlags(config="small", overrides=line).require_consistent((RunId("gpt-3fa2c1"), sealed), folder)


@pytest.mark.swarm
def test_the_line_that_began_a_run_may_be_given_again(folder: Path) -> None:
    """It gets as far as the memory, which is too little."""
    folder.mkdir()
    line = ["small", "--set", "seed=2", "--private"]
    FounderFile.create(folder, "gpt")
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.load("small", ["seed=2"]))
    assert "smallest part of this model" in refusal(folder, *line, "--memory", "1KB")


@pytest.mark.swarm
def test_a_peer_that_was_in_the_swarm_starts_where_join_does_not_answer(folder: Path) -> None:
    join = ["--join", f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.load_or_create(folder / 'other').peer}"]
    assert "check the address" in refusal(folder, *join)
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.Config())
    assert "smallest part of this model" in refusal(folder, *join, "--memory", "1KB")


@pytest.mark.swarm
def test_a_damaged_run_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.json").write_text("{")
    assert "run.json is damaged" in refusal(folder)


@pytest.mark.swarm
@pytest.mark.parametrize("content", ["[]", "{}", '{"run": 1, "config": 2}', "null"])
def test_a_run_file_that_holds_something_else(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "run.json").write_text(content)
    assert "run.json" in refusal(folder, "--memory", "1KB")


# The config


@pytest.mark.swarm
def test_an_unknown_key_names_the_nearest_one(folder: Path) -> None:
    said = refusal(folder, "--set", "gossip.windows_s=2")
    assert said == "config: unknown key gossip.windows_s; did you mean gossip.window_s?"


@pytest.mark.swarm
def test_a_wrong_type_says_what_was_expected(folder: Path) -> None:
    said = refusal(folder, "--set", "model.depth=deep")
    assert "model.depth" in said
    assert "integer" in said
    assert "deep" in said


@pytest.mark.swarm
def test_a_config_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    said = refusal(folder, str(tmp_path / "none.yaml"))
    assert "cannot read" in said
    assert "default" in said


@pytest.mark.swarm
def test_data_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none.txt"
    assert str(missing) in refusal(folder, "--set", "data.kind=text", "--set", f"data.path={missing}")


# What a swarm asks for


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSwarm]:
    played = PlayedSwarm(tmp_path_factory.mktemp("swarm"))
    yield played
    played.close()


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("sections", "flags", "said"),
    [
        ({"model": {"layers": "evil:go"}}, [], "if you trust it, give --trust-model-code evil:go"),
        ({"model": {"layers": "evil:go"}}, ["--trust-model-code", "my:own"], "--trust-model-code my:own: this swarm's"),
        ({"data": {"kind": "text"}}, [], "on its own data of kind text: give --data PATH"),
        ({"data": {"kind": "text", "path": "/etc/passwd"}}, ["--data", "."], "sets data.path, which only"),
        ({}, ["--data", "."], "this swarm trains on Python's standard library"),
        (
            {"model": {"depth": 3_000_000_000}},
            [],
            "model.depth must be less than or equal to 1024 (integer, above 0, at most 1,024); it is 3000000000",
        ),
    ],
)
def test_a_joiner_runs_and_reads_only_what_its_own_flags_name(
    folder: Path,
    swarm: PlayedSwarm,
    sections: dict[str, dict[str, object]],
    flags: list[str],
    said: str,
) -> None:
    swarm.config = json.dumps(sections)
    assert said in refusal(folder, "--join", swarm.address, *flags)
    assert not (folder / "run.json").exists()


def test_a_folder_remembers_the_data_that_its_user_has_named(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    named = config.load(None, ["data.kind=text"], OwnInputs(data="text", data_glob="*.md", model_code="mine:layers"))
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), named)
    (_, kept) = StateFolder(folder).read_run() or (None, config.Config())
    assert kept.own_inputs == OwnInputs(model_code="mine:layers", data=str(Path("text").absolute()), data_glob="*.md")
    (_, moved) = StateFolder(folder).read_run(OwnInputs(data=str(tmp_path))) or (None, config.Config())
    assert (moved.data.path, moved.model.layers) == (str(tmp_path), "mine:layers")


def test_a_folder_remembers_files_by_their_whole_path_and_a_name_of_the_hub_as_it_is(folder: Path) -> None:
    folder.mkdir()
    keys = ["data.kind=huggingface", "data.path=nobody/texts", "data.part=2/3", "data.column=body"]
    named = config.load(None, keys, OwnInputs(tokenizer="my-tokenizer"))
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), named)
    (_, kept) = StateFolder(folder).read_run() or (None, config.Config())
    assert kept.own_inputs == OwnInputs(
        data="nobody/texts", data_column="body", data_part="2/3", tokenizer=str(Path("my-tokenizer").absolute())
    )


@pytest.mark.swarm
@pytest.mark.parametrize("device", ["tpu", "cuda:99", "gpu0", "meta"])
def test_a_device_that_is_not_there(folder: Path, device: str) -> None:
    assert "--device" in refusal(folder, "--device", device)


# Joining


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize("flags", [["default"], ["--set", "seed=2"]])
def test_a_config_together_with_join(folder: Path, flags: list[str]) -> None:
    said = refusal(folder, "--join", JOIN, *flags)
    assert said == "with --join the config comes from the swarm; leave CONFIG and --set out"


@pytest.mark.swarm
@pytest.mark.parametrize(
    "address", ["127.0.0.1:4001", "/ip4/1.2.3.4/tcp/4001", f"/ip4/300.0.0.1/tcp/1/p2p/{SOMEBODY}", "x"]
)
def test_an_address_that_is_none(folder: Path, address: str) -> None:
    said = refusal(folder, "--join", address)
    assert "--join expects an address such as" in said
    assert repr(address) in said


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize("missing", [1, 10, 44])
def test_an_address_without_the_end_of_its_peer_id(folder: Path, missing: int) -> None:
    """libp2p said `length greater than remaining number of bytes in buffer` after five seconds."""
    said = refusal(folder, "--join", JOIN[:-missing])
    assert f"--join {JOIN[:-missing]}: the peer id at its end is incomplete or mistyped" in said


@pytest.mark.usefixtures("nothing_slow")
def test_an_invitation_that_is_not_there(folder: Path) -> None:
    assert refusal(folder, "--join", JOIN, "--invite", "nofile") == "--invite nofile: no such file"


@pytest.mark.usefixtures("nothing_slow")
def test_a_file_of_a_state_folder_leads_to_the_folder(folder: Path) -> None:
    folder.mkdir()
    StateFolder(folder).write_run(RunId("gpt-3fa2c1"), config.Config())
    assert refusal(folder / "run.json") == f"--state-dir {folder / 'run.json'} is a file; did you mean {folder}?"


@pytest.mark.swarm
def test_an_address_where_nobody_is(folder: Path, tmp_path: Path) -> None:
    nobody = Identity.load_or_create(tmp_path / "nobody.key").peer
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}"
    said = refusal(folder, "--join", address)
    assert said.startswith(f"--join {address}: unreachable")
    assert said.endswith("check the address, that the peer there runs, and its port")


@pytest.mark.swarm
def test_an_error_is_said_before_the_rest_of_the_program_has_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, had_ended = threading.Event(), []
    monkeypatch.setattr(start_peer, "load", lambda _: had_ended.append(may_end.wait(LIMIT_S)))
    assert "--listen expects an address" in refusal(folder, "small", "--listen", "/ip4/0.0.0.0/4001")
    assert not had_ended
    may_end.set()


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize("flag", ["--listen", "--announce"])
def test_a_place_where_it_cannot_listen(folder: Path, flag: str) -> None:
    said = refusal(folder, "small", flag, "4001")
    example = "/ip4/0.0.0.0/tcp/4001"
    assert said == f"{flag} expects an address such as {example}; got '4001'; did you mean {example}?"


# As a process


@pytest.mark.swarm
def test_the_process_exits_2_with_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "decentral.peer", *LOOPBACK, "--state-dir", str(folder), "--set", "modle.depth=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "error: config: unknown key modle; did you mean model?"


def test_ctrl_c_while_the_libraries_load_ends_it_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-m", "decentral.peer"], capture_output=True, env=environment, cwd=ROOT, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, b"", b"interrupted\n")


def test_a_folder_with_a_run_says_that_it_does_not_resume_from_another_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place may have another run, and the peer went on with the folder's without a word."""
    (tmp_path / "run.json").write_text("{}")
    flags = peer._downloaded(StartFlags(state_dir=str(tmp_path), resume_from="s3://bucket/other"))
    assert flags.resume_from is None
    said = f"starting: --resume-from s3://bucket/other is not used: {tmp_path} has a run, whose state goes on\n"
    assert capsys.readouterr().out == said
