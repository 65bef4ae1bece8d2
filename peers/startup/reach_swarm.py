"""How a peer gets into its swarm: the run that it is in, the peers that answer it, and its node of the DHT."""

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
from decentral.peers.startup.visit import NobodyAnswers, refused_member, say_hello
from decentral.scheduler.placement import plans

JOIN_AGAIN_S = 0.5  # between the first two tries of --join, within --join-wait; then ever longer
JOIN_LONGER = 1.3  # times, from one try to the next
MOST_JOIN_AGAIN_S = 3.0
JOIN_SAID_S = 30.0  # between two lines that say that this goes on
REACH_S = 30.0  # for all addresses of a peer: a start waits for the slowest of those that it knows
MOST_NAME_CHARS = 37  # of a private run, whose name also has the hash of the founder's key

Run = tuple[RunId, config.Config]


@dataclass(frozen=True, slots=True)
class SwarmAccess:
    """The run that this peer is in, and how it reaches the other peers."""

    run: RunId
    config: config.Config
    contacts: tuple[PeerId, ...]
    network: PeerNetwork
    directory: SwarmDirectory
    addresses: tuple[str, ...]
    clock: SwarmClock
    private: PrivateSwarm | None  # None: the swarm is public

    def signer(self, own: Signer) -> Signer:
        """How this peer signs its records, and opens those of others."""
        return MemberSigner(own, self.private) if self.private else own


@dataclass(frozen=True, slots=True)
class OwnRun:
    """What a peer knows of its run before it asks anybody."""

    kept: Run | None  # of its folder
    known: Run | None  # that one, or the one that begins here; None: the swarm at --join has it


def own_run(flags: StartFlags, folder: state.StateFolder) -> OwnRun:
    """Return the run of the folder, or a new one without --join. Raises UserError for flags that cannot be meant."""
    kept = folder.read_run(flags.own)
    _check_flags(flags, kept, folder.path)
    return OwnRun(kept, kept if kept or flags.join else _begin(flags, folder.path))


async def reach_swarm(start: PeerStart, begun: OwnRun, transport: PeerNetwork, clock: SwarmClock) -> SwarmAccess:
    """The run is the folder's, else the swarm's at --join, else a new one; the clock becomes the swarm's.

    Raises UserError.
    """
    kept, known, flags, folder = begun.kept, begun.known, start.flags, start.folder
    private = _membership(flags, folder.path, known, transport.peer, clock)
    if private:
        await transport.enclose(private)
    contacts, welcome = await _greet(start, transport, known[0] if known else private.run if private else None, kept)
    if known is None:
        assert welcome is not None, "say_hello raises where no peer answers"
        known = RunId(welcome.run), received.received(welcome.config).adopt(flags.own)
    if kept:
        shared.stage("looking for the peers that this one knows")
        contacts += await _reconnect(folder, transport, private)
    run, settings = known
    addresses = records.publishable(await transport.addresses())
    keys = [
        *swarm_size.keys(run),
        plans.key_of(run),
        *([revoked_key(run)] if private else ()),
    ]
    shared.stage("joining the DHT")
    directory = await transport.directory(keys, contacts)
    contacts = list(dict.fromkeys(contacts))
    if set_s := clock.agree(await directory.clocks_ahead_s(contacts)):
        theirs = "the other peers'" if len(contacts) > 1 else f"that of {contacts[0]}"
        start.warnings.append(f"this machine's clock is {difference(-set_s)} {theirs}; this peer goes by theirs")
    if private and (over := private.over()):
        raise UserError(ENDINGS[over])
    return SwarmAccess(run, settings, tuple(contacts), transport, directory, addresses, clock, private)


def commit_start(flags: StartFlags, folder: state.StateFolder, access: SwarmAccess) -> None:
    """Write flags, invitation, port and run to the state folder, so that `--state-dir` alone resumes the peer.

    To be called once the start has succeeded, so that a user can correct a wrong setting by another start.

    Raises:
        UserError: If the disk refuses.
    """
    folder.write_flags(flags.peer)
    if access.private:
        invitation_files.write_holding(invitation_files.kept_path(folder.path), access.private.holding)
    folder.write_listen(access.addresses, flags.peer.listen)
    folder.write_run(access.run, access.config)


async def _greet(
    start: PeerStart, transport: PeerNetwork, run: RunId | None, kept: Run | None
) -> tuple[list[PeerId], Welcome | None]:
    """The peers at --join, as `say_hello` finds them, for as long as --join-wait says.

    A peer that comes back goes on where they are not there.
    """
    flags = start.flags
    end, again_s, say_at = time.monotonic() + flags.join_wait, JOIN_AGAIN_S, 0.0
    if flags.join:
        shared.stage(f"asking {', '.join(flags.join)} for the run")
    while True:
        try:
            return await say_hello(flags.join, transport, run or RunId(""))
        except NobodyAnswers as error:
            if kept:
                alone = "this peer goes on with those that it knows, and tries again while it is alone"
                start.warnings.append(f"{error}; {alone}")
                return [], None
            if (now := time.monotonic()) >= end:
                raise
            if now >= say_at:
                shared.stage(f"{error}; trying for {end - now:.0f} s more")
                say_at = now + JOIN_SAID_S
            await asyncio.sleep(again_s)
            again_s = min(JOIN_LONGER * again_s, MOST_JOIN_AGAIN_S)


