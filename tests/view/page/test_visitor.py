"""A visitor's lines: records as they are read, peers that do not answer, and a directory that fails for a while."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong
from decentral.comm.wire.transport import AskError
from decentral.core.config import Config
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup.visit import VisitedSwarm
from decentral.view.page.source_lines import MissedLine, PageEvent, RecordLine
from decentral.view.page.visitor import Visitor

RECORD = PeerRecord(
    "run", 1.0, ("/ip4/1.2.3.4/tcp/1",), Profile("cpu", 1, 1.0, 70.0), 0, 3, 5, 5, 100, phase=PeerPhase.TRAINING
)


class Swarm:
    """Records by peer, peers that are dead, and a directory that may fail."""

    def __init__(self, *peers: str) -> None:
        self.records = {PeerId(peer): RECORD for peer in peers}
        self.dead = set[str]()
        self.fails = False
        self.now = 10.0
        own: Any = SimpleNamespace(peer=PeerId("us"), open=lambda key, peer, value, now: (value, 60.0))
        this, clock = cast(Any, self), cast(SwarmClock, lambda: self.now)
        self.visitor = Visitor(VisitedSwarm(this, RunId("run"), Config(), [], this, clock, own))

    async def fetch(self, key: str) -> dict[str, bytes]:
        if self.fails:
            raise OSError("the daemon has ended")
        return {peer: records.pack(record) for peer, record in self.records.items()}

    async def ask(self, peer: PeerId, envelope: Envelope, deadline_s: float, most: int) -> object:
        assert isinstance(envelope.message, Ping)
        if peer in self.dead:
            raise AskError(Reason.UNREACHABLE)
        return SimpleNamespace(envelope=Envelope(Pong(0)))

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None: ...

    def looked(self) -> list[PageEvent | None]:
        asyncio.run(self.visitor.look())
        return [line.event for _, line in self.visitor.lines()]


def test_a_record_is_told_when_it_is_new() -> None:
    swarm = Swarm("A", "B")
    assert swarm.looked() == [RecordLine(peer=PeerId(name), record=RECORD) for name in "AB"]
    assert swarm.looked() == []
    later = dataclasses.replace(RECORD, time=21.0, step=9)
    swarm.records[PeerId("B")] = later
    assert swarm.looked() == [RecordLine(peer=PeerId("B"), record=later)]


def test_a_peer_that_leaves_two_questions_unanswered_is_missed_once() -> None:
    swarm = Swarm("A", "B")
    swarm.looked()
    swarm.dead.add("B")
    assert swarm.looked() == []
    assert swarm.looked() == [MissedLine(peer=PeerId("B"), reason="unreachable")]
    assert swarm.looked() == []


@pytest.mark.parametrize(
    ("dead", "now", "reason"),
    [(False, 10.0, "left"), (True, 100.0, "expired"), pytest.param(True, 10.0, "left", id="replaced-by-a-goodbye")],
)
def test_a_record_that_is_gone_means_that_its_peer_left_or_that_it_was_dead(
    dead: bool, now: float, reason: str
) -> None:
    swarm = Swarm("A", "B")
    swarm.looked()
    swarm.dead |= {"B"} if dead else set()
    swarm.now = now
    swarm.looked()
    del swarm.records[PeerId("B")]
    assert swarm.looked() == [MissedLine(peer=PeerId("B"), reason=reason)]


def test_a_directory_that_fails_is_asked_again_and_nobody_is_missed_for_it() -> None:
    swarm = Swarm("A", "B")
    swarm.looked()
    swarm.fails = True
    assert swarm.looked() == []
    swarm.fails = False
    assert swarm.looked() == []


def test_of_many_peers_some_are_asked_each_time_and_all_in_turn() -> None:
    swarm = Swarm(*(f"P{number:03d}" for number in range(100)))
    swarm.looked()
    swarm.dead |= {"P099"}
    missed = [line for _ in range(10) for line in swarm.looked()]
    assert missed == [MissedLine(peer=PeerId("P099"), reason="unreachable")]
