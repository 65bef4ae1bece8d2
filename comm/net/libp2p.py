"""The network over libp2p: `Libp2p` implements PeerNetwork, and `DaemonPlace` starts its daemon.

Only a few modules import hivemind: this one, daemon.py, libp2p_directory.py, libp2p_services.py and dht_*.py.
hivemind's P2P, which drives a libp2p daemon in a process of its own, and hivemind's DHTNode run in our event loop. We
do not use hivemind's DHT and averager classes, since they fork processes and change signal handlers. Questions travel
on binary streams, which are four times as fast as hivemind's unary calls and have no limit of 4 MiB.
"""

import asyncio
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

from decentral.comm.net import causes, libp2p_services, ports
from decentral.comm.net.daemon import OwnDaemon, require_address, require_dialled, without_traceback
from decentral.comm.net.dht_calls import MOST_PEER_ID_BYTES, CallShares, GuardedCalls
from decentral.comm.net.dialler import Dialler
from decentral.comm.net.fair_shares import QuestionShares
from decentral.comm.net.libp2p_directory import (
    CONNECT_S,
    MEET_AGAIN,
    NETWORK_ERRORS,
    HivemindDirectory,
    SignedRecords,
    dht_node,
)
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
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

PROTOCOL = "/decentral/ask"  # has no version: peers of other versions connect and get a clear refusal
DAEMON_END_S = 5.0  # if hivemind has stopped reading a daemon's answers, we kill the daemon after this time
# A killed peer's daemon occupies its port until it notices that the peer is gone (1.4 s on an idle machine). So if a
# port is taken, we try to start our daemon again every PORT_AGAIN_S, for up to OLD_DAEMON_S.
OLD_DAEMON_S, PORT_AGAIN_S = 5.0, 0.2
# This many peers are remembered as connected; then one that we dial replaces another, and one that asks us does not.
MOST_CONNECTED = 256
LISTED_S = 5.0  # a DHT call asks the daemon for the connected peers again if the last list is older than this
MOST_LEARNED = 4096  # we remember the addresses of at most this many peers; then the oldest are forgotten
TIMED = ("hivemind.utils.timed_storage", *(f"hivemind.dht.{module}" for module in ("node", "protocol", "routing")))

logging.getLogger("hivemind").setLevel(logging.ERROR)  # hide hivemind's warnings: our journal has the same events


