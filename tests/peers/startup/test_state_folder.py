"""The state folder: what a disk that refuses, and a file that is damaged, cost a peer at its start."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from decentral.comm.net import ports
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.invitations import Permission
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.file import Journal
from decentral.core.layer_work import UNMEASURED
from decentral.core.units import Measured
from decentral.data.stream import Position, PositionFile, SequenceBlock
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.startup import invitation_files, state
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.state import StateFolder
from tests.journal_lines import event_of

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


def write_all_that_a_start_makes(folder: StateFolder) -> None:
    """Call the writers of every file that a peer has before it trains, on two ranks of an island."""
    path = folder.path
    Identity.load_or_create(path / "identity.key")
    folder.write_flags(state.PeerFlags())
    folder.write_listen(LISTENED)
    folder.write_profile("it", Measured("cpu", 1, 1.0, 1.0, UNMEASURED))
    AddressBook.load(path / "peers.json").learn(PeerId("A"), ("/ip4/192.0.2.1/tcp/1",))
    Journal(path / "journal.jsonl", lambda: 0.0).write(event_of("started", peer="A"))
    MicroBatchNumbers.of(path).take(0)
    tokens_NT, learned_NT = np.zeros((8, 2), np.uint32), np.ones((8, 1), np.bool_)
    for rank in ("", "-1", "-12"):
        block = SequenceBlock(tokens_NT, learned_NT, Position(), Position(number=1))
        PositionFile(path / f"data-position{rank}.json", "key").cover(block, 8)
    founder = FounderFile.create(path, "gpt")
    invitation_files.write_holding(invitation_files.kept_path(path), founder.own_holding(Permission.TRAIN, 1e12))
    invitation_files.keep_revocations(path, b"list")
    with FounderFile.open(path):
        (path / "compiled" / "triton").mkdir(parents=True)


def test_a_start_that_fails_removes_all_that_it_has_made(tmp_path: Path) -> None:
    path = tmp_path / "peer-1"
    with suppress(UserError), StateFolder.claim(str(path)) as folder:
        write_all_that_a_start_makes(folder)
        raise UserError("a mistake")
    assert not path.exists()


def test_a_file_that_cannot_be_removed_does_not_hide_why_the_start_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(UserError, match="a mistake"), StateFolder.claim(str(tmp_path / "peer-1")):
        raise UserError("a mistake")


def test_the_lock_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: removed.append(path.name))
    fail_to_start(tmp_path, "identity.key", "names.key", "revoked")
    assert removed[-1] == "lock"
    assert set(removed) == {"identity.key", "names.key", "revoked", "lock"}


def test_a_write_that_a_full_disk_refuses_leaves_no_temporary_file(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(UserError, match="No space left on device"):
        folder.write_flags(state.PeerFlags())
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("left", ["lock", "identity.key", "flags.json.new"])
def test_a_folder_whose_first_start_was_killed_begins_nothing_unless_the_line_says_what(
    tmp_path: Path, left: str
) -> None:
    folder = tmp_path / "peer-1"
    folder.mkdir()
    (folder / left).touch()
    with pytest.raises(UserError, match=r"has no run: the start that made it ended too early; .* add a CONFIG"):
        state.require_meant(str(folder), says_run=False)
    state.require_meant(str(folder), says_run=True)
    state.require_meant(str(folder), says_run=False, says_peer=True)


@pytest.mark.parametrize("other", [None, "lost+found"])
def test_a_folder_without_files_of_a_peer_may_begin_the_default_run(tmp_path: Path, other: str | None) -> None:
    if other:
        (tmp_path / other).mkdir()
    state.require_meant(str(tmp_path), says_run=False)


def test_each_protocol_keeps_its_own_port_where_they_differ(folder: StateFolder) -> None:
    folder.write_listen([*LISTENED, "/ip6/2001:db8::1/tcp/4002/p2p/Qm"])
    assert folder.listen([ports.ALL_IPV4, ports.ALL_IPV6]) == ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4002"]


def test_the_port_of_any_address_is_kept_that_was_asked_for_without_one(folder: StateFolder) -> None:
    wanted = ["/ip4/192.168.1.5/tcp/0"]
    folder.write_listen(LISTENED, wanted)
    assert folder.listen(wanted) == ["/ip4/192.168.1.5/tcp/4001"]
    assert folder.listen([]) == [one.removesuffix("0") + "4001" for one in ports.anywhere()]
