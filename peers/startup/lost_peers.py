"""A swarm that came apart comes together again: a peer looks for those that it has known and that are in no roster.

Records reach whom the DHT reaches. Parts of a swarm that were cut off from each other until their nodes of the DHT had
forgotten each other, or a swarm that was down as a whole, would never see each other's records again. So a peer that is
alone keeps looking where the others were, and any other one looks for one of those that it has lost, now and then.

Who is found may have another time. Neither sees the other's records then, and the lesser part is told to start again.
Who would keep its time, because most of those that it knows have that, is not told. A part may know nobody of the
other; so whoever is connected and in no roster counts as well, as it may have found us, and is known from then on.
"""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence

from decentral.comm.wire.network import PeerNetwork, SwarmDirectory
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.runtime.clock import MOST_FINDERS, agreed_s, difference
from decentral.peers.runtime.host import Host
from decentral.peers.startup.reach_swarm import connect_all

ALONE_LOOK_S = 10.0  # a peer that is alone looks this often
LOST_LOOK_S = 60.0  # any other one

Places = Sequence[tuple[str, ...]]
"""The addresses of one peer each."""
AddressesByPeer = Mapping[PeerId, tuple[str, ...]]


async def look_for_the_lost(host: Host, transport: PeerNetwork, directory: SwarmDirectory, join: Sequence[str]) -> None:
    """Until it is cancelled. `join`: the addresses of --join, because a name there may lead somewhere else by now."""
    looked_at = host.now()
    while True:
        await asyncio.sleep(ALONE_LOOK_S)
        live = host.node.roster.live
        if live and host.now() < looked_at + LOST_LOOK_S:
            continue
        looked_at = host.now()
        lost = [addresses for peer, addresses in host.book.known.items() if peer not in live]
        places = random.sample(lost, min(1, len(lost))) if live else [*((address,) for address in join), *lost]
        found = await meet(transport, directory, places)
        finders = some_finders(await transport.connections(), live)
        if ahead_s := await time_to_take(transport, directory, [*found, *finders], host.book.known):
            for peer, addresses in finders.items():
                host.book.learn(peer, addresses)
            apart = f"this peer's clock is {difference(-ahead_s)} the others'"
            host.watch.note("clock", f"{apart}; start this peer again, and it goes by theirs")


def some_finders(connections: AddressesByPeer, live: Collection[PeerId]) -> AddressesByPeer:
    """A few of those that are connected and in no roster, by chance: they may have found us."""
    strangers = [peer for peer in connections if peer not in live]
    return {peer: connections[peer] for peer in random.sample(strangers, min(MOST_FINDERS, len(strangers)))}


async def time_to_take(
    transport: PeerNetwork, directory: SwarmDirectory, found: Sequence[PeerId], known: Mapping[PeerId, Sequence[str]]
) -> Seconds:
    """How far those are ahead of our clock that this peer would go by if it started again; 0 if that changes nothing.

    A start asks all that are `known`, each once (peers/startup/reach_swarm.py). So where one of those `found` has
    another time, they are asked here.
    """
    if not any(agreed_s([one]) for one in await directory.clocks_ahead_s(found)):
        return 0.0
    everyone = dict.fromkeys([*found, *await connect_all(transport, known.values())])
    return agreed_s(await directory.clocks_ahead_s(everyone))


async def meet(transport: PeerNetwork, directory: SwarmDirectory, places: Places) -> list[PeerId]:
    """Puts those that answer at these places into our node's routing table."""
    found = await connect_all(transport, places)
    await at_once(map(directory.meet, found))
    return found
