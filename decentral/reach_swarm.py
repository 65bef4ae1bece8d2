"""How a peer gets into its swarm: the run that it is in, the peers that answer it, and its node of the DHT."""

import argparse
import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from decentral import state
from decentral.comm.net.libp2p import HivemindDirectory, Libp2p
from decentral.comm.wire.transport import AskError
from decentral.core import config, swarm_config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.own_inputs import OwnInputs
from decentral.peers.hosts.clock import SwarmClock, difference
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.planning import swarm_plans
from decentral.visit import say_hello

CLOCKS_ASKED = 9  # peers whose clocks are compared with ours


@dataclass(frozen=True, slots=True)
class SwarmAccess:
    """The run that this peer is in, and how it reaches the other peers."""

    run: RunId
    config: config.Config
    contacts: tuple[PeerId, ...]
    directory: HivemindDirectory
    addresses: tuple[str, ...]
    clock: SwarmClock


async def reach_swarm(
    flags: argparse.Namespace, folder: state.StateFolder, transport: Libp2p, clock: SwarmClock
) -> SwarmAccess:
    """The run is the folder's, else the swarm's at --join, else a new one; the clock becomes the swarm's.

    Raises UserError.
    """
    own = OwnInputs(flags.trust_model_code, flags.data, flags.data_glob)
    kept = folder.read_run(own)
    if kept and (flags.config or flags.set):
        raise UserError(f"{folder.path} belongs to run {kept[0]}, whose config is settled; leave CONFIG and --set out")
    if flags.join and (flags.config or flags.set):
        raise UserError("with --join the config comes from the swarm; leave CONFIG and --set out")
    contacts, welcome = await say_hello(flags.join, transport, kept[0] if kept else RunId(""))
    if kept:
        run, settings = kept
        contacts += await _reconnect(folder, transport)
    elif welcome:
        run, settings = RunId(welcome.run), swarm_config.received(welcome.config).adopt(own)
    else:
        settings = config.load(flags.config, flags.set, own)
        run = RunId(f"{settings.name}-{secrets.token_hex(3)}")
    folder.write_run(run, settings)
    addresses = records.publishable(await transport.addresses())
    folder.write_listen(addresses)
    keys = [*records.keys(run, settings.swarm.shards), swarm_plans.key_of(run)]
    directory = await transport.directory(keys, contacts)
    known = tuple(dict.fromkeys(contacts))
    if set_s := clock.agree(await directory.clocks_ahead_s(known[:CLOCKS_ASKED])):
        theirs = "the other peers'" if len(known) > 1 else f"that of {known[0]}"
        flags.warnings.append(f"this machine's clock is {difference(-set_s)} {theirs}; this peer goes by theirs")
    return SwarmAccess(run, settings, known, directory, addresses, clock)


async def _reconnect(folder: state.StateFolder, transport: Libp2p) -> list[PeerId]:
    """Connects to the peers that are where they were before this peer restarted."""
    known = AddressBook.load(folder.path / "peers.json").known
    reached = await asyncio.gather(*(connect(transport, addresses) for addresses in known.values()))
    return [peer for peer in reached if peer is not None]


async def connect(transport: Libp2p, addresses: Sequence[str]) -> PeerId | None:
    """The peer at the first of these addresses that answers."""
    for address in addresses:
        with suppress(AskError, UserError):
            return await transport.connect(address)
    return None
