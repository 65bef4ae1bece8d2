"""The page as a process of its own: it gets lines, ends with its parent, and never makes a peer wait."""

import json
import os
import select
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import pytest

from decentral.core.journal.events import ErrorLine
from decentral.core.journal.file import Journal
from decentral.view.page.address import PageAddress
from decentral.view.page.child import MOST_UNREAD_BYTES, DashboardProcess, dashboard
from decentral.view.page.connections import MOST_CONNECTIONS
from decentral.view.page.source_lines import NowLine
from tests.commands.peer_processes import Peers
from tests.journal_lines import event_of
from tests.patient_time import LIMIT_S

NO_PROCESS = cast("subprocess.Popen[bytes]", None)


def test_a_page_that_does_not_read_keeps_nobody_waiting_and_misses_lines() -> None:
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    page = DashboardProcess("", NO_PROCESS, _pipe=ours)
    for number in range(4000):
        page.tell("A", float(number), ErrorLine(reason="x" * 500))
    assert page.left_out > 0
    assert len(page._waiting) < MOST_UNREAD_BYTES + 1000
    data = b""
    while len(data) < MOST_UNREAD_BYTES:
        data += os.read(theirs, 1 << 20)
        page.tell("A", 0.0, NowLine())
    numbers = [json.loads(line)[1]["t"] for line in data.splitlines()[:1000]]
    assert numbers == list(range(1000))  # whole lines, none lost before the first that was left out
    os.close(theirs)
    os.close(ours)


def test_a_page_that_has_gone_does_not_end_its_parent() -> None:
    theirs, ours = os.pipe()
    page = DashboardProcess("", NO_PROCESS, _pipe=ours)
    os.close(theirs)
    for _ in range(3):
        page.tell("A", 0.0, NowLine())
    assert page._pipe == -1


def test_who_asks_for_no_page_gets_none() -> None:
    with dashboard(None) as page:
        assert page is None


def swarm(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/api/swarm", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.swarm
def test_a_page_shows_its_folder_and_what_it_is_told_and_ends_when_its_parent_lets_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", lambda: 5.0)
    journal.write(event_of("started", peer="A", device="cpu"))
    journal.write(event_of("step", step=1, tokens=7, loss=2.0, seconds=0.9))
    with dashboard(PageAddress(port=0, strict=True), tmp_path) as page:
        assert page is not None
        page.tell("B", 6.0, event_of("started", peer="B", device="cuda"))
        Peers(tmp_path).until("both are there", lambda: len(swarm(page.url)["peers"]) == 2)
        assert swarm(page.url)["totals"]["tokens"] == 7
        host, port = page.url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST_CONNECTIONS)]
            assert select.select(silent, [], [], LIMIT_S)[0]  # the page ends some of so many of one network
    assert page.process.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=LIMIT_S)
