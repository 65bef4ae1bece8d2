"""How soon peers that a private swarm does not take in are refused, and how many bytes they got: by their packets.

    python -m benchmarks.refusals [--times 5] [--json FILE]

Linux, with root. A founder trains (a process over libp2p on loopback), and peers are started that are `uninvited`, or
whose invitation has `expired` or is `revoked`; `connected` only connects to the founder's libp2p daemon and asks
nothing, as anybody can; `invited` is taken in. All packets of the founder's port are captured on loopback. `line_s` is
the time from an attempt's first packet until its user has the line that says why, without the seconds in which Python
loads its libraries; `received` the bytes that its connection brought, of which the handshake and what libp2p's daemons
tell each other are as many as those of `connected`. Payloads are encrypted, so it is by their number that they hold no
config: `config_bytes` is its length. What is in them is read by the tests of streams
(tests/comm/net/test_private_transports.py).
"""

import argparse
import asyncio
import os
import re
import socket
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.trained_swarm import say
from decentral import invitation_files, invite
from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.invitations import Permission
from decentral.invitation_files import FounderFile
from decentral.peers.hosts.clock import SwarmClock
from tests.commands.peer_processes import TINY, Peers
from tests.patient_time import LIMIT_S

LONG_AGO, FAR_AHEAD = 1e9, 9e9  # unix time
QUIET_S = 0.3  # after an attempt, for the last packets
IPV4, TCP, ETHERNET_BYTES = 0x0800, 6, 14
REFUSED = ("uninvited", "expired", "revoked")


@dataclass(frozen=True, slots=True)
class Packet:
    at: float  # unix time
    remote: int  # the other port
    received: int  # bytes of payload that came from the captured port; 0 of a packet in the other direction


class Capture(threading.Thread):
    """The TCP packets of one port on loopback, from `with` to its end."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.packets: list[Packet] = []
        self._port, self._over = port, threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IPV4))
        self._socket.bind(("lo", 0))
        self._socket.settimeout(QUIET_S)

    def __enter__(self) -> "Capture":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(QUIET_S)
        self._over.set()
        self.join()
        self._socket.close()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                frame, address = self._socket.recvfrom(1 << 16)
            except TimeoutError:
                continue
            packet = frame[ETHERNET_BYTES:]
            if address[2] == socket.PACKET_OUTGOING or packet[9] != TCP:  # loopback shows each packet twice
                continue
            header = (packet[0] & 15) * 4
            source, target = struct.unpack("!HH", packet[header : header + 4])
            payload = struct.unpack("!H", packet[2:4])[0] - header - (packet[header + 12] >> 4) * 4
            if source == self._port:
                self.packets.append(Packet(time.time(), target, payload))
            elif target == self._port:
                self.packets.append(Packet(time.time(), source, 0))

    def connection(self) -> list[Packet]:
        """The packets of the busiest connection: others are the ends of earlier ones."""
        found: dict[int, list[Packet]] = defaultdict(list)
        for packet in self.packets:
            found[packet.remote].append(packet)
        return max(found.values(), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description="how soon uninvited peers are refused, and what they get")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    args = parser.parse_args()
    if not hasattr(socket, "AF_PACKET") or os.geteuid() != 0:
        raise SystemExit("packets are captured on Linux, with root")
    with tempfile.TemporaryDirectory(prefix="refusals-") as folder:
        measure(Peers(Path(folder)), args)


def measure(peers: Peers, args: argparse.Namespace) -> None:
    try:
        peers.start("founder", "--private", *TINY)
        peers.until("the founder trains", lambda: bool(peers.lines("founder", "joined")))
        say({"config_bytes": (peers.folder / "founder" / "run.json").stat().st_size}, args.json)
        flags = invitations(peers)
        for kind in ("connected", *REFUSED, "invited"):
            found = [attempt(peers, kind, number, flags.get(kind, [])) for number in range(args.times)]
            for one in found:
                say({"kind": kind} | one, args.json)
            figures = {name: [one[name] for one in found] for name in ("line_s", "received") if name in found[0]}
            said = {name: [round(median(values), 3), max(values)] for name, values in figures.items()}
            say({"kind": kind, "median and most": said}, args.json)
    finally:
        peers.end()


def invitations(peers: Peers) -> dict[str, Sequence[str]]:
    """The flags of each kind of peer that has an invitation. One has been revoked, and the founder's peer knows."""
    home = peers.folder / "founder"
    flags: dict[str, Sequence[str]] = {}
    for kind, until in (("expired", LONG_AGO), ("revoked", FAR_AHEAD), ("invited", FAR_AHEAD)):
        path = peers.folder / f"{kind}.invite"
        with FounderFile.open(home) as ours:
            invitation_files.write_holding(path, ours.invite(kind, until, Permission.TRAIN))
        flags[kind] = ["--invite", str(path)]
    if invite.main(["--state-dir", str(home), "--revoke", str(peers.folder / "revoked.invite")]):
        raise SystemExit("nobody has heard of the revocation")
    peers.until("the founder's peer knows", lambda: bool(peers.lines("founder", "revoked")))
    return flags


def attempt(peers: Peers, kind: str, number: int, flags: Sequence[str]) -> dict[str, Any]:
    """What one peer got that connects to the founder's, and what its user was told."""
    address = str(peers.lines("founder", "started")[0]["addresses"][0])
    found = re.search(r"/tcp/(\d+)/", address)
    assert found, address
    with Capture(int(found[1])) as capture:
        said = told(peers, f"{kind}-{number}", ["--join", address, *flags]) if kind != "connected" else None
        if said is None:
            asyncio.run(only_connect(address))
    packets = capture.connection()
    result: dict[str, Any] = {"received": sum(packet.received for packet in packets)}
    return result | ({"line_s": round(said[0] - packets[0].at, 3), "exit": said[1], "line": said[2]} if said else {})


async def only_connect(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        transport = await Libp2p.start(Path(folder) / "identity.key", ports.anywhere(), [], SwarmClock())
        try:
            await transport.connect(address)
            await asyncio.sleep(QUIET_S)
        finally:
            await transport.close()


def told(peers: Peers, name: str, flags: Sequence[str]) -> tuple[float, int | None, str]:
    """When a peer's user had its first line, or the peer has joined, its exit code, and its last line."""
    output = peers.folder / name / "output.txt"
    peers.start(name, *flags)

    def happened() -> bool:
        return bool(peers.lines(name, "joined")) or ("error:" in output.read_text())

    deadline = time.monotonic() + LIMIT_S
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} was neither refused nor taken in")
        time.sleep(0.002)
    at = time.time()
    process = peers.processes.pop(name)
    joined = bool(peers.lines(name, "joined"))
    if joined:
        process.terminate()
    code = process.wait(LIMIT_S)
    return at, None if joined else code, output.read_text().splitlines()[-1]


if __name__ == "__main__":
    main()
