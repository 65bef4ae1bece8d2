"""The state folder: what a disk that refuses, and a file that is damaged, cost a peer at its start."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from decentral import state
from decentral.comm.net import ports
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.state import StateFolder

RUN = RunId("gpt-3fa2c1")
LISTENED = ["/ip4/10.0.0.1/tcp/4001/p2p/Qm"]


def refused(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path)


def test_a_new_run_on_a_full_disk_is_a_user_error(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "write_atomically", refused)
    with pytest.raises(UserError, match=r"run.json cannot be written \(No space left on device\); make room there"):
        folder.write_run(RUN, config.Config())


def test_a_peer_starts_again_on_a_full_disk(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_run(RUN, config.Config())
    folder.write_listen(LISTENED)
    monkeypatch.setattr(state, "write_atomically", refused)
    folder.write_run(RUN, config.Config())
    folder.write_listen(["/ip4/10.0.0.1/tcp/4002/p2p/Qm"])
    assert folder.read_run() == (RUN, config.Config())
    assert folder.listen([])[0] == "/ip4/0.0.0.0/tcp/4001"
    assert set(folder.listen([])[1:]) <= {"/ip6/::/tcp/4001"}  # where this machine has IPv6


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": "it"}', '{"key": "it", "measured": {"a": 1}}'])
def test_a_damaged_profile_is_measured_again(folder: StateFolder, content: str) -> None:
    (folder.path / "profile.json").write_text(content)
    assert folder.read_profile("it") is None


@pytest.mark.parametrize("content", ["", "[]", '{"/ip4/0.0.0.0/tcp/0": 7}'])
def test_a_damaged_port_is_a_new_one(folder: StateFolder, content: str) -> None:
    (folder.path / "listen.json").write_text(content)
    assert folder.listen([]) == ports.anywhere()


def fail_to_start(path: Path, *made: str) -> None:
    with suppress(UserError), StateFolder.claim(str(path)) as folder:
        for name in made:
            (folder.path / name).write_text("made by this start")
        raise UserError("a mistake")


def test_a_start_that_fails_leaves_no_folder_where_there_was_none(tmp_path: Path) -> None:
    fail_to_start(tmp_path / "swarm" / "peer-1", "identity.key", "journal.jsonl", "founder.json")
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_leaves_what_was_in_the_folder(tmp_path: Path) -> None:
    for name in ("identity.key", "notes.txt"):
        (tmp_path / name).write_text("mine")
    fail_to_start(tmp_path, "listen.json")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["identity.key", "notes.txt"]


def test_a_peer_that_was_in_a_run_loses_nothing_by_a_start_that_fails(tmp_path: Path) -> None:
    StateFolder(tmp_path).write_run(RUN, config.Config())
    fail_to_start(tmp_path, "identity.key", "journal.jsonl")
    assert {"identity.key", "journal.jsonl", "run.json"} < {one.name for one in tmp_path.iterdir()}


def test_the_port_of_any_address_is_kept_that_was_asked_for_without_one(folder: StateFolder) -> None:
    wanted = ["/ip4/192.168.1.5/tcp/0"]
    folder.write_listen(LISTENED, wanted)
    assert folder.listen(wanted) == ["/ip4/192.168.1.5/tcp/4001"]
    assert folder.listen([]) == [one.removesuffix("0") + "4001" for one in ports.anywhere()]