class Libp2p:
    """Implementation of PeerNetwork over libp2p. Create it with `start`."""

    def __init__(self, p2p: P2P, place: "DaemonPlace", now: Callable[[], float]) -> None:
        """Use a running daemon; `serve` begins to answer questions.

        Args:
            p2p: hivemind's client of the daemon.
            place: The daemon's settings, with which `revive` starts it again.
            now: Returns unix time, by which records of the DHT expire.
        """
        self._p2p, self._place, self._now = p2p, place, now
        self.peer = PeerId(p2p.peer_id.to_base58())
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._connected: set[PeerId] = set()
        self._server: Server | None = None
        self._uplink = Uplink()
        self._asker = Asker(self, self._uplink)
        self._directory: HivemindDirectory | None = None
        self._private: PrivateSwarm | None = None
        self._dialler = Dialler(self)
        self._lately, self._listed_at = dict[PeerId, tuple[str, ...]](), -LISTED_S

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
        """Start a daemon, and return the network over it; the arguments are those of `PeerNetwork.start`.

        Raises:
            UserError: If the daemon cannot listen at `listen`, or an address in `announce` cannot be dialled.
        """
        place = DaemonPlace(key, tuple(listen), tuple(announce), only_dials)
        for module in TIMED:  # hivemind reads the wall clock, which may jump: use `now` instead
            import_module(module).get_dht_time = now  # type: ignore[attr-defined]
        network = cls(await place.start(say), place, now)
        network._dialler.begin(await network.addresses())
        return network

    async def ended(self) -> str:
        """Wait until the daemon has ended, and return the cause of its end as a text for the user.

        If hivemind has stopped reading the daemon's answers, the daemon is useless: it is killed after DAEMON_END_S.
        """
        reading, child = self._p2p._client.control._read_task, self._p2p._child
        await asyncio.wait([reading])
        try:
            async with asyncio.timeout(DAEMON_END_S):
                code = await child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            return f"the libp2p daemon has ended (hivemind stopped reading: {reading.exception() or 'end of file'!r})"
        return f"the libp2p daemon has ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    async def revive(self) -> None:
        """Start the daemon and our DHT node again, at the same addresses. Raises UserError if an address is taken."""
        self._asker.close()
        self._connected.clear()
        with suppress(Exception):  # the daemon is gone, so the shutdown may raise any error
            await self._p2p.shutdown()
        self._p2p = await self._place.at_ports_of(self._p2p).start()
        if self._server is not None:
            await self._listen()
        some = random.sample(sorted(self._addresses), min(MEET_AGAIN, len(self._addresses)))
        await at_once(self.reach(peer, self._addresses[peer]) for peer in some)
        if self._directory is not None:
            await self._directory.revive(self._calls, some)

    async def addresses(self) -> tuple[str, ...]:
        """Return our addresses for other peers, loopback addresses last. Raises AskError if the daemon is down."""
        try:
            visible = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except NETWORK_ERRORS as error:  # the daemon may be restarting
            raise causes.failure(error) from None
        return tuple(sorted(visible, key=lambda address: address.startswith(ports.OF_LOOPBACK)))

    async def connections(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the peers that are connected to us, with their addresses; in a private swarm only members."""
        return {one: at for one, at in (await self._listed()).items() if not self._private or self._private.admits(one)}

    async def has_connection_to(self, peer: PeerId) -> bool:
        """Return whether this peer, member of the swarm or not, is connected to us."""
        return peer in await self._listed()

    async def places_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses of our connections to a peer, member of the swarm or not."""
        return (await self._listed()).get(peer, ())

    async def _listed(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the connected peers, members or not, and the addresses of the connections to them."""
        listed: dict[PeerId, tuple[str, ...]] = {}
        try:
            async with asyncio.timeout(CONNECT_S):
                for one in await self._p2p.list_peers():  # the daemon lists a peer once, or once for each connection
                    peer = PeerId(one.peer_id.to_base58())
                    listed[peer] = listed.get(peer, ()) + tuple(f"{place}/p2p/{peer}" for place in one.addrs)
        except (*NETWORK_ERRORS, TimeoutError):
            pass
        self._lately, self._listed_at = listed, time.monotonic()
        return listed

    async def _known_places_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return a peer's addresses in the last list of connections; if it lacks the peer, return `places_of(peer)`."""
        return self._lately.get(peer) or await self.places_of(peer)

    async def connect(self, address: str) -> PeerId:
        """Connect to the peer at an address, and return its id. Raises AskError if no peer answers there."""
        peer, place = self.parse_address(address)
        await self._connect(peer, [place])
        await self._dialler.connected(peer)
        return peer

    async def reach(self, peer: PeerId, addresses: Sequence[str] | None) -> bool:
        """Connect to a peer at addresses from other peers, if dialling.py permits; return whether it is connected."""
        if is_reached := await self._dialler.reach(peer, addresses):
            self._remember(peer)
        return is_reached

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> str:
        """Dial a peer at all of these addresses, or search for it; return "" if it is connected, else the error."""
        try:
            await self._connect(peer, [self.parse_address(address)[1] for address in addresses])
        except (AskError, UserError) as error:
            return str(error.__cause__ or error)
        return ""

    async def _connect(self, peer: PeerId, places: Sequence[str]) -> None:
        """Have the daemon dial a peer at all of these addresses at once. Raises AskError if none answers."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._p2p._client.connect(PeerID.from_base58(peer), list(map(Multiaddr, places)))
        except (*NETWORK_ERRORS, TimeoutError) as error:
            raise causes.failure(error) from error
        self._remember(peer)

    def _remember(self, peer: PeerId) -> None:
        """Add a peer to the set of connected peers; if it exceeds MOST_CONNECTED, remove another peer from it."""
        self._connected.add(peer)
        while len(self._connected) > MOST_CONNECTED:
            self._connected.remove(next(one for one in self._connected if one != peer))

    @staticmethod
    def parse_address(address: str) -> tuple[PeerId, str]:
        """Split an address such as `/ip4/1.2.3.4/tcp/4001/p2p/Qm...` into the peer id and the part before `/p2p/`.

        Raises:
            UserError: If the text is not such an address.
        """
        place, found, peer = address.rpartition("/p2p/")
        try:
            if not found:
                raise ValueError("expected /p2p/ and a peer id at the end")
            Multiaddr(place), PeerID.from_base58(peer)
        except Exception:  # Multiaddr raises errors of many classes for malformed text
            raise UserError(
                f"--join expects an address such as /ip4/203.0.113.7/tcp/4001/p2p/Qm...; got {address!r}"
            ) from None
        return PeerId(peer), place

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember the addresses that a peer announces; `ask` dials them if the peer is not connected."""
        keep_latest(self._addresses, peer, addresses, MOST_LEARNED)

    def pace(self, rate: Callable[[], float | None]) -> None:
        """Send questions and answers at `rate()` bytes/s at most from now on; a rate of None means no limit."""
        self._uplink.queue.pace_by(rate)

    def take_sent(self) -> Mapping[PeerId, int]:
        """Return the bytes of large messages, without probes, that have left to each peer since the last call."""
        return self._uplink.take_sent()

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        """Ask a peer a question and return its answer. Raises AskError if no answer comes in `deadline_s` seconds."""
        try:
            return await self._asker.ask(to, envelope, deadline_s, max_blob_bytes)
        except NETWORK_ERRORS as error:
            self._connected.discard(to)
            raise causes.failure(error) from None

    async def open_stream(self, to: PeerId) -> Stream:
        """Return a new stream to a peer. A peer that is not connected is dialled at its remembered addresses first.

        Raises AskError if `to` is not a libp2p peer id, and NETWORK_ERRORS if the daemon cannot reach the peer.
        """
        try:
            if len(to) > MOST_PEER_ID_BYTES * 3 // 2:  # base58 has 1.37 characters a byte
                raise ValueError("no peer id is so long")
            name = PeerID.from_base58(to)
        except ValueError:  # another peer may have sent any text as an id
            raise AskError(Reason.UNREACHABLE, "the peer's name is not a libp2p peer id") from None
        await self._reach(to)
        _, reader, writer = await self._p2p.call_binary_stream_handler(name, PROTOCOL)
        return Stream(reader, writer)

    async def call(self, to: PeerId, protocol: str, request: bytes, most_bytes: int, deadline_s: Seconds) -> bytes:
        """Call a connected peer in a libp2p protocol other than ours, and return all bytes of its answer.

        Args:
            to: The peer.
            protocol: Name of the protocol.
            request: Bytes to send.
            most_bytes: Most bytes that the answer may have.
            deadline_s: Seconds for the whole call.

        Raises:
            AskError: If the peer is unreachable or does not speak the protocol, or its answer is too large or late.
        """
        try:
            async with asyncio.timeout(deadline_s):
                _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(to), protocol)
                with closing(writer):
                    writer.write(request)
                    return await read_until_closed(reader, most_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"no answer within {deadline_s:.1f} s") from None
        except NETWORK_ERRORS as error:
            raise causes.failure(error) from None

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        """Answer questions from now on, as `Transport.serve` says. A later call replaces the arguments."""
        if self._server is not None:
            self._server.handler, self._server.bound, self._server.shares.knows = handler, bound, knows
            return
        self._server = Server(handler, bound, self._uplink, shares=QuestionShares(knows))
        await self._listen()

    async def enclose(self, private: PrivateSwarm | None) -> None:
        """Ask and answer only members of this private swarm from now on, or any peer if `private` is None.

        Membership proofs are answered even before `serve`, since other members' DHT nodes ask for our proof first.
        """
        self._private = private
        self._asker.enclose(private)
        if self._server is None:
            await self.serve(_not_yet, lambda _: 0)
        assert self._server is not None
        self._server.enclose(private)

    async def drop(self, peer: PeerId) -> None:
        """Close all connections to a peer, abort the questions on them, and forget the peer's addresses."""
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
                if sender not in self._connected:
                    self._dialler.met(sender, f"{info.addr}/p2p/{sender}")
                self._connected.add(sender)
            with closing(writer):
                assert self._server is not None
                await self._server.answer_on(sender, reader, writer)

        await self._p2p.add_binary_stream_handler(PROTOCOL, on_stream)

    @property
    def refused(self) -> Mapping[str, int]:
        """Return the number of other peers' questions that this peer has refused or failed to answer, by reason."""
        return self._server.refused if self._server else Counter()

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> HivemindDirectory:
        """Start and return our DHT node, which stores records under `keys` only and joins through `known` peers."""
        valid = SignedRecords(keys, self._now, self._private)
        self._directory = HivemindDirectory(await dht_node(self._calls, valid, known), valid, self._connected)
        return self._directory

    @property
    def _calls(self) -> GuardedCalls:
        """Return the guarded libp2p connection (hivemind's P2P) through which our DHT node makes and answers calls."""
        shares, places = CallShares(time.monotonic, self._private), self._known_places_of
        return GuardedCalls(self._p2p, shares, self._reach_again, places, self._private, self._prove)

    async def _prove(self, to: PeerId) -> None:
        """Exchange membership proofs with a peer. Raises as `exchange_proofs` and `open_stream` do."""
        assert self._private is not None
        await exchange_proofs(self._private, self._asker.ask_any, to)

    async def identify(self, peer: PeerId) -> Identified:
        """Return our address as a peer sees it, and the peer's software. Raises AskError if no answer comes in time."""
        return await libp2p_services.identify(self, peer)

    async def dial_back(self, peer: PeerId, addresses: Sequence[str]) -> DialBack:
        """Ask a connected peer to dial our addresses, and return its report. Raises AskError if the question fails."""
        return await libp2p_services.dial_back(self, peer, addresses)

    def processor_s(self) -> Seconds:
        """Return the CPU seconds that the daemon has used so far; 0 on a system other than Linux."""
        try:
            fields = Path(f"/proc/{self._p2p._child.pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, AttributeError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def close(self) -> None:
        """Close all streams and end the daemon."""
        self._asker.close()
        await self._p2p.shutdown()

    async def _reach(self, peer: PeerId) -> None:
        """Connect to a peer at the addresses that we remember, or have libp2p search for it if we remember none.

        Raises:
            AskError: If the peer is not reached, or must not be dialled now.
        """
        if peer not in self._connected and not await self.reach(peer, self._addresses.get(peer)):
            raise AskError(Reason.UNREACHABLE, "no published address of the peer answers or may be dialled now")

    async def _reach_again(self, peer: PeerId) -> None:
        """Connect to a peer that may have disconnected. Raises AskError if the peer is not reached."""
        if time.monotonic() >= self._listed_at + LISTED_S:
            await self._listed()
        if peer not in self._lately:
            self._connected.discard(peer)
            await self._reach(peer)


@dataclass(frozen=True, slots=True)
class DaemonPlace:
    """The settings of a libp2p daemon: its key file, and its addresses."""

    key: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]  # multiaddrs that are published; if empty, the daemon publishes its `listen` addresses
    only_dials: bool = False  # True: no other peer needs to connect, so the daemon asks no router for a port

    async def start(self, say: Callable[[str], None] = lambda _: None) -> OwnDaemon:
        """Start the daemon and return hivemind's client of it.

        Args:
            say: Is called with a text for the user, at most once, if the start has to wait for a port.

        Raises:
            UserError: If the daemon cannot listen at `listen`, or an address in `announce` cannot be dialled.
        """
        require_dialled(self.announce)
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

    async def _start_at(self, listen: Sequence[str]) -> OwnDaemon:
        try:
            for address in listen:
                require_address(address, "--listen")
            daemon = await OwnDaemon.begin(self.key, listen, self.announce, self.only_dials)
        except (P2PDaemonError, ValueError) as error:
            raise UserError(f"cannot listen on {', '.join(self.listen)}: {causes.last_line(error)}") from None
        for task in (daemon._client.control._read_task, daemon._client.control._write_task):
            task.add_done_callback(without_traceback)
        return daemon

    def at_ports_of(self, daemon: P2P) -> "DaemonPlace":
        """Return these settings with the daemon's port in place of `tcp/0`, so that a restart gets the same port."""
        ports = {address["tcp"] for address in daemon._visible_maddrs or () if "tcp" in address}
        port = ports.pop() if len(ports) == 1 else "0"
        return replace(self, listen=tuple(re.sub("/tcp/0$", f"/tcp/{port}", address) for address in self.listen))


async def _not_yet(_sender: PeerId, _question: Envelope) -> Envelope:
    return Envelope(Refused(Reason.NOT_READY))
