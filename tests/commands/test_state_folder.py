"""The state folder: what a disk that refuses, and a file that is damaged, cost a peer at its start."""

import errno
import os
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
