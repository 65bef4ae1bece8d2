"""Hooks of a whole swarm: each event once, though many peers report it, and nothing of the past."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from decentral.commands import dashboard, local
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.lines import Recorded
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.view.event_hooks import Hooks
from decentral.view.hook_messages import HookMessage
from decentral.view.page.follow import PageFollower, SwarmTime
from decentral.view.page.source_lines import MissedLine, PageEvent, RecordLine
from decentral.view.page.sources import JournalFolder
from decentral.view.page.swarm_hooks import FOUND_S, SwarmHooks
from tests.journal_lines import event_of

ANN, BOB, EVE = ("Qm" + one * 44 for one in "abe")


class Kept:
    """A hook that keeps its messages."""

    flag, tries = "--on-event", 1

    def __init__(self) -> None:
        self.messages: list[HookMessage] = []

    def deliver(self, message: HookMessage) -> None:
        self.messages.append(message)

    def end(self) -> None:
        pass


class Watch:
    """A swarm that hooks follow, and what they were told."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.hooks = Hooks([self.kept])
        self.swarm = SwarmHooks(self.hooks)

    def line(self, of: str, event: str, new: bool = True, **fields: Any) -> None:
        self.said(of, event_of(event, **fields), new)

    def said(self, peer: str, event: PageEvent, new: bool = True, t: float = 1.7e9) -> None:
        self.swarm.take(peer, Recorded(t, event), new)

    def started(self, *peers: str, new: bool = False) -> None:
        for peer in peers:
            self.line(peer, "started", new, peer=peer, run="gpt-3fa2c1", name=peer[2:5])

    def told(self) -> list[tuple[str, str, str]]:
        """Each message's event, the peer that tells, and its text."""
        self.hooks.start()
        self.hooks.close()
        return [(one.event, one.peer, one.text) for one in self.kept.messages]


def test_a_peer_that_is_lost_or_joins_is_told_once_though_all_others_report_it() -> None:
    watch = Watch()
    watch.started(ANN, BOB)
    for _ in range(2):
        for peer in (ANN, BOB):
            watch.line(peer, "peer_joined", peer=EVE, name="eve")
        for peer in (ANN, BOB):
            watch.line(peer, "peer_left", peer=EVE, reason="silent")
    told = [(event, peer) for event, peer, _ in watch.told()]
    assert told == [("peer_joined", ANN), ("peer_lost", ANN)] * 2


def test_a_peer_that_stops_in_order_is_not_lost_as_well() -> None:
    watch = Watch()
    watch.started(ANN, BOB)
    watch.line(BOB, "stopped", reason="interrupted")
    watch.line(ANN, "peer_left", peer=BOB, reason="left")
    watch.said(BOB, MissedLine(peer=PeerId(BOB), reason="its process is gone", certain=True))
    assert [event for event, *_ in watch.told()] == ["stopped"]


def test_a_peer_whose_process_is_gone_without_a_last_line_is_lost() -> None:
    watch = Watch()
    watch.started(ANN)
    watch.said(ANN, MissedLine(peer=PeerId(ANN), reason="its process is gone", certain=True))
    assert watch.told() == [("peer_lost", ANN, f"peer {ANN[-6:]} is lost (its process is gone)")]


def test_plans_revocations_and_lost_layers_are_told_once() -> None:
    watch = Watch()
    watch.started(ANN, BOB)
    for name, fields in (
        ("plan", {"digest": "ab"}),
        ("revoked", {"number": 1}),
        ("unheld", {"reason": "no peer holds layer 3"}),
        ("held", {}),
        ("unheld", {"reason": "no peer holds layer 3"}),
        ("plan", {"digest": "cd"}),
    ):
        for peer in (ANN, BOB):
            watch.line(peer, name, **fields)
    expected = ["plan_adopted", "revoked", "layers_lost", "layers_back", "layers_lost", "plan_adopted"]
    assert sorted(event for event, *_ in watch.told()) == sorted(expected)  # kinds take turns


def test_troubles_of_each_peer_are_told_each_time() -> None:
    watch = Watch()
    watch.started(ANN, BOB)
    for peer in (ANN, BOB, ANN):
        watch.line(peer, "error", reason="the disk is full")
    assert [(event, peer) for event, peer, _ in watch.told()] == [("trouble", one) for one in (ANN, BOB, ANN)]


def test_the_past_is_not_told_and_its_names_are_known() -> None:
    watch = Watch()
    watch.started(ANN)
    watch.line(ANN, "peer_joined", new=False, peer=EVE, name="eve")
    watch.line(ANN, "peer_left", peer=EVE, reason="silent")
    assert watch.told() == [("peer_lost", ANN, f"peer {EVE[-6:]} (eve) is lost (silent)")]


def test_a_watch_from_outside_tells_of_records_that_come_and_of_peers_that_do_not_answer() -> None:
    watch = Watch()

    def record(peer: str, t: float) -> None:
        profile = Profile("cpu", 1 << 30, 1e9, 50.0, name=peer[2:5])
        found = PeerRecord(RunId("gpt-3fa2c1"), t, (), profile, 0, 3, 7, 7, 700)
        watch.said("", RecordLine(peer=PeerId(peer), record=found), t=1.7e9 + t)

    record(ANN, 0.0)
    record(EVE, FOUND_S + 1)
    record(EVE, FOUND_S + 21)
    watch.said("", MissedLine(peer=PeerId(ANN), reason="expired"))
    watch.said("", MissedLine(peer=PeerId(ANN), reason="expired"))
    found = watch.told()
    assert [event for event, *_ in found] == ["peer_joined", "peer_lost"]
    assert watch.kept.messages[1].sentence() == f"run gpt-3fa2c1: peer {ANN[-6:]} (aaa) is lost (expired)"


def test_a_page_tells_what_journals_say_after_it_was_opened(tmp_path: Path) -> None:
    now = 1.7e9
    journal = tmp_path / "journal.jsonl"
    started = {"t": now - 10, "event": "started", "peer": ANN, "run": "gpt-3fa2c1"}
    journal.write_text(json.dumps(started) + "\n" + json.dumps({"t": now, "event": "error", "reason": "old"}) + "\n")
    watch = Watch()
    follower = PageFollower([JournalFolder(tmp_path)], SwarmTime(lambda: now + 1), hooks=watch.swarm)
    asyncio.run(follower.take(follower.sources[0], False))
    with journal.open("a") as file:
        file.write(json.dumps({"t": now + 1, "event": "error", "reason": "new"}) + "\n")
    asyncio.run(follower.take(follower.sources[0], True))
    assert [text for _, _, text in watch.told()] == ["new"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--events", "peer_lost", "."], "--events needs --on-event CMD or --webhook URL"),
        (["--webhook", "nowhere", "."], "--webhook expects a URL"),
        (["--on-event", "true", "--serve-model", "."], "need --join ADDR of a running peer, or a folder"),
    ],
)
def test_wrong_flags_of_the_page_take_one_line(flags: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(flags) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


def test_a_local_swarm_has_the_same_flags() -> None:
    found = local.parse(["--on-event", "true", "--events", "peer_lost"]).hooks
    assert found is not None
    assert [one.hook.flag for one in found.threads] == ["--on-event"]
    assert local.parse([]).hooks is None
    with pytest.raises(UserError, match="--events needs"):
        local.parse(["--events", "peer_lost"])
