"""A hostile peer over libp2p that eclipses keys of the DHT: all nodes next to a key are its own, and keep nothing.

It grinds `names` key pairs for each key (grinding.py), and runs a libp2p daemon and a node of the DHT with each, under
its own invitation. The nodes ping all peers that it knows again and again, so that they stay in the peers' routing
tables. They accept each record and forget it, answer that nothing is stored, and name each other as the nearest nodes.
The peer itself answers who asks it for records that it knows nobody, and no revocations.

It also tries the attack that needs no grinding: pings with node ids of its own choice. `eclipse.json` in its state
folder counts what it did.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import NodeInfo, PingRequest

from decentral.comm.net.dht_calls import node_id
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import PeerRecords, RecordsQuery
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import BlobBound, Handler, Knows, knows_all
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from tests.hostile.grinding import GroundName, grind

TRIES = 30_000  # key pairs, two seconds of one core
PING_S = 5.0  # time between two pings of a peer by each of the nodes
STARTED_AT_ONCE = 4  # daemons
PINGS_AT_ONCE = 32  # by all nodes together
FORGED = 24  # node ids of its own choice that it names to each peer
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
FIGURES = "eclipse.json"


class Swallowing(DHTLocalStorage):  # type: ignore[misc]
    """A storage that accepts each record and has none."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def get(self, key: DHTID) -> None:
        self._counts["finds"] += 1

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        self._counts["stores"] += 1
        return True


