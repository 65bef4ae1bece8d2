"""python -m benchmarks.fuzz_services: a million calls of the DHT and HTTP requests of liars, at real services.

    python -m benchmarks.fuzz_services --calls 1000000 --json services.json

PARTS says what is played, and the part of the calls that each gets. `dht` and `private` call the guarded handlers with
bytes inside one process (tests/fuzz/fuzzed_dht.py). All others have the service in a process of its own, and reach it
as liars do: `streams` over libp2p on 127.0.0.1, `page`, `metrics` and `model` over TCP. The services are the real ones:
the DHT node with its guard and daemon, the page's server, the server of a peer's metrics, and /v1 with a model of a few
thousand parameters.

A part fails if its service ends, prints an error, leaves an error in the event loop, has more than MOST_BYTES resident,
or its event loop is silent for MOST_SILENT_S. Silence is told by a task that wakes every 20 ms. Where others share the
cores they can make it late, so a silence counts as far as the service's own process has computed in it.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzzed_services import serve
from decentral.core import rng
from decentral.core.units import MiB, readable_bytes
from tests.fuzz.fuzzed_dht import KINDS
from tests.fuzz.http_requests import Clients, Target, Visit

PARTS = {"dht": 0.35, "private": 0.2, "streams": 0.06, "page": 0.19, "metrics": 0.06, "model": 0.14}
MOST_BYTES = 600 * MiB
MOST_SILENT_S = 0.5
LEAST_ACCEPTED = 0.1  # of the calls and requests of each part, without those that a share refuses before they are read
WORKERS = {"metrics": 4, "streams": 32}  # connections, or calls under way, at one time
USUAL_WORKERS = 16
ANSWER_S = 1.0  # a client that has sent everything waits so long for the next bytes
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
REASON = re.compile(r"busy|fields|identity|DecodeError|exceeds")
TROUBLE = ("Traceback", "exception", "Exception", "Error", "panic", "Fatal")


@dataclass
class Part:
    """What became of the calls of one part."""

    until: float  # by the monotonic clock, when it ends at the latest
    calls: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)  # by error or status
    silent_s: float = 0.0  # longest silence of the event loop, as far as the process computed
    silent_wall_s: float = 0.0  # the same by the clock, whoever computed
    peak_bytes: int = 0
    trouble: str = ""  # why the part has failed

    def goes_on(self, calls: int) -> bool:
        return self.calls < calls and time.monotonic() < self.until


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_services")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="end each part after so long, whatever it has played"
    )
    parser.add_argument("--json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags.serve)
        return 0
    found = dict[str, Part]()
    for name in (name for name in PARTS if name in flags.parts.split(",")):
        found[name] = _played(name, round(flags.calls * PARTS[name]), flags.seed, flags.seconds)
        print(_said(name, found[name]), flush=True)
        if flags.json:
            parts = {one: vars(part) for one, part in found.items()}
            Path(flags.json).write_text(json.dumps(parts, indent=1) + "\n")
    calls, accepted = (sum(getattr(part, one) for part in found.values()) for one in ("calls", "accepted"))
    failed = [name for name, part in found.items() if part.trouble]
    share = accepted / max(1, calls)
    print(f"{calls:,} calls and requests, {share:.1%} accepted; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


def _played(name: str, calls: int, seed: int, most_s: float) -> Part:
    began = time.monotonic()
    part = Part(until=began + most_s)
    try:
        play = _inside(name, calls, seed, part) if name in ("dht", "private") else _outside(name, calls, seed, part)
        asyncio.run(play)
    except AssertionError as error:
        part.trouble = f"{type(error).__name__}: {error}"
    part.seconds = time.monotonic() - began
    if not part.trouble:
        part.trouble = _why_failed(part)
    return part


def _why_failed(part: Part) -> str:
    if part.peak_bytes > MOST_BYTES:
        return f"{readable_bytes(part.peak_bytes)} resident"
    if part.silent_s > MOST_SILENT_S:
        return f"an event loop that was silent for {part.silent_s:.2f} s"
    unread = sum(count for reason, count in part.ended.items() if reason.endswith(": busy"))
    return "few were accepted" if part.accepted < LEAST_ACCEPTED * (part.calls - unread) else ""


def _said(name: str, part: Part) -> str:
    why = ", ".join(f"{reason} {count:,}" for reason, count in part.ended.most_common(7))
    silent = f"silent {part.silent_s:.3f} s ({part.silent_wall_s:.3f} s by the clock)"
    played = f"{name:8} {part.calls:8,} in {part.seconds:.0f} s, {part.accepted / max(1, part.calls):.1%} accepted"
    failed = f"; FAILED: {part.trouble}" * bool(part.trouble)
    return f"{played}; {readable_bytes(part.peak_bytes)} resident, {silent}; {why}{failed}"


# Inside one process


async def _inside(name: str, calls: int, seed: int, part: Part) -> None:
    """Plays the guarded handlers in a process of their own, so that its memory is theirs."""
    kind = KINDS[name == "private"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.fuzz_services",
        "--serve",
        f"{kind}:{calls}:{seed}:{part.until}",
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate()
    if process.returncode:
        part.trouble = f"exit code {process.returncode}"
        return
    figures = json.loads(said)
    part.calls, part.accepted = figures.pop("calls"), figures.pop("accepted")
    part.ended.update(figures.pop("ended"))
    part.silent_s = part.silent_wall_s = figures.pop("longest_s")
    part.peak_bytes = figures.pop("peak_bytes")
    part.ended["answers to the node's own calls"] = figures.pop("answers")


# At a service in another process


@dataclass
class Service:
    """A service's process, and where it is reached."""

    process: "asyncio.subprocess.Process"
    log: Path
    at: dict[str, Any]

    async def end(self, part: Part) -> None:
        """Ends the process, and writes down what it says of itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        part.peak_bytes = int(peak[1]) * 1024 if peak else 0
        self.process.stdin.close()
        said = await self.process.stdout.read()
        await self.process.wait()
        log = self.log.read_text()
        if self.process.returncode or not said:
            part.trouble = f"the service ended with {self.process.returncode}: {log[-2000:]}"
            return
        watched = json.loads(said)
        part.silent_s, part.silent_wall_s = watched["silent_s"], watched["silent_wall_s"]
        if watched["left"] or any(word in log for word in TROUBLE):
            part.trouble = f"{watched['left']} {_errors(log)}"


def _errors(log: str) -> str:
    """The last line of each traceback, and how often it is there; without one, the end of the log."""
    found = Counter(re.findall(r"^[\w.]+(?:Error|Exception|Disconnect)\b.*$", log, re.MULTILINE))
    return f"{dict(found.most_common(9))} {log[-1500:]}"


@asynccontextmanager
async def _service(name: str, part: Part) -> AsyncIterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.fuzz_services", "--serve", name,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert process.stdout is not None
        first = await process.stdout.readline()
        if not first:
            raise AssertionError(f"the service did not start: {log.read_text()[-2000:]}")
        service = Service(process, log, json.loads(first))
        try:
            yield service
        finally:
            if process.returncode is None:
                await service.end(part)
            else:
                part.trouble = f"the service ended with {process.returncode}: {log.read_text()[-2000:]}"


async def _outside(name: str, calls: int, seed: int, part: Part) -> None:
    async with _service("peer" if name in ("streams", "metrics") else "page", part) as service:
        if name == "streams":
            await _call(service, calls, seed, part)
        else:
            target: Target = "page" if name == "page" else "model" if name == "model" else "metrics"
            clients = Clients(rng.stream(seed, "fuzzed", target), target)
            workers = [
                _visit(service, clients, number, calls, part) for number in range(WORKERS.get(name, USUAL_WORKERS))
            ]
            await asyncio.gather(*workers)


async def _call(service: Service, calls: int, seed: int, part: Part) -> None:
    """Calls the peer's DHT over libp2p, with the names of some daemons."""
    from hivemind.p2p import PeerID

    from decentral.comm.net.libp2p import Libp2p
    from decentral.comm.wire.identity import Identity, Signer
    from decentral.core.ids import PeerId
    from tests.fuzz.dht_calls import Liars

    with tempfile.TemporaryDirectory() as folder:
        own = [Identity.load_or_create(Path(folder) / f"liar{number}") for number in range(3)]
        daemons = [await Libp2p.start(Path(folder) / f"liar{n}", ("/ip4/127.0.0.1/tcp/0",), ()) for n in range(3)]
        signers: dict[PeerId, Signer] = {one.peer: one for one in own}
        hidden = {key: key for key in service.at["keys"]}  # the swarm is public
        liars = Liars(rng.stream(seed, "streams"), signers, hidden, time.time())
        for daemon in daemons:
            await daemon.connect(service.at["address"])
        to = PeerID.from_base58(service.at["address"].rpartition("/p2p/")[2])

        async def worker(daemon: Libp2p) -> None:
            while part.goes_on(calls) and service.process.returncode is None:
                part.calls += 1
                liars.now = time.time()
                name = liars.chance.choices(("ping", "store", "find"), (1, 3, 2))[0]
                data = liars.request(name, PeerID.from_base58(daemon.peer))
                patience_s = 30.0 if liars.chance.random() < 0.97 else liars.chance.choice((0.0, 0.001))
                try:
                    async with asyncio.timeout(patience_s):
                        await daemon._p2p._client.call_unary_handler(to, f"DHTProtocol.rpc_{name}", data)
                    part.accepted += 1
                except Exception as error:
                    reason = REASON.search(str(error))
                    part.ended[f"{name}: {reason[0] if reason else str(error)[-60:]}"] += 1

        try:
            await asyncio.gather(*(worker(daemons[number % 3]) for number in range(WORKERS["streams"])))
        finally:
            await asyncio.gather(*(daemon.close() for daemon in daemons))


