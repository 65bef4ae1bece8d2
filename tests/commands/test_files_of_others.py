"""Every reader of a file that somebody else may have written goes on, or ends in one line, where it is a pipe.

A pipe without a writer stands for all that is no regular file: a reader that opened it would never return.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import audit, report
from decentral.commands.checks import disk, running_peer
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.journal.file import Journal
from decentral.core.peer_folders import identity
from decentral.data import token_file, tokenizer
from decentral.engine import checkpoint
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.model import families
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.startup import invitation_files
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.scheduler.topology import topology
from decentral.serving import chat_template
from decentral.sim import faults
from decentral.view.page.sources import JournalFolder
from tests.journal_lines import event_of

REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {  # reader -> the pipe's name, and the call, with its folder
    "report": ("journal.jsonl", lambda folder: report._main(report.parse([str(folder)]))),
    "audit": ("journal.jsonl", lambda folder: audit._main(audit.parse([str(folder)]))),
    "a peer's journal": ("journal.jsonl", lambda folder: Journal(folder / "journal.jsonl", lambda: 0.0)),
    "run.json": ("run.json", lambda folder: StateFolder(folder).read_run()),
    "run.json that is only read": ("run.json", lambda folder: StateFolder(folder).look_at_run()),
    "flags.json": ("flags.json", lambda folder: StateFolder(folder).read_flags()),
    "the lock of a folder": ("lock", lambda folder: StateFolder.claim(str(folder)).__enter__()),
    "an invitation": ("a.invite", lambda folder: invitation_files.read_holding(folder / "a.invite")),
    "a key": ("identity.key", lambda folder: Identity.load_or_create(folder / "identity.key")),
    "a checkpoint": ("checkpoint.safetensors", checkpoint.read),
    "a config": ("a.yaml", lambda folder: config.load(folder / "a.yaml")),
    "a topology": ("a.yaml", lambda folder: topology.load(folder / "a.yaml")),
    "a trace": ("a.csv", lambda folder: faults.trace(folder / "a.csv")),
    "a model": ("config.json", families.read),
    "a tokenizer": ("tokenizer.json", lambda folder: tokenizer.load(str(folder))),
    "settings": ("tokenizer_config.json", lambda folder: tokenizer.settings(folder / "tokenizer_config.json")),
    "a chat template": ("tokenizer_config.json", lambda folder: chat_template.of_tokenizer(str(folder))),
    "tokens": ("a.bin", lambda folder: token_file.mapped(config.DataConfig(path=str(folder / "a.bin")), 256)),
    "an array": ("a.npy", lambda folder: token_file.mapped(config.DataConfig(path=str(folder / "a.npy")), 256)),
    "their description": ("a.bin.json", lambda folder: token_file.described(folder / "a.bin")),
}
IGNORED: dict[str, tuple[str, Callable[[Path], object], object]] = {  # the same, and what the reader returns
    "the page's facts": ("run.json", lambda folder: JournalFolder(folder).facts(), {}),
    "the doctor's journal": ("journal.jsonl", running_peer.JournalTail.of, None),
    "the doctor's lock": ("lock", disk.in_use, True),
    "addresses": ("peers.json", lambda folder: AddressBook.load(folder / "peers.json").known, {}),
    "ports": ("listen.json", lambda folder: StateFolder(folder).listening(), []),
    "revocations": ("revoked", invitation_files.kept_revocations, b""),
    "whose copy a folder is": ("identity.key", lambda folder: identity(folder) == str(folder).encode(), True),
    "numbers": ("position.json", lambda folder: MicroBatchNumbers.of(folder).least > 0, True),
}


@pytest.mark.parametrize("reader", REFUSED)
def test_a_pipe_is_refused_in_one_line(tmp_path: Path, reader: str) -> None:
    name, read = REFUSED[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", IGNORED)
def test_a_pipe_counts_as_a_damaged_file(tmp_path: Path, reader: str) -> None:
    name, read, expected = IGNORED[reader]
    os.mkfifo(tmp_path / name)
    (tmp_path / "journal.jsonl").touch()
    assert read(tmp_path) == expected


def test_flags_replace_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flags.json")
    StateFolder(tmp_path).write_flags(PeerFlags(region="Oregon"))
    assert StateFolder(tmp_path).read_flags().region == "Oregon"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_the_page_goes_on_without_a_journal_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "B").mkdir()
    Journal(tmp_path / "A" / "journal.jsonl", lambda: 1.0).write(event_of("started", peer="A", device="cpu"))
    make(tmp_path / "B" / "journal.jsonl")
    assert [peer for peer, _ in JournalFolder(tmp_path).lines()] == ["A"]


@pytest.mark.parametrize("command", [report.main, audit.main])
def test_a_journal_that_cannot_be_read_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: Callable[[list[str]], int]
) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    assert command([str(tmp_path)]) == 2
    said = f"{tmp_path / 'journal.jsonl'} cannot be read (expected a file; it is a folder); omit its folder"
    assert capfd.readouterr().err == f"error: {said}\n"
