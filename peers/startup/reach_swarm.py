"""How a starting peer reaches its swarm: find its run, greet other peers, join the DHT. Start at `reach_swarm`."""

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.invitations import FOR_EVER, Permission, is_private
from decentral.comm.wire.messages import Welcome
from decentral.comm.wire.network import PeerNetwork, SwarmDirectory
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import AskError
from decentral.commands import shared
from decentral.core import config, received
from decentral.core.at_once import at_once
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.data import run_inputs
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.revocation_watch import ENDINGS
from decentral.peers.runtime.clock import SwarmClock, difference
from decentral.peers.startup import invitation_files, state
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.visit import NobodyAnswers, invited, refused_member, say_hello
from decentral.scheduler.placement import plans

JOIN_AGAIN_S = 0.5  # first pause between two tries to reach a peer at --join
JOIN_LONGER = 1.3
MOST_JOIN_AGAIN_S = 3.0
JOIN_SAID_S = 30.0  # interval at which the user is told that --join is still being tried
REACH_S = 30.0  # longest time to connect to one peer, over all its addresses together
MOST_NAME_CHARS = 37  # longest name of a private run, since the run's id also contains the hash of the founder's key

Run = tuple[RunId, config.Config]


@dataclass(frozen=True, slots=True)
class SwarmAccess:
    """The run that this peer has reached, with the peer's network, DHT node and clock."""

    run: RunId
    config: config.Config
    contacts: tuple[PeerId, ...]
    network: PeerNetwork
    directory: SwarmDirectory
    addresses: tuple[str, ...]
    clock: SwarmClock
    private: PrivateSwarm | None

    def signer(self, own: Signer) -> Signer:
        """Return the signer that signs this peer's records and checks the signatures of other peers' records.

        In a private swarm, the signer also encrypts and decrypts the records.
        """
        return MemberSigner(own, self.private) if self.private else own


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The result of `own_run`: the run that a starting peer's state folder and flags determine."""

    kept: Run | None  # run stored in the state folder; None if there is none
    known: Run | None  # `kept`, or the new run that this peer founds; None: a peer at --join must tell us its run


def own_run(start: PeerStart) -> OwnRun:
    """Return the run of the folder; if the folder has none and --join is not given, begin a new run.

    Warnings for the user are added to `start`.

    Raises:
        UserError: If flags contradict the folder or each other, or the config cannot be loaded.
    """
    flags, folder = start.flags, start.folder
    kept = folder.read_run(flags.own)
    start.warnings.extend(flags.require_consistent(kept, folder.path))
    return OwnRun(kept, kept if kept or flags.join else _begin(flags, folder.path))


async def reach_swarm(start: PeerStart, begun: OwnRun, transport: PeerNetwork, clock: SwarmClock) -> SwarmAccess:
    """Greet the peers at --join and in the folder's address book, join the DHT, and set `clock` to the swarm's time.

    Args:
        start: This start of the peer; warnings for the user are added to it.
        begun: The result of `own_run`; if it has no run, the peers at --join are asked for their run.
        transport: This peer's network.
        clock: This peer's clock.

    Raises:
        UserError: If the folder has no run and no peer at --join answers, the invitation is missing or refused, or the
            config is invalid.
    """
    kept, known, flags, folder = begun.kept, begun.known, start.flags, start.folder
    private = _membership(flags, folder.path, known, transport.peer, clock)
    if private:
        await transport.enclose(private)
    expected = (RunId(""), "") if known is None else (known[0], _belongs(folder.path, known[0]))
    contacts, welcome = await _greet(start, transport, invited(private) if private and not known else expected, kept)
    if known is None:
        assert welcome is not None, "say_hello raises where no peer answers"
        known = RunId(welcome.run), received.received(welcome.config).adopt(flags.own)
    if kept:
        shared.starting("looking for the peers that this one knows")
        contacts += await _reconnect(folder, transport, private)
    run, settings = known
    addresses = records.publishable(await transport.addresses())
    keys = [
        *swarm_size.keys(run),
        plans.key_of(run),
        *([revoked_key(run)] if private else ()),
    ]
    shared.starting("joining the DHT")
    directory = await transport.directory(keys, contacts)
    contacts = list(dict.fromkeys(contacts))
    if set_s := clock.agree(await directory.clocks_ahead_s(contacts)):
        theirs = "the other peers'" if len(contacts) > 1 else f"that of {contacts[0]}"
        start.warnings.append(f"this machine's clock is {difference(-set_s)} {theirs}; this peer uses the swarm's time")
    if private and (over := private.over()):
        raise UserError(ENDINGS[over])
    return SwarmAccess(run, settings, tuple(contacts), transport, directory, addresses, clock, private)


def commit_start(flags: StartFlags, folder: state.StateFolder, access: SwarmAccess) -> None:
    """Write flags, invitation, port and run to the state folder, so that `--state-dir` alone resumes the peer.

    It is called only when the start has succeeded, so that after a failed start the user can correct a wrong flag.

    Raises:
        UserError: If a file cannot be written.
    """
    folder.write_flags(flags.peer)
    if access.private:
        invitation_files.write_holding(invitation_files.kept_path(folder.path), access.private.holding)
    folder.write_listen(access.addresses, flags.peer.listen)
    folder.write_run(access.run, access.config)


