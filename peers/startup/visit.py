"""How a command reaches a live swarm: it says hello. One that only looks does so under a key that it throws away."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from decentral.comm.net import ports
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity, Signer
from decentral.comm.wire.invitations import Holding, is_private
from decentral.comm.wire.messages import VERSION, Hello, Message, Refused, Welcome
from decentral.comm.wire.network import PeerNetwork, SwarmDirectory, peer_network
from decentral.comm.wire.private_swarm import NOT_COUNTED, TELLS, MemberSigner, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import AskError
from decentral.core import config, received
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.core.temporary import temporary_folder
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import PeerRecord
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import state

HELLO_S = 15.0
PEERS_TRIED = 4  # of those that the founder's peer has met: one that is gone may take ten seconds
CHECK = "check the address, that the peer there runs, and its port"


class NobodyAnswers(UserError):
    """No peer is at the addresses of --join, or none can be reached. It may be there later."""


@dataclass(frozen=True, slots=True)
class VisitedSwarm:
    """A swarm that a command looks at, and the connections through which it does."""

    transport: PeerNetwork
    run: RunId
    config: config.Config
    contacts: list[PeerId]
    directory: SwarmDirectory
    clock: SwarmClock
    own: Signer  # who looks; it opens the records in the DHT

    async def records(self) -> dict[PeerId, PeerRecord]:
        """Return the records of all peers in the DHT, except those that leave."""
        return await records.lookup(self.directory, self.run, self.own, self.clock())


@asynccontextmanager
async def visit(join: Sequence[str], holding: Holding | None = None) -> AsyncIterator[VisitedSwarm]:
    """Connects for as long as the swarm is looked at. Raises UserError if no peer at these addresses answers.

    `holding`: the invitation to a private swarm.
    """
    with temporary_folder() as folder:
        clock = SwarmClock()
        transport = await peer_network().start(folder / "identity.key", ports.anywhere(), [], clock)
        private = PrivateSwarm(transport.peer, holding, clock) if holding else None
        try:
            if private:
                await transport.enclose(private)
            contacts, welcome = await say_hello(join, transport, private.run if private else RunId(""))
            assert welcome is not None, "say_hello raises where no peer answers"
            run, settings = RunId(welcome.run), received.received(welcome.config).built_in()
            keys = [*swarm_size.keys(run), *([revoked_key(run)] if private else ())]
            directory = await transport.directory(keys, contacts)
            clock.agree(await directory.clocks_ahead_s(contacts))
            identity = Identity.load_or_create(folder / "identity.key")
            own = MemberSigner(identity, private) if private else identity
            yield VisitedSwarm(transport, run, settings, contacts, directory, clock, own)
        finally:
            await transport.close()


def known_addresses(folder: Path) -> list[str]:
    """Where the peer of this state folder listens, and where it has met others last."""
    key, places = folder / "identity.key", state.StateFolder(folder).listening()
    own = [f"{place}/p2p/{Identity.load_or_create(key).peer}" for place in places if key.exists()]
    met = [known[0] for known in AddressBook.load(folder / "peers.json").known.values() if known]
    return own + met[-PEERS_TRIED:]


async def say_hello(join: Sequence[str], transport: PeerNetwork, run: RunId) -> tuple[list[PeerId], Welcome | None]:
    """The peers at --join that gave a welcome, and the first welcome.

    Raises UserError if all addresses fail: NobodyAnswers, unless one that answers takes us for no member of its run.
    """
    contacts, welcome, trouble, silent = [], None, "", True
    for address in join:
        try:
            peer = await transport.connect(address)
            answer = await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)
        except AskError as error:
            refused = _why(error.reason, error.detail)
            trouble, silent = f"--join {address}: {refused or f'{error}; {CHECK}'}", silent and not refused
            continue
        message = answer.envelope.message
        if isinstance(message, Welcome) and is_private(RunId(message.run)) and message.run != run:
            silent = False
            trouble = f"--join {address}: it says to be in private run {message.run}, and proves it to nobody"
        elif isinstance(message, Welcome) and run and message.run != run:
            trouble = f"--join {address}: it was asked for run {run}, and says to be in {message.run}"
        elif isinstance(message, Welcome):
            contacts.append(peer)
            welcome = welcome or message
        else:
            trouble, silent = f"--join {address}: {_no_welcome(message)}", False
    if join and not contacts:
        raise (NobodyAnswers if silent else UserError)(trouble)
    return contacts, welcome


async def refused_member(transport: PeerNetwork, peer: PeerId, run: RunId) -> str:
    """Why this peer of a private swarm does not take us for a member; "": it does, or does not answer."""
    try:
        message = (await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)).envelope.message
    except AskError as error:
        return _why(error.reason, error.detail)
    return _why(message.reason, message.detail) if isinstance(message, Refused) else ""


def _no_welcome(message: Message) -> str:
    if isinstance(message, Refused):
        refused = f"refused: {message.detail} (this peer speaks protocol {VERSION}); {CHECK}"
        return _why(message.reason, "") or refused
    return f"refused: it gave no welcome (this peer speaks protocol {VERSION}); {CHECK}"


def _why(reason: str, detail: str) -> str:
    """What a user is told who is not taken for a member; "" for any other reason."""
    return (detail or TELLS[Reason(reason)]) if reason in NOT_COUNTED else ""
