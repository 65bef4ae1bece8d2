"""The page in a real browser: it shows what is there, does what is clicked, complains of nothing, asks nobody else."""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.browser import CHROMIUM, DRIVER, browsing, complaints, hosts_asked, until
from decentral.view.page import swarm_view
from decentral.view.page.address import PageAddress, link
from decentral.view.page.connections import settings
from decentral.view.page.server import Updates, application
from decentral.view.page.source_lines import PAGE_LINES
from decentral.view.page.swarm_view import SwarmView

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver; apt-get has both")
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>alert(1)</script>"
PEERS = [f"Qm{'x' * 36}{name}" for name in ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd")]


@dataclass(slots=True)
class Served:
    """A page served from this process; `tell` and `publish` are for its event loop's thread, by `do`."""

    view: SwarmView = field(default_factory=SwarmView)
    updates: Updates = field(init=False)
    url: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.updates = Updates(self.view)

    def tell(self, owner: str, t: float, event: str, **fields: Any) -> None:
        line = PAGE_LINES.parse({"t": t, "event": event, **fields})
        assert line is not None
        self._loop.call_soon_threadsafe(self.view.take, owner, line)

    def publish(self, now: float) -> None:
        self._loop.call_soon_threadsafe(self._publish, now)

    def _publish(self, now: float) -> None:
        self.view.tick(now)
        self.updates.publish()


@pytest.fixture
def served() -> Iterator[Served]:
    page = Served()
    with PageAddress(port=0, strict=True).bind() as listening:
        page.url = link(listening)
        of_page = settings(application(page.updates))
        of_page.timeout_graceful_shutdown = 0  # streams have no end
        server = uvicorn.Server(of_page)
        work = server.serve(sockets=[listening])
        thread = threading.Thread(target=page._loop.run_until_complete, args=(work,))
        thread.start()
        yield page
        server.should_exit = True
        thread.join()
    page._loop.close()


def four_peers(page: Served) -> None:
    page.tell("", 0.0, "facts", facts={"run": "test-000000", "layers": 4, "parameters": 467_584, "data": HOSTILE})
    for number, peer in enumerate(PEERS):
        page.tell(peer, 0.0, "started", peer=peer, device=HOSTILE, region="home" if number else "", first=0, last=4)
        page.tell(peer, 0.0, "joined", donors=[], seconds=0.1)
        for t in range(1, 8):
            page.tell(peer, t, "step", step=t, tokens=100, loss=3 - t / 5, seconds=0.9, aside={"gossip": 0.1})
        page.tell(peer, 8.0, "exchange", partner=PEERS[number - 1], outcome="done")
    page.publish(8.0)


def told_by_record(page: Served, peer: str, region: str) -> None:
    profile = {"device": "cpu", "memory_bytes": 1, "flops": 1.0, "tokens_per_s": 1.0, "region": region}
    numbers = {"time": 8.0, "first": 0, "last": 4, "step": 0, "lr_step": 0, "tokens": 0}
    record = {"run": "test-000000", "addresses": [], "profile": profile, "phase": "training", **numbers}
    page.tell("", 8.0, "record", peer=peer, record=record)


def row(peer: str) -> str:
    return f"tr:has([title={peer}])"


def text(driver: Chrome, selector: str) -> str:
    return driver.find_element(By.CSS_SELECTOR, selector).text


def test_a_reader_finds_a_peer_and_its_figures_and_the_page_is_silent_about_it(served: Served) -> None:
    four_peers(served)
    with browsing(served.url) as driver:
        until(driver, lambda: "4 peers train" in text(driver, "#verdict"))
        assert len(driver.find_elements(By.CSS_SELECTOR, ".peers tbody tr")) == 4
        assert driver.find_elements(By.CSS_SELECTOR, "#loss canvas")

        driver.find_element(By.CSS_SELECTOR, f"{row(PEERS[1])} .peer").click()
        assert "Peer bbbbbb" in text(driver, "#one")
        driver.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
        assert not driver.find_element(By.ID, "one").is_displayed()

        for axis in ("tokens", "step"):
            driver.find_element(By.CSS_SELECTOR, f"[data-axis={axis}]").click()
            assert driver.find_element(By.CSS_SELECTOR, f"[data-axis={axis}]").get_attribute("aria-pressed") == "true"
        driver.find_element(By.ID, "filter").send_keys("cccccc")
        assert len(driver.find_elements(By.CSS_SELECTOR, ".peers tbody tr")) == 1
        before = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        driver.find_element(By.ID, "theme").click()
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") != before

        assert driver.find_elements(By.CSS_SELECTOR, ".place img, #facts img, script:not([src])") == []
        assert driver.title.startswith("test-000000")
        assert complaints(driver) == []
        assert hosts_asked(driver) == {served.url.removeprefix("http://")}


def test_what_happens_shows_while_the_page_is_open(served: Served) -> None:
    four_peers(served)
    with browsing(served.url) as driver:
        until(driver, lambda: "Nothing is wrong" in text(driver, "#verdict"))
        served.tell("", 9.0, "missed", peer=PEERS[2], reason="killed by signal 9", certain=True)
        served.publish(9.0)
        until(driver, lambda: "1 thing is wrong" in text(driver, "#verdict"))
        assert "cccccc has ended (killed by signal 9)" in text(driver, "#problems")
        assert "ended" in text(driver, row(PEERS[2]))
        assert complaints(driver) == []


def test_a_page_with_a_thousand_peers_on_a_phone_is_as_wide_as_the_phone(served: Served) -> None:
    for number in range(1000):
        peer = f"sim{number:05d}"
        served.tell(peer, 0.0, "joined", donors=[], seconds=0.1)
        served.tell(peer, 1.0, "step", step=1, tokens=100, loss=2.0, seconds=0.9)
    served.publish(1.0)
    with browsing(served.url, width=375, height=800) as driver:
        until(driver, lambda: "1000 peers train" in text(driver, "#verdict"))
        assert driver.execute_script("return document.documentElement.scrollWidth") == 375
        assert "1 to 20 of 1000" in text(driver, "#page")
        assert complaints(driver) == []


def test_the_table_of_200_long_named_peers_fits_a_laptop_s_screen(served: Served) -> None:
    for number in range(200):
        peer = f"Qm{'z' * 36}{number:08d}"
        name = f"lab-machine-number-{number:03d}"
        started: dict[str, Any] = {
            "peer": peer,
            "name": name,
            "device": "NVIDIA GeForce RTX 4090",
            "first": 0,
            "last": 26,
        }
        served.tell(peer, 0.0, "started", **started, region="frankfurt")
        served.tell(peer, 0.0, "joined", donors=[], seconds=0.1)
        for step in range(1, 4):
            served.tell(peer, step, "step", step=step, tokens=123_456_789, loss=2.5, seconds=0.9, aside={"gossip": 0.1})
        for outcome in ["done"] * 100 + ["solo"] * 100 + ["failed"] * 10:
            served.tell(peer, 3.0, "exchange", partner=PEERS[0], outcome=outcome, sent_bytes=123_456)
    served.publish(4.0)
    for width in (1440, 1366, 1024):
        with browsing(served.url, width=width) as driver:
            until(driver, lambda: "200 peers train" in text(driver, "#verdict"))
            table = "const one = document.querySelector('.peers .scroll'); return one.scrollWidth - one.clientWidth"
            assert driver.execute_script(table) == 0, width


def test_peers_that_name_a_region_each_do_not_break_the_page(served: Served) -> None:
    four_peers(served)
    for number in range(600):
        told_by_record(served, f"Qm{number:040d}", f"region {number}")
    served.publish(8.0)
    with browsing(served.url) as driver:
        until(driver, lambda: "604 peers train" in text(driver, "#verdict"))
        until(driver, lambda: "1 to 20 of 604" in text(driver, "#page"))
        assert "in 602 regions" in text(driver, "#map-note")
        assert complaints(driver) == []


def test_the_peers_of_the_page_s_own_machine_are_marked_if_there_are_others(served: Served) -> None:
    four_peers(served)
    for peer in PEERS:
        served.tell(peer, 8.0, "continued", peer=peer, name="a name of thirty-two characters!", device="cpu", last=4)
    served.publish(8.0)
    with browsing(served.url, width=1024) as driver:
        until(driver, lambda: "4 peers train" in text(driver, "#verdict"))
        assert driver.find_elements(By.CSS_SELECTOR, ".here") == []
        told_by_record(served, f"Qm{'y' * 44}", "oregon")
        served.publish(8.0)
        until(driver, lambda: "5 peers train" in text(driver, "#verdict"))
        marked = driver.find_elements(By.CSS_SELECTOR, ".peers .here")
        assert [one.text for one in marked] == ["this machine"] * 4
        table = "const one = document.querySelector('.peers .scroll'); return one.scrollWidth - one.clientWidth"
        assert driver.execute_script(table) == 0
        driver.find_element(By.ID, "filter").send_keys("this machine")
        assert len(driver.find_elements(By.CSS_SELECTOR, ".peers tbody tr")) == 4
        assert complaints(driver) == []


def test_a_lost_peer_stays_until_the_reader_acknowledges_it_in_the_title_too(served: Served) -> None:
    four_peers(served)
    with browsing(served.url) as driver:
        until(driver, lambda: "4 peers train" in text(driver, "#verdict"))
        served.tell("", 9.0, "missed", peer=PEERS[2], reason="killed by signal 9", certain=True)
        served.publish(9.0)
        until(driver, lambda: driver.title.startswith("(1 of 4 peers lost) test-000000"))
        for peer in (PEERS[0], PEERS[1], PEERS[3]):
            served.tell(peer, 7209.0, "step", step=9, tokens=100, loss=1.0, seconds=0.9, aside={})
        served.publish(7210.0)  # two hours later
        until(driver, lambda: "2 h ago" in text(driver, "#problems"))
        assert "1 of 4 peers lost: cccccc has ended (killed by signal 9)" in text(driver, "#problems").replace(
            "\n", " "
        )
        driver.find_element(By.CSS_SELECTOR, "#problems button").click()
        until(driver, lambda: "lost" not in driver.title)
        driver.refresh()
        until(driver, lambda: "train" in text(driver, "#verdict"))
        assert "cccccc has ended" not in text(driver, "#problems")
        served.tell(PEERS[2], 7220.0, "started", peer=PEERS[2])
        served.tell(PEERS[2], 7221.0, "step", step=9, tokens=100, loss=1.0, seconds=0.9, aside={})
        served.tell("", 7222.0, "missed", peer=PEERS[2], reason="killed again", certain=True)
        served.publish(7222.0)
        until(driver, lambda: "peers lost" in driver.title)
        assert "killed again" in text(driver, "#problems")
        assert complaints(driver) == []


def test_names_windows_checkpoint_goal_and_clock_times_are_on_the_first_screen(served: Served) -> None:
    four_peers(served)
    for peer, name in zip(PEERS, ("ann", "bob", "bob", HOSTILE[:32]), strict=True):
        served.tell(peer, 8.0, "continued", peer=peer, name=name, device="cpu", last=4)
        served.tell(peer, 8.0, "status", window_s=2.0, bound="link", first=0, last=4)
        served.tell(peer, 8.0, "checkpoint", step=7, bytes=5, seconds=0.1)
        served.tell(peer, 8.0, "eval", tokens=64, loss=5.14, seconds=0.1)
        served.tell(peer, 8.0, "step", step=8, tokens=100, loss=1.0, seconds=0.9, aside={})
    served.tell("", 8.0, "facts", facts={"stop_after": "90s", "since": 0.0})
    served.publish(30.0)
    with browsing(served.url) as driver:
        until(driver, lambda: "ann" in text(driver, ".peers tbody"))
        tiles = text(driver, "#tiles")
        for part in ("bound by link (4 of 4)", "22 s ago", "5.140", "33%", "90s, 60 s left"):
            assert part in tiles, part
        assert {"ann", "bob [bbbbbb]", "bob [cccccc]"} <= {
            one.text for one in driver.find_elements(By.CSS_SELECTOR, ".peers tbody .peer")
        }
        assert re.search(r"\d\d:\d\d:\d\d", text(driver, "#events li"))
        assert driver.find_elements(By.CSS_SELECTOR, ".peers tbody img") == []
        assert complaints(driver) == []


def test_what_is_in_the_browser_s_storage_does_not_break_the_page(served: Served) -> None:
    """Browsers keep storage by address, so another program's page at this port may have written any content to it."""
    four_peers(served)
    with browsing(served.url) as driver:
        for left in ("5", '{"a": 1}', "[1]", "[null]", "{"):
            driver.execute_script("localStorage.setItem('decentral-acknowledged', arguments[0])", left)
            driver.refresh()
            until(driver, lambda: "4 peers train" in text(driver, "#verdict"))
        assert complaints(driver) == []


def test_a_browser_forgets_peers_that_come_and_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_view, "PEERS_SHOWN", 10)
    four_peers(served)
    with browsing(served.url) as driver:
        until(driver, lambda: "4 peers train" in text(driver, "#verdict"))
        for number in range(0, 600, 6):
            for one in range(number, number + 6):
                peer = f"Qm{one:044d}"
                served.tell(PEERS[0], 9.0, "peer_joined", peer=peer, device="cpu")
                served.tell(PEERS[0], 9.0, "peer_left", peer=peer, reason="left")
            served.publish(9.0)
        shown = "return document.getElementById('page').textContent"  # it is hidden where all peers fit
        until(driver, lambda: driver.execute_script(shown) == "1 to 10 of 10")
        assert complaints(driver) == []


def test_no_name_looks_like_that_of_another_peer(served: Served) -> None:
    four_peers(served)
    names = ("ann", "ann\u3164", "Ann [aaaaaa]", "bob")
    for peer, name in zip(PEERS, names, strict=True):
        served.tell(peer, 8.0, "continued", peer=peer, name=name, device="cpu", last=4)
    served.publish(9.0)
    with browsing(served.url) as driver:
        until(driver, lambda: "bob" in text(driver, ".peers tbody"))
        buttons = driver.find_elements(By.CSS_SELECTOR, ".peers tbody .peer")
        shown = {one.get_attribute("title"): one.text for one in buttons}
        assert [shown[peer] for peer in PEERS] == ["ann", "ann\u3164 [bbbbbb]", "Ann (aaaaaa)", "bob"]