def _check_flags(flags: StartFlags, kept: Run | None, folder: Path) -> None:
    """Raises UserError for flags that say otherwise than the folder, or the swarm, or each other.

    The line that a folder was begun with may be given again: whatever starts peers again repeats it.
    """
    if flags.join and flags.say_config:
        raise UserError("with --join the config comes from the swarm; leave CONFIG and --set out")
    if kept and flags.say_config and _said(flags, kept[1]).digest() != kept[1].digest():
        settled = "whose config is settled, and differs from these CONFIG and --set"
        raise UserError(f"{folder} belongs to run {kept[0]}, {settled}; leave CONFIG and --set out")
    if flags.private and (flags.join or (kept and not invitation_files.founder_path(folder).exists())):
        raise UserError("--private begins a new swarm; leave it out with --join, or to go on with a state folder")
    if flags.invite and not (flags.join or kept):
        raise UserError("--invite is for a swarm that is there: give --join ADDR, the address of one of its peers")
    if flags.invite and kept and not is_private(kept[0]):
        raise UserError(f"--invite: {folder} belongs to run {kept[0]}, which is public; use another --state-dir")


def _said(flags: StartFlags, kept: config.Config) -> config.Config:
    """What CONFIG and --set say, with this peer's own files and code as the folder has them. Raises UserError."""
    return config.load(flags.config, flags.overrides, kept.own_inputs)


def _begin(flags: StartFlags, folder: Path) -> Run:
    """A new run. A private one's founder is this folder. Raises UserError."""
    settings = run_inputs.sealed(config.load(flags.config, flags.overrides, flags.own))
    if not flags.private:
        return RunId(f"{settings.name}-{secrets.token_hex(3)}"), settings
    if len(settings.name) > MOST_NAME_CHARS:
        raise UserError(f"the name of a private run has at most {MOST_NAME_CHARS} characters; it is {settings.name!r}")
    founder = FounderFile.create(folder, settings.name)
    holding = founder.own_holding(Permission.TRAIN, FOR_EVER)
    invitation_files.write_holding(invitation_files.kept_path(folder), holding)
    return founder.keys.run, settings


def _membership(
    flags: StartFlags, folder: Path, known: Run | None, peer: PeerId, clock: SwarmClock
) -> PrivateSwarm | None:
    """This peer as a member by --invite, else by the folder; None: the swarm is public. Raises UserError."""
    if not (flags.invite or (known and is_private(known[0]))):
        return None
    path = Path(flags.invite) if flags.invite else invitation_files.kept_path(folder)
    if not path.exists():
        raise UserError(f"{path} is not there; {folder} belongs to a private swarm: give --invite FILE")
    holding = invitation_files.read_holding(path)
    if known and holding.invitation.run != known[0]:
        raise UserError(f"{path} is for run {holding.invitation.run}, but {folder} belongs to {known[0]}")
    if not holding.invitation.may.allows(Permission.DONATE):
        raise UserError(f"{path} allows only to look (decentral.plan, decentral.export); ask the founder for another")
    return invitation_files.member(folder, holding, peer, clock)


async def _reconnect(folder: state.StateFolder, transport: PeerNetwork, private: PrivateSwarm | None) -> list[PeerId]:
    """Connects to the peers that are where they were before this peer restarted.

    In a private swarm each has to take us for a member. Raises UserError if the founder has revoked our invitation.
    """
    peers = await connect_all(transport, AddressBook.load(folder.path / "peers.json").known.values())
    if private is None:
        return peers
    refusals = await at_once(refused_member(transport, peer, private.run) for peer in peers)
    if private.revoked_us:
        raise UserError(ENDINGS[Reason.REVOKED])
    trouble = [said for said in refusals if said]
    if peers and len(trouble) == len(peers):
        raise UserError(f"all {len(peers)} peers that this folder knows refuse this one: {trouble[0]}")
    return [peer for peer, said in zip(peers, refusals, strict=True) if not said]


async def connect_all(transport: PeerNetwork, places: Iterable[Sequence[str]]) -> list[PeerId]:
    """The peers at these places that answer. All are asked at once, but one peer's addresses one after another:
    dials of one peer fail together."""
    by_peer: dict[str, list[str]] = {}
    for address in chain.from_iterable(places):
        by_peer.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    reached = await at_once(connect(transport, addresses) for addresses in by_peer.values())
    return [peer for peer in reached if peer is not None]


async def connect(transport: PeerNetwork, addresses: Sequence[str]) -> PeerId | None:
    """The peer at the first of these addresses that answers."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REACH_S):
            for address in addresses:
                with suppress(AskError, UserError):
                    return await transport.connect(address)
    return None
