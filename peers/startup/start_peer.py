"""From a peer's flags to a peer that trains: opens the network, reaches the swarm, prepares and trains.

peers/startup/reach_swarm.py   says hello to the swarm, and learns the run and its config
peers/startup/prepare.py       chooses layers, loads data and model, trains

libp2p starts early: what computes is loaded meanwhile.
"""

import asyncio
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from decentral.comm.net import ports
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.network import PeerNetwork, peer_network
from decentral.commands import shared
from decentral.core.ids import PeerId
from decentral.engine import compile_caches
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import state
from decentral.peers.startup.copied_identity import refuse_copy
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.reach_swarm import commit_start, own_run, reach_swarm
from decentral.view.page.address import reserved
from decentral.view.page.child import dashboard

if TYPE_CHECKING:
    from decentral.comm.gossip.outer_kernels import OuterKernels
    from decentral.engine.island import Island
    from decentral.view.metrics_server import MetricsServer

LOADED_NETWORK = peer_network()  # it is there before the rest is loaded
LOADING = "loading"  # how the names of the thread begin that loads the rest of the program


async def start(flags: StartFlags, device: str, island: "Island | None" = None, again: bool = False) -> None:
    """Run one peer until it stops.

    Args:
        flags: What its user asks for.
        device: On which this process computes.
        island: Of which it is rank 0; None: the peer is alone on its device.
        again: Whether it is started once more by its launcher.
    """
    _raise_file_limit()
    with (
        _metrics_server(flags.peer.metrics) as metrics_server,
        reserved(flags.dashboard) as page_socket,
        state.StateFolder.claim(flags.state_dir) as folder,
        dashboard(flags.dashboard, folder.path, listening=page_socket) as page,
    ):
        compile_caches.keep_in(folder.path)
        asked = flags.of_restart(bool(folder.read_run()), bool(_known_peers(folder))) if again else flags
        own = Identity.load_or_create(folder.path / "identity.key")
        # On threads of its own: asyncio waits for those of its executor before a user who is refused would hear of it.
        loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, LOADING), load, device)
        begun, clock = PeerStart(asked.without_address_of(own.peer), folder, own, device, island), SwarmClock()
        run = own_run(begun.flags, folder)
        shared.stage("opening the network (libp2p)")
        transport = await _listen(begun, clock)
        try:
            access = await reach_swarm(begun, run, transport, clock)
            await refuse_copy(access, access.signer(own), transport, asked.join)
            if not loading.done():
                shared.stage("loading torch and the training code")
            kernels, why = await loading
            from decentral.peers.startup import prepare

            request, claimed = await prepare.claim_layers(begun, access)
            host = await prepare.prepare(begun, access, request, claimed, kernels)
            commit_start(begun.flags, folder, access)
            await prepare.train(begun, access, host, why, page, metrics_server)
        finally:
            await transport.close()


async def _listen(start: PeerStart, clock: SwarmClock) -> PeerNetwork:
    """Open the network where this peer listened before, or at a free port if another program has that one now.

    Raises UserError, also if a port is taken that --listen names.
    """
    key, announce = start.folder.path / "identity.key", start.flags.peer.announce
    wanted = list(start.flags.peer.listen) or ports.anywhere()
    kept = start.folder.listen(wanted)
    try:
        return await LOADED_NETWORK.start(key, kept, announce, clock, shared.stage)
    except ports.PortTaken as error:
        if kept == wanted:
            raise
        said = str(error).removesuffix(f"; {ports.TAKEN}")
        start.warnings.append(f"{said}, where this peer listened before; it listens at a free port instead")
    return await LOADED_NETWORK.start(key, wanted, announce, clock, shared.stage)


def _known_peers(folder: state.StateFolder) -> Mapping[PeerId, Sequence[str]]:
    return AddressBook.load(folder.path / "peers.json").known


def _metrics_server(address: tuple[str, int] | None) -> "AbstractContextManager[MetricsServer | None]":
    """Return the server of --metrics, which has its port before anything is settled. Raises UserError if it cannot."""
    if address is None:
        return nullcontext()
    from decentral.view.metrics_server import bound

    return bound(address)


def _raise_file_limit() -> None:
    """Lets this process open as many files as the system allows it: each stream to another peer is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load(device: str) -> "tuple[OuterKernels, str]":
    """Load the rest of the program. Return the kernels of gossip for this device, which are proven, and the reason."""
    from decentral.peers.startup import prepare

    return prepare.prove_kernels(device)
