"""Reach a running swarm from a command: greet a peer, which answers with its run and config. Start at `visit`."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from decentral.comm.net import names, ports
from decentral.comm.net.causes import DialFailure, dial_failure
from decentral.comm.net.dialling import Ranges
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

HELLO_S = 15.0  # a peer that does not answer our greeting within this time counts as unreachable
PEERS_TRIED = 4  # at most this many peers of the address book are tried, as each dead address may take ten seconds
CHECK = "check the address, that the peer there runs, and its port"


class NobodyAnswers(UserError):
    """Raised if no peer of the run answers at the addresses of --join; a later try may succeed."""


@dataclass(frozen=True, slots=True)
class VisitedSwarm:
    """A swarm that a command reads without joining it, with the network and DHT node that reach its peers."""

    transport: PeerNetwork
    run: RunId
    config: config.Config
    contacts: list[PeerId]
    directory: SwarmDirectory
    clock: SwarmClock
    own: Signer  # checks and, in a private swarm, decrypts other peers' records

    async def records(self) -> dict[PeerId, PeerRecord]:
        """Return the valid records in the DHT, without leaving peers; in a large swarm, only a part of the records."""
        return await records.lookup(self.directory, self.run, self.own, self.clock())


@asynccontextmanager
async def visit(join: Sequence[str], holding: Holding | None = None) -> AsyncIterator[VisitedSwarm]:
    """Connect to a swarm under a temporary identity, and disconnect when the context ends.

    Args:
        join: Addresses of the swarm's peers.
        holding: The invitation, if the swarm is private.

    Raises:
        UserError: If no peer at these addresses answers, or none accepts the invitation.
    """
    with temporary_folder() as folder:
        clock = SwarmClock()
        transport = await peer_network().start(folder / "identity.key", ports.anywhere(), [], clock)
        private = PrivateSwarm(transport.peer, holding, clock) if holding else None
        try:
            if private:
                await transport.enclose(private)
            wanted, why = invited(private) if private else (RunId(""), "")
            contacts, welcome = await say_hello(join, transport, wanted, why)
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
    """Return addresses at which the swarm of a state folder may be found.

    These are the address of the folder's own peer, and one address of each of the last PEERS_TRIED peers in the
    folder's address book. The book's addresses come from other peers, so those in private networks other than this
    machine's are left out (comm/net/dialling.py), and so are loopback addresses, unless the folder's peer listens
    there only.

    Raises:
        UserError: If the folder's flags or key cannot be read.
    """
    key, here = folder / "identity.key", state.StateFolder(folder)
    own = [f"{place}/p2p/{Identity.load_or_create(key).peer}" for place in here.listening() if key.exists()]
    listen = here.read_flags().listen
    ranges = Ranges(names.source, bool(listen) and all(place.startswith(ports.OF_LOOPBACK) for place in listen))
    known = AddressBook.load(folder / "peers.json").known
    met = [next((one for one in known[peer] if ranges.permit(peer, one)), None) for peer in known]
    return own + [one for one in met if one is not None][-PEERS_TRIED:]


async def say_hello(
    join: Sequence[str], transport: PeerNetwork, run: RunId, why: str = ""
) -> tuple[list[PeerId], Welcome | None]:
    """Greet the peers at these addresses, and ask them for their run and its config.

    Args:
        join: Addresses of --join.
        transport: Our network.
        run: The run that the peers must be in; "" accepts any public run.
        why: Why they must be in `run`, and what to do if they are not; for the error that a peer is in another run.

    Returns:
        The peers that answered with a Welcome, and the first Welcome; ([], None) if `join` is empty.

    Raises:
        NobodyAnswers: If at every address either no peer answers, or the peer is in another run.
        UserError: If no peer answers with a Welcome, and at least one peer refuses us, or claims a private run without
            proof.
    """
    contacts, welcome, trouble, silent = [], None, "", True
    for address in join:
        try:
            peer = await transport.connect(address)
            answer = await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)
        except AskError as error:
            refused = _why(error.reason, error.detail)
            trouble, silent = f"--join {address}: {refused or _no_answer(address, error)}", silent and not refused
            continue
        message = answer.envelope.message
        if isinstance(message, Welcome) and is_private(RunId(message.run)) and message.run != run:
            silent = False
            trouble = f"--join {address}: it claims to be in private run {message.run}, but has not proved it"
        elif isinstance(message, Welcome) and run and message.run != run:
            trouble = f"--join {address}: expected a peer of run {run}, but it is in {message.run}"
        elif isinstance(message, Welcome):
            contacts.append(peer)
            welcome = welcome or message
        elif isinstance(message, Refused) and message.reason == Reason.RUN:
            trouble, silent = f"--join {address}: {message.detail}; {why or CHECK}", False
        else:
            trouble, silent = f"--join {address}: {_no_welcome(message)}", False
    if join and not contacts:
        raise (NobodyAnswers if silent else UserError)(trouble)
    return contacts, welcome


async def refused_member(transport: PeerNetwork, peer: PeerId, run: RunId) -> str:
    """Return why a peer of a private swarm refuses our membership; "" if it accepts us or does not answer."""
    try:
        message = (await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)).envelope.message
    except AskError as error:
        return _why(error.reason, error.detail)
    return _why(message.reason, message.detail) if isinstance(message, Refused) else ""


def invited(private: PrivateSwarm) -> tuple[RunId, str]:
    """Return the run of an invitation, and the explanation for a user who joins another run with it."""
    return private.run, f"the invitation is for run {private.run}; correct --join, or give another --invite"


def _no_answer(address: str, error: AskError) -> str:
    if "no good addresses" in error.detail and (name := re.match(r"/dns[46]?/([^/]+)", address)):
        return f"{name[1]} resolves to no address; check the name, and this machine's DNS"
    is_another = dial_failure(error.detail) is DialFailure.ANOTHER_PEER
    return f"{error.detail}; ask for the current address" if is_another else f"{error}; {CHECK}"


def _no_welcome(message: Message) -> str:
    if isinstance(message, Refused):
        refused = f"refused: {message.detail} (this peer speaks protocol {VERSION}); {CHECK}"
        return _why(message.reason, "") or refused
    return f"refused: it gave no welcome (this peer speaks protocol {VERSION}); {CHECK}"


def _why(reason: str, detail: str) -> str:
    """Return the text for the user if `reason` means that a peer refuses our membership; "" for other reasons."""
    return (detail or TELLS[Reason(reason)]) if reason in NOT_COUNTED else ""
