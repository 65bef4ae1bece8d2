"""Check the swarm: which peers answer, their versions and run, whether this peer may join, which layers have a holder.

`meet` sends Hello to the peer at each address. `Visit` then reads the peers' records in the DHT, under a temporary key.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decentral import __version__
from decentral.comm.net.causes import DialFailure, dial_failure
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.invitations import Permission, is_private
from decentral.comm.wire.messages import VERSION, Hello, Refused, Welcome
from decentral.comm.wire.network import PeerNetwork, SwarmDirectory
from decentral.comm.wire.private_swarm import TELLS, PrivateSwarm, revoked_key
from decentral.comm.wire.transport import AskError
from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core import received
from decentral.core.at_once import at_once
from decentral.core.config import Config
from decentral.core.errors import UserError
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.own_inputs import NOTHING_NAMED
from decentral.core.peer_names import titled
from decentral.core.reasons import Reason
from decentral.core.units import Seconds, plural, readable_bytes
from decentral.engine import checkpoint, measure, memory
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import invitation_files
from decentral.peers.startup.reach_swarm import connect_all
from decentral.peers.startup.state import StateFolder
from decentral.peers.startup.visit import HELLO_S

# The DHT is read up to LOOKS times, LOOK_PAUSE_S apart, until the records of all peers that answered are found.
LOOKS, LOOK_PAUSE_S = 4, 1.0
CLOCKS_ASKED = 9
UPGRADE = "python -m pip install --upgrade decentral"
NEW_INVITATION = (
    "ask the swarm's founder for a new invitation (python -m decentral.invite), and give it with --invite FILE"
)


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that answered Hello with a Welcome, which has the run's config."""

    peer: PeerId
    address: str
    welcome: Welcome


async def meet(transport: PeerNetwork, addresses: Sequence[str], run: RunId) -> tuple[list[Contact], list[Finding]]:
    """Send Hello to the peer at each address; return the peers that answer Welcome, and a finding for each failure.

    Args:
        transport: The network.
        addresses: Addresses as a user gives them with --join.
        run: The run that the state folder or the invitation names; "": any run.
    """
    met = await at_once(_greet(transport, address, run) for address in addresses)
    contacts = {one.peer: one for one in met if isinstance(one, Contact)}  # one address is enough for each peer
    return list(contacts.values()), [one for one in met if isinstance(one, Finding)]


def welcomed(contact: Contact, own: PeerId | None) -> Finding:
    """Return the finding that a contact answers; `own` is the id of the state folder's peer, if there is one."""
    who = f"this peer itself, at {contact.address}," if contact.peer == own else contact.address
    return ok("join", f"{who} answers; run {contact.welcome.run}, protocol {VERSION}")


async def _greet(transport: PeerNetwork, address: str, run: RunId) -> Contact | Finding:
    try:
        peer = await transport.connect(address)
    except UserError as error:
        return wrong("join", str(error), "copy the address from the line that the first peer printed")
    except AskError as error:
        seen, remedy = _no_connection(error.detail)
        return wrong("join", f"{address}: {seen}", remedy)
    try:
        message = (await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)).envelope.message
    except AskError as error:
        return _refused(address, error.reason, error.detail, run)
    if isinstance(message, Refused):
        return _refused(address, message.reason, message.detail, run)
    if not isinstance(message, Welcome):
        return wrong("join", f"{address}: its answer is not a welcome", "check that a decentral peer runs there")
    if is_private(RunId(message.run)) and message.run != run:
        return wrong("join", f"{address}: it claims the private run {message.run}", TELLS[Reason.UNINVITED])
    return Contact(peer, address, message)


def _no_connection(detail: str) -> tuple[str, str]:
    """Return a text and a remedy for a failed connection; `detail` is that of the AskError."""
    match dial_failure(detail):
        case DialFailure.NOBODY_LISTENS:
            return "connection refused: that machine is there, but nothing listens at that port", (
                "start that peer, or use the address that it prints now: its port may have changed"
            )
        case DialFailure.ANOTHER_PEER:
            return "another peer listens there", "use the address that the peer prints now: it has another identity"
        case DialFailure.NO_ROUTE:
            remedy = "check network, VPN and address: a private address needs its network"
            return "this machine has no route there", remedy
        case DialFailure.SILENCE:
            return "no answer: packets are dropped on the way, or that machine is off", (
                "open that TCP port in the firewalls of both machines, and forward it if the peer is behind a router"
            )
        case DialFailure.OTHER:
            return detail or "no connection", "check the address, that the peer there runs, and its port"


