"""What the live page costs, and how soon it shows that a peer was killed, in a real headless Chromium.

    python -m benchmarks.page [--parts feed,many,training,kill] [--seconds 40] [--json FILE]

feed   a peer's event loop: the processor time in which it hands a roster of 1,000 peers on to its page
many   a simulation of 1,000 peers: how long the browser takes for an update, and the page's process of a core
training   a peer's steps per second with and without its page of 1,000 peers (benchmarks/page_training.py)
kill   four real peers, one of them killed with SIGKILL: how long until a page says so. In the browser that is the page
       of decentral.local; those of another peer and of a visitor are asked for their JSON
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from selenium.webdriver import Chrome

from benchmarks.browser import browsing, complaints, hosts_asked
from benchmarks.page_roster import RENEWED_S, ROSTER, record, roster
from benchmarks.page_training import training
from decentral.core.journal.file import read
from decentral.view.page.address import PageAddress
from decentral.view.page.child import DashboardProcess
from decentral.view.page.record_lines import ToldRecords

START_S = 300.0  # until real peers train, on a busy machine
ALL_JOINED_S = 1200.0  # until simulated ones do; they come over 200 s of virtual time


def main() -> None:
    flags = _flags()
    found = {part: PARTS[part](flags.seconds) for part in flags.parts}
    print(json.dumps(found, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n")


def feed(seconds: float) -> dict[str, float]:
    """The event loop's processor time a second, once the page has all records; and for the first second of all."""
    page, told = DashboardProcess.start(PageAddress(port=0, strict=True)), ToldRecords()
    live = roster()
    costs = []
    try:
        for second in range(int(min(seconds, 30))):
            renewed = [peer for number, peer in enumerate(live) if number % RENEWED_S == second % RENEWED_S]
            live |= {peer: record(number, 1.0 + second) for number, peer in enumerate(renewed)}
            began = time.thread_time()
            for line in told.news(live):
                page.tell("", float(second), line)
            costs.append(time.thread_time() - began)
            time.sleep(0.2)
    finally:
        page.close()
    return {"first_ms": round(1e3 * costs[0], 2), "ms_a_second": round(1e3 * median(costs[12:]), 2)}