async def _greet(
    start: PeerStart, transport: PeerNetwork, expected: tuple[RunId, str], kept: Run | None
) -> tuple[list[PeerId], Welcome | None]:
    """Greet the peers at --join; return those that welcome us, and the first welcome. Try again for --join-wait.

    `expected` is the run, or "", and why it must be this one. A peer with a run in its folder does not try again: it
    goes on without these peers, and `start` gets a warning.

    Raises:
        UserError: If nobody answers and the folder has no run, or if no peer accepts this peer and one refuses it.
    """
    flags = start.flags
    end, again_s, say_at = time.monotonic() + flags.join_wait, JOIN_AGAIN_S, 0.0
    if flags.join:
        shared.starting(f"asking {', '.join(flags.join)} for the run")
    while True:
        try:
            return await say_hello(flags.join, transport, expected[0], expected[1])
        except NobodyAnswers as error:
            if kept:
                alone = "this peer goes on with the peers that it knows, and tries again while it is alone"
                start.warnings.append(f"{error}; {alone}")
                return [], None
            if (now := time.monotonic()) >= end:
                raise
            if now >= say_at:
                shared.starting(f"{error}; trying for {end - now:.0f} s more")
                say_at = now + JOIN_SAID_S
            await asyncio.sleep(again_s)
            again_s = min(JOIN_LONGER * again_s, MOST_JOIN_AGAIN_S)


def _belongs(folder: Path, run: RunId) -> str:
    return f"{folder} belongs to run {run}; use another --state-dir"


def _begin(flags: StartFlags, folder: Path) -> Run:
    """Return a new run; with --private, also write the founder's keys and own invitation to the folder.

    Raises:
        UserError: If the config cannot be loaded, a private run's name is too long, or a file cannot be written.
    """
    settings = run_inputs.sealed(config.load(flags.config, flags.overrides, flags.own))
    if not flags.private:
        return RunId(f"{settings.name}-{secrets.token_hex(3)}"), settings
    if len(settings.name) > MOST_NAME_CHARS:
        raise UserError(
            f"a private run's name has at most {MOST_NAME_CHARS} characters; {settings.name!r} is longer: shorten it"
        )
    founder = FounderFile.create(folder, settings.name)
    holding = founder.own_holding(Permission.TRAIN, FOR_EVER)
    invitation_files.write_holding(invitation_files.kept_path(folder), holding)
    return founder.keys.run, settings


def _membership(
    flags: StartFlags, folder: Path, known: Run | None, peer: PeerId, clock: SwarmClock
) -> PrivateSwarm | None:
    """Return this peer's membership from the invitation of --invite, or else of the folder; None in a public swarm.

    Raises:
        UserError: If the invitation is missing, invalid, for another run, or does not allow this peer to compute.
    """
    if not (flags.invite or (known and is_private(known[0]))):
        return None
    path = Path(flags.invite) if flags.invite else invitation_files.kept_path(folder)
    if not path.exists():
        raise UserError(f"{path} does not exist, but {folder} belongs to a private swarm: give --invite FILE")
    holding = invitation_files.read_holding(path)
    if known and holding.invitation.run != known[0]:
        raise UserError(f"{path} is for run {holding.invitation.run}, but {_belongs(folder, known[0])}")
    if not holding.invitation.may.allows(Permission.DONATE):
        raise UserError(
            f"{path} allows only to look (decentral.plan, decentral.export); ask the founder for new rights"
        )
    return invitation_files.member(folder, holding, peer, clock)


async def _reconnect(folder: state.StateFolder, transport: PeerNetwork, private: PrivateSwarm | None) -> list[PeerId]:
    """Connect to the peers in the folder's address book, and return those that answer and accept us.

    Raises:
        UserError: In a private swarm, if our invitation was revoked, or all peers that can be reached refuse us.
    """
    peers = await connect_all(transport, AddressBook.load(folder.path / "peers.json").known.values())
    if private is None:
        return peers
    refusals = await at_once(refused_member(transport, peer, private.run) for peer in peers)
    if private.revoked_us:
        raise UserError(ENDINGS[Reason.REVOKED])
    trouble = [said for said in refusals if said]
    if peers and len(trouble) == len(peers):
        raise UserError(f"every peer of this folder's address book that answers refuses this peer: {trouble[0]}")
    return [peer for peer, said in zip(peers, refusals, strict=True) if not said]


async def connect_all(transport: PeerNetwork, places: Iterable[Sequence[str]]) -> list[PeerId]:
    """Connect to the peers at these addresses, all at the same time, and return the peers that were reached.

    A peer counts as reached if the connection is open within REACH_S. The limits on dials to other peers apply.
    """
    found = by_peer(places)

    async def reaches(peer: PeerId) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_S):
                return await transport.reach(peer, found[peer])
        return False

    reached = await at_once(map(reaches, found))
    return [peer for peer, is_reached in zip(found, reached, strict=True) if is_reached]


def by_peer(places: Iterable[Sequence[str]]) -> dict[PeerId, list[str]]:
    """Group addresses by the peer id at their end, since in libp2p concurrent dials of one peer fail together."""
    found: dict[PeerId, list[str]] = {}
    for address in chain.from_iterable(places):
        found.setdefault(PeerId(address.rpartition("/p2p/")[2]), []).append(address)
    return found


async def connect(transport: PeerNetwork, addresses: Sequence[str]) -> PeerId | None:
    """Connect to a peer at the first of these addresses that answers, and return its id; None if none answers.

    Pass only this peer's own addresses or addresses from the user, since no limit on dials applies.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(REACH_S):
            for address in addresses:
                with suppress(AskError, UserError):
                    return await transport.connect(address)
    return None
