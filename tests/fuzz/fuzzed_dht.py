"""The DHT node of a peer among liars, without a network: its calls come as bytes, and so do the answers that it gets.

hivemind's node, our guard, our storage and our rules for records are the real ones. `Network` takes the place of the
libp2p daemon: it has the handlers by name, as hivemind's client has them, and answers what our node asks with what a
liar says.

    no error of a task    whatever a call raises, its caller gets; nothing is left in the event loop
    bounded               the routing table, the records, and what hivemind keeps of their expiry
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Literal

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2PContext, PeerID

from decentral.comm.net.dht_calls import MOST_NODES, CallShares, GuardedCalls
from decentral.comm.net.libp2p import TIMED
from decentral.comm.net.libp2p_directory import LEAST_EXPIRIES, HivemindDirectory, SignedRecords, dht_node
from decentral.comm.net.stored_records import MOST_STORED
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import AskError
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from tests.comm.wire.invited import HOUR_S, founder, member
from tests.fuzz.dht_calls import Liars, identities
from tests.fuzz.fuzzed_node import Figures, FuzzViolation

Kind = Literal["public", "private"]
KINDS: tuple[Kind, ...] = ("public", "private")
CALLS_A_SECOND = 180.0  # of the clock by which the node counts the calls of each caller
LOOKUPS = 0.004  # part of the steps in which the node asks for records itself


class Network:
    """The daemon's place: handlers by name, and liars who answer."""

    def __init__(self, peer: PeerId, liars: Callable[[], Liars]) -> None:
        self.peer_id, self._liars = PeerID.from_base58(peer), liars
        self.handlers: dict[str, Callable[[bytes, PeerID], Awaitable[Message]]] = {}
        self.answers = 0

    async def add_protobuf_handler(
        self, name: str, handler: Callable[[Message, P2PContext], Awaitable[Message]], kind: type[Message], **_: bool
    ) -> None:
        async def answered(data: bytes, caller: PeerID) -> Message:
            return await handler(kind.FromString(data), P2PContext(name, self.peer_id, caller))

        self.handlers[name] = answered

    async def remove_protobuf_handler(self, name: str, **_: bool) -> None:
        del self.handlers[name]

    async def call_protobuf_handler(self, to: PeerID, name: str, request: Message, kind: type[Message]) -> Message:
        self.answers += 1
        return kind.FromString(self._liars().answer(kind, to))


class FuzzedDht:
    """A node of the kind, and all who call it. Make it with `begin`."""

    liars: Liars
    directory: HivemindDirectory

    def __init__(self, kind: Kind, seed: int, figures: Figures | None = None) -> None:
        self.kind, self.chance = kind, rng.stream(seed, "fuzzed dht", kind)
        self.figures = figures or Figures()
        self.now, self.calls = time.time(), 0

    async def begin(self) -> "FuzzedDht":
        """Starts the node, with everybody who may be a member as one."""
        self._go_by(self.clock)
        own, *others = identities()
        run = founder().run
        keys = [f"{run}/peers", f"{run}/plan"]
        private: PrivateSwarm | None = None
        signers: dict[PeerId, Signer] = {one.peer: one for one in others}
        if self.kind == "private":
            keys.append(revoked_key(run))
            private = member(own.peer, until=self.now + HOUR_S, now=self.clock)
            swarms = {one: member(one.peer, until=self.now + HOUR_S, now=self.clock) for one in others}
            signers = {one.peer: MemberSigner(one, swarm) for one, swarm in swarms.items()}
            for one, swarm in list(swarms.items())[:-1]:  # the last has not proved itself
                private.verify(one.peer, swarm.proof)
        valid = SignedRecords(keys, self.clock, private)
        self.liars = Liars(self.chance, signers, {key: valid.hidden(key) for key in keys}, self.now)
        self.network = Network(own.peer, lambda: self.liars)
        shares = CallShares(lambda: self.calls / CALLS_A_SECOND, private)
        guarded = GuardedCalls(self.network, shares, self._reach, self._places, private, self._prove)
        node = await dht_node(guarded, valid, ())
        self.directory = HivemindDirectory(node, valid, {one.peer for one in others})
        self._keys = keys
        asyncio.get_running_loop().set_exception_handler(self._left)
        return self

    def clock(self) -> float:
        return self.now

    @staticmethod
    async def _places(peer: PeerId) -> list[str]:
        return [f"/ip4/10.0.{sum(peer.encode()) % 256}.1/tcp/4001/p2p/{peer}"]  # 256 sites

    @staticmethod
    def _go_by(clock: Callable[[], float]) -> None:
        """hivemind goes by this clock from now on, as `Libp2p.start` has it."""
        for module in TIMED:
            import_module(module).get_dht_time = clock  # type: ignore[attr-defined]

    async def step(self) -> None:
        """One call of a liar more, or a lookup of the node."""
        self.calls += 1
        self.now += 1 / CALLS_A_SECOND
        self.liars.now = self.now
        if self.chance.random() < LOOKUPS:
            kind, error = "lookup", await self._lookup()
        else:
            name, data, caller = self.liars.call()
            kind, error = name.rpartition("_")[2], await self._called(name, data, caller)
        await asyncio.sleep(0)  # tasks that the call has begun
        self.figures.add(kind, error)

    async def _called(self, name: str, data: bytes, caller: PeerID) -> str:
        try:
            (await self.network.handlers[name](data, caller)).SerializeToString()
        except ProtocolError as error:
            return str(error.reason)
        except (PermissionError, DecodeError, AssertionError) as error:
            return type(error).__name__
        return ""

    async def _lookup(self) -> str:
        found = await self.directory.fetch(self.chance.choice(self._keys))
        return "" if found else "nothing"

    async def _reach(self, peer: PeerId) -> None:
        if self.chance.random() < 0.1:
            raise AskError(Reason.UNREACHABLE, "nobody is there")

    async def _prove(self, peer: PeerId) -> None:
        if self.chance.random() < 0.5:
            raise AskError(Reason.UNINVITED, "no proof")

    def _left(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.left = context

    left: dict[str, object] | None = None  # an error that nobody has taken

    def check(self) -> None:
        """Raises FuzzViolation if a rule does not hold."""
        protocol = self.directory._dht.protocol
        sizes = {
            "nodes": (len(protocol.routing_table.uid_to_peer_id), MOST_NODES),
            "records": (len(protocol.storage._room.records), MOST_STORED),
            "expiries": (self.expiries(), 4 * self.stored() + 2 * LEAST_EXPIRIES * len(self._keys)),
        }
        if self.left is not None:
            raise FuzzViolation(f"an error in the event loop: {self.left}")
        for name, (size, most) in sizes.items():
            if size > most:
                raise FuzzViolation(f"{size} {name}; at most {most}")

    def expiries(self) -> int:
        storage = self.directory._dht.protocol.storage
        inner = [values.expiration_heap for values, _ in storage.data.values()]
        return sum(map(len, (storage.expiration_heap, *inner)))

    def stored(self) -> int:
        """How many records the node has."""
        return sum(len(values) for values, _ in self.directory._dht.protocol.storage.data.values())

    async def leave(self) -> None:
        await self.directory.close()
        self._go_by(time.time)
