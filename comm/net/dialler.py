"""Dial the addresses that other peers publish, as the rule of dialling.py permits. Start at `Dialler.reach`."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from decentral.comm.net import causes, names, ports
from decentral.comm.net.dialling import Dial, Dialling, Ranges
from decentral.core.ids import PeerId
from decentral.core.units import Seconds


class Dials(Protocol):
    """Interface of the network through which a Dialler dials; Libp2p implements it."""

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> str:
        """Dial a peer at all of these addresses at once, or search for it if there are none.

        Returns:
            "" once the peer is connected, else the text of the error.
        """

    async def places_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses of the connections to a peer; () if it is not connected."""


class Dialler:
    """Dials peers of one network at addresses from other peers, as the rule of dialling.py permits."""

    def __init__(self, network: Dials) -> None:
        """Dial through this network."""
        self._network = network
        self._rule = Dialling(Ranges(names.source))
        self._ended = asyncio.Event()  # set for a moment when a dial of `reach` ends, to wake waiting calls

    def begin(self, own: Sequence[str]) -> None:
        """Allow loopback addresses from other peers if all of this peer's `own` addresses are loopback addresses."""
        if all(address.startswith(ports.OF_LOOPBACK) for address in own):
            self._rule.ranges.allow_loopback()

    async def connected(self, peer: PeerId) -> None:
        """Record that we have reached a peer at an address from the user; allow loopback if the address is loopback."""
        at = await self._network.places_of(peer)
        self._rule.met(peer, at, _loop_s())
        if any(address.startswith(ports.OF_LOOPBACK) for address in at):
            self._rule.ranges.allow_loopback()

    def met(self, peer: PeerId, address: str) -> None:
        """Record that a peer has connected to us from this address."""
        self._rule.met(peer, [address], _loop_s())

    async def reach(self, peer: PeerId, addresses: Sequence[str] | None) -> bool:
        """Connect to a peer at addresses from other peers, and return whether it is connected.

        The call may wait for other dials of the same peer or machine. If `addresses` is None, libp2p searches for the
        peer.
        """
        found = addresses
        if addresses is not None and not self._rule.is_paused(peer, _loop_s()):
            found = await names.resolved(addresses)
        while (dial := await self._begin(peer, found)).allowed:
            if await self._dial(dial):
                return True
        return bool(await self._network.places_of(peer))  # the peer itself may have connected to us meanwhile

    async def _begin(self, peer: PeerId, addresses: Sequence[str] | None) -> Dial:
        while (dial := self._rule.begin(peer, addresses, _loop_s())) is None:
            await self._ended.wait()
        return dial

    async def _dial(self, dial: Dial) -> bool:
        at: tuple[str, ...] = ()
        error = ""
        try:
            error = await self._network.dial(dial.owner, dial.addresses)
            at = () if error else await self._network.places_of(dial.owner)
        finally:
            failed_at = [f"{place}/p2p/{dial.owner}" for place in causes.failed_at(error)]
            self._rule.end(dial, at, failed_at, _loop_s(), dialled=not causes.found_nowhere(error))
            self._ended.set()
            self._ended.clear()
        return bool(at)


def _loop_s() -> Seconds:
    return asyncio.get_running_loop().time()
