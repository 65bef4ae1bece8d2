"""Bring a divided swarm together again: dial peers that are no longer in the roster. See `look_for_the_lost`.

If parts of a swarm are cut off from each other for so long that their DHT nodes forget each other, or the whole swarm
was down, the parts never see each other's records again. So a peer whose roster is empty keeps dialling the last
addresses of all peers that it knew. Any other peer dials one of its lost peers every LOST_LOOK_S.

The clocks of this peer and a peer that it reaches may differ so much that neither accepts the other's records. If a
restart would set this peer's clock to the time of most known peers, the user is told to restart it. The clocks of
connected peers outside the roster are compared too, since such a peer may have dialled this peer.
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
from decentral.peers.startup.reach_swarm import by_peer, connect, connect_all

ALONE_LOOK_S = 10.0  # at this interval, a peer whose roster is empty dials all peers in its address book
LOST_LOOK_S = 60.0  # at this interval, a peer with others in its roster dials one peer that it has lost

Places = Sequence[tuple[str, ...]]
"""For each peer, its addresses."""
AddressesByPeer = Mapping[PeerId, tuple[str, ...]]


async def look_for_the_lost(host: Host, transport: PeerNetwork, directory: SwarmDirectory, join: Sequence[str]) -> None:
    """Dial lost peers at intervals, and warn the user if this peer's clock is wrong; run until cancelled.

    Args:
        host: The peer's host, with its roster and address book.
        transport: The peer's network.
        directory: The peer's node of the DHT.
        join: Addresses of --join, dialled while the roster is empty, since a DNS name may lead to a new machine.
    """
    looked_at = host.now()
    while True:
        await asyncio.sleep(ALONE_LOOK_S)
        live = host.node.roster.live
        if live and host.now() < looked_at + LOST_LOOK_S:
            continue
        looked_at = host.now()
        lost = [addresses for peer, addresses in host.book.known.items() if peer not in live]
        found = [] if live else await join_again(transport, directory, join)
        found += await meet(transport, directory, random.sample(lost, min(1, len(lost))) if live else lost)
        finders = some_finders(await transport.connections(), live)
        if ahead_s := await time_to_take(transport, directory, [*found, *finders], host.book.known):
            for peer, addresses in finders.items():
                host.book.learn(peer, addresses)
            said = f"this peer's clock is {difference(-ahead_s)} the other peers'"
            host.watch.note("clock", f"{said}; start this peer again, so that it takes their time")


def some_finders(connections: AddressesByPeer, live: Collection[PeerId]) -> AddressesByPeer:
    """Return the addresses of up to MOST_FINDERS random peers that are connected to us but not in the roster."""
    strangers = [peer for peer in connections if peer not in live]
    return {peer: connections[peer] for peer in random.sample(strangers, min(MOST_FINDERS, len(strangers)))}


async def time_to_take(
    transport: PeerNetwork, directory: SwarmDirectory, found: Sequence[PeerId], known: Mapping[PeerId, Sequence[str]]
) -> Seconds:
    """Return the seconds by which a restart would move this peer's clock forward; negative to move it backward.

    First, the clocks of the `found` peers are compared with ours. If all agree, the result is 0.0. If one differs, all
    `known` peers are asked for their time too, as in a restart (peers/startup/reach_swarm.py).
    """
    if not any(agreed_s([one]) for one in await directory.clocks_ahead_s(found)):
        return 0.0
    everyone = dict.fromkeys([*found, *await connect_all(transport, known.values())])
    return agreed_s(await directory.clocks_ahead_s(everyone))


async def join_again(transport: PeerNetwork, directory: SwarmDirectory, join: Sequence[str]) -> list[PeerId]:
    """Dial the addresses of --join, add the peers that answer to our DHT's routing table, and return them."""
    reached = await at_once(connect(transport, addresses) for addresses in by_peer([join]).values())
    found = [peer for peer in reached if peer is not None]
    await at_once(map(directory.meet, found))
    return found


async def meet(transport: PeerNetwork, directory: SwarmDirectory, places: Places) -> list[PeerId]:
    """Dial the peers at these addresses, add the peers that answer to our DHT's routing table, and return them."""
    found = await connect_all(transport, places)
    await at_once(map(directory.meet, found))
    return found
