"""Guard the calls of hivemind's DHT: who may call our node, how often and with what, and which answers our node takes.

hivemind's DHT calls other nodes through a P2P object, and takes every argument of a call for granted. `GuardedCalls`
takes the place of that object, and checks each call before the DHT sees it. In a private swarm it refuses all peers
that are not members. So a refused peer cannot discover other peers, and cannot store or read records, not even
encrypted records; and before our node calls a peer, both peers prove their membership.

A node's id in the DHT is the hash of its peer id (`node_id`). So nobody can place a node next to a chosen key, except
by making peer ids until the hash of one fits.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from google.protobuf.message import Message
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto.dht_pb2 import (
    FOUND_DICTIONARY,
    NOT_FOUND,
    FindRequest,
    FindResponse,
    FindResult,
    PingRequest,
    StoreRequest,
)

from decentral.comm.net.dht_values import require_records
from decentral.comm.net.dialling import Target
from decentral.comm.net.fair_shares import RateShare
from decentral.comm.wire.private_swarm import NOT_COUNTED, PrivateSwarm, share_holder
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.ip_networks import SITE, network_of
from decentral.core.reasons import Reason
from decentral.core.units import MiB, Seconds

MOST_CALLS = 256  # our node answers at most this many calls a second; one site alone gets half, one peer alone a third
# After this many bytes of answers in a second our node answers no call in that second; one site alone gets half. A key
# with 64 records of 2 kB that 128 peers look up every 26 s takes 0.6 MiB/s. The limit exceeds the largest answer
# (MOST_ANSWERED_BYTES), so that one such answer does not make our node refuse all other callers.
ANSWER_BYTES = 4 * MiB
MOST_NEAREST = 20  # an answer may name at most this many nodes, as many as a bucket of hivemind holds
# Longest peer id in an answer; libp2p's have at most 44 bytes. hivemind writes each peer id in base58, in a time that
# grows with the square of its length: 1.9 s for 40 kB.
MOST_PEER_ID_BYTES = 64
MOST_NODES = 4096  # our routing table has at most this many nodes, including those that wait to replace another node
# A node enters our routing table only if one of its Groups has fewer than this many nodes there: half of a bucket. So
# nobody fills our table, or a bucket, from one site, and a swarm behind one router still finds its nodes. The filter of
# libp2p's DHT is stricter, but does not apply inside a LAN: of an IPv4 /16 it admits 2 nodes to a bucket and 3 to the
# table (go-libp2p-kad-dht, rt_diversity_filter.go and dual/dual.go).
MOST_OF_SITE = 10

Call = Callable[[Message, P2PContext], Awaitable[Message]]
Connect = Callable[[PeerId], Awaitable[None]]
Places = Callable[[PeerId], Awaitable[Iterable[str]]]
Group = tuple[str, int]
"""A site, and how many leading bits the ids of its nodes share with our node's id."""


def node_id(peer: PeerID) -> DHTID:
    """Return the id of a peer's node in the DHT: the hash of its peer id."""
    return DHTID.generate(source=peer.to_bytes())


def sites_of(peer: PeerId, places: Iterable[str]) -> set[str]:
    """Return the sites (IP networks, `SITE`) of the addresses of our connections to a peer."""
    targets = (Target.of(peer, place) for place in places)
    return {network_of(target.ip, SITE) for target in targets if target is not None}


class CallShares:
    """Counts the calls and the bytes of answers of each site and each peer per second, and limits both (`FairShare`).

    A call must fit in the free share of its site, and in that of its peer. For the peer, as much as its site has used
    does not count as free. So one peer alone gets a third of all calls, and the other peers of its site, such as those
    behind the same router or relay, get calls as well.
    """

    def __init__(self, now: Callable[[], Seconds], private: PrivateSwarm | None = None) -> None:
        """Begin with no calls.

        Args:
            now: Returns the time in seconds.
            private: Our private swarm, in which all peers with one invitation have one share; None in a public swarm.
        """
        self._private = private
        self._calls, self._sent = ((RateShare(most, now), RateShare(most, now)) for most in (MOST_CALLS, ANSWER_BYTES))

    def begin(self, caller: PeerId, site: str) -> None:
        """Count a call before it is answered. A refused call is not counted.

        Raises:
            ProtocolError: If the caller, or all callers at its site together, have used their share of this second.
        """
        holder = share_holder(self._private, caller)
        for (of_site, of_peer), amount in ((self._sent, 0), (self._calls, 1)):
            if not of_site.fits(site, amount) or not of_peer.fits(holder, amount, of_site.used_by(site)):
                raise ProtocolError(Reason.BUSY, "you have used your share of this node's calls; try later")
        self._count(self._calls, site, holder, 1)

    def answered(self, caller: PeerId, site: str, size: int) -> None:
        """Count the bytes of the answer to a call."""
        self._count(self._sent, site, share_holder(self._private, caller), size)

    @staticmethod
    def _count(shares: tuple[RateShare, RateShare], site: str, holder: PeerId, amount: int) -> None:
        for share, of in zip(shares, (site, holder), strict=True):
            share.add(of, amount)