async def _visit(service: Service, clients: Clients, number: int, requests: int, part: Part) -> None:
    """Visits an HTTP server again and again, from one of some networks of this machine."""
    unread = list[asyncio.StreamWriter]()
    while part.goes_on(requests) and service.process.returncode is None:
        visit = clients.visit()
        try:
            connecting = asyncio.open_connection(
                "127.0.0.1", service.at["ports"][clients.target], local_addr=(f"127.0.0.{2 + number % 4}", 0)
            )
            reader, writer = await asyncio.wait_for(connecting, ANSWER_S)
        except (OSError, TimeoutError):
            part.ended["no connection"] += 1
            part.calls += 1
            continue
        statuses = await _statuses(visit, reader, writer)
        if visit.ending == "unread":
            unread.append(writer)
        for old in [unread.pop(0)] if len(unread) > 2 else [] if visit.ending == "unread" else [writer]:
            old.transport.abort()
        part.calls += min(visit.requests, len(statuses) + 1)
        part.accepted += sum(200 <= status < 300 for status in statuses)
        part.ended.update(map(str, statuses))
        part.ended["no answer"] += not statuses
    for writer in unread:
        writer.transport.abort()


async def _statuses(visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[int]:
    """Sends what the visit says, and returns the status of each answer."""
    got = bytearray()
    with suppress(OSError, TimeoutError):
        for piece in visit.pieces:
            writer.write(piece)
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
            await asyncio.sleep(0.001 if len(visit.pieces) > 1 else 0)
        if visit.ending == "unread":
            return []
        while len(STATUS.findall(got)) < visit.requests or visit.ending == "reads":
            async with asyncio.timeout(ANSWER_S if visit.ending == "reads" else ANSWER_S / 20):
                data = await reader.read(1 << 18)
            if not data:
                break
            got += data
    return [int(status) for status in STATUS.findall(got)]


if __name__ == "__main__":
    raise SystemExit(main())
