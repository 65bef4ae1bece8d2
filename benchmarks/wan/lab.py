"""The lab: real processes over an emulated WAN, for benchmarks.

    with Lab(description, seconds=120) as lab:
        server = lab.popen(0, [sys.executable, "server.py"])
        lab.change("degrade 0-1 x0.1")
        before = lab.traffic()
        ...
        print((lab.traffic() - before).rate(0, 1))

Each peer has a network namespace of its own, with loopback and one device; a router process (router.py) carries what
they send. All ends with the lab, and at the latest after `seconds`: then processes that still run are killed.
"""

import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.wan import namespaces
from benchmarks.wan.description import Description
from benchmarks.wan.links import Count
from benchmarks.wan.router import address_of
from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Ints

ROOT = Path(__file__).parent.parent.parent
START_S = 600.0  # the loop is compiled at the first start after a change
ANSWER_S = 30.0
LATE_SHARE = 0.05  # of a round trip: a router that is later for one in a hundred packets was itself the bottleneck,
LATE_MS = 5.0  # unless it is no later than this, which is what a process waits for its core on a busy machine


class Lab:
    """Create it with `with`. Its methods may be called from several threads."""

    def __init__(self, description: Description, seconds: float) -> None:
        """`seconds`: how long it lasts at most, from its start. Raises UserError where the lab cannot run."""
        namespaces.require_root()
        self.description, self.seconds = description, seconds
        self.addresses = [address_of(peer) for peer in range(len(description))]
        self.congestion_control = ""  # of TCP in the namespaces, from the start on
        self._lock = threading.Lock()
        self._networks: list[int] = []
        self._processes: list[subprocess.Popen[Any]] = []  # those that may still run
        self._router: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lines: Any = None

    def __enter__(self) -> Self:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.wan.router", str(theirs.fileno())]
        with theirs, namespaces.children_in(None):
            self._router = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._lines = self._control.makefile("r")
        self._control.sendall(f"{self.description.to_json()}\n{self.seconds}\n".encode())
        try:
            ready = self._answer(START_S)
        except BaseException:
            self.close()
            raise
        self._networks, self.congestion_control = ready["networks"], ready["congestion_control"]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the router, and with it every process in the lab.

        The kernel lets go of the first process of a PID namespace only when all others have been waited for.
        """
        if self._router is not None:
            self._router.kill()
            for process in self._processes:
                process.wait()
            self._router.wait()
        if self._control is not None:
            self._lines.close()
            self._control.close()

    @property
    def router_pid(self) -> int:
        assert self._router is not None, "the lab has not begun"
        return self._router.pid

    def address(self, peer: int) -> str:
        """Where others find this peer: its own address, or that of its router."""
        return str(ipaddress.ip_address(self.addresses[peer]))

    def popen(self, peer: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """subprocess.Popen in a peer's namespaces. The process id is that of this machine, as for any other child."""
        enter = [sys.executable, "-I", "-S", str(Path(__file__).parent / "enter.py")]
        enter += [str(self.router_pid), str(self._networks[peer])]
        pids = os.open(f"/proc/{self.router_pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with namespaces.children_in(pids):
                process = subprocess.Popen([*enter, *command], **options)
        finally:
            os.close(pids)
        with self._lock:
            self._processes = [one for one in self._processes if one.poll() is None] + [process]
        return process

    def change(self, text: str) -> None:
        """Changes the network, in the words of schedule.py: now, or later where a part says `at`. Raises UserError."""
        self.addresses = self._ask({"play": text})["addresses"]

    def heal(self) -> None:
        """Ends all changes, and forgets those that were to come."""
        self._ask({"heal": None})

    def traffic(self) -> "Traffic":
        """What was carried and dropped since the lab began."""
        found = self._ask({"traffic": None})
        self.addresses = found["addresses"]
        count = len(self.description)
        counts = np.array(found["counts"]).reshape(count, count, len(Count))
        return Traffic(found["seconds"], counts, found["tally"], np.array(found["late"]), found["router_s"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._control is not None, "the lab has not begun"
        with self._lock:
            self._control.sendall(json.dumps(request).encode() + b"\n")
            return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._control is not None
        self._control.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise UserError(f"the lab's router said nothing for {timeout_s:g} s; is the machine loaded?") from None
        if not line:
            raise UserError(f"the lab's router has ended; it lasts {self.seconds:g} s at most")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the router counted until some moment; the difference of two is what it counted between them."""

    seconds: float
    counts: Ints  # N x N x Count, from the row's peer to the column's
    tally: dict[str, int]
    late: Ints  # how many packets were late by up to 1, 2, 4, ... microseconds
    router_s: float  # processor time

    def __sub__(self, before: "Traffic") -> "Traffic":
        """Maxima stay those of the whole time: the longest wait, and the latest packet."""
        counts = self.counts - before.counts
        counts[..., Count.LONGEST_WAIT_NS] = self.counts[..., Count.LONGEST_WAIT_NS]
        tally = {name: value - before.tally[name] for name, value in self.tally.items()}
        tally["latest_ns"] = self.tally["latest_ns"]
        late, seconds = self.late - before.late, self.seconds - before.seconds
        return Traffic(seconds, counts, tally, late, self.router_s - before.router_s)

    def of(self, count: Count, source: int | None = None, target: int | None = None) -> int:
        """A sum over pairs; None: over all senders, or all receivers."""
        rows = slice(None) if source is None else slice(source, source + 1)
        columns = slice(None) if target is None else slice(target, target + 1)
        return int(self.counts[rows, columns, count].sum())

    def rate(self, source: int | None = None, target: int | None = None) -> float:
        """Bytes/s that were delivered, of IP packets."""
        return self.of(Count.DELIVERED_BYTES, source, target) / max(1e-9, self.seconds)

    def late_ms(self, share: float) -> float:
        """By how much at most this share of all packets was late; a bin's upper end, so up to twice what it was."""
        total = self.late.sum()
        if not total:
            return 0.0
        return float(2.0 ** int(np.searchsorted(np.cumsum(self.late), share * total)) / 1e3)

    def complaints(self, round_trip_s: float) -> list[str]:
        """Why the figures of this time are those of the router, where this is the round trip of the links."""
        said = []
        if self.late_ms(0.99) > max(LATE_MS, LATE_SHARE * round_trip_s * 1e3):
            said.append("router late")
        if self.tally["full"] or self.tally["refused"]:
            said.append("router full")
        return said

    @property
    def router_cores(self) -> float:
        return self.router_s / max(1e-9, self.seconds)