class GuardedCalls:
    """A hivemind P2P that checks the calls of the DHT in both directions; in a private swarm only members call."""

    def __init__(
        self,
        p2p: P2P,
        shares: CallShares,
        reach: Connect,
        places: Places,
        private: PrivateSwarm | None = None,
        prove: Connect | None = None,
    ) -> None:
        """Wrap a P2P.

        Args:
            p2p: Makes and answers the calls.
            shares: Counts the calls that our node answers.
            reach: Connects to a peer before our node calls it, since the daemon would dial without a limit. It raises
                AskError if the peer is not reached or must not be dialled.
            places: Returns the addresses of our connections to a peer.
            private: Our private swarm, which knows the members; None in a public swarm.
            prove: In a private swarm, exchanges proofs with a peer. It raises AskError if either side does not accept
                the other's proof.
        """
        self._p2p, self._shares, self._reach, self.places = p2p, shares, reach, places
        self._private, self._prove = private, prove

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped P2P that this class does not define."""
        return getattr(self._p2p, name)

    async def add_protobuf_handler(self, name: str, handler: Call, kind: type[Message], **options: bool) -> None:
        """Register a handler, which gets the calls that pass all checks; a caller of any other call gets an error.

        In a private swarm the error for a peer that is not a member is a PermissionError, else a ProtocolError.
        """

        async def guarded(request: Message, context: P2PContext) -> Message:
            caller = PeerId(context.remote_id.to_base58())
            refusal = self._private.refusal(caller) if self._private else None
            if refusal is not None:
                raise PermissionError(_marked(refusal))
            site = min(sites_of(caller, await self.places(caller)), default="")
            self._shares.begin(caller, site)
            check_request(request, context.remote_id)
            answer = await handler(request, context)
            self._shares.answered(caller, site, answer.ByteSize())
            return answer

        await self._p2p.add_protobuf_handler(name, guarded, kind, **options)

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Message, kind: type[Message]) -> Message:
        """Call a peer and return its answer, without what `keep_honest` removes.

        In a private swarm, exchange proofs first if the peer is not known as a member. A member refuses the call if it
        has forgotten our proof, or knows only our proof of an earlier invitation. Then we exchange proofs and call
        again.

        Raises:
            AskError: If the peer is not reached, or either side does not accept the other's proof.
            Exception: hivemind's error if the call fails.
        """
        await self._reach(PeerId(peer.to_base58()))
        answer = await self._answer(peer, name, request, kind)
        keep_honest(answer, peer)
        return answer

    async def _answer(self, peer: PeerID, name: str, request: Message, kind: type[Message]) -> Message:
        if self._private is None or self._prove is None:
            return await self._p2p.call_protobuf_handler(peer, name, request, kind)
        to = PeerId(peer.to_base58())
        if self._private.admits(to):
            try:
                return await self._p2p.call_protobuf_handler(peer, name, request, kind)
            except Exception as error:  # hivemind passes the other peer's error on as text only
                if not any(_marked(reason) in str(error) for reason in NOT_COUNTED):
                    raise
        await self._prove(to)
        return await self._p2p.call_protobuf_handler(peer, name, request, kind)


def check_request(request: Message, caller: PeerID) -> None:
    """Raise ProtocolError unless a call of the DHT is one that a node of ours could make.

    A node of ours names its own id, or none. It asks for one key, or stores one record of a dictionary at a time, not
    in a cache, and never asks to be called back.
    """
    assert isinstance(request, FindRequest | PingRequest | StoreRequest)
    if request.peer.node_id not in (b"", node_id(caller).to_bytes()):
        raise ProtocolError(Reason.IDENTITY, "a node's id must be the hash of its peer id")
    if isinstance(request, PingRequest):
        fits = not request.validate
    elif isinstance(request, FindRequest):
        fits = len(request.keys) == 1 and len(request.keys[0]) == DHTID.HASH_NBYTES
    else:
        fields = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
        fits = all(len(field) == 1 for field in fields) and len(request.keys[0]) == DHTID.HASH_NBYTES
        fits = fits and not request.in_cache[0] and request.subkeys[0] not in DHTProtocol.RESERVED_SUBKEYS
    if not fits:
        raise ProtocolError(Reason.FIELDS, "a call must find one key, or store one record of a peer")


def keep_honest(answer: Message, peer: PeerID) -> None:
    """Remove from an answer what no honest node would send.

    Remove all nodes whose id is not the hash of their peer id, including the answering node, and all values that
    `require_records` refuses. An answer with results for more or fewer keys than one, or with more nodes or longer peer
    ids than an honest node sends, loses all results before any is read, so that no answer keeps the event loop busy.

    Args:
        answer: The answer, which is changed.
        peer: The peer that has answered.
    """
    if answer.peer.node_id not in (b"", node_id(peer).to_bytes()):
        answer.ClearField("peer")
    if not isinstance(answer, FindResponse):
        return
    if len(answer.results) != 1 or not _is_small(answer.results[0]):
        answer.ClearField("results")
        return
    result = answer.results[0]
    if not _is_readable(result):
        result.ClearField("type")  # hivemind reads this as: nothing was found
    pairs = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
    honest = [(node, other) for node, other in pairs if node == node_id(PeerID(other)).to_bytes()]
    result.nearest_node_ids[:] = [node for node, _ in honest]
    result.nearest_peer_ids[:] = [other for _, other in honest]


def _is_small(result: FindResult) -> bool:
    """Return whether an answer names at most MOST_NEAREST nodes, whose peer ids have at most MOST_PEER_ID_BYTES."""
    nodes, peers = result.nearest_node_ids, result.nearest_peer_ids
    return max(len(nodes), len(peers)) <= MOST_NEAREST and all(len(peer) <= MOST_PEER_ID_BYTES for peer in peers)


def _is_readable(result: FindResult) -> bool:
    """Return whether hivemind may read what a node has found."""
    if result.type != FOUND_DICTIONARY:
        return bool(result.type == NOT_FOUND)  # valid records have subkeys (peer ids), so they come in a dictionary
    try:
        require_records(result.value, result.expiration_time)
    except Exception:  # a malformed value may raise any error
        return False
    return True


class GuardedTable:
    """The rule by which our node learns of other nodes; `update` takes the place of DHTProtocol.update_routing_table.

    A new node enters the table only if the table has fewer than MOST_NODES nodes, and at least one of the new node's
    Groups has fewer than MOST_OF_SITE. A node's site is that of the address of our connection to it, which may be the
    address of its router or relay. If a new node may not enter, we ping the node in its way that we have heard
    of longest ago, and replace that node if it does not answer. Other nodes' answers name nodes without addresses, so
    the rule does not bound how many nodes of one site a lookup asks.

    hivemind's rule also sends all records that we store to each new node, so that any peer could make us send them as
    often as it likes. Our rule sends none: a record reaches a new node when its publisher renews it.
    """

    def __init__(self, protocol: DHTProtocol, places: Places) -> None:
        """Keep the routing table of a node.

        Args:
            protocol: The node's protocol.
            places: Returns the addresses of our connections to a peer.
        """
        self._protocol, self._places = protocol, places
        self._groups: dict[DHTID, set[Group]] = {}  # by node in the table, the node heard of longest ago first
        self._counts = Counter[Group]()  # number of nodes of each group
        self._pings = False  # whether a node that is in the way of a new node is being pinged

    async def update(self, node: DHTID | None, peer: PeerID, responded: bool = True) -> None:
        """Add a peer's node to the routing table, or remove it if the peer did not answer.

        Args:
            node: The id that the peer claims; None if it claims none. A peer with a wrong id is no node.
            peer: The peer that called us, or that we called.
            responded: False if the peer did not answer our call.
        """
        table, own = self._protocol.routing_table, node_id(peer)
        if not responded:
            if own in table:
                del table[own]
            self._counts -= Counter(self._groups.pop(own, ()))
        elif node == own and (own in table or await self._has_room(own, peer)):
            self._groups[own] = self._groups.pop(own, set())
            oldest = table.add_or_update_node(own, peer)
            if oldest is not None:
                await self._protocol.call_ping(oldest[1])

    async def _has_room(self, node: DHTID, peer: PeerID) -> bool:
        """Return whether a new node may enter the table, and count it in its groups."""
        name, shared = PeerId(peer.to_base58()), DHTID.HASH_NBYTES * 8 - (node ^ self._protocol.node_id).bit_length()
        groups = {(site, shared) for site in sites_of(name, await self._places(name))}
        if not groups or (self._is_full(groups) and not await self._replaces(groups)):
            return False
        if node not in self._groups:  # another task may have added the node during the `await`
            self._groups[node] = groups
            self._counts.update(groups)
        return True

    def _is_full(self, groups: set[Group]) -> bool:
        return len(self._groups) >= MOST_NODES or all(self._counts[one] >= MOST_OF_SITE for one in groups)

    async def _replaces(self, groups: set[Group]) -> bool:
        """Ping the node in the way of these groups, if no ping runs; return whether a new node may enter now."""
        if self._pings:
            return False
        nodes = (node for node, its in self._groups.items() if len(self._groups) >= MOST_NODES or its & groups)
        peer = self._protocol.routing_table.get(node_id=next(nodes))
        self._pings = True
        try:
            if await self._protocol.call_ping(peer) is None:
                await self.update(None, peer, responded=False)
        finally:
            self._pings = False
        return not self._is_full(groups)


def _marked(reason: Reason) -> str:
    return f"members only: {reason}"
