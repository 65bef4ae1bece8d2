"""Signed records in journals are read whoever has written the journal, and forged ones are refused."""

import base64
import dataclasses
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from decentral.comm.wire.identity import Identity
from decentral.core.credit import SeenWork
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import StatementLine
from decentral.core.journal.file import Journal, recent, rotated
from decentral.core.journal.lines import recorded
from decentral.core.units import KiB
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import PeerRecord, Profile, Standing
from decentral.peers.membership.statements import LINES_TRIED, MOST_SIGNERS, newest_records, opened, statement_of
from tests.journal_lines import event_of

RUN = RunId("run-0123")
ROW = SeenWork("abcdefgh", 1000, 990, 5, 60, 4096, 12, 1)


@cache
def identity(name: str) -> Identity:
    return Identity.load_or_create(Path(mkdtemp()) / name)


def record(time: float = 1000.0, run: RunId = RUN) -> PeerRecord:
    profile = Profile("cpu", 1 << 30, 1e9, 50.0, name="ann")
    return PeerRecord(run, time, (), profile, 0, 3, 7, 7, 700, standing=Standing(seen=(ROW,)))


def line(name: str = "ann", time: float = 1000.0, run: RunId = RUN, key: str | None = None) -> StatementLine:
    signer = identity(name)
    signed_for = key or swarm_size.key_of(RUN, signer.peer)
    sealed = signer.seal(signed_for, records.pack(record(time, run)), time + 60)
    return StatementLine(peer=signer.peer, key=signed_for, record=base64.b64encode(sealed).decode())


def test_a_record_is_read_long_after_it_has_expired() -> None:
    found = opened(line())
    assert found == record()
    statement = statement_of(found)
    assert (statement.name, statement.claimed_tokens, statement.seen) == ("ann", 700, (ROW,))


@pytest.mark.parametrize(
    "forged",
    [
        dataclasses.replace(line(), peer=identity("bob").peer),
        dataclasses.replace(line(), key=f"{RUN}/peers/1/0"),
        dataclasses.replace(line(), record=line("bob").record),
        dataclasses.replace(line(), record=line().record[:-8]),
        dataclasses.replace(line(), record="not base64!"),
        dataclasses.replace(line(), record=""),
        dataclasses.replace(line(), record=base64.b64encode(b"\xff" * 40_000).decode()),
        line(key=f"{RUN}/plan"),
        line(run=RunId("other-9999")),
    ],
)
def test_a_forged_or_malformed_record_is_refused(forged: StatementLine) -> None:
    with pytest.raises(ProtocolError):
        opened(forged)
    assert newest_records([forged]) == ({}, 1)


def test_a_changed_bit_is_noticed() -> None:
    sealed = bytearray(base64.b64decode(line().record))
    sealed[30] ^= 1
    with pytest.raises(ProtocolError):
        opened(dataclasses.replace(line(), record=base64.b64encode(sealed).decode()))


def test_the_newest_records_of_a_journal_come_with_the_number_of_refused_ones() -> None:
    bad = dataclasses.replace(line(), record="AAAA")
    found, refused = newest_records([line(), None, line("bob", 5.0), bad])
    assert refused == 1
    assert found == {identity("ann").peer: record(), identity("bob").peer: record(5.0)}


def test_a_journal_with_very_many_forged_lines_costs_little() -> None:
    bad = dataclasses.replace(line(), record="AAAA")
    found, refused = newest_records([line(), *[bad] * 10_000])
    assert (found, refused) == ({}, LINES_TRIED)
    names = (dataclasses.replace(bad, peer=PeerId(f"Qm{number}")) for number in range(2 * MOST_SIGNERS))
    assert newest_records(names) == ({}, MOST_SIGNERS)


def test_a_restarted_peer_finds_its_last_valid_record() -> None:
    ann = identity("ann").peer
    damaged = dataclasses.replace(line(), record="AAAA")
    found, _ = newest_records([line(time=1.0), line(time=2.0), line("bob", 9.0), damaged])
    assert found[ann].time == 2.0


def test_a_peer_that_restarts_just_after_its_journal_began_a_new_file_finds_its_last_record(tmp_path: Path) -> None:
    ann, path = identity("ann").peer, tmp_path / "journal.jsonl"
    journal = Journal(path, clock=lambda: 5.0, file_bytes=8 * KiB)
    journal.write(line(time=1.0))
    while not rotated(path):
        journal.write(event_of("step"))
    journal.close()
    found, _ = newest_records(one.event for one in recorded(recent(path, 1 << 20)))
    assert found[ann].time == 1.0
