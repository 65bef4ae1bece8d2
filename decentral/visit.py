"""How a command reaches a live swarm: it says hello. One that only looks does so under a key that it throws away."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from decentral import state
from decentral.comm.net.libp2p import HivemindDirectory, Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import VERSION, Hello, Refused, Welcome
from decentral.comm.wire.transport import AskError
from decentral.core import config, swarm_config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.peers.hosts.clock import SwarmClock
from decentral.peers.membership import records

HELLO_S = 15.0


@dataclass(frozen=True, slots=True)
class VisitedSwarm:
    """A swarm that a command looks at, and the connections through which it does."""

    transport: Libp2p
    run: RunId
    config: config.Config
    contacts: list[PeerId]
    directory: HivemindDirectory
    clock: SwarmClock


@asynccontextmanager
async def visit(join: Sequence[str]) -> AsyncIterator[VisitedSwarm]:
    """Connects for as long as the swarm is looked at. Raises UserError if no peer at these addresses answers."""
    with tempfile.TemporaryDirectory() as folder:
        clock = SwarmClock()
        transport = await Libp2p.start(Path(folder) / "identity.key", [state.ANYWHERE], [], clock)
        try:
            contacts, welcome = await say_hello(join, transport, RunId(""))
            assert welcome is not None, "say_hello raises where no peer answers"
            run, settings = RunId(welcome.run), swarm_config.received(welcome.config).built_in()
            directory = await transport.directory(records.keys(run, settings.swarm.shards), contacts)
            clock.agree(await directory.clocks_ahead_s(contacts))
            yield VisitedSwarm(transport, run, settings, contacts, directory, clock)
        finally:
            await transport.close()


async def say_hello(join: Sequence[str], transport: Libp2p, run: RunId) -> tuple[list[PeerId], Welcome | None]:
    """The peers at --join that gave a welcome, and the first welcome. Raises UserError if all addresses fail."""
    contacts, welcome, trouble = [], None, ""
    for address in join:
        try:
            peer = await transport.connect(address)
            answer = await transport.ask(peer, Envelope(Hello(run)), HELLO_S, 0)
        except AskError as error:
            trouble = f"--join {address}: {error}"
            continue
        message = answer.envelope.message
        if isinstance(message, Welcome):
            contacts.append(peer)
            welcome = welcome or message
        else:
            reason = message.detail if isinstance(message, Refused) else "it gave no welcome"
            trouble = f"--join {address}: refused: {reason} (this peer speaks protocol {VERSION})"
    if join and not contacts:
        raise UserError(f"{trouble}; check the address, that the peer there runs, and its port")
    return contacts, welcome
