"""Refuse to start a peer whose identity another peer uses already: its state folder was copied.

libp2p never dials its own peer id, so the addresses in this peer's DHT record are dialled from a temporary identity.
After a kill the record stays in the DHT until it expires; its addresses are usually those of the new start, and
those are not dialled.
"""

import asyncio
from collections.abc import Sequence

from decentral.comm.net import ports
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.network import PeerNetwork, peer_network
from decentral.core.errors import ProtocolError, UserError
from decentral.core.temporary import temporary_folder
from decentral.peers.membership import records
from decentral.peers.membership.swarm_size import Look, key_of
from decentral.peers.startup.reach_swarm import SwarmAccess, connect

ANSWERS_S = 5.0  # for the answer of a peer that runs; without one the check is skipped


async def refuse_copy(access: SwarmAccess, own: Signer, transport: PeerNetwork, named: Sequence[str]) -> None:
    """Check that no peer with this identity runs elsewhere.

    Args:
        access: The run, its DHT, and the addresses of this start.
        own: This peer's identity.
        transport: This peer's own network.
        named: Addresses given by --join; those that end in this peer's id are tried too.

    Raises:
        UserError: If such a peer answers within ANSWERS_S.
    """
    places = [*await _in_record(access, own), *(address for address in named if address.endswith(f"/p2p/{own.peer}"))]
    places = [address for address in dict.fromkeys(places) if address not in access.addresses]
    if not places:
        return
    with temporary_folder() as folder:
        caller: PeerNetwork | None = None
        try:
            try:  # without a limit of its own: on a loaded machine a daemon takes long, and the check counts there, too
                key = folder / "identity.key"
                caller = await peer_network().start(key, [ports.LOOPBACK], [], access.clock, only_dials=True)
            except UserError:  # the check is worth no failed start
                return
            async with asyncio.timeout(ANSWERS_S):
                reached = await connect(caller, places)
            if reached == own.peer and not await transport.has_connection_to(caller.peer):  # a router may lead to us
                remedy = "stop it, or start this one with a new --state-dir, since a copied folder is the same peer"
                where = f"a peer with the identity in this --state-dir already runs at {', '.join(places)}"
                raise UserError(f"{where}; {remedy}")
        except TimeoutError:
            return
        finally:
            if caller is not None:
                await caller.close()


async def _in_record(access: SwarmAccess, own: Signer) -> list[str]:
    """Return the addresses in this peer's DHT record, relays left out; none if it has left, or has no record."""
    look = Look(access.directory, access.run, own.peer)
    await look.measure()
    for level in range(look.level, -1, -1):  # that of the swarm, or of one that was smaller
        key = key_of(access.run, own.peer, level)
        sealed = (look.values.get(key) or await access.directory.fetch(key)).get(own.peer)
        if sealed is None:
            continue
        try:
            record = records.unpack(own.open(key, own.peer, sealed, access.clock())[0])
        except ProtocolError:
            continue
        left = record.phase == "leaving"
        return [] if left else [address for address in record.addresses if "/p2p-circuit" not in address]
    return []
