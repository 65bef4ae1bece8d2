"""The interface PeerNetwork: a Transport with the calls that only starting peers and user commands need.

`peer_network` returns the class that implements PeerNetwork. No config key chooses this class, because a newcomer needs
a network before it has the config: it knows only a peer's address, and downloads the config from that peer.
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

NETWORK = "decentral.comm.net.libp2p:Libp2p"  # the implementation of PeerNetwork that peers create, as module:class
NETWORK_PACKAGE = "hivemind"  # the package with compiled code that this class needs; the doctor loads it


def peer_network() -> "type[PeerNetwork]":
    """Return the class that NETWORK names. The first call imports this class, which takes about a second."""
    found: type[PeerNetwork] = load(NETWORK)
    return found


class DialStatus(IntEnum):
    """The outcome of a dial-back (a peer's attempt to connect to our addresses), as in libp2p's AutoNAT protocol."""

    OK = 0
    ERROR = 100  # the peer could dial none of the given addresses
    REFUSED = 101  # the peer has dialled too often lately, or all given addresses are private
    BAD_REQUEST = 200
    INTERNAL = 300


@dataclass(frozen=True, slots=True)
class Identified:
    """Another peer's statements about our address and about the peer's own software. They may be false."""

    observed: str  # this machine's address as the peer sees it, such as /ip4/203.0.113.7/tcp/4001; "": unknown
    dials_back: bool  # whether the peer, on request, dials our addresses to test whether they are reachable
    agent: str  # name and version of the peer's libp2p software


@dataclass(frozen=True, slots=True)
class DialBack:
    """A peer's report after we asked it to dial our addresses."""

    status: int  # the number in the peer's answer, usually a DialStatus
    address: str  # our address at which the peer reached us; "": it did not reach us
    text: str  # the peer's explanation, for the user


class SwarmDirectory(Directory, Protocol):
    """Interface of our DHT node: a Directory that also reads other peers' clocks; HivemindDirectory implements it."""

    async def store_at_others(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a signed record in the DHT at other peers only, so that the record outlives this process.

        Returns:
            Whether at least one other peer has accepted the record.
        """

    async def meet(self, peer: PeerId) -> None:
        """Put a connected peer into our node's routing table, if the peer answers."""

    async def clocks_ahead_s(self, peers: Iterable[PeerId]) -> list[Seconds]:
        """Return how many seconds each peer's clock is ahead of ours; a peer that does not answer is left out."""


class PeerNetwork(Transport, Protocol):
    """Interface of a Transport whose peers have addresses; Libp2p implements it.

    A process opens one network, under the identity in its key file.
    """

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
        """Open the network.

        Args:
            key: File with our identity; created if it is missing.
            listen: Multiaddrs to listen at.
            announce: Multiaddrs to publish to other peers; if empty, publish those at which the network listens.
            now: Returns unix time, by which records of the DHT expire.
            say: Is called with a text for the user if the start has to wait for a port.
            only_dials: If True, no other peer needs to connect to this peer, and no router is asked for a port.

        Raises:
            UserError: If this machine cannot listen at `listen`, or an address in `announce` cannot be dialled.
        """

    @staticmethod
    def parse_address(address: str) -> tuple[PeerId, str]:
        """Split an address that a user gives with --join into the peer id and the part that is dialled.

        Raises:
            UserError: If the text is not such an address.
        """

    async def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which other peers can reach us; loopback addresses come last.

        Raises:
            AskError: If the network is down: it has stopped, and `revive` has not yet returned.
        """

    async def connect(self, address: str) -> PeerId:
        """Connect to the peer at an address that the user has given, and return its id.

        Raises:
            UserError: If the text is not an address.
            AskError: If no peer answers there.
        """

    async def reach(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        """Connect to a peer at addresses that other peers have told us, and return whether the peer is connected.

        Use `connect` only for addresses from the user. An address from another peer may be that of a third machine, so
        `reach` limits how often it is dialled (comm/net/dialling.py), and may therefore wait or not dial at all.
        """

    async def connections(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Return the connected peers and the addresses of their connections; in a private swarm only members."""

    async def has_connection_to(self, peer: PeerId) -> bool:
        """Return whether this peer, member of the swarm or not, is connected to us."""

    async def enclose(self, private: PrivateSwarm | None) -> None:
        """Ask and answer only members of this private swarm from now on, or any peer if `private` is None."""

    async def directory(self, keys: Iterable[str], known: Iterable[PeerId]) -> SwarmDirectory:
        """Start our node of the DHT and return it. In a private swarm, call `enclose` first.

        Args:
            keys: The keys whose records the node stores.
            known: Connected peers through which the node joins the DHT.
        """

    async def identify(self, peer: PeerId) -> Identified:
        """Ask a connected peer for our address as it sees it, and for its software; return its answer.

        Raises:
            AskError: If no answer comes in time.
            ProtocolError: If the answer is malformed.
        """

    async def dial_back(self, peer: PeerId, addresses: Sequence[str]) -> DialBack:
        """Ask a connected peer to open a new connection to one of our addresses, and return its report.

        Raises:
            AskError: If no answer comes for a reason other than the deadline. If the deadline passes, nothing is
                raised, and the report has DialStatus.ERROR.
            ProtocolError: If the answer is malformed.
        """

    async def ended(self) -> str:
        """Wait until the network stops without a call of `close`, and return the cause as a text for the user."""

    async def revive(self) -> None:
        """Open the network again at the same addresses after `ended`. Raises UserError if an address is taken."""
