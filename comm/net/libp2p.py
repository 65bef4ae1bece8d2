"""The network over libp2p. Only this file, daemon.py, libp2p_directory.py and libp2p_services.py know hivemind.

hivemind's P2P (a libp2p daemon beside us) and DHTNode live in our own event loop. Its DHT and averager classes fork
processes and change signal handlers, so they are not used. Questions travel on binary streams, which are four times as
fast as its unary calls and have no 4 MiB limit (docs/ARCHITECTURE.md, "What was measured").
"""

import asyncio
import errno
import logging
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from decentral.comm.net import libp2p_services, ports
from decentral.comm.net.daemon import OwnDaemon
from decentral.comm.net.fair_shares import QuestionShares
from decentral.comm.net.libp2p_directory import (
    CONNECT_S,
    MEET_AGAIN,
    NETWORK_ERRORS,
    HivemindDirectory,
    SignedRecords,
    dht_node,
)
from decentral.comm.net.member_calls import MemberCalls
from decentral.comm.net.streams import Asker, Server, Stream, exchange_proofs, read_until_closed
from decentral.comm.net.uplink import Uplink
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.network import DialBack, Identified
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler, Knows, knows_all
from decentral.core.at_once import at_once
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.plain_text import printable
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

PROTOCOL = "/decentral/ask"  # the version is in each header, so that a wrong one gets a clear answer
DAEMON_END_S = 5.0  # from the end of its connection to us to its own, where it has died
OLD_DAEMON_S, PORT_AGAIN_S = 5.0, 0.2  # a killed peer's daemon keeps the port until it notices: 1.4 s on a free machine
MOST_CONNECTED = 256  # peers that are remembered as connected; those that we connect to go before those that ask us
MOST_LEARNED = 4096  # peers whose addresses are remembered; beyond them, those learned longest ago are forgotten
TIMED = ("hivemind.utils.timed_storage", *(f"hivemind.dht.{module}" for module in ("node", "protocol", "routing")))
OF_LOOPBACK = ("/ip4/127.", "/ip6/::1/")
BEFORE_CAUSE = re.compile(r"^(\* \[\S+\] )?dial \S+ \S+: (connect: )?")  # of a failed dial, in libp2p's words
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

logging.getLogger("hivemind").setLevel(logging.ERROR)  # our journal has what matters of its warnings


