"""Whether a peer already runs with this peer's identity: a state folder was copied to another machine, or beside it.

Libp2p dials no peer of its own name, so the address in our record is dialled under a name that is thrown away. A record
of a peer that was killed, which lives in the DHT for a minute, mostly names the very addresses that this start has.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Signer
from decentral.core.errors import ProtocolError, UserError
from decentral.peers.membership import records
from decentral.reach_swarm import SwarmAccess, connect

ANSWERS_S = 5.0  # for the start of a helper and the answer of a peer that runs; without them the check is skipped


async def refuse_copy(access: SwarmAccess, own: Signer, transport: Libp2p, named: Sequence[str]) -> None:
    """Raise UserError if a peer with this identity runs elsewhere.

    `named`: addresses of --join, of which one with this peer's name may be another place than ours.
    """
    places = [*await _in_record(access, own), *(address for address in named if address.endswith(f"/p2p/{own.peer}"))]
    places = [address for address in dict.fromkeys(places) if address not in access.addresses]
    if not places:
        return
    with tempfile.TemporaryDirectory() as folder:
        caller: Libp2p | None = None
        try:
            async with asyncio.timeout(ANSWERS_S):
                try:
                    caller = await Libp2p.start(Path(folder) / "identity.key", [ports.LOOPBACK], [], only_dials=True)
                except UserError:  # the check is worth no failed start
                    return
                reached = await connect(caller, places)
            if reached == own.peer and not await transport.has_connection_to(caller.peer):  # a router may lead to us
                remedy = "stop that one, or give this one another --state-dir: a copied folder cannot be a second peer"
                raise UserError(f"a peer with this folder's identity runs already, at {', '.join(places)}; {remedy}")
        except TimeoutError:
            return
        finally:
            if caller is not None:
                await caller.close()


async def _in_record(access: SwarmAccess, own: Signer) -> list[str]:
    """The addresses in the swarm's record of this peer; none if it has left, or has no record."""
    key = records.key_of(access.run, own.peer, access.config.swarm.shards)
    sealed = (await access.directory.fetch(key)).get(own.peer)
    if sealed is None:
        return []
    try:
        record = records.unpack(own.open(key, own.peer, sealed, access.clock())[0])
    except ProtocolError:
        return []
    left = record.phase == "leaving"
    return [] if left else [address for address in record.addresses if "/p2p-circuit" not in address]
