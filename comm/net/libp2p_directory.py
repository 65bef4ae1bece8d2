"""The directory over libp2p: our node of hivemind's Kademlia DHT, which keeps and returns signed records only."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, DispatchFailure
from hivemind.proto.dht_pb2 import PingRequest
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from decentral.comm.net.member_calls import MemberCalls
from decentral.comm.net.stored_records import StoredRecords
from decentral.comm.wire import identity
from decentral.comm.wire.private_swarm import MAX_SEAL_BYTES, PrivateSwarm, storable
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

CONNECT_S = 10.0
STORE_S = 10.0
STORE_TRIES = 3  # until a peer other than us has a record: a search that waits for dead peers drops them as it goes
FETCH_S = 10.0
DHT_END_S = 1.0
MAX_SUBKEY_BYTES = 128  # a peer id as the DHT packs it has about 50
BYTES_HEADER_BYTES = 5  # of a record as msgpack packs bytes
MEET_AGAIN = 3  # peers that are asked back into an empty routing table at once
NETWORK_ERRORS = (ControlFailure, DispatchFailure, P2PDaemonError, ConnectionError, OSError, EOFError)


async def dht_node(p2p: P2P | MemberCalls, valid: "SignedRecords", known: Iterable[PeerId]) -> DHTNode:
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

    async def revive(self, p2p: P2P | MemberCalls, known: Iterable[PeerId]) -> None:
        """A new node in the place of the one whose daemon has ended. It has no records: others send them again."""
        with suppress(Exception):  # it wants to tell the daemon, which is gone
            async with asyncio.timeout(DHT_END_S):
                await self._dht.shutdown()
        self._dht = await dht_node(p2p, self._valid, known)

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        return await self._store(key, subkey, value, expires)

    async def store_at_others(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        for _ in range(STORE_TRIES):
            if await self._store(key, subkey, value, expires, exclude_self=True):
                return True
        return False

    async def _store(self, key: str, subkey: str, value: bytes, expires: float, exclude_self: bool = False) -> bool:
        hidden = self._valid.hidden(key)
        try:
            async with asyncio.timeout(STORE_S):
                await self._meet_again()
                return bool(await self._dht.store(hidden, value, expires, subkey=subkey, exclude_self=exclude_self))
        except (*NETWORK_ERRORS, TimeoutError):
            return False

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        try:
            async with asyncio.timeout(FETCH_S):
                await self._meet_again()
                found = await self._dht.get(self._valid.hidden(key), latest=True)
        except (*NETWORK_ERRORS, TimeoutError):
            return {}
        return _plain(found)

    async def _meet_again(self) -> None:
        """Fills the routing table if it is empty.

        A peer that leaves one call unanswered for 3 s is out of hivemind's table. In a swarm of two it was the only
        one, and then the records of each would not reach the other until they expire.
        """
        if not self._dht.protocol.routing_table.uid_to_peer_id:
            await at_once(map(self.meet, self.some_connected()))

    def some_connected(self) -> list[PeerId]:
        """A few of the peers that we are connected to, by chance."""
        return random.sample(sorted(self._connected), min(MEET_AGAIN, len(self._connected)))

    async def meet(self, peer: PeerId) -> None:
        with suppress(*NETWORK_ERRORS):
            async with asyncio.timeout(CONNECT_S):
                await self._dht.protocol.call_ping(PeerID.from_base58(peer))

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[Seconds]:
        """How far these peers' clocks are ahead of ours, to half of the way there and back; of those that answer."""
        asked = await at_once(map(self._clock_ahead_s, peers))
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
        return StoredRecords(self._keys, self._private)

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
        if self._has(key, subkey, value, expiration_time):
            return True  # another node has brought it already: who stores it now is to hear that it is here
        if not self._room.take((key.to_bytes(), subkey), expiration_time, len(value), self._now()):
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _has(self, key: DHTID, subkey: str, value: bytes, expires: float) -> bool:
        found = self.get(key)
        records = found.value if found else None
        return isinstance(records, DictionaryDHTValue) and records.get(subkey) == ValueWithExpiration(value, expires)


def _plain(found: ValueWithExpiration | None) -> dict[str, bytes]:
    """The DHT's answer as bytes by subkey, without values of any other type."""
    if not isinstance(found, ValueWithExpiration) or not isinstance(found.value, Mapping):
        return {}
    values = {key: one.value if isinstance(one, ValueWithExpiration) else one for key, one in found.value.items()}
    return {key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, bytes)}
