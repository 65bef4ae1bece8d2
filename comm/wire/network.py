"""What start-up, visits and the doctor need of a network beside asking and answering (`Transport`), and which they use.

Which one that is cannot be a key of the config: who joins a swarm has an address, and gets the config through it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Directory, Transport
from decentral.core.choices import load
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

NETWORK = "decentral.comm.net.libp2p:Libp2p"  # the PeerNetwork that peers use


def peer_network() -> "type[PeerNetwork]":
    """Return NETWORK. The first call loads it, which takes a second."""
    found: type[PeerNetwork] = load(NETWORK)
    return found


class DialStatus(IntEnum):
    """How a dial back has ended, in the numbers of libp2p's AutoNAT."""

    OK = 0
    ERROR = 100  # no address could be dialled
    REFUSED = 101  # too many dials, or no public address among those
    BAD_REQUEST = 200
    INTERNAL = 300


@dataclass(frozen=True, slots=True)
class Identified:
    """What another peer says of us and of itself. All of it may be a lie."""

    observed: str  # our address as it sees it, such as /ip4/203.0.113.7/tcp/4001; "": it says none
    dials_back: bool  # whether `dial_back` may be asked of it
    agent: str


@dataclass(frozen=True, slots=True)
class DialBack:
    """What came of a dial back."""

    status: int  # a DialStatus, or another number that the peer has sent
    address: str  # the address at which we were reached, where we were
    text: str


class SwarmDirectory(Directory, Protocol):
    """Our node of the DHT, which also tells other peers' clocks."""

    async def store_at_others(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Return whether another peer than us has the record now: a visitor's own node ends with it."""

    async def meet(self, peer: PeerId) -> None:
        """Put a peer that we are connected to into the routing table."""

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[Seconds]:
        """Return how far the clocks of these peers are ahead of ours; of those that answer."""


class PeerNetwork(Transport, Protocol):
    """A Transport whose peers have addresses: what a process opens once, under the identity of its key."""

    @classmethod
    async def start(
        cls,
        key: Path,
        listen: Sequence[str],
        announce: Sequence[str],
        now: Callable[[], Seconds],
        say: Callable[[str], None] = lambda _: None,
        only_dials: bool = False,
    ) -> "PeerNetwork":
        """Open the network with the identity in `key`. Raises UserError if it cannot listen there.

        Records of the DHT expire by `now`, which gives unix time. `say` is told that the start waits for a port.
        `only_dials`: nobody needs to reach it, so that it asks no router for a port.
        """

    @staticmethod
    def parse_address(address: str) -> tuple[PeerId, str]:
        """Return the peer and the place in the address that a user gives with --join. Raises UserError."""

    async def addresses(self) -> tuple[str, ...]:
        """Return our addresses for others, those of this machine only last. Raises AskError, as while `revive` runs."""

    async def connect(self, address: str) -> PeerId:
        """Connect to the peer there. Raises UserError if that is no address, AskError if nobody answers there."""

    async def connections(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the peers with a connection to us and their addresses; of a private swarm its members only."""

    async def has_connection_to(self, peer: PeerId) -> bool:
        """Return whether this peer, member of the swarm or not, is connected to us."""

    async def enclose(self, private: PrivateSwarm | None) -> None:
        """From now on ask and answer only members of this swarm; None: anybody, as before the first call."""

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> SwarmDirectory:
        """Return our node of the DHT. It stores records of these keys, and begins with peers that we know."""

    async def identify(self, peer: PeerId) -> Identified:
        """Return what a peer to which we have a connection says of us. Raises AskError and ProtocolError."""

    async def dial_back(self, peer: PeerId, addresses: Sequence[str]) -> DialBack:
        """Ask a peer to which we have a connection to reach us anew. Raises AskError and ProtocolError."""

    async def ended(self) -> str:
        """Wait until the network has ended by itself, and return what has happened."""

    async def revive(self) -> None:
        """Open it again at the same addresses. Raises UserError if it cannot listen there."""
