"""The part `training` of benchmarks/page.py: what a peer loses of its training that serves the page of 1,000 peers.

    python -m benchmarks.page_training PEER [--core 0]     the peer; reads what to do from standard input
    python -m benchmarks.page_training                     PEER: who answers its questions for a sign of life

The peer is real but for its swarm, as a thousand do not fit one machine. The training thread takes steps of the default
config. While the page is on, its event loop does what `decentral.peer --dashboard` does: every second it hands on the
records that are new, 50 of 1,000, and every three seconds it asks 32 peers over libp2p for a sign of life. One process
answers for all of them. While it is off, that process, the page's and the browser are stopped (SIGSTOP). Steps are
timed from the first to the last within each interval. Intervals alternate, off on on off, so that what drifts falls on
both; the loss is the mean over pairs of neighbours, with its standard error.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from selenium.webdriver import Chrome

from benchmarks.browser import browsing, complaints
from benchmarks.page_roster import RENEWED_S, record, roster
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong
from decentral.comm.wire.transport import Answer
from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.peers.membership.records import PeerRecord
from decentral.view.page.address import PageAddress
from decentral.view.page.child import DashboardProcess
from decentral.view.page.record_lines import ASKED_EVERY_S, SignsOfLife, ToldRecords

INTERVAL_S = 6.0
SETTLE_S = 1.5  # after each switch, before steps are timed
END_S = 30.0  # in which a process ends
HERE = "/ip4/127.0.0.1/tcp/0"


def training(seconds: float) -> dict[str, Any]:
    """With two cores for the peer, its page and the browser; and with one for the peer and its page."""
    return {"two_cores": _lost(seconds), "one_core": _lost(seconds, core=0)}


def _lost(seconds: float, core: int | None = None) -> dict[str, Any]:
    answering = [sys.executable, "-m", "benchmarks.page_training"]
    with ExitStack() as stack:
        asked = stack.enter_context(_process(answering))
        command = [*answering, _line(asked).strip(), *(["--core", str(core)] if core is not None else [])]
        peer = stack.enter_context(_process(command))
        started = json.loads(_line(peer))
        driver = stack.enter_context(browsing(started["url"]))
        others = [*_tree(asked.pid), *_tree(driver.service.process.pid)]
        if core is not None:
            _pin(others, 1 - core)
        others.append(started["page"])
        seen, off, on = dict[float, float](), list[float](), list[float]()
        for number in range(max(4, int(seconds / INTERVAL_S) // 4 * 4)):
            is_on = number % 4 in (1, 2)
            _signal(others, signal.SIGCONT if is_on else signal.SIGSTOP)
            _say(peer, "on" if is_on else "off")
            time.sleep(SETTLE_S)
            _say(peer, "begin")
            _wait_through(driver, INTERVAL_S - SETTLE_S, seen, is_on)
            _say(peer, "end of interval")
            (on if is_on else off).append(float(json.loads(_line(peer))["steps_per_s"]))
        _signal(others, signal.SIGCONT)
        pairs = [1 - with_page / without for with_page, without in zip(on, off, strict=True)]
        drawn = sorted(seen.values())
        return {
            "steps_per_s_without": round(median(off), 3),
            "steps_per_s_with": round(median(on), 3),
            "lost": round(mean(pairs), 4),
            "standard_error": round(stdev(pairs) / len(pairs) ** 0.5, 4),
            "pairs": len(pairs),
            "updates": len(drawn),
            "update_ms_median": round(median(drawn), 1),
            "update_ms_of_95_percent": round(drawn[int(0.95 * len(drawn))], 1),
            "update_ms_most": round(drawn[-1], 1),
            "complaints": complaints(driver),
        }


def _wait_through(driver: Chrome, seconds: float, seen: dict[float, float], is_on: bool) -> None:
    """Notes what each update took the browser, by the number of the update."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_on:
            cost = driver.execute_script("return {...window.decentral.cost}")
            seen[cost["updates"]] = cost["last_ms"]
        time.sleep(0.5)


@contextmanager
def _process(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        with suppress(OSError):
            _say(process, "end")
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _say(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the peer has ended; see its error above")
    return line


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _pin(processes: Sequence[int], core: int) -> None:
    for process in processes:
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), {core})


