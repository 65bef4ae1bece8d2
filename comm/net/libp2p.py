"""Transport and directory over libp2p: the only file that knows hivemind.

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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, DispatchFailure
from hivemind.proto.dht_pb2 import PingRequest
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from decentral.comm.net.fair_shares import QuestionShares
from decentral.comm.net.member_calls import MemberCalls
from decentral.comm.net.stored_records import StoredRecords
from decentral.comm.net.streams import Asker, Server, Stream, exchange_proofs, read_until_closed
from decentral.comm.net.uplink import Uplink
from decentral.comm.wire import identity
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused
from decentral.comm.wire.private_swarm import MAX_SEAL_BYTES, PrivateSwarm, storable
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler, Knows, knows_all
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

PROTOCOL = "/decentral/ask"  # the version is in each header, so that a wrong one gets a clear answer
LIBP2P_START_S = 60.0  # the daemon's start on a loaded machine; hivemind's default of 15 s is too short
CONNECT_S = 10.0
STORE_S = 10.0
FETCH_S = 10.0
DHT_END_S = 1.0
MAX_SUBKEY_BYTES = 128  # a peer id as the DHT packs it has about 50
BYTES_HEADER_BYTES = 5  # of a record as msgpack packs bytes
MEET_AGAIN = 3  # peers that are asked back into an empty routing table at once
MOST_CONNECTED = 256  # peers that are remembered as connected; those that we connect to go before those that ask us
MOST_LEARNED = 4096  # peers whose addresses are remembered; beyond them, those learned longest ago are forgotten
_NETWORK_ERRORS = (ControlFailure, DispatchFailure, P2PDaemonError, ConnectionError, OSError, EOFError)
TIMED = ("hivemind.utils.timed_storage", *(f"hivemind.dht.{module}" for module in ("node", "protocol", "routing")))
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

logging.getLogger("hivemind").setLevel(logging.ERROR)  # our journal has what matters of its warnings


class Libp2p:
    """A Transport. Create it with `start`."""

    def __init__(self, p2p: P2P, place: "DaemonPlace", now: Callable[[], float]) -> None:
        self._p2p, self._place, self._now = p2p, place, now
        self.peer = PeerId(p2p.peer_id.to_base58())
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._connected: set[PeerId] = set()
        self._server: Server | None = None
        self._uplink = Uplink()
        self._asker = Asker(self._open, self._uplink)
        self._directory: HivemindDirectory | None = None
        self._private: PrivateSwarm | None = None  # None: the swarm is public

    @classmethod
    async def start(
        cls, key: Path, listen: Sequence[str], announce: Sequence[str], now: Callable[[], float] = time.time
    ) -> "Libp2p":
        """Starts the daemon with the identity in `key`. Raises UserError if it cannot listen there.

        Records of the DHT expire by `now`, which gives unix time.
        """
        place = DaemonPlace(key, tuple(listen), tuple(announce))
        for module in TIMED:  # hivemind asks the wall clock, which may jump
            import_module(module).get_dht_time = now  # type: ignore[attr-defined]
        return cls(await place.start(), place, now)

    async def ended(self) -> str:
        """Waits until the daemon has ended, and says how."""
        code = await self._p2p._child.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

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
        await asyncio.gather(*map(self._reach, some))
        if self._directory is not None:
            await self._directory.revive(self._calls, some)

    async def addresses(self) -> tuple[str, ...]:
        """Our addresses for others, each ending in /p2p/<our id>; the loopback ones come last."""
        visible = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        return tuple(sorted(visible, key=lambda address: "/127.0.0.1/" in address or "/::1/" in address))

    async def connect(self, address: str) -> PeerId:
        """Connects to `.../p2p/<id>`. Raises UserError if that is no address, AskError if nobody answers there."""
        peer, place = parse_address(address)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(place)])
        except (*_NETWORK_ERRORS, TimeoutError) as error:
            raise _failure(error) from None
        self._connected.add(peer)
        while len(self._connected) > MOST_CONNECTED:
            self._connected.remove(next(one for one in self._connected if one != peer))
        return peer

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        keep_latest(self._addresses, peer, addresses, MOST_LEARNED)

    def pace(self, rate: Callable[[], float | None]) -> None:
        self._uplink.queue.rate = rate

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._asker.ask(to, envelope, max_blob_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"{deadline_s:.1f} s") from None
        except _NETWORK_ERRORS as error:
            self._connected.discard(to)
            raise _failure(error) from None

    async def _open(self, to: PeerId) -> Stream:
        """A new stream to this peer. Raises AskError, and _NETWORK_ERRORS."""
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
        except _NETWORK_ERRORS as error:
            raise _failure(error) from None

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        if self._server is not None:
            self._server.handler, self._server.bound, self._server.shares.knows = handler, bound, knows
            return
        self._server = Server(handler, bound, self._uplink, shares=QuestionShares(knows))
        await self._listen()

    async def enclose(self, private: PrivateSwarm | None) -> None:
        """From now on only members of this swarm are asked and answered; None: anybody, as before the first call.

        Proofs are answered at once, whatever else is not yet: other members' nodes of the DHT want to talk to ours.
        """
        self._private = self._asker.private = private
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
        with suppress(*_NETWORK_ERRORS, TimeoutError):
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

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> "HivemindDirectory":
        """Our node of the DHT. It stores records of these keys only, and begins with peers that we are connected to."""
        valid = SignedRecords(keys, self._now, self._private)
        self._directory = HivemindDirectory(await _dht_node(self._calls, valid, known), valid, self._connected)
        return self._directory

    @property
    def _calls(self) -> Any:
        """The P2P by which our node of the DHT calls others."""
        return MemberCalls(self._p2p, self._private, self._prove) if self._private else self._p2p

    async def _prove(self, to: PeerId) -> None:
        """Both prove to be members. Raises AskError, and _NETWORK_ERRORS."""
        assert self._private is not None
        await exchange_proofs(self._private, self._asker.ask_any, to)

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

    async def start(self) -> P2P:
        """Raises UserError if it cannot listen there."""
        try:
            return await P2P.create(
                host_maddrs=[Multiaddr(address) for address in self.listen],
                announce_maddrs=[Multiaddr(address) for address in self.announce] or None,
                identity_path=str(self.key),
                check_if_identity_free=False,
                startup_timeout=LIBP2P_START_S,
                idle_timeout=3600,
                use_auto_relay=True,
            )
        except (P2PDaemonError, ValueError) as error:
            raise UserError(f"cannot listen on {', '.join(self.listen)}: {_last_line(error)}") from None

    def at_ports_of(self, daemon: P2P) -> "DaemonPlace":
        """The same place, with the port that `tcp/0` became: others know that one."""
        ports = {address["tcp"] for address in daemon._visible_maddrs or () if "tcp" in address}
        port = ports.pop() if len(ports) == 1 else "0"
        return replace(self, listen=tuple(re.sub("/tcp/0$", f"/tcp/{port}", address) for address in self.listen))


async def _dht_node(p2p: Any, valid: "SignedRecords", known: Iterable[PeerId]) -> DHTNode:
    node = await DHTNode.create(
        p2p=p2p,
        initial_peers=[Multiaddr(f"/p2p/{peer}") for peer in known] or None,
        record_validator=valid,
        ensure_bootstrap_success=False,
        strict=False,
        cache_locally=False,
        cache_nearest=0,
        num_workers=4,
    )
    protocol = node.protocol
    protocol.storage = protocol.cache = BoundedStorage(valid, protocol.storage)  # others may ask for either
    return node


class HivemindDirectory:
    """A Directory on hivemind's Kademlia DHT."""

    def __init__(self, dht: DHTNode, valid: "SignedRecords", connected: Set[PeerId]) -> None:
        """`connected`: the peers that the transport is connected to, as they come and go."""
        self._dht, self._valid, self._connected = dht, valid, connected

    async def revive(self, p2p: Any, known: Iterable[PeerId]) -> None:
        """A new node in the place of the one whose daemon has ended. It has no records: others send them again."""
        with suppress(Exception):  # it wants to tell the daemon, which is gone
            async with asyncio.timeout(DHT_END_S):
                await self._dht.shutdown()
        self._dht = await _dht_node(p2p, self._valid, known)

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        try:
            async with asyncio.timeout(STORE_S):
                await self._meet_again()
                return bool(await self._dht.store(self._valid.hidden(key), value, expires, subkey=subkey))
        except (*_NETWORK_ERRORS, TimeoutError):
            return False

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        try:
            async with asyncio.timeout(FETCH_S):
                await self._meet_again()
                found = await self._dht.get(self._valid.hidden(key), latest=True)
        except (*_NETWORK_ERRORS, TimeoutError):
            return {}
        return _plain(found)

    async def _meet_again(self) -> None:
        """Fills the routing table if it is empty.

        A peer that leaves one call unanswered for 3 s is out of hivemind's table. In a swarm of two it was the only
        one, and then the records of each would not reach the other until they expire.
        """
        if not self._dht.protocol.routing_table.uid_to_peer_id:
            some = random.sample(sorted(self._connected), min(MEET_AGAIN, len(self._connected)))
            await asyncio.gather(*map(self.meet, some))

    async def meet(self, peer: PeerId) -> None:
        """Puts a peer that we are connected to into the routing table."""
        with suppress(*_NETWORK_ERRORS, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self._dht.protocol.call_ping(PeerID.from_base58(peer))

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[Seconds]:
        """How far these peers' clocks are ahead of ours, to half of the way there and back; of those that answer."""
        asked = await asyncio.gather(*map(self._clock_ahead_s, peers))
        return [ahead_s for ahead_s in asked if ahead_s is not None]

    async def _clock_ahead_s(self, peer: PeerId) -> Seconds | None:
        protocol = self._dht.protocol
        question, began = PingRequest(peer=protocol.node_info), self._valid.now()
        try:
            async with asyncio.timeout(CONNECT_S):
                answer = await protocol.get_stub(PeerID.from_base58(peer)).rpc_ping(question, timeout=CONNECT_S)
        except Exception:  # of another peer's answer
            return None
        return answer.dht_time - (began + self._valid.now()) / 2 if answer.dht_time else None

    async def close(self) -> None:
        await self._dht.shutdown()


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Our node of the DHT stores and returns only records of our keys that are signed by the peer they name.

    In a private swarm that peer also has to prove that it is a member.
    """

    def __init__(self, keys: Iterable[str], now: Callable[[], float], private: PrivateSwarm | None = None) -> None:
        self.now, self._open = now, storable(private)
        self.hidden: Callable[[str], str] = private.hidden if private else lambda key: key
        self._most_bytes = BYTES_HEADER_BYTES + (MAX_SEAL_BYTES if private else 0)
        self._keys = {DHTID.generate(source=self.hidden(key)).to_bytes(): key for key in keys}
        self._private = private

    def stored(self) -> StoredRecords:
        """The room of a new node."""
        return StoredRecords(self._keys, self._private.holder_of) if self._private else StoredRecords(self._keys)

    def validate(self, record: DHTRecord) -> bool:
        key = self._keys.get(record.key)
        if key is None or len(record.subkey) > MAX_SUBKEY_BYTES:
            return False
        if len(record.value) > identity.max_record_bytes(key) + self._most_bytes:
            return False
        try:
            peer = MSGPackSerializer.loads(record.subkey)
            value = DHTProtocol.serializer.loads(record.value)
            if not isinstance(peer, str) or not isinstance(value, bytes):
                return False
            _, expires = self._open(key, PeerId(peer), value, self.now())
        except Exception:  # another peer's bytes may raise anything
            return False
        return bool(expires == record.expiration_time)


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """What our node of the DHT stores, within the room that there is. It does not bound what we read of others: those
    that are refused room here must not keep us from reading the rest."""

    def __init__(self, valid: SignedRecords, before: DHTLocalStorage) -> None:
        """`before`: what the node has stored since it began."""
        super().__init__()
        self._now, self._room = valid.now, valid.stored()
        for key, (values, _) in before.items():
            for subkey, (value, expires) in values.items():
                self.store_subkey(key, subkey, value, expires)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        if not self._room.take((key.to_bytes(), subkey), expiration_time, len(value), self._now()):
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


async def _not_yet(_sender: PeerId, _question: Envelope) -> Envelope:
    return Envelope(Refused(Reason.NOT_READY))


def parse_address(address: str) -> tuple[PeerId, str]:
    """The peer and the place in `/ip4/1.2.3.4/tcp/4001/p2p/Qm...`. Raises UserError."""
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


def packed_address(address: str) -> bytes:
    """A valid address, or `/p2p/Qm...` as the peer's id alone, as libp2p's own messages have it."""
    peer = address.removeprefix("/p2p/")
    return bytes(Multiaddr(address).to_bytes() if peer == address else PeerID.from_base58(peer).to_bytes())


def address_text(packed: bytes) -> str:
    """An address that a peer has sent; "" if it is none."""
    try:
        return str(Multiaddr(packed))
    except Exception:  # multiaddr raises what its parsers raise
        return ""


def _plain(found: Any) -> dict[str, bytes]:
    """The DHT's answer as bytes by subkey, without values of any other type."""
    if not isinstance(found, ValueWithExpiration) or not isinstance(found.value, Mapping):
        return {}
    values = {key: one.value if isinstance(one, ValueWithExpiration) else one for key, one in found.value.items()}
    return {key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, bytes)}


def _failure(error: BaseException) -> AskError:
    """Why no answer came: the other peer is out of reach, or this machine has nothing left to ask with."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        remedy = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        return AskError(Reason.RESOURCES, f"{error.strerror}{remedy}")
    return AskError(Reason.UNREACHABLE, _last_line(error))


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__
