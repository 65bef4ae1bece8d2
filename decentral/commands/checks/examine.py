"""Run all checks in the order in which they depend on each other: computer, disk, network, swarm, running peer."""

import argparse
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decentral.comm.net import ports
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.invitations import Holding
from decentral.comm.wire.network import PeerNetwork, peer_network
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm
from decentral.commands.checks import computer, disk, network, running_peer, swarm
from decentral.commands.checks.finding import Finding, FindingState, unknown, warn, wrong
from decentral.commands.checks.swarm import Visit
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.temporary import temporary_folder
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import invitation_files
from decentral.peers.startup.state import PeerFlags, StateFolder, refuse_swarm
from decentral.peers.startup.visit import known_addresses

LOADED_NETWORK = peer_network()


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """The peer that is checked: the peer of a state folder, or a new peer that would start on this machine."""

    folder: Path | None  # the peer's state folder; None: a new peer, which would start in a new folder
    running: bool
    device: str
    announce: list[str]  # addresses of --announce, at which other peers reach this peer
    listen: list[str]  # addresses at which the checks start libp2p on this machine
    addresses: list[str]
    given: bool  # whether the user gave `addresses` with --join
    run: RunId  # the run that the folder or the invitation names; "": any run
    peer: PeerId | None  # id of the peer, from the folder; None: the folder has no readable key
    holding: Holding | None

    @classmethod
    def of(cls, flags: argparse.Namespace) -> "PeerPlace":
        """Return the peer that the flags of decentral.doctor describe.

        Raises:
            UserError: If an address of --join is not valid, or the state folder cannot be read or is a swarm's.
        """
        for address in flags.join:
            LOADED_NETWORK.parse_address(address)
        if flags.state_dir and Path(flags.state_dir).is_dir() and not os.access(flags.state_dir, os.R_OK | os.X_OK):
            raise UserError(f"--state-dir {flags.state_dir} cannot be read; run doctor as the peer's user")
        folder = Path(flags.state_dir) if flags.state_dir and Path(flags.state_dir).is_dir() else None
        if folder:
            refuse_swarm(folder)
        kept = _kept_flags(folder)
        running = folder is not None and disk.in_use(folder)
        wanted = flags.listen or list(kept.listen)
        listen = ports.anywhere() if running else wanted or ports.anywhere()
        if folder is not None and not running:
            listen = StateFolder(folder).listen(wanted)
        holding = _holding(flags.invite, folder)
        return cls(
            folder,
            running,
            flags.device or kept.device.split(",")[0],
            flags.announce or list(kept.announce),
            listen,
            flags.join or (_known(folder, running) if folder else []),
            bool(flags.join),
            _run(folder) or (holding.invitation.run if holding else RunId("")),
            _own_peer(folder),
            holding,
        )


def _kept_flags(folder: Path | None) -> PeerFlags:
    """Return the flags that are stored in the folder; the default flags if none are stored or they cannot be read."""
    try:
        return StateFolder(folder).read_flags() if folder else PeerFlags()
    except UserError:  # disk.belongs_to reports this error to the user
        return PeerFlags()


def _holding(invite: str | None, folder: Path | None) -> Holding | None:
    """Return the invitation of --invite, or else that in the folder; None if there is no readable invitation."""
    path = _invitation_path(invite, folder)
    try:
        return invitation_files.read_holding(path) if path else None
    except UserError:
        return None


def _invitation_path(invite: str | None, folder: Path | None) -> Path | None:
    kept = invitation_files.kept_path(folder) if folder else None
    return Path(invite) if invite else kept if kept and kept.exists() else None


def _known(folder: Path, running: bool) -> list[str]:
    """Return the addresses of peers that the folder's peer has met; if that peer is running, also its own address."""
    tail = running_peer.JournalTail.of(folder)
    found = list(tail.facts.addresses) if tail and running else []
    with suppress(UserError):  # the key is damaged; disk.belongs_to reports that to the user
        found = [*known_addresses(folder), *found[:1]]
    own = _own_peer(folder)
    return [one for one in dict.fromkeys(found) if running or not one.endswith(f"/p2p/{own}")]


def _own_peer(folder: Path | None) -> PeerId | None:
    key = folder / "identity.key" if folder else None
    with suppress(UserError):
        return Identity.load_or_create(key).peer if key and key.exists() else None
    return None


def _run(folder: Path | None) -> RunId:
    try:
        kept = StateFolder(folder).look_at_run() if folder else None
    except UserError:  # disk.belongs_to reports this error to the user
        kept = None
    return kept[0] if kept else RunId("")


async def findings(flags: argparse.Namespace) -> AsyncIterator[Finding]:
    """Yield the findings of all checks except those of Python and its packages.

    Raises:
        UserError: If an address of --join is not valid, or the state folder cannot be read.
    """
    place = PeerPlace.of(flags)
    for finding in _computer_and_disk(flags, place):
        yield finding
    swarm_clock = SwarmClock()
    async for finding in _from_here(place, swarm_clock):
        yield finding
    if place.folder is not None:
        for finding in running_peer.checks(place.folder, swarm_clock()):
            yield finding


