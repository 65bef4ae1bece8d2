"""Checks of the swarm: who answers, in which version and run, whether this peer may join, who is there.

`meet` says hello at each address. `Visit` then looks into the DHT as a visitor, under a key that is thrown away.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decentral import __version__
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
from decentral.core.ids import PeerId, RunId
from decentral.core.own_inputs import NOTHING_NAMED
from decentral.core.reasons import Reason
from decentral.core.units import Seconds, plural, readable_bytes
from decentral.engine import measure, memory
from decentral.peers.membership import records, swarm_size
from decentral.peers.membership.records import PeerRecord
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import invitation_files
from decentral.peers.startup.reach_swarm import connect
from decentral.peers.startup.visit import HELLO_S

LOOKS, LOOK_PAUSE_S = 4, 1.0  # into the DHT, until the records of those are there that we have met
CLOCKS_ASKED = 9  # peers whose clocks are compared with ours
UPGRADE = "python -m pip install --upgrade decentral"
NEW_INVITATION = (
    "ask the swarm's founder for a new invitation (python -m decentral.invite), and give it with --invite FILE"
)


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that has welcomed us."""

    peer: PeerId
    address: str
    welcome: Welcome


async def meet(transport: PeerNetwork, addresses: Sequence[str], run: RunId) -> tuple[list[Contact], list[Finding]]:
    """Says hello at these addresses. `run`: the one that the state folder or the invitation is for; "": any."""
    met = await at_once(_greet(transport, address, run) for address in addresses)
    contacts = {one.peer: one for one in met if isinstance(one, Contact)}  # one peer may have several addresses
    return list(contacts.values()), [one for one in met if isinstance(one, Finding)]


def welcomed(contact: Contact, own: PeerId | None) -> Finding:
    """Return the finding for a peer that has welcomed us. `own`: the peer of the state folder, if there is one."""
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
        return wrong("join", f"{address}: it gave no welcome", "check that a decentral peer runs there")
    if is_private(RunId(message.run)) and message.run != run:
        return wrong("join", f"{address}: it says to be in private run {message.run}, unasked", TELLS[Reason.UNINVITED])
    return Contact(peer, address, message)


def _no_connection(detail: str) -> tuple[str, str]:
    """What is seen, and the remedy, where no connection comes about. `detail` is libp2p's last line."""
    if "connection refused" in detail:
        return "connection refused: that machine is there, and nothing listens at that port", (
            "start that peer, or take the address that it prints now: its port may be another one"
        )
    if "peer id mismatch" in detail:
        return "another peer listens there", "take the address that the peer prints now: it has another identity"
    if "no route" in detail or "unreachable" in detail:
        return "this machine has no route there", "check network, VPN and address: a private address needs its network"
    if "timeout" in detail.lower() or "deadline" in detail:
        return "no answer: packets are dropped on the way, or that machine is off", (
            "open that TCP port in the firewalls of both machines, and forward it where the peer is behind a router"
        )
    return detail or "no connection", "check the address, that the peer there runs, and its port"


def _refused(address: str, reason: str, detail: str, run: RunId) -> Finding:
    """Of a peer that is there and gives no welcome."""
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
            return wrong("join", seen, "that peer hangs, is suspended or overloaded: look at its machine")
        case Reason.NOT_READY:
            return wrong("join", f"{address}: it is still starting", "try again in a minute")
    return wrong("join", f"{address}: {reason}: {detail}", "check that a decentral peer of this version runs there")


def _upgrade(detail: str) -> str:
    """Who has to upgrade: an answer that we cannot read says `this peer speaks version 5; that one 4`."""
    theirs = re.search(r"that one (\d+)", detail)
    older = theirs is not None and int(theirs[1]) < VERSION
    return f"{'upgrade the peer there' if older else 'upgrade this machine'}: {UPGRADE}"


