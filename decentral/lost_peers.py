"""A swarm that came apart comes together again: a peer looks for those that it has known and that are in no roster.

Records reach whom the DHT reaches. Parts of a swarm that were cut off from each other until their nodes of the DHT had
forgotten each other, or a swarm that was down as a whole, would never see each other's records again. So a peer that is
alone keeps looking where the others were, and any other one looks for one of those that it has lost, now and then.

Who is found may have another time. Neither sees the other's records then, and the lesser part is told to start again.
Who would keep its time, because most of those that it knows have that, is not told.
"""

import asyncio
import random
from collections.abc import Sequence

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.hosts.clock import agreed_s, difference
from decentral.peers.hosts.host import Host
from decentral.reach_swarm import connect

ALONE_LOOK_S = 10.0  # a peer that is alone looks this often
LOST_LOOK_S = 60.0  # any other one

Places = Sequence[tuple[str, ...]]
"""The addresses of one peer each."""


async def look_for_the_lost(host: Host, join: Sequence[str]) -> None:
    """Until it is cancelled. `join`: the addresses of --join, because a name there may lead somewhere else by now."""
    transport, directory = host.transport, host.directory
    assert isinstance(transport, Libp2p)
    assert isinstance(directory, HivemindDirectory)
    looked_at = host.now()
    while True:
        await asyncio.sleep(ALONE_LOOK_S)
        live = host.node.roster.live
        lost = [addresses for peer, addresses in host.book.known.items() if peer not in live]
        if live and (not lost or host.now() < looked_at + LOST_LOOK_S):
            continue
        looked_at = host.now()
        places = [random.choice(lost)] if live else [*((address,) for address in join), *lost]
        found = await meet(transport, directory, places)
        if not live:  # those that know us may have found us
            found += directory.some_connected()
        if ahead_s := await time_to_take(transport, directory, found, lost, list(live)):
            again = "start this peer again" if host.book.known else "start this peer again with --join"
            apart = f"this peer's clock is {difference(-ahead_s)} the others'"
            host.watch.note("clock", f"{apart}; {again}, and it goes by theirs")


async def time_to_take(
    transport: Libp2p, directory: HivemindDirectory, found: Sequence[PeerId], lost: Places, live: Sequence[PeerId]
) -> Seconds:
    """How far those are ahead of our clock that this peer would go by if it started again; 0 if that changes nothing.

    Where one of those `found` has another time, all that are `lost` are looked for and count, and the `live` ones, too.
    """
    ahead_s = await directory.clocks_ahead_s(found)
    if live and any(agreed_s([one]) for one in ahead_s):
        ahead_s = await directory.clocks_ahead_s([*await meet(transport, directory, lost), *live])
    return agreed_s(ahead_s)


async def meet(transport: Libp2p, directory: HivemindDirectory, places: Places) -> list[PeerId]:
    """Puts those that answer at these places into our node's routing table."""
    found = [peer for addresses in places if (peer := await connect(transport, addresses))]
    for peer in found:
        await directory.meet(peer)
    return found
