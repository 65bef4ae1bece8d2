"""Start a peer from its flags: open the network, reach the swarm, prepare, and train. See `start`.

peers/startup/reach_swarm.py   says hello to the swarm, and learns the run and its config
peers/startup/prepare.py       chooses layers, loads data and model, trains

libp2p starts first; torch and the training code are loaded in a thread meanwhile.
"""

import asyncio
import resource
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.comm.net import ports
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.network import PeerNetwork, peer_network
from decentral.commands import shared
from decentral.core.plain_text import plain_text
from decentral.engine import compile_caches
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup import state
from decentral.peers.startup.copied_identity import refuse_copy
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.reach_swarm import OwnRun, commit_start, own_run, reach_swarm
from decentral.view.page.address import reserved
from decentral.view.page.child import dashboard

if TYPE_CHECKING:
    from decentral.comm.gossip.outer_kernels import OuterKernels
    from decentral.engine.island import Island
    from decentral.view.metrics_server import MetricsServer

LOADED_NETWORK = peer_network()  # imported with this module, so that the network can open while torch is still loading
LOADING = "loading"


async def start(flags: StartFlags, device: str, island: "Island | None" = None, again: bool = False) -> None:
    """Run one peer until it stops.

    Args:
        flags: What the user asks for.
        device: The device on which this process computes, as named by --device.
        island: The island of which this process is rank 0; None if the peer has one device.
        again: Whether a launcher restarts the peer, so that the state folder's run and peers replace those in `flags`.

    Raises:
        UserError: If the user has to change something before the peer can start.
        SystemExit: If the peer stops because of an error; `prepare.train` documents the exit codes.
    """
    _raise_file_limit()
    with (
        _metrics_server(flags.peer.metrics) as metrics_server,
        reserved(flags.dashboard) as page_socket,
        state.StateFolder.claim(flags.state_dir) as folder,
        dashboard(flags.dashboard, folder.path, listening=page_socket) as page,
    ):
        compile_caches.keep_in(folder.path)
        if flags.resume_from:
            folder.restore(Path(flags.resume_from))
        known = AddressBook.load(folder.path / "peers.json").known
        asked = flags.of_restart(bool(folder.look_at_run()), bool(known)) if again else flags
        own = Identity.load_or_create(folder.path / "identity.key")
        # Do not use asyncio's default executor: asyncio waits for it at exit, which would delay an error message.
        loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, LOADING), load, device)
        begun, clock = PeerStart(asked.without_address_of(own.peer), folder, own, device, island), SwarmClock()
        run = own_run(begun)
        shared.starting(what_begins(begun, run))
        shared.starting("opening the network")
        transport = await _listen(begun, clock)
        try:
            access = await reach_swarm(begun, run, transport, clock)
            await refuse_copy(access, access.signer(own), transport, asked.join)
            if not loading.done():
                shared.starting("loading torch and the training code")
            kernels, why = await loading
            from decentral.peers.startup import prepare

            with shared.interrupted_at_once():  # choosing and building a large model take minutes without an `await`
                request, claimed = await prepare.claim_layers(begun, access)
                host = await prepare.prepare(begun, access, request, claimed, kernels)
            commit_start(begun.flags, folder, access)
            await prepare.train(begun, access, host, why, page, metrics_server)
        finally:
            await transport.close()


def what_begins(start: PeerStart, run: OwnRun) -> str:
    """Return as text which run this start continues, begins or joins, and where its state is.

    If the user named no folder, and a stopped peer's is there, `start` gets a warning with the command that goes on.
    """
    folder, flags = start.folder.path, start.flags
    if run.kept:
        return f"going on with run {plain_text(run.kept[0])} from {folder}"
    if flags.state_dir is None and (stopped := state.stopped_beside(folder)):
        again = f"{shared.as_called('python -m decentral.peer')} --state-dir {shlex.quote(str(stopped))}"
        start.warnings.append(f"this is a new peer in {folder}; to go on with the stopped one instead: {again}")
    return f"{'joining a run' if flags.join else 'beginning a new run'} in {folder}"


async def _listen(start: PeerStart, clock: SwarmClock) -> PeerNetwork:
    """Open the network at the ports of the last start; if another program has taken them, at free ports.

    Raises:
        UserError: If the network cannot be opened, or a port that --listen names is taken.
    """
    key, announce = start.folder.path / "identity.key", start.flags.peer.announce
    wanted = list(start.flags.peer.listen) or ports.anywhere()
    kept = start.folder.listen(wanted)
    try:
        return await LOADED_NETWORK.start(key, kept, announce, clock, shared.starting)
    except ports.PortTaken as error:
        if kept == wanted:
            raise
        said = str(error).removesuffix(f"; {ports.TAKEN}")
        start.warnings.append(f"{said}, where this peer listened before; it listens at a free port instead")
    return await LOADED_NETWORK.start(key, wanted, announce, clock, shared.starting)


def _metrics_server(address: tuple[str, int] | None) -> "AbstractContextManager[MetricsServer | None]":
    """Return a context manager that yields the server of --metrics with its port bound, or None without an address.

    Raises:
        UserError: If the port cannot be bound.
    """
    if address is None:
        return nullcontext()
    from decentral.view.metrics_server import bound

    return bound(address)


def _raise_file_limit() -> None:
    """Raise this process's limit of open files to what the system allows, since each stream to a peer is a file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load(device: str) -> "tuple[OuterKernels, str]":
    """Import the training code, and return the gossip kernels for this device and the reason for the choice.

    Raises:
        UserError: If the device does not exist.
    """
    from decentral.peers.startup import prepare

    return prepare.prove_kernels(device)