def _computer_and_disk(flags: argparse.Namespace, place: PeerPlace) -> Iterator[Finding]:
    yield computer.open_files()
    yield computer.compute_device(place.device)
    if flags.state_dir:
        says_peer = any((flags.device, flags.listen, flags.announce))
        yield from disk.meant(flags.state_dir, any((flags.join, flags.invite)), says_peer)
    yield from disk.checks(Path(flags.state_dir or "."), place.folder is not None)
    path = _invitation_path(flags.invite, place.folder)
    if path is not None:
        yield swarm.invitation(path)
    if place.holding and place.run != place.holding.invitation.run:
        seen = f"it is for run {place.holding.invitation.run}; the state folder belongs to {place.run}"
        yield wrong("invitation", seen, "use another --state-dir, or the invitation to that run")


async def _from_here(place: PeerPlace, swarm_clock: SwarmClock) -> AsyncIterator[Finding]:
    """Start libp2p as a peer would, under a temporary key, and yield the findings about network and swarm."""
    with temporary_folder() as folder:
        key = folder / "identity.key"
        try:
            transport = await LOADED_NETWORK.start(key, place.listen, place.announce, swarm_clock)
        except UserError as error:
            yield network.cannot_listen(str(error), place.listen)
            return
        try:
            listens = place.listen if place.announce else await transport.addresses()
            yield network.listens(listens, place.running)
            async for finding in _swarm(place, transport, swarm_clock, Identity.load_or_create(key)):
                yield finding
        finally:
            await transport.close()


async def _swarm(
    place: PeerPlace, transport: PeerNetwork, swarm_clock: SwarmClock, own: Identity
) -> AsyncIterator[Finding]:
    private = PrivateSwarm(transport.peer, place.holding, swarm_clock) if place.holding else None
    if private:
        await transport.enclose(private)
    contacts, refusals = await swarm.meet(transport, place.addresses, place.run)
    welcomes = [swarm.welcomed(contact, place.peer) for contact in contacts]
    for finding in [*welcomes, *_excused(refusals, bool(contacts), place)]:
        yield finding
    if not contacts:
        if place.announce:
            yield network.announced(place.announce, [], place.peer if place.running else None)
        if not place.addresses:
            yield unknown("swarm", "no peer's address is known", "give --join ADDR to check a swarm from here")
        yield network.clock([])
        return
    try:
        visit = Visit(transport, contacts, swarm_clock, MemberSigner(own, private) if private else own, private)
    except UserError as error:
        yield unknown("swarm", str(error))
        return
    await visit.begin(place.peer)
    yield network.clock(visit.ahead_s)
    for finding in visit.findings(place.peer, running_peer.departure(place.folder, swarm_clock())):
        yield finding
    async for finding in _links(place, visit):
        yield finding


def _excused(refusals: list[Finding], answered: bool, place: PeerPlace) -> list[Finding]:
    """Return which of these failed connections to report to the user.

    If a peer answered, failures at --join addresses are reported as warnings, and failures at addresses from the state
    folder are left out, since some peers there have usually left the swarm. If no peer answered, all are reported; but
    a stopped peer starts without the peers that its folder knows, so one warning says that instead.
    """
    if answered:
        return [warn(one.check, one.seen, one.remedy) for one in refusals] if place.given else []
    if place.folder is None or place.given or place.running:
        return refusals
    silent = [one for one in refusals if one.check == "join"]
    without = swarm.starts_without(place.folder, silent) if silent else None
    return refusals if without is None else [without, *(one for one in refusals if one.check != "join")]


async def _links(place: PeerPlace, visit: Visit) -> AsyncIterator[Finding]:
    transport, others = visit.transport, [peer for peer in visit.reached if peer != place.peer]
    addresses, seen = await transport.addresses(), await network.seen_by(transport, others or visit.reached)
    yield network.address_translation(addresses, seen)
    came = await network.dialled_back(transport, seen, place.announce)
    reachable = (
        network.announced(place.announce, came, place.peer if place.running else None)
        if place.announce
        else network.reachability(addresses, seen, came)
    )
    if place.running and reachable.state == FindingState.WARN:
        there = "run this on another machine: python -m decentral.doctor --join ADDR, with this peer's address"
        reachable = unknown("reachability", f"{reachable.seen} (a port of this check, not the peer's)", there)
    yield reachable
    if not others:  # do not measure the link to this machine's own peer: links to other peers may be slower
        gone = "the swarm has no other peer" if visit.known.keys() <= {place.peer} else "no other peer answers"
        yield unknown("latency", gone)
        return
    yield await network.latency(transport, others)
    own = visit.known.get(place.peer) if place.peer else None
    rates, fetched = network.measured(own.profile) if own else [], await network.download(transport, others, visit.run)
    for finding in [fetched] if fetched.state == FindingState.WRONG or not rates else rates:
        yield finding