def _refused(address: str, reason: str, detail: str, run: RunId) -> Finding:
    """Return the finding about a peer that refused our Hello for this reason."""
    match reason:
        case Reason.VERSION:
            return wrong("version", f"{address}: {detail.removeprefix('version: ')}", _upgrade(detail))
        case Reason.RUN:
            remedy = f"the state folder is for run {run}: give --join an address of that run, or another --state-dir"
            return wrong("run", f"{address}: {detail}", remedy)
        case Reason.UNINVITED:
            seen = f"{address}: {detail or 'this swarm is private'}"
            return wrong("invitation", seen, TELLS[Reason.UNINVITED])
        case Reason.EXPIRED | Reason.REVOKED:
            return wrong("invitation", f"{address}: {TELLS[Reason(reason)]}", NEW_INVITATION)
        case Reason.DEADLINE:
            seen = f"{address}: connected, but no answer within {HELLO_S:g} s"
            return wrong("join", seen, "that peer hangs, is suspended or overloaded: check its machine")
        case Reason.NOT_READY:
            return wrong("join", f"{address}: it is still starting", "try again in a minute")
    return wrong("join", f"{address}: {reason}: {detail}", "check that a decentral peer of this version runs there")


def _upgrade(detail: str) -> str:
    """Return the remedy for different protocol versions; `detail`, from the refusing peer, names both versions."""
    theirs = re.search(r"that one (\d+)", detail)
    older = theirs is not None and int(theirs[1]) < VERSION
    return f"{'upgrade the peer there' if older else 'upgrade this machine'}: {UPGRADE}"


def starts_without(folder: Path, silent: Sequence[Finding]) -> Finding | None:
    """Return the finding that none of the peers that a stopped peer's folder knows answers, and how it then starts.

    Args:
        folder: The stopped peer's state folder.
        silent: The findings about those peers.

    Returns:
        The finding; None if the folder has no run or a file that cannot be read, since no peer starts with that.
    """
    try:
        kept, held = StateFolder(folder).look_at_run(), checkpoint.span(folder)
    except UserError:  # disk.checks reports this error to the user
        return None
    if kept is None:
        return None
    starts = "it would start alone, from its checkpoint, and look for them again"
    if held is None:
        starts = "it would start alone, with fresh weights, since it has no checkpoint, and look for them again"
    elif held != (0, kept[1].facts()["layers"] or held[1]):
        starts = f"it would start, and wait for peers with the layers that it lacks; it has {held[0]} to {held[1] - 1}"
    seen = f"no peer that this one knows answers now, such as {silent[0].seen}; {starts}"
    remedy = "nothing, if it is the first to start; else start one of them, or give it a running peer's --join ADDR"
    return warn("join", seen, remedy)


def invitation(path: Path) -> Finding:
    """Return the finding on whether a file is an invitation that lets a peer join; the expiry is checked later."""
    try:
        one = invitation_files.read_holding(path).invitation
    except UserError as error:
        return wrong("invitation", str(error), NEW_INVITATION)
    seen = f"{path}: for {one.holder}, run {one.run}"
    if not one.may.allows(Permission.DONATE):
        return wrong("invitation", f"{seen}, to {one.may} only", "ask the founder for one to donate or to train")
    return ok("invitation", f"{seen}, to {one.may}")


