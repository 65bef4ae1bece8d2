"""The router process: makes the peers' namespaces, carries their packets, and changes the network when it is told.

The lab starts it (lab.py) as the first process of a PID namespace, and speaks to it over a socket: a line of JSON for
each request and each answer. It ends with the lab, whatever ends that, at its own deadline, and by `kill -9`; in each
case the kernel ends all peers with it, and then their namespaces and devices are gone.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.wan import description, namespaces, schedule
from benchmarks.wan.description import Description
from benchmarks.wan.links import unlimited
from benchmarks.wan.loop import LATE_BINS, Tally, carry, devices, tick_of
from benchmarks.wan.nat import forget, no_nat
from benchmarks.wan.packets import packets
from decentral.core.errors import UserError

PRIORITY = 1  # of real time: the router is the wire, and must not wait for those who compute. It sleeps in each round
LAB_NETWORK = 11 << 24
PRIVATE_ADDRESS = 192 << 24 | 168 << 16 | 2  # of every peer behind a router; each has a network of its own
MOVED = 256  # addresses that peers move to begin here, in the lab's network
SECOND_NS = 1_000_000_000
MOST_IDLE_NS = SECOND_NS


def main() -> None:
    namespaces.die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans in our PID namespace become our children
    lines = control.makefile("r")
    try:
        base, seconds = description.from_json(lines.readline()), float(lines.readline())
        namespaces.own_proc()
        namespaces.wake_exactly()
        router = Router(base, control.fileno(), seconds)
    except (UserError, OSError) as error:
        control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    with suppress(PermissionError):  # a container may lack that right; then the router may be late, and says so
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    ready = {"networks": router.networks, "congestion_control": router.congestion_control}
    control.sendall(json.dumps(ready).encode() + b"\n")
    while router.run():
        request = lines.readline()
        if not request:
            return
        control.sendall(json.dumps(router.answer(json.loads(request))).encode() + b"\n")


@dataclass(slots=True)
class Active:
    """A change that is in force, and when it ends; None: when it is healed."""

    change: schedule.Change
    ends_ns: int | None


class Router:
    """The network, and what is going to change in it."""

    def __init__(self, base: Description, control: int, seconds: float) -> None:
        """Makes the peers' networks, and compiles the loop. Raises UserError and OSError where that is not possible."""
        count = len(base)
        self.base = base
        self.active: list[Active] = []
        self.coming: list[tuple[int, schedule.Change]] = []  # by time
        self.moves = 0
        self.nat = no_nat(count, base.seed)
        for peer, kind in base.nat.items():
            self.nat.inside_N[peer] = PRIVATE_ADDRESS
            self.nat.symmetric_N[peer] = kind == "symmetric"
        with namespaces.congestion_control_allowed():
            opened = [self._open(peer) for peer in range(count)]
        self.networks = [network for network, _ in opened]  # descriptors
        self.congestion_control = namespaces.congestion_control()  # of TCP in the namespaces
        namespaces.unshare(namespaces.NEW_NETWORK)  # we stay in an empty one, without any device
        self.links = unlimited(count, base.seed)
        self.packets = packets(base.mtu)
        self.devices = devices([device for _, device in opened], control, base.mtu)
        for peer in range(count):
            self._own(peer, address_of(peer))
        self._apply()
        carry(self.devices, self.links, self.packets, self.nat, 0)
        self.began_ns = time.monotonic_ns()
        self.deadline_ns = self.began_ns + int(seconds * SECOND_NS)

    def _open(self, peer: int) -> tuple[int, int]:
        network, device = namespaces.open_network()
        private = peer in self.base.nat
        namespaces.set_up(PRIVATE_ADDRESS if private else address_of(peer), self.base.mtu, private)
        return network, device

    def run(self) -> bool:
        """Carries packets until there is a request; False at the deadline."""
        while (now := time.monotonic_ns()) < self.deadline_ns:
            self._change(now)
            ends = [one.ends_ns for one in self.active if one.ends_ns is not None]
            until = min([self.deadline_ns, now + MOST_IDLE_NS, *ends, *(at for at, _ in self.coming[:1])])
            carry(self.devices, self.links, self.packets, self.nat, until)
            if self.devices.polls[-1] >> 16:
                self.devices.polls[-1] = 1
                return True
        return False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a request is answered with: {"error": ...} for one that cannot be done."""
        asked: dict[str, Callable[[Any], dict[str, Any]]] = {
            "play": self._play,
            "heal": self._heal,
            "traffic": self._traffic,
        }
        ((name, value),) = request.items()
        try:
            return asked[name](value)
        except UserError as error:
            return {"error": str(error)}

    def _play(self, text: str) -> dict[str, Any]:
        now = time.monotonic_ns()
        found = schedule.parse(text, len(self.base))
        self.coming += [(now + int(change.at * SECOND_NS), change) for change in found]
        self.coming.sort(key=lambda one: one[0])
        self._change(now)
        return self._addresses()

    def _heal(self, _: None) -> dict[str, Any]:
        """Ends all changes, and forgets those that were to come. Addresses stay."""
        self.active.clear()
        self.coming.clear()
        self._apply()
        return self._addresses()

    def _addresses(self) -> dict[str, Any]:
        return {"addresses": self.devices.outside_N.tolist()}

    def _traffic(self, _: None) -> dict[str, Any]:
        tally = self.devices.tally.tolist()
        used = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        return {
            "seconds": (time.monotonic_ns() - self.began_ns) / SECOND_NS,
            "counts": self.links.counts_PC.tolist(),
            "tally": dict(zip([one.name.lower() for one in Tally], tally, strict=False)),
            "late": tally[len(Tally) : len(Tally) + LATE_BINS],
            "router_s": used,
            **self._addresses(),
        }

    def _change(self, now: int) -> None:
        """Begins and ends what is due."""
        before = len(self.active)
        self.active = [one for one in self.active if one.ends_ns is None or one.ends_ns > now]
        due = len(self.active) != before
        while self.coming and self.coming[0][0] <= now:
            at, change = self.coming.pop(0)
            if change.kind == "move":
                self._move(change.peers[0])
                continue
            self.active.append(Active(change, None if change.lasts is None else at + int(change.lasts * SECOND_NS)))
            due = True
        if due:
            self._apply()

    def _apply(self) -> None:
        """Writes the conditions of now into the arrays that the loop reads."""
        now, links = schedule.conditions(self.base, [one.change for one in self.active]), self.links
        links.up_N[:], links.down_N[:] = SECOND_NS / now.up, SECOND_NS / now.down
        links.path_P[:] = (SECOND_NS / now.path).ravel()
        links.delay_P[:] = np.rint(now.delay_s * SECOND_NS).ravel()
        between = ~np.eye(len(self.base), dtype=bool).ravel()
        self.devices.tick[0] = tick_of(int(links.delay_P[between].min()))
        links.loss_P[:], links.open_P[:] = now.loss.ravel(), now.open.ravel()

    def _move(self, peer: int) -> None:
        """Gives a peer another address: itself, or its router, which forgets all mappings with it."""
        address = LAB_NETWORK + MOVED + self.moves
        self.moves += 1
        self.devices.owner_A[self.devices.outside_N[peer] & 0xFFFF] = -1
        if peer in self.base.nat:
            forget(self.nat, peer)
        else:
            namespaces.enter(self.networks[peer], namespaces.NEW_NETWORK)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                namespaces.set_address(control, address, namespaces.LAB_PREFIX)
            namespaces.unshare(namespaces.NEW_NETWORK)
        self._own(peer, address)

    def _own(self, peer: int, address: int) -> None:
        self.devices.outside_N[peer] = address
        self.devices.owner_A[address & 0xFFFF] = peer


def address_of(peer: int) -> int:
    """The address that a peer begins with."""
    return LAB_NETWORK + 1 + peer


if __name__ == "__main__":
    main()