class Libp2p:
    """A PeerNetwork. Create it with `start`."""

    def __init__(self, p2p: P2P, place: "DaemonPlace", now: Callable[[], float]) -> None:
        self._p2p, self._place, self._now = p2p, place, now
        self.peer = PeerId(p2p.peer_id.to_base58())
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._connected: set[PeerId] = set()
        self._server: Server | None = None
        self._uplink = Uplink()
        self._asker = Asker(self, self._uplink)
        self._directory: HivemindDirectory | None = None
        self._private: PrivateSwarm | None = None  # None: the swarm is public

    @classmethod
    async def start(
        cls,
        key: Path,
        listen: Sequence[str],
        announce: Sequence[str],
        now: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda _: None,
        only_dials: bool = False,
    ) -> "Libp2p":
        """Starts the daemon."""
        place = DaemonPlace(key, tuple(listen), tuple(announce), only_dials)
        for module in TIMED:  # hivemind asks the wall clock, which may jump
            import_module(module).get_dht_time = now  # type: ignore[attr-defined]
        return cls(await place.start(say), place, now)

    async def ended(self) -> str:
        """Waits until the daemon has ended, and says how. It is ended where hivemind reads its answers no more."""
        reading, child = self._p2p._client.control._read_task, self._p2p._child
        await asyncio.wait([reading])
        try:
            async with asyncio.timeout(DAEMON_END_S):
                code = await child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            return f"the libp2p daemon has ended (hivemind reads it no more: {reading.exception() or 'end of file'!r})"
        return f"the libp2p daemon has ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    async def revive(self) -> None:
        """Starts the daemon again after it has ended, at the same addresses. Raises UserError if it cannot listen."""
        self._asker.close()
        self._connected.clear()
        with suppress(Exception):  # of its client, whose daemon is gone
            await self._p2p.shutdown()
        self._p2p = await self._place.at_ports_of(self._p2p).start()
        if self._server is not None:
            await self._listen()
        some = random.sample(sorted(self._addresses), min(MEET_AGAIN, len(self._addresses)))
        await at_once(map(self._reach, some))
        if self._directory is not None:
            await self._directory.revive(self._calls, some)

    async def addresses(self) -> tuple[str, ...]:
        try:
            visible = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except NETWORK_ERRORS as error:  # the daemon may be starting again
            raise _failure(error) from None
        return tuple(sorted(visible, key=lambda address: address.startswith(OF_LOOPBACK)))

    async def connections(self) -> dict[PeerId, tuple[str, ...]]:
        found = await self._connections()
        return {peer: places for peer, places in found.items() if self._private is None or self._private.admits(peer)}

    async def has_connection_to(self, peer: PeerId) -> bool:
        return peer in await self._connections()

    async def _connections(self) -> dict[PeerId, tuple[str, ...]]:
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await self._p2p.list_peers()
        except (*NETWORK_ERRORS, TimeoutError):
            return {}
        peers = {PeerId(one.peer_id.to_base58()): one.addrs for one in found}
        return {peer: tuple(f"{place}/p2p/{peer}" for place in places) for peer, places in peers.items()}

    async def connect(self, address: str) -> PeerId:
        peer, place = self.parse_address(address)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(place)])
        except (*NETWORK_ERRORS, TimeoutError) as error:
            raise _failure(error) from None
        self._connected.add(peer)
        while len(self._connected) > MOST_CONNECTED:
            self._connected.remove(next(one for one in self._connected if one != peer))
        return peer

    @staticmethod
    def parse_address(address: str) -> tuple[PeerId, str]:
        """The peer and the place in `/ip4/1.2.3.4/tcp/4001/p2p/Qm...`."""
        place, found, peer = address.rpartition("/p2p/")
        try:
            if not found:
                raise ValueError("no /p2p/")
            Multiaddr(place), PeerID.from_base58(peer)
        except Exception:  # multiaddr raises what its parsers raise
            raise UserError(
                f"--join expects an address such as /ip4/203.0.113.7/tcp/4001/p2p/Qm...; got {address!r}"
            ) from None
        return PeerId(peer), place

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        keep_latest(self._addresses, peer, addresses, MOST_LEARNED)

    def pace(self, rate: Callable[[], float | None]) -> None:
        self._uplink.queue.pace_by(rate)

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._asker.ask(to, envelope, max_blob_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"{deadline_s:.1f} s") from None
        except NETWORK_ERRORS as error:
            self._connected.discard(to)
            raise _failure(error) from None

    async def open_stream(self, to: PeerId) -> Stream:
        """A new stream to this peer. Raises AskError, and NETWORK_ERRORS."""
        try:
            name = PeerID.from_base58(to)
        except ValueError:  # peers name other peers to us, and can name anything
            raise AskError(Reason.UNREACHABLE, "not a peer's name") from None
        await self._reach(to)
        _, reader, writer = await self._p2p.call_binary_stream_handler(name, PROTOCOL)
        return Stream(reader, writer)

    async def call(self, to: PeerId, protocol: str, request: bytes, most_bytes: int, deadline_s: Seconds) -> bytes:
        """What a peer that we are connected to answers in another protocol of libp2p, until it closes the stream.

        Raises AskError if it does not speak it, says more than `most_bytes`, or not all in time.
        """
        try:
            async with asyncio.timeout(deadline_s):
                _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(to), protocol)
                with closing(writer):
                    writer.write(request)
                    return await read_until_closed(reader, most_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"{deadline_s:.1f} s") from None
        except NETWORK_ERRORS as error:
            raise _failure(error) from None

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        if self._server is not None:
            self._server.handler, self._server.bound, self._server.shares.knows = handler, bound, knows
            return
        self._server = Server(handler, bound, self._uplink, shares=QuestionShares(knows))
        await self._listen()

    async def enclose(self, private: PrivateSwarm | None) -> None:
        """Proofs are answered at once, whatever else is not: other members' nodes of the DHT want to talk to ours."""
        self._private = private
        self._asker.enclose(private)
        if self._server is None:
            await self.serve(_not_yet, lambda _: 0)
        assert self._server is not None
        self._server.enclose(private)

    async def drop(self, peer: PeerId) -> None:
        """Ends all connections to a peer that is no member any more."""
        self._asker.drop(peer)
        self._connected.discard(peer)
        self._addresses.pop(peer, None)
        if self._server is not None:
            self._server.drop(peer)
        with suppress(*NETWORK_ERRORS):
            async with asyncio.timeout(CONNECT_S):
                await self._p2p._client.disconnect(PeerID.from_base58(peer))

    async def _listen(self) -> None:
        async def on_stream(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sender = PeerId(info.peer_id.to_base58())
            if len(self._connected) < MOST_CONNECTED and (self._private is None or self._private.admits(sender)):
                self._connected.add(sender)
            with closing(writer):
                assert self._server is not None
                await self._server.answer_on(sender, reader, writer)

        await self._p2p.add_binary_stream_handler(PROTOCOL, on_stream)

    @property
    def refused(self) -> Mapping[str, int]:
        return self._server.refused if self._server else Counter()

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> HivemindDirectory:
        valid = SignedRecords(keys, self._now, self._private)
        self._directory = HivemindDirectory(await dht_node(self._calls, valid, known), valid, self._connected)
        return self._directory

    @property
    def _calls(self) -> P2P | MemberCalls:
        """The P2P by which our node of the DHT calls others."""
        return MemberCalls(self._p2p, self._private, self._prove) if self._private else self._p2p

    async def _prove(self, to: PeerId) -> None:
        """Both prove to be members. Raises AskError, and NETWORK_ERRORS."""
        assert self._private is not None
        await exchange_proofs(self._private, self._asker.ask_any, to)

    async def identify(self, peer: PeerId) -> Identified:
        return await libp2p_services.identify(self, peer)

    async def dial_back(self, peer: PeerId, addresses: Sequence[str]) -> DialBack:
        return await libp2p_services.dial_back(self, peer, addresses)

    def processor_s(self) -> Seconds:
        """Of the daemon. Only Linux says so of another process."""
        try:
            fields = Path(f"/proc/{self._p2p._child.pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, AttributeError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def close(self) -> None:
        self._asker.close()
        await self._p2p.shutdown()

    async def _reach(self, peer: PeerId) -> None:
        """Connects to an address that we know, so that the daemon need not search for the peer."""
        if peer in self._connected:
            return
        for address in self._addresses.get(peer, ()):
            with suppress(AskError, UserError):
                if await self.connect(address) == peer:
                    return


@dataclass(frozen=True, slots=True)
class DaemonPlace:
    """Under which key a libp2p daemon runs, where it listens, and where it says that it does."""

    key: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    only_dials: bool = False

    async def start(self, say: Callable[[str], None] = lambda _: None) -> P2P:
        """Start the daemon. `say` is told once that it waits for a port.

        Raises UserError if it cannot listen there, or if others cannot dial `announce`.
        """
        _require_dialled(self.announce)
        end, said = time.monotonic() + OLD_DAEMON_S, False
        while True:
            try:
                with ports.held(self.listen) as listen:
                    return await self._start_at(listen)
            except ports.PortTaken as error:
                if time.monotonic() >= end:
                    raise
                if not said:
                    say(f"{error}; waiting {OLD_DAEMON_S:g} s for the port")
                    said = True
                await asyncio.sleep(PORT_AGAIN_S)

    async def _start_at(self, listen: Sequence[str]) -> P2P:
        try:
            for address in listen:
                _require_address(address, "--listen")
            daemon = await OwnDaemon.begin(self.key, listen, self.announce, self.only_dials)
        except (P2PDaemonError, ValueError) as error:
            raise UserError(f"cannot listen on {', '.join(self.listen)}: {_last_line(error)}") from None
        for task in (daemon._client.control._read_task, daemon._client.control._write_task):
            task.add_done_callback(_without_traceback)
        return daemon

    def at_ports_of(self, daemon: P2P) -> "DaemonPlace":
        """The same place, with the port that `tcp/0` became: others know that one."""
        ports = {address["tcp"] for address in daemon._visible_maddrs or () if "tcp" in address}
        port = ports.pop() if len(ports) == 1 else "0"
        return replace(self, listen=tuple(re.sub("/tcp/0$", f"/tcp/{port}", address) for address in self.listen))


def _require_dialled(announced: Iterable[str]) -> None:
    """Raise UserError for an address of --announce that others cannot dial."""
    for address in announced:
        _require_address(address, "--announce")
        if address.endswith("/tcp/0"):
            raise UserError(f"--announce expects the port at which others reach this peer; got {address}")


def _require_address(address: str, flag: str) -> None:
    """Raise UserError unless the text is a multiaddr."""
    try:
        Multiaddr(address)
    except ValueError:
        example = "/ip4/0.0.0.0/tcp/4001"
        raise UserError(f"{flag} expects an address such as {example}; got {printable(address, 200)!r}") from None


def _without_traceback(task: "asyncio.Task[None]") -> None:
    """Asks what a task at a daemon's connection has failed with: asyncio prints what nobody has asked for."""
    if not task.cancelled():
        task.exception()


async def _not_yet(_sender: PeerId, _question: Envelope) -> Envelope:
    return Envelope(Refused(Reason.NOT_READY))


def _failure(error: BaseException) -> AskError:
    """Why no answer came: the other peer is out of reach, or this machine has nothing left to ask with."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        remedy = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        return AskError(Reason.RESOURCES, f"{error.strerror}{remedy}")
    return AskError(Reason.UNREACHABLE, _last_line(error))


def _last_line(error: BaseException) -> str:
    """Return the last line of what libp2p says, without the address and the call before the cause."""
    lines = str(error).strip().splitlines()
    return BEFORE_CAUSE.sub("", lines[-1].strip())[:200] if lines else type(error).__name__