class EclipsingLibp2p(Libp2p):
    """A Transport. `eclipsing` makes the class that eclipses given keys."""

    kinds: tuple[str, ...] = ()
    names = 24

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> HivemindDirectory:
        keys = list(keys)
        found = await super().directory(keys, known)
        eclipsed = [key for key in keys if key.partition("/")[2] in self.kinds]
        if eclipsed:
            self._task = asyncio.create_task(self._eclipse(eclipsed))
        return found

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        async def hiding(sender: PeerId, envelope: Envelope) -> Envelope:
            if isinstance(envelope.message, RecordsQuery):
                return Envelope(PeerRecords(envelope.message.run, ()))
            return await handler(sender, envelope)

        await super().serve(hiding, bound, knows)

    async def close(self) -> None:
        task = self.__dict__.get("_task")
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await super().close()

    async def _eclipse(self, keys: Sequence[str]) -> None:
        """Grind names, start their nodes, and keep them in all peers' routing tables until cancelled."""
        counts, began = Counter[str](), time.monotonic()
        hidden = self._private.hidden if self._private else str
        ids = [DHTID.generate(source=hidden(key)) for key in keys]
        ground, cpu_s = await asyncio.to_thread(_ground, ids, self.names)
        figures = {
            "keys": keys,
            "names": self.names,
            "tries": TRIES,
            "grinding_cpu_s": round(cpu_s, 2),
            "farthest": [_farthest(key, of_key) for key, of_key in zip(ids, ground, strict=True)],
        }
        nodes = list[Libp2p]()
        try:
            for key, of_key in zip(keys, ground, strict=True):
                for at in range(0, len(of_key), STARTED_AT_ONCE):
                    some = of_key[at : at + STARTED_AT_ONCE]
                    nodes += await at_once(self._node(name, key, of_key, counts) for name in some)
            figures["up_s"], figures["up_at"] = round(time.monotonic() - began, 1), time.time()
            turns = asyncio.Semaphore(PINGS_AT_ONCE)
            stays = [self._stay(node, turns, counts) for node in nodes]
            await at_once([*stays, self._forge(nodes[0], ids[0], counts), self._tell(figures, counts)])
        finally:
            await at_once(node.close() for node in nodes)

    async def _node(
        self, name: GroundName, key: str, accomplices: Sequence[GroundName], counts: Counter[str]
    ) -> Libp2p:
        """Start the node of a name, which knows its accomplices only."""
        file = self._place.key.parent / f"{key.partition('/')[2]}-{name.peer}.key"
        file.write_bytes(name.key_file())
        node = await Libp2p.start(file, LOOPBACK, (), self._now, only_dials=True)
        if self._private:
            own = self._private
            await node.enclose(PrivateSwarm(node.peer, own.holding, own.now, own.revocations))
        await node.directory([key], [])
        protocol = _protocol(node)
        protocol.storage, protocol.cache = Swallowing(counts), DHTLocalStorage()
        protocol.record_validator = None
        for other in accomplices:
            if other != name:
                protocol.routing_table.add_or_update_node(node_id(other.peer), other.peer)
        return node

    async def _stay(self, node: Libp2p, turns: asyncio.Semaphore, counts: Counter[str]) -> None:
        """Have a node ping each known peer again and again, so that it stays in the peers' routing tables."""
        while True:
            connected = await node.connections()
            await at_once(self._meet(node, peer, peer in connected, turns, counts) for peer in self._known())
            await asyncio.sleep(PING_S)

    async def _meet(
        self, node: Libp2p, peer: PeerId, connected: bool, turns: asyncio.Semaphore, counts: Counter[str]
    ) -> None:
        async with turns:
            if not connected and await node.dial(peer, self._addresses[peer]):
                counts["dials failed"] += 1
                return
            found = await _protocol(node).call_ping(PeerID.from_base58(peer))
            counts["pings answered" if found else "pings not answered"] += 1

    async def _forge(self, node: Libp2p, key: DHTID, counts: Counter[str]) -> None:
        """Have a node ping each peer once with node ids next to a key, which are not the hash of its own peer id."""
        told = set[PeerId]()
        while True:
            for peer in await node.connections():
                for number in range(0 if peer in told else FORGED):
                    forged = NodeInfo(node_id=DHTID(int(key) ^ number).to_bytes())
                    try:
                        stub = _protocol(node).get_stub(PeerID.from_base58(peer))
                        await stub.rpc_ping(PingRequest(peer=forged), timeout=PING_S)
                        counts["forged ids accepted"] += 1
                    except Exception as error:  # hivemind passes the other peer's error on as text only
                        counts["forged ids refused" if "must be the hash" in str(error) else "forged ids lost"] += 1
                told.add(peer)
            await asyncio.sleep(PING_S)

    async def _tell(self, figures: dict[str, Any], counts: Counter[str]) -> None:
        while True:
            found = {**figures, "peers": len(self._known()), **dict(sorted(counts.items()))}
            (self._place.key.parent / FIGURES).write_text(json.dumps(found, indent=1) + "\n")
            await asyncio.sleep(1.0)

    def _known(self) -> list[PeerId]:
        return [peer for peer in self._addresses if peer != self.peer]


def _ground(keys: Sequence[DHTID], names: int) -> tuple[list[list[GroundName]], float]:
    """Grind, and return the names and the CPU seconds that they took."""
    began = time.thread_time()
    return grind(keys, names, TRIES), time.thread_time() - began


def _protocol(node: Libp2p) -> DHTProtocol:
    assert node._directory is not None
    return node._directory._dht.protocol


def _farthest(key: DHTID, names: Sequence[GroundName]) -> float:
    """Return which part of the DHT's space is nearer to the key than the farthest of these names."""
    return float(max(key.xor_distance(node_id(name.peer)) for name in names) / DHTID.MAX)


def eclipsing(kinds: Sequence[str], names: int = EclipsingLibp2p.names) -> type[EclipsingLibp2p]:
    """Return the transport of a peer that eclipses these keys with so many names each.

    Args:
        kinds: Ends of the run's keys: `peers`, `plan`, `revoked`.
        names: Nodes for each key.
    """
    return type("EclipsingLibp2p", (EclipsingLibp2p,), {"kinds": tuple(kinds), "names": names})


def figures_of(folder: Path) -> dict[str, Any]:
    """Return what the hostile peer of a state folder has counted so far; {} before all its nodes run."""
    try:
        found: dict[str, Any] = json.loads((folder / FIGURES).read_text())
    except (OSError, ValueError):
        return {}
    return found