@dataclass(slots=True)
class Visit:
    """A visit to the swarm of `contacts`. Await `begin` before any other call.

    The constructor raises UserError if the swarm's config is not valid, or names code that builds the model.
    """

    transport: PeerNetwork
    contacts: list[Contact]
    clock: SwarmClock
    own: Signer
    private: PrivateSwarm | None
    config: Config = field(init=False)
    ahead_s: list[Seconds] = field(init=False)  # seconds by which other peers' clocks are ahead of this machine's
    known: dict[PeerId, PeerRecord] = field(init=False)
    reached: list[PeerId] = field(init=False)
    silent: set[PeerId] = field(init=False)  # peers of `known` that were dialled and did not answer

    def __post_init__(self) -> None:
        """Read the config from the first welcome."""
        self.config = received.received(self.contacts[0].welcome.config).built_in()

    @property
    def run(self) -> RunId:
        """Return the id of the swarm's run."""
        return RunId(self.contacts[0].welcome.run)

    async def begin(self, own: PeerId | None) -> None:
        """Set `clock` to the swarm's time, and fill `known`, `reached`, `silent` and `ahead_s`.

        `ahead_s` leaves out the clock of `own`, the state folder's peer.
        """
        keys = [*swarm_size.keys(self.run), *([revoked_key(self.run)] if self.private else ())]
        met = [contact.peer for contact in self.contacts]
        directory = await self.transport.directory(keys, met)
        self.clock.agree(await directory.clocks_ahead_s(met))
        self.known = await self._records(directory, set(met))
        others = [peer for peer in self.known if peer not in met][: CLOCKS_ASKED - len(met)]
        self.reached = [*met, *await connect_all(self.transport, (self.known[peer].addresses for peer in others))]
        self.silent = {peer for peer in others if peer not in self.reached}
        ahead_s = await directory.clocks_ahead_s(peer for peer in self.reached if peer != own)
        set_s = -self.clock.machine_ahead_s()  # seconds by which `agree` has set our clock ahead of the machine's
        self.ahead_s = [ahead + set_s for ahead in ahead_s]

    async def _records(self, directory: SwarmDirectory, met: set[PeerId]) -> dict[PeerId, PeerRecord]:
        known: dict[PeerId, PeerRecord] = {}
        for _ in range(LOOKS):
            known |= await records.lookup(directory, self.run, self.own, self.clock())
            if met <= known.keys():
                break
            await asyncio.sleep(LOOK_PAUSE_S)
        return known

    def findings(self, own: PeerId | None, departed: str) -> Iterator[Finding]:
        """Yield the findings about members, layers, versions, model and invitation.

        Args:
            own: Id of the state folder's peer; None: there is no such peer.
            departed: Text about the peer that left most recently; "": no peer has left in the last 10 minutes.
        """
        yield self._members(own, departed)
        yield self._layers()
        yield self._software()
        yield self._model()
        if self.private and (over := self.private.over()):
            yield wrong("invitation", TELLS[over], NEW_INVITATION)

    def _members(self, own: PeerId | None, departed: str) -> Finding:
        others = [record for peer, record in self.known.items() if peer != own and peer not in self.silent]
        phases = [record.phase for record in others]
        silent = ", ".join(titled(peer, self.known[peer].profile.name) for peer in self.silent if peer != own)
        if not others and silent:
            remedy = (
                "start it again with its --state-dir if it was killed: its record lasts up to a minute longer; else "
            )
            remedy += "it is cut off, or behind a router: run the doctor there"
            return warn("swarm", f"run {self.run}: no other peer answers now, but has a record: {silent}", remedy)
        if not others and own in self.known and departed:
            return ok("swarm", f"run {self.run}: no peer but this one; {departed}")
        if not others and own in self.known:
            remedy = "start others with the line that this peer printed; or see reachability, below"
            return wrong("swarm", f"run {self.run}: no peer but this one", remedy)
        if not others:
            remedy = "peers that answer do not train yet, or cannot reach each other: try again in a minute"
            return warn("swarm", f"run {self.run}: no peer's record is in the DHT", remedy)
        step = max(record.lr_step for record in others)
        parts = f"{phases.count(PeerPhase.TRAINING)} train, {phases.count(PeerPhase.JOINING)} join"
        seen = f"run {self.run}: {plural(len(others), 'other peer')} ({parts}), learning-rate step {step}"
        return ok("swarm", f"{seen}; without an answer now: {silent}" if silent else seen)

    def _layers(self) -> Finding:
        fragments = memory.needs(self.config).fragments
        training = {peer: record for peer, record in self.known.items() if record.phase == PeerPhase.TRAINING}
        holders = [{peer for peer, record in training.items() if record.covers(cut)} for cut in fragments]
        missing = [cut for cut, peers in zip(fragments, holders, strict=True) if not peers]
        silent = [cut for cut, peers in zip(fragments, holders, strict=True) if peers and peers <= self.silent]
        if not training:
            return unknown("layers", "no peer trains yet")
        if missing:
            remedy = "start a peer with enough memory (--memory), or restart former holders from their state folders"
            seen = f"no training peer holds layers {_places(missing)}: no micro-batch gets through"
            return wrong("layers", seen, remedy)
        if silent:
            return unknown("layers", f"those that hold layers {_places(silent)} do not answer now", "see swarm")
        return ok("layers", f"all {fragments[-1].last} layers are held")

    def _software(self) -> Finding:
        others = sorted({record.profile.software for record in self.known.values()} - {f"decentral {__version__}", ""})
        if others:
            remedy = f"let all peers have one version: {UPGRADE}"
            return warn("software", f"this is decentral {__version__}; others have {', '.join(others)}", remedy)
        return ok("software", f"decentral {__version__} everywhere")

    def _model(self) -> Finding:
        """Return the finding on whether a peer with this machine's memory can take part in the run."""
        needs, here = memory.needs(self.config), measure.machine_bytes()
        whole = needs.span_bytes(0, len(needs.fragments))
        seen = f"{readable_bytes(whole)} for the whole model; this machine has {readable_bytes(here)}"
        try:
            memory.check(needs, here)
            received.received(self.contacts[0].welcome.config).adopt(NOTHING_NAMED)
        except UserError as error:
            return warn("model", seen, str(error))
        return ok("model", seen if whole <= here else f"{seen}, so a peer would hold a part")


def _places(cuts: Iterable[Fragment]) -> str:
    return ", ".join(f"{cut.first} to {cut.last - 1}" for cut in cuts)