def _tree(root: int) -> list[int]:
    """A process and all that it has started."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


# The peer


def main() -> None:
    parser = argparse.ArgumentParser(description="A peer that trains and serves a page of 1,000 peers.")
    parser.add_argument("answering", nargs="?")
    parser.add_argument("--core", type=int)
    flags = parser.parse_args()
    if flags.core is not None:
        os.sched_setaffinity(0, {flags.core})
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_train(Path(folder), flags.answering) if flags.answering else _answer(Path(folder)))


async def _answer(folder: Path) -> None:
    transport = await Libp2p.start(folder / "identity.key", [HERE], [])
    await transport.serve(_pong, lambda message: 0)
    print((await transport.addresses())[0], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await transport.close()


async def _train(folder: Path, answering: str) -> None:
    transport = await Libp2p.start(folder / "identity.key", [HERE], [])
    page, steps = DashboardProcess.start(PageAddress(port=0, strict=True)), _Steps(folder)
    swarm = _Roster(page, SignsOfLife(_OneForAll(transport, await transport.connect(answering))))  # type: ignore[arg-type]
    swarm.tell_all()
    while not steps.ended:
        await asyncio.sleep(0.1)
    print(json.dumps({"url": page.url, "page": page.process.pid}), flush=True)
    serving: list[asyncio.Task[None]] = []
    while (word := (await asyncio.to_thread(sys.stdin.readline)).strip()) not in ("end", ""):
        if word == "on":
            serving = serving or [asyncio.create_task(work()) for work in (swarm.feed, swarm.watch)]
        elif word == "off":
            for task in serving:
                task.cancel()
            serving = []
        elif word == "begin":
            steps.ended.clear()
        else:
            ended = list(steps.ended)
            print(json.dumps({"steps_per_s": (len(ended) - 1) / (ended[-1] - ended[0])}), flush=True)
    os.kill(page.process.pid, signal.SIGCONT)
    page.close()
    await transport.close()
    os._exit(0)  # the training thread has no end


async def _pong(sender: PeerId, envelope: Envelope) -> Envelope:
    assert isinstance(envelope.message, Ping)
    return Envelope(Pong(envelope.message.nonce))


class _OneForAll:
    """A transport on which one peer answers for all."""

    def __init__(self, transport: Libp2p, answering: PeerId) -> None:
        self._transport, self._answering = transport, answering

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: float, max_blob_bytes: int) -> Answer:
        return await self._transport.ask(self._answering, envelope, deadline_s, max_blob_bytes)


class _Roster:
    """1,000 records, 50 of them new in each second, handed on as decentral/view/page/record_lines.py does."""

    def __init__(self, page: DashboardProcess, signs: SignsOfLife) -> None:
        self._page, self._signs, self._told, self._second = page, signs, ToldRecords(), 0
        self._live: dict[PeerId, PeerRecord] = roster()

    def tell_all(self) -> None:
        while lines := list(self._told.news(self._live)):
            for line in lines:
                self._page.tell("", time.time(), line)

    async def feed(self) -> None:
        while True:
            self._second += 1
            for number, peer in enumerate(self._live):
                if number % RENEWED_S == self._second % RENEWED_S:
                    self._live[peer] = record(number, float(self._second))
            for line in self._told.news(self._live):
                self._page.tell("", time.time(), line)
            await asyncio.sleep(1.0)

    async def watch(self) -> None:
        while True:
            await self._signs.missed(self._live)
            await asyncio.sleep(ASKED_EVERY_S)


class _Steps:
    """The training thread of a peer that has no partners; `ended`: when each of its steps was over."""

    def __init__(self, folder: Path) -> None:
        from decentral.comm.codecs import blockwise
        from decentral.data import corpora
        from decentral.engine import measure
        from decentral.engine.compute import Compute, ComputeSetup

        run = config.load(None, [])
        device = measure.choose("cpu")
        corpus = corpora.load(run.data, run.model)
        compute = Compute(ComputeSetup(run, PeerId("A"), corpus, blockwise, device, folder))
        self.ended = list[float]()
        compute.step = self._timed(compute.step)  # type: ignore[method-assign]
        compute.submit(jobs.Start(newcomer=False))
        threading.Thread(target=compute.run, args=(lambda outcome: None,), daemon=True).start()

    def _timed(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            outcome = step()
            self.ended.append(time.monotonic())
            return outcome

        return timed


if __name__ == "__main__":
    main()
