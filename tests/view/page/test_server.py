"""The server: what it lets a page do, whom it answers, and streams that stay small however slow a browser is."""

import asyncio
import json
import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from decentral.core.journal.lines import Recorded
from decentral.view.page import server
from decentral.view.page.server import STATIC, Updates, application
from decentral.view.page.source_lines import PageLine
from decentral.view.page.swarm_view import SwarmView
from tests.journal_lines import event_of


def line(event: str, t: float, **fields: Any) -> PageLine:
    return Recorded(t, event_of(event, **fields))


@pytest.fixture
def updates() -> Updates:
    view = SwarmView()
    view.take("A", line("started", 0.0, peer="A", device="cpu"))
    view.take("A", line("step", 1.0, step=1, tokens=5, loss=2.0, seconds=1.0))
    view.tick(1.0)
    return Updates(view)


@pytest.fixture
def client(updates: Updates) -> TestClient:
    return TestClient(application(updates), base_url="http://127.0.0.1:8420")


def test_the_page_and_its_parts_are_served_with_a_policy_that_forbids_other_hosts(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/static/style.css", "/static/vendor/uPlot.iife.min.js"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_that_is_served_names_another_host_or_makes_markup_of_text() -> None:
    own = [path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")]
    assert len(own) > 10
    for path in own:
        text = path.read_text()
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name


def test_every_part_that_a_part_names_is_there() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', path.read_text()):
            assert (STATIC / name).exists(), name
    for name in re.findall(r'(?:src|href)="/static/([^"]+)"', (STATIC / "index.html").read_text()):
        assert (STATIC / name).exists(), name


def test_the_vendored_library_comes_with_its_licence_and_its_version() -> None:
    vendor = STATIC / "vendor"
    assert "MIT" in (vendor / "uPlot.LICENSE.txt").read_text()
    assert re.search(r"uPlot \(v\d+\.\d+\.\d+\)", (vendor / "uPlot.iife.min.js").read_text()[:200])


@pytest.mark.parametrize("host", ["127.0.0.1:8420", "localhost:8420", "[::1]:8420", "192.168.1.7", "LOCALHOST"])
def test_a_browser_may_ask_by_an_address_or_as_this_machine(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8420", "127.0.0.1.evil.example", "", "localhost.evil.example:8420"])
def test_a_page_of_somebody_else_whose_name_leads_here_gets_nothing(client: TestClient, host: str) -> None:
    answer = client.get("/api/swarm", headers={"host": host})
    assert answer.status_code == 421
    assert "peers" not in answer.text


def test_a_name_that_the_user_gave_is_ours(updates: Updates) -> None:
    client = TestClient(application(updates, "swarm.lab"), base_url="http://swarm.lab:8420")
    assert client.get("/").status_code == 200


def test_programs_get_everything_as_json(client: TestClient) -> None:
    swarm = client.get("/api/swarm").json()
    assert swarm["totals"]["tokens"] == 5
    assert len(swarm["peers"]) == 1
    history = client.get("/api/peers/0").json()
    assert history["series"]["loss 0"] == [None, 2.0] or history["series"]["loss 0"] == [2.0]
    assert client.get("/api/peers/7").status_code == 404


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/server.py", "/static/vendor/"])
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1.0", "", "0x0", "\u0663"])
def test_a_number_that_no_peer_has_is_answered_as_such(client: TestClient, number: str) -> None:
    assert client.get(f"/api/peers/{number}").status_code == 404


def test_programs_that_ask_often_make_no_work_between_two_updates(client: TestClient, updates: Updates) -> None:
    first = client.get("/api/swarm").content
    updates.view.tick(5.0)
    assert client.get("/api/swarm").content == first
    updates.publish()
    assert client.get("/api/swarm").json()["now"] == 5.0


def test_a_supervisor_is_told_whether_the_page_answers_and_whether_a_peer_trains(
    client: TestClient, updates: Updates
) -> None:
    assert (client.get("/healthz").status_code, client.get("/healthz").text) == (200, "ok\n")
    assert (client.get("/readyz").status_code, client.get("/readyz").text) == (200, "ok\n")
    updates.view.take("A", line("stopped", 2.0, reason="interrupted"))
    updates.view.tick(2.0)
    assert (client.get("/readyz").status_code, client.get("/readyz").text) == (503, "no peer trains\n")


def test_nothing_can_be_changed_through_the_page(client: TestClient) -> None:
    for method in ("post", "put", "delete", "patch"):
        assert getattr(client, method)("/api/swarm").status_code == 405


def events(data: bytes) -> tuple[str, int, dict[str, Any]]:
    found = re.fullmatch(rb"event: (\w+)\nid: (\d+)\ndata: (.*)\n\n", data)
    assert found
    return found[1].decode(), int(found[2]), json.loads(found[3])


async def streamed(updates: Updates, steps: int) -> list[bytes]:
    stream, found = updates.listen(), []
    updates.browsers.append("10.0.0.1")
    for number in range(steps):
        if number:
            updates.view.take("A", line("step", 1.0 + number, step=number, tokens=5, loss=1.0, seconds=1.0))
            updates.view.tick(1.0 + number)
            updates.publish()
        found.append(await anext(stream))
    await stream.aclose()
    return found


def test_a_stream_begins_with_everything_and_goes_on_with_changes(updates: Updates) -> None:
    found = [events(data) for data in asyncio.run(streamed(updates, 3))]
    assert [(name, number) for name, number, _ in found] == [("everything", 0), ("changes", 1), ("changes", 2)]
    assert [content["totals"]["tokens"] for _, _, content in found] == [5, 10, 15]


def test_a_browser_that_has_missed_updates_gets_everything_and_nothing_queues_up(updates: Updates) -> None:
    async def slow() -> list[bytes]:
        stream = updates.listen()
        first = await anext(stream)
        for _ in range(50):
            updates.publish()
        return [first, await anext(stream)]

    name, number, _ = events(asyncio.run(slow())[1])
    assert (name, number) == ("everything", 50)


def test_an_update_is_encoded_once_for_all_browsers(updates: Updates) -> None:
    async def two() -> tuple[bytes, bytes]:
        one, other = updates.listen(), updates.listen()
        await anext(one), await anext(other)
        updates.publish()
        return await anext(one), await anext(other)

    first, second = asyncio.run(two())
    assert first is second


@dataclass
class Crowd:
    """Browsers that ask for the stream of one application, and stay until `leave`."""

    app: ASGIApp
    statuses: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by address
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def browser(self, address: str) -> None:
        async def receive() -> Message:
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses[address].append(message["status"])

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "method": "GET",
            "path": "/stream",
            "root_path": "",
        }
        scope |= {"headers": [(b"host", b"127.0.0.1")], "query_string": b"", "client": (address, 5)}
        await self.app(scope, receive, send)

    async def answered(self, count: int) -> None:
        while sum(map(len, self.statuses.values())) < count:
            await asyncio.sleep(0)


def test_two_hundred_browsers_of_one_network_that_come_at_once_get_half_of_the_streams(updates: Updates) -> None:
    async def story() -> dict[str, list[int]]:
        crowd = Crowd(application(updates))
        tasks = [asyncio.create_task(crowd.browser("10.0.0.1")) for _ in range(200)]
        await crowd.answered(200)
        tasks.append(asyncio.create_task(crowd.browser("10.0.0.2")))
        await crowd.answered(201)
        assert len(updates.browsers) == server.MOST_BROWSERS // 2 + 1
        crowd.leave.set()
        await asyncio.gather(*tasks)
        return crowd.statuses

    statuses = asyncio.run(story())
    assert Counter(statuses["10.0.0.1"]) == {200: server.MOST_BROWSERS // 2, 503: 200 - server.MOST_BROWSERS // 2}
    assert statuses["10.0.0.2"] == [200]
    assert updates.browsers == []


def test_one_browser_more_than_there_may_be_is_told_so(client: TestClient, updates: Updates) -> None:
    updates.browsers += map(str, range(server.MOST_BROWSERS))
    answer = client.get("/stream")
    assert answer.status_code == 503
    assert "close one" in answer.text


def test_every_file_of_the_page_is_in_the_package() -> None:
    tables = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = tables["tool"]["setuptools"]["package-data"]["decentral.view.page"]
    packed = {path for pattern in patterns for path in STATIC.parent.glob(pattern) if path.is_file()}
    assert packed == {path for path in STATIC.rglob("*") if path.is_file()}
