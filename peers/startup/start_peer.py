"""From a peer's flags to a peer that trains: opens the network, reaches the swarm, prepares and trains.

peers/startup/reach_swarm.py   says hello to the swarm, and learns the run and its config
peers/startup/prepare.py       chooses layers, loads data and model, trains

libp2p starts early: what computes is loaded meanwhile.
"""

import argparse
import asyncio
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.commands import shared
from decentral.engine import compile_caches
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import state
from decentral.peers.startup.copied_identity import refuse_copy
from decentral.peers.startup.reach_swarm import commit_start, own_run, reach_swarm
from decentral.view.page.address import reserved
from decentral.view.page.child import dashboard

if TYPE_CHECKING:
    from decentral.comm.gossip.outer_kernels import OuterKernels
    from decentral.engine.island import Island

LOADING = "loading"  # how the names of the thread begin that loads the rest of the program


async def start(flags: argparse.Namespace, island: "Island | None" = None) -> None:
    """One peer: alone, or as rank 0 of its island."""
    _raise_file_limit()
    flags.island, flags.warnings = island, []  # what the user is told when training begins
    with (
        _metrics_server(flags) as flags.metrics_server,
        reserved(flags.dashboard) as page_socket,
        state.StateFolder.claim(flags.state_dir) as folder,
        dashboard(flags.dashboard, folder.path, listening=page_socket) as flags.page,
    ):
        compile_caches.keep_in(folder.path)
        if flags.restarted:
            _forget_start(flags, folder)
        own = Identity.load_or_create(folder.path / "identity.key")
        # On threads of its own: asyncio waits for those of its executor before a user who is refused would hear of it.
        loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, LOADING), load, flags.device)
        key, clock, named = folder.path / "identity.key", SwarmClock(), flags.join
        begun = own_run(flags, folder, own.peer)
        shared.stage("opening the network (libp2p)")
        transport = await _listen(flags, folder, key, clock)
        try:
            access = await reach_swarm(flags, folder, begun, transport, clock)
            await refuse_copy(access, access.signer(own), transport, named)
            if not loading.done():
                shared.stage("loading torch and the training code")
            proven = await loading
            from decentral.peers.startup import prepare

            request, claimed = await prepare.claim_layers(flags, folder, access.signer(own), transport, access)
            host = await prepare.prepare(flags, folder, transport, access, request, claimed, proven)
            commit_start(flags, folder, access)
            await prepare.train(flags, folder, host)
        finally:
            await transport.close()


async def _listen(flags: argparse.Namespace, folder: state.StateFolder, key: Path, clock: SwarmClock) -> Libp2p:
    """Start libp2p where this peer listened before, or at a free port if another program has that one now.

    Raises UserError, also if a port is taken that --listen names.
    """
    wanted = list(flags.listen) or ports.anywhere()
    kept = folder.listen(wanted)
    try:
        return await Libp2p.start(key, kept, flags.announce, clock, shared.stage)
    except ports.PortTaken as error:
        if kept == wanted:
            raise
        said = str(error).removesuffix(f"; {ports.TAKEN}")
        flags.warnings.append(f"{said}, where this peer listened before; it listens at a free port instead")
    return await Libp2p.start(key, wanted, flags.announce, clock, shared.stage)


def _metrics_server(flags: argparse.Namespace) -> AbstractContextManager[object]:
    """Return the server of --metrics, which has its port before anything is settled. Raises UserError if it cannot."""
    if not flags.metrics:
        return nullcontext()
    from decentral.view.metrics_server import bound

    return bound(flags.metrics)


def _raise_file_limit() -> None:
    """Lets this process open as many files as the system allows it: each stream to another peer is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load(device: str) -> "tuple[OuterKernels, str]":
    """Load the rest of the program. Return the kernels of gossip for this device, which are proven, and the reason."""
    from decentral.peers.startup import prepare

    return prepare.prove_kernels(device)


def _forget_start(flags: argparse.Namespace, folder: state.StateFolder) -> None:
    """Makes ranks that were started again go on from the folder, whatever the user's line said of the start."""
    if folder.read_run():
        flags.config, flags.set, flags.private, flags.invite = None, [], False, None
    if AddressBook.load(folder.path / "peers.json").known:
        flags.join = []  # that peer may be gone by now
