"""The founder's command gives its list to the peers themselves first, and counts those that have it afterwards."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import NOTHING_REVOKED, Holding, Permission, Revocations
from decentral.comm.wire.messages import PeerRecords, RecordsQuery
from decentral.comm.wire.network import PeerNetwork, SwarmDirectory
from decentral.comm.wire.transport import Answer
from decentral.commands import invite
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.peers.membership import records
from decentral.peers.membership.records import Profile, first_record
from decentral.peers.membership.swarm_size import key_of
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.visit import VisitedSwarm
from decentral.sim.virtual_signer import VirtualSigner

DHT = "the DHT"


@dataclass
class Members:
    """Members with a list of revocations each, some of which keep no list; and a DHT that keeps nothing."""

    founder: FounderFile
    lists: dict[str, Revocations]
    deaf: str = ""
    names_others: bool = False  # whether each answer names one more peer, and takes as long as it may
    now: float = 1000.0
    heard: list[str] = field(default_factory=list)  # who was told, in order

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: float, max_blob_bytes: int) -> Answer:
        query = envelope.message
        assert isinstance(query, RecordsQuery)
        self.heard.append(to)
        told = Revocations.parse(query.revoked, self.founder.keys.run, self.founder.keys.public)
        if to not in self.deaf and told.number > self.lists[to].number:
            self.lists[to] = told
        newer = self.lists[to].number > query.revocations
        named: tuple[tuple[str, bytes], ...] = ()
        if self.names_others:
            self.now += deadline_s
            other = PeerId(f"{to}+")
            self.lists[other] = NOTHING_REVOKED
            record = records.pack(first_record(self.founder.keys.run, (), Profile("cpu", 1, 1.0, 1.0)))
            named = (
                (other, VirtualSigner(other).seal(key_of(self.founder.keys.run, other, 0), record, self.now + 60)),
            )
        return Answer(Envelope(PeerRecords(query.run, named, self.lists[to].packed if newer else b"")), 0.1, 0.1, 1, 1)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Take no addresses."""

    def clock(self) -> float:
        return self.now

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        self.heard.append(DHT)
        return {}

    async def store_at_others(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        self.heard.append(DHT)
        return False

    @asynccontextmanager
    async def visit(self, join: Sequence[str], holding: Holding | None) -> AsyncIterator[VisitedSwarm]:
        contacts = [PeerId(name) for name in self.lists]
        network, directory = cast(PeerNetwork, self), cast(SwarmDirectory, self)
        own = VirtualSigner(PeerId("visitor"))
        clock = SwarmClock(self.clock, self.clock)
        yield VisitedSwarm(network, self.founder.keys.run, config.load(None), contacts, directory, clock, own)


@pytest.fixture
def founder(tmp_path: Path) -> Iterator[FounderFile]:
    FounderFile.create(tmp_path, "gpt")
    with FounderFile.open(tmp_path) as ours:
        yield ours


def revoke(founder: FounderFile, holder: str) -> Revocations:
    return founder.revoke(founder.invite(holder, 1e9, Permission.TRAIN).invitation.id, 0.0)


def announce(members: Members, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(invite, "visit", members.visit)
    return asyncio.run(invite._announce(members.founder, []))


def test_peers_get_the_list_before_the_dht_is_asked(founder: FounderFile, monkeypatch: pytest.MonkeyPatch) -> None:
    found = revoke(founder, "ann")
    members = Members(founder, {"a": NOTHING_REVOKED, "b": NOTHING_REVOKED})
    assert announce(members, monkeypatch) == "2 of 2 peers"
    assert members.heard == ["a", "b", DHT]
    assert members.lists == {"a": found, "b": found}


def test_a_peer_that_answers_without_the_list_has_not_confirmed_it(
    founder: FounderFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(founder, "ann")
    members = Members(founder, {"a": NOTHING_REVOKED, "b": NOTHING_REVOKED}, deaf="b")
    assert announce(members, monkeypatch) == "1 of 2 peers"
    with pytest.raises(UserError, match="no peer took the list"):
        announce(Members(founder, {"b": NOTHING_REVOKED}, deaf="b"), monkeypatch)


def test_a_chain_of_names_holds_the_list_back_from_the_dht_for_a_minute(
    founder: FounderFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(founder, "ann")
    members = Members(founder, {"M": NOTHING_REVOKED}, names_others=True)
    announce(members, monkeypatch)
    assert members.heard[-1] == DHT
    assert members.now == 1000.0 + invite.TELLING_S


def test_a_founder_s_file_from_an_old_copy_replaces_the_list_that_peers_have(
    founder: FounderFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = revoke(founder, "ann")
    founder.number, founder.revoked = 0, frozenset()
    ours = revoke(founder, "bob")
    members = Members(founder, {"a": theirs, "b": NOTHING_REVOKED})
    assert announce(members, monkeypatch) == "2 of 2 peers"
    assert {found.ids for found in members.lists.values()} == {theirs.ids | ours.ids}