def many(seconds: float) -> dict[str, Any]:
    """After the peers have joined, in virtual time that runs as fast as it can."""
    command = ["decentral.simulate", "--peers", str(ROSTER), "--seconds", "100000", "--set", "gossip.window_s=120"]
    command += ["--step-seconds", "5", "--topology", "eight-cities", "--dashboard", "0"]
    with _started(command) as (process, url), browsing(url) as driver:
        _wait(lambda: f"{ROSTER} live" in _text(driver, "peers-note"), ALL_JOINED_S)
        page = _child(process.pid)
        driver.execute_cdp_cmd("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
        driver.execute_cdp_cmd("Performance.enable", {})
        began, cpu_s, first, busy_s = time.monotonic(), _cpu_s(page), _cost(driver)["updates"], _busy_s(driver)
        costs = dict[float, float]()  # by number of the update
        while time.monotonic() < began + seconds:
            cost = _cost(driver)
            costs[cost["updates"]] = cost["last_ms"]
            time.sleep(0.2)
        took_s, updates = time.monotonic() - began, int(_cost(driver)["updates"] - first)
        return {
            "updates": updates,
            "update_ms_median": round(median(costs.values()), 1),
            "update_ms_of_95_percent": round(sorted(costs.values())[int(0.95 * len(costs))], 1),
            "update_ms_most": round(max(costs.values()), 1),
            "update_processor_ms": round(1e3 * (_busy_s(driver) - busy_s) / updates, 1),
            "page_process_share_of_a_core": round((_cpu_s(page) - cpu_s) / took_s, 4),
            "page_process_mb": _resident_mb(page),
            "complaints": complaints(driver),
            "hosts": sorted(hosts_asked(driver)),
        }


def kill(seconds: float) -> dict[str, Any]:
    """Four peers train for a while before one is killed."""
    with tempfile.TemporaryDirectory(prefix="page-") as name, ExitStack() as stack:
        folder = Path(name)
        command = ["decentral.local", "--peers", "4", "--stop-after", "1e4s", "--dashboard", "0"]
        process, local = stack.enter_context(_started([*command, "--state-dir", name]))
        _wait(lambda: all(_lines(folder, number, "joined") for number in range(4)))
        address = _lines(folder, 0, "started")[0]["addresses"][0]
        _, visitor = stack.enter_context(_started(["decentral.dashboard", "--join", address, "--at", "0"]))
        joined = ["decentral.peer", "--plain", "--join", address, "--dashboard", "0", "--state-dir", f"{name}/own"]
        _, own = stack.enter_context(_started(joined))
        driver = stack.enter_context(browsing(local))
        victim = _lines(folder, 2, "started")[0]["peer"]
        states = {"local": partial(_shown, driver, victim)}
        states |= {kind: partial(_told, url, victim) for kind, url in (("visitor", visitor), ("peer", own))}
        for state in states.values():
            _wait(partial(_is_training, state))
        time.sleep(seconds)
        os.kill(_peer_process(process.pid, f"{name}/peer-2"), signal.SIGKILL)
        began, shown = time.monotonic(), dict[str, Any]()
        while len(shown) < len(states) and time.monotonic() < began + 120:
            for kind, state in states.items():
                if kind not in shown and state() != "training":
                    shown[kind] = round(time.monotonic() - began, 1)
            time.sleep(0.1)
        return {"shown_after_s": shown, "complaints": complaints(driver), "hosts": sorted(hosts_asked(driver))}


@contextmanager
def _started(arguments: Sequence[str]) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A command that serves a page, and the page's link."""
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            url = ""
            deadline = time.monotonic() + START_S
            while not url:
                said = os.pread(output.fileno(), 1 << 16, 0).decode(errors="replace")
                found = re.search(r"the page: (http://\S+)", said)
                url = found[1] if found else ""
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(arguments)}: no page: {said}")
                time.sleep(0.1)
            yield process, url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(holds: Callable[[], object], patience_s: float = START_S) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("the peers did not start in time; is the machine loaded?")
        time.sleep(0.5)


def _lines(folder: Path, number: int, event: str) -> list[dict[str, Any]]:
    return [line for line in read(folder / f"peer-{number}" / "journal.jsonl") if line["event"] == event]


def _cost(driver: Chrome) -> dict[str, float]:
    cost: dict[str, float] = driver.execute_script("return {...window.decentral.cost}")
    return cost


def _busy_s(driver: Chrome) -> float:
    """Processor time of the page's main thread: scripts, style, layout and painting together."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def _text(driver: Chrome, name: str) -> str:
    return str(driver.execute_script("return document.getElementById(arguments[0]).textContent", name))


def _shown(driver: Chrome, peer: str) -> str:
    """The state of a peer that the page's table shows."""
    script = "return document.querySelector(arguments[0])?.closest('tr').cells[1].textContent ?? ''"
    return str(driver.execute_script(script, f'[title="{peer}"]'))


def _told(url: str, peer: str) -> str:
    """The state of a peer that the page's JSON has."""
    with urlopen(f"{url}/api/swarm", timeout=START_S) as answer:
        swarm = json.loads(answer.read())
    rows = (dict(zip(swarm["row"], row, strict=True)) for row in swarm["peers"])
    return next((str(row["state"]) for row in rows if row["peer"] == peer), "")


def _is_training(state: Callable[[], str]) -> bool:
    return state() == "training"


def _child(parent: int) -> int:
    """The page's process."""
    return next(pid for pid in _children(parent) if b"decentral.dashboard" in _command(pid))


def _peer_process(parent: int, folder: str) -> int:
    return next(pid for pid in _children(parent) if folder.encode() in _command(pid))


def _children(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                yield int(path.parent.name)
        except (OSError, IndexError):
            continue


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the live page costs.")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    if unknown := set(flags.parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return flags


PARTS = {"feed": feed, "many": many, "training": training, "kill": kill}

if __name__ == "__main__":
    main()
