"""Refuse to start a peer if another running peer has the same identity, because the state folder was copied.

This peer's record in the DHT does not prove that another peer runs, since the record of a killed peer stays there until
it expires. So the addresses in the record are dialled, except those at which this process itself listens. A temporary
identity dials them, because a libp2p node never dials its own peer id.
"""

import asyncio
from collections.abc import Sequence

from decentral.comm.net import ports
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.network import PeerNetwork, peer_network
from decentral.core.errors import ProtocolError, UserError
from decentral.core.temporary import temporary_folder
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase
from decentral.peers.membership.swarm_size import Look, key_of
from decentral.peers.startup.reach_swarm import SwarmAccess, connect

ANSWERS_S = 5.0  # a running copy of this identity is noticed only if it answers within this time


async def refuse_copy(access: SwarmAccess, own: Signer, transport: PeerNetwork, named: Sequence[str]) -> None:
    """Check that no other running peer has this peer's identity.

    Args:
        access: The run, its DHT, and the addresses at which this peer listens.
        own: This peer's identity.
        transport: This peer's own network.
        named: Addresses given by --join. Those that end in this peer's id are dialled too.

    Raises:
        UserError: If a peer with this identity answers within ANSWERS_S.
    """
    places = [*await _in_record(access, own), *(address for address in named if address.endswith(f"/p2p/{own.peer}"))]
    places = [address for address in dict.fromkeys(places) if address not in access.addresses]
    if not places:
        return
    with temporary_folder() as folder:
        caller: PeerNetwork | None = None
        try:
            try:  # only the connection has a time limit: the libp2p daemon may start slowly on a loaded machine
                key = folder / "identity.key"
                caller = await peer_network().start(key, [ports.LOOPBACK], [], access.clock, only_dials=True)
            except UserError:  # the check needs a second, temporary identity; if that fails, start without the check
                return
            async with asyncio.timeout(ANSWERS_S):
                reached = await connect(caller, places)
            # If our own network is connected to the temporary peer, the address that answered was our own.
            if reached == own.peer and not await transport.has_connection_to(caller.peer):
                remedy = "stop that peer, or start this one with a new --state-dir: a copied folder keeps the identity"
                where = f"a peer with the identity in this --state-dir already runs at {', '.join(places)}"
                raise UserError(f"{where}; {remedy}")
        except TimeoutError:
            return
        finally:
            if caller is not None:
                await caller.close()


async def _in_record(access: SwarmAccess, own: Signer) -> list[str]:
    """Return the addresses in this peer's DHT record, without relays; [] without a record or if the peer has left."""
    look = Look(access.directory, access.run, own.peer)
    await look.measure()
    for level in range(look.level, -1, -1):  # a record from when the swarm was smaller is at a lower level
        key = key_of(access.run, own.peer, level)
        sealed = (look.values.get(key) or await access.directory.fetch(key)).get(own.peer)
        if sealed is None:
            continue
        try:
            record = records.unpack(own.open(key, own.peer, sealed, access.clock())[0])
        except ProtocolError:
            continue
        left = record.phase == PeerPhase.LEAVING
        return [] if left else [address for address in record.addresses if "/p2p-circuit" not in address]
    return []