def invitation(path: Path) -> Finding:
    """Whether the file is an invitation with which a peer may join. Its end is looked at by the swarm's time."""
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
    """A look into a swarm in which somebody has welcomed us. Begin it with `begin`."""

    transport: PeerNetwork
    contacts: list[Contact]
    clock: SwarmClock
    own: Signer
    private: PrivateSwarm | None
    config: Config = field(init=False)
    ahead_s: list[Seconds] = field(init=False)  # other peers' clocks, by this machine's
    known: dict[PeerId, PeerRecord] = field(init=False)
    reached: list[PeerId] = field(init=False)  # peers that we are connected to

    def __post_init__(self) -> None:
        self.config = received.received(self.contacts[0].welcome.config).built_in()

    @property
    def run(self) -> RunId:
        return RunId(self.contacts[0].welcome.run)

    async def begin(self, own: PeerId | None) -> None:
        """Compare clocks, that of the state folder's peer (`own`) apart, and read the records in the DHT."""
        keys = [*swarm_size.keys(self.run), *([revoked_key(self.run)] if self.private else ())]
        met = [contact.peer for contact in self.contacts]
        directory = await self.transport.directory(keys, met)
        self.clock.agree(await directory.clocks_ahead_s(met))
        self.known = await self._records(directory, set(met))
        others = [record for peer, record in self.known.items() if peer not in met][: CLOCKS_ASKED - len(met)]
        reached = await at_once(connect(self.transport, record.addresses) for record in others)
        self.reached = [*met, *(peer for peer in reached if peer)]
        ahead_s = await directory.clocks_ahead_s(peer for peer in self.reached if peer != own)
        set_s = -self.clock.machine_ahead_s()  # the clock is the swarm's by now
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
        """`own`: the peer of the state folder, if there is one. `departed`: which peer has left it last; "": none."""
        yield self._members(own, departed)
        yield self._layers()
        yield self._software()
        yield self._model()
        if self.private and (over := self.private.over()):
            yield wrong("invitation", TELLS[over], NEW_INVITATION)

    def _members(self, own: PeerId | None, departed: str) -> Finding:
        others = [record for peer, record in self.known.items() if peer != own]
        phases = [record.phase for record in others]
        if not others and own in self.known and departed:
            return ok("swarm", f"run {self.run}: no peer but this one; {departed}")
        if not others and own in self.known:
            remedy = "start others with the line that this peer printed; or see reachability, below"
            return wrong("swarm", f"run {self.run}: no peer but this one", remedy)
        if not others:
            remedy = "those that answer do not train yet, or cannot reach each other: try again in a minute"
            return warn("swarm", f"run {self.run}: no peer's record is in the DHT", remedy)
        step = max(record.lr_step for record in others)
        parts = f"{phases.count('training')} train, {phases.count('joining')} join"
        return ok("swarm", f"run {self.run}: {plural(len(others), 'other peer')} ({parts}), learning-rate step {step}")

    def _layers(self) -> Finding:
        fragments = memory.needs(self.config).fragments
        training = [record for record in self.known.values() if record.phase == "training"]
        missing = [cut for cut in fragments if not any(record.covers(cut) for record in training)]
        if not training:
            return unknown("layers", "no peer trains yet")
        if missing:
            places = ", ".join(f"{cut.first} to {cut.last - 1}" for cut in missing)
            remedy = "start a peer with memory for them (--memory), or those that held them, from their state folders"
            return wrong("layers", f"no peer that trains holds layers {places}: no micro-batch gets through", remedy)
        return ok("layers", f"all {fragments[-1].last} layers are held")

    def _software(self) -> Finding:
        others = sorted({record.profile.software for record in self.known.values()} - {f"decentral {__version__}", ""})
        if others:
            remedy = f"let all peers have one version: {UPGRADE}"
            return warn("software", f"this is decentral {__version__}; others have {', '.join(others)}", remedy)
        return ok("software", f"decentral {__version__} everywhere")

    def _model(self) -> Finding:
        """Whether a peer with this machine's memory can take a part in the run."""
        needs, here = memory.needs(self.config), measure.machine_bytes()
        whole = needs.span_bytes(0, len(needs.fragments))
        seen = f"{readable_bytes(whole)} for the whole model; this machine has {readable_bytes(here)}"
        try:
            memory.check(needs, here)
            received.received(self.contacts[0].welcome.config).adopt(NOTHING_NAMED)
        except UserError as error:
            return warn("model", seen, str(error))
        return ok("model", seen if whole <= here else f"{seen}, and would hold a part")
