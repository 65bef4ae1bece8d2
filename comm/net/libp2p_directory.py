"""Run our node of hivemind's Kademlia DHT, which stores and returns signed records only.

Start with `HivemindDirectory`. `SignedRecords` decides which records are valid, `BoundedStorage` how many are stored.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, DispatchFailure
from hivemind.proto.dht_pb2 import PingRequest
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from decentral.comm.net.dht_calls import GuardedCalls, GuardedTable, node_id
from decentral.comm.net.dht_values import plain
from decentral.comm.net.stored_records import StoredRecords
from decentral.comm.wire import identity
from decentral.comm.wire.invitations import MAX_SEAL_BYTES
from decentral.comm.wire.private_swarm import PrivateSwarm, storable
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

CONNECT_S = 10.0
STORE_S = 10.0
STORE_TRIES = 3  # `store_at_others` tries this often; each try removes unreachable peers from the routing table
FETCH_S = 10.0
JOIN_S = 3.0  # a new node searches for the nodes nearest to it for at most this long
DHT_END_S = 1.0
MAX_SUBKEY_BYTES = 128  # a record with a longer subkey is refused; a peer id, packed for the DHT, has about 50 bytes
BYTES_HEADER_BYTES = 5  # msgpack puts at most this many bytes before the bytes of a record
LEAST_EXPIRIES = 64  # a storage always keeps up to this many expiry times of replaced records before it removes them
MEET_AGAIN = 3  # to join the DHT again, we ping or dial at most this many peers
NETWORK_ERRORS = (ControlFailure, DispatchFailure, P2PDaemonError, ConnectionError, OSError, EOFError)


def leave_lookups_unreported(loop: asyncio.AbstractEventLoop) -> None:
    """Keep the loop from reporting the tasks that hivemind's lookups leave behind when they are cancelled.

    Such a task waits for an `asyncio.Event` that only the lookup would have set (hivemind/dht/traverse.py).
    """
    before = loop.get_exception_handler()

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "was destroyed" in context["message"] and context["task"].get_coro().__qualname__ == "Event.wait":
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(report)


async def dht_node(p2p: GuardedCalls, valid: "SignedRecords", known: Iterable[PeerId]) -> DHTNode:
    """Start and return a DHT node, which stores only records that `valid` accepts and joins through `known` peers."""
    node = await DHTNode.create(
        node_id=node_id(p2p.peer_id),
        p2p=p2p,
        record_validator=valid,
        cache_locally=False,
        cache_nearest=0,
        num_workers=4,
    )
    protocol = node.protocol
    protocol.storage = protocol.cache = BoundedStorage(valid, protocol.storage)  # hivemind's lookups read both
    protocol.update_routing_table = GuardedTable(protocol, p2p.places).update
    leave_lookups_unreported(asyncio.get_running_loop())
    await at_once(protocol.call_ping(PeerID.from_base58(peer)) for peer in known)
    with suppress(TimeoutError):
        async with asyncio.timeout(JOIN_S):
            await node.find_nearest_nodes([node.node_id])
    return node


class HivemindDirectory:
    """Implementation of Directory by our node of hivemind's Kademlia DHT."""

    def __init__(self, dht: DHTNode, valid: "SignedRecords", connected: Set[PeerId]) -> None:
        """Use a running DHT node. `connected` is the set of connected peers, which the transport keeps current."""
        self._dht, self._valid, self._connected = dht, valid, connected

    async def revive(self, p2p: GuardedCalls, known: Iterable[PeerId]) -> None:
        """Start a new DHT node after a restart of the libp2p daemon; it joins the DHT through the `known` peers.

        The new node has no records until other peers store their records again.
        """
        with suppress(Exception):  # the old daemon is gone, so the shutdown may raise any error
            async with asyncio.timeout(DHT_END_S):
                await self._dht.shutdown()
        self._dht = await dht_node(p2p, self._valid, known)

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a record until `expires` (unix seconds), and return whether at least one node accepted it."""
        return await self._store(key, subkey, value, expires)

    async def store_at_others(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a record until `expires` (unix seconds) at other nodes, and return whether at least one accepted it."""
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
        """Return the values of a key that have not expired, by subkey; empty if the DHT does not answer in FETCH_S."""
        try:
            async with asyncio.timeout(FETCH_S):
                await self._meet_again()
                found = await self._dht.get(self._valid.hidden(key), latest=True)
        except (*NETWORK_ERRORS, TimeoutError):
            return {}
        return _plain(found)

    async def _meet_again(self) -> None:
        """Ping some connected peers if the routing table is empty: each peer that answers enters the table again.

        hivemind removes a peer from the table if the peer does not answer a call within 3 s. In a swarm of two peers
        the table is then empty, and without the ping neither peer would get new records from the other peer.
        """
        if not self._dht.protocol.routing_table.uid_to_peer_id:
            await at_once(map(self.meet, self.some_connected()))

    def some_connected(self) -> list[PeerId]:
        """Return up to MEET_AGAIN connected peers, chosen at random."""
        return random.sample(sorted(self._connected), min(MEET_AGAIN, len(self._connected)))

    async def meet(self, peer: PeerId) -> None:
        """Ping a peer, which puts it into the routing table if it answers."""
        with suppress(*NETWORK_ERRORS):
            async with asyncio.timeout(CONNECT_S):
                await self._dht.protocol.call_ping(PeerID.from_base58(peer))

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[Seconds]:
        """Return how many seconds each peer's clock is ahead of ours; a peer that does not answer is left out.

        Each value is off by at most half of the round trip to that peer.
        """
        asked = await at_once(map(self._clock_ahead_s, peers))
        return [ahead_s for ahead_s in asked if ahead_s is not None]

    async def _clock_ahead_s(self, peer: PeerId) -> Seconds | None:
        protocol = self._dht.protocol
        question, began = PingRequest(peer=protocol.node_info), self._valid.now()
        try:
            async with asyncio.timeout(CONNECT_S):
                answer = await protocol.get_stub(PeerID.from_base58(peer)).rpc_ping(question, timeout=CONNECT_S)
        except Exception:  # a malformed answer may raise any error
            return None
        return answer.dht_time - (began + self._valid.now()) / 2 if answer.dht_time else None

    async def close(self) -> None:
        """Stop our DHT node, but not the libp2p daemon."""
        await self._dht.shutdown()


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Decides which records our DHT node stores and returns: those under our keys, signed by the peer in the subkey.

    In a private swarm a record must also include the peer's proof of an invitation; an expired invitation is accepted.
    """

    def __init__(self, keys: Iterable[str], now: Callable[[], float], private: PrivateSwarm | None = None) -> None:
        """Accept records under these keys only.

        Args:
            keys: DHT keys of the run.
            now: Returns unix time.
            private: Our private swarm; None if the swarm is public.
        """
        self.now, self._open = now, storable(private)
        self.hidden: Callable[[str], str] = private.hidden if private else lambda key: key
        self._most_bytes = BYTES_HEADER_BYTES + (MAX_SEAL_BYTES if private else 0)
        self._keys = {DHTID.generate(source=self.hidden(key)).to_bytes(): key for key in keys}
        self._private = private

    def stored(self) -> StoredRecords:
        """Return an empty StoredRecords, which limits how many records a new DHT node stores under our keys."""
        return StoredRecords(self._keys, self._private)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether our node may store or return this record."""
        key = self._keys.get(record.key)
        if key is None or len(record.subkey) > MAX_SUBKEY_BYTES:
            return False
        if len(record.value) > identity.max_record_bytes(key) + self._most_bytes:
            return False
        try:
            peer, value = plain(record.subkey), plain(record.value)
            if not isinstance(peer, str) or not isinstance(value, bytes):
                return False
            _, expires = self._open(key, PeerId(peer), value, self.now())
        except Exception:  # a malformed record may raise any error
            return False
        return bool(expires == record.expiration_time)


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """The records that our node of the DHT stores, within the limits of StoredRecords.

    The limits do not apply to records that we read from other nodes, so we can also read records that our node does
    not store.
    """

    def __init__(self, valid: SignedRecords, before: DHTLocalStorage) -> None:
        """Take over the records of another storage.

        Args:
            valid: Gives the time, and the limits of this storage (`SignedRecords.stored`).
            before: The storage that the node has used until now. Its records are copied as far as the limits allow.
        """
        super().__init__()
        self._now, self._room = valid.now, valid.stored()
        for key, (values, _) in before.items():
            for subkey, (value, expires) in values.items():
                self.store_subkey(key, subkey, value, expires)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Store a record until `expiration_time` (unix seconds), and return whether our node has it now."""
        if self._has(key, subkey, value, expiration_time):
            return True  # our node already has the same record
        if not self._room.take((key.to_bytes(), subkey), expiration_time, len(value), self._now()):
            return False
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        for storage in (self, self.data[key].value) if stored else ():
            _forget_replaced(storage)
        return stored

    def _has(self, key: DHTID, subkey: str, value: bytes, expires: float) -> bool:
        found = self.get(key)
        records = found.value if found else None
        return isinstance(records, DictionaryDHTValue) and records.get(subkey) == ValueWithExpiration(value, expires)


def _forget_replaced(storage: TimedStorage) -> None:
    """Remove the expiry times of replaced records once they are the majority; hivemind keeps each until it is past."""
    expiries, latest = storage.expiration_heap, storage.key_to_heap
    if len(expiries) > 2 * len(latest) + LEAST_EXPIRIES:
        expiries[:] = sorted(latest.values())  # a sorted list is a valid heap


def _plain(found: ValueWithExpiration | None) -> dict[str, bytes]:
    """Return the values of type bytes that a DHT lookup has found, by subkey."""
    if not isinstance(found, ValueWithExpiration) or not isinstance(found.value, Mapping):
        return {}
    values = {key: one.value if isinstance(one, ValueWithExpiration) else one for key, one in found.value.items()}
    return {key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, bytes)}
