"""A real peer's page in a real browser: another peer is killed, and the page says so.

By day test_browser.py shows the same from a journal, and tests/commands/test_endings.py a real peer that falls silent.
"""

import signal

import pytest

from benchmarks.browser import CHROMIUM, DRIVER, browsing, complaints, hosts_asked, until
from tests.commands.peer_processes import TINY, Peers, exchanged


@pytest.mark.swarm
@pytest.mark.night
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver; apt-get has both")
def test_a_peer_that_is_killed_shows_in_another_one_s_page(peers: Peers) -> None:
    peers.start("a", *TINY, "--dashboard", "0")
    peers.until("a trains", lambda: bool(peers.lines("a", "step")))
    peers.start("b", "--join", peers.lines("a", "started")[0]["addresses"][0])
    peers.until("they exchange", lambda: exchanged(peers, "a") and exchanged(peers, "b"))
    said = (peers.folder / "a" / "output.txt").read_text()
    url = said.split("the page: ")[1].split()[0]
    victim = peers.lines("b", "started")[0]["peer"]
    with browsing(url) as driver:
        row = f"return document.querySelector('tr:has([title={victim}])')?.innerText ?? ''"
        until(driver, lambda: "training" in driver.execute_script(row))
        peers.processes["b"].send_signal(signal.SIGKILL)
        peers.processes["b"].wait()
        until(driver, lambda: "silent" in driver.execute_script(row))
        until(driver, lambda: "thing is wrong" in driver.execute_script("return document.body.innerText"))
        assert complaints(driver) == []
        assert hosts_asked(driver) == {url.removeprefix("http://")}
