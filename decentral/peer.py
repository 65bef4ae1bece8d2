"""python -m decentral.peer: one peer, which starts a swarm, joins one, or goes on where its state folder stopped.

decentral/reach_swarm.py   says hello to the swarm, and learns the run and its config
decentral/prepare.py       chooses layers, loads data and model, trains

Imports are few here, so that libp2p starts early: what computes is loaded meanwhile.
"""

import argparse
import asyncio
import atexit
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # while the libraries below load, which takes seconds, there is nothing to save
    from decentral.command import ending_signals
    from decentral.lifeline import heed

    for _each in ending_signals():
        signal.signal(_each, lambda *_: os._exit(0))
    heed()

from decentral import command, compile_caches, launch, state
from decentral.comm.net import ports
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.copied_identity import refuse_copy
from decentral.core.errors import UserError
from decentral.core.own_inputs import NOTHING_NAMED
from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.units import Amount
from decentral.dashboard.address import add_dashboard_flag, reserved
from decentral.dashboard.child import dashboard
from decentral.lifeline import heed
from decentral.peers.hosts.clock import SwarmClock
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.reach_swarm import commit_start, named_by, reach_swarm
from decentral.train.island import Island

MAX_JOIN_WAIT_S = 7 * 86400.0
LOADING = "loading"  # how the names of the thread begin that loads the rest of the program


def main(argv: Sequence[str] | None = None) -> int:
    heed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # what is left the system frees at once; Python would look through it for a second
    arguments = sys.argv[1:] if argv is None else argv
    return command.run(lambda: _start(arguments), lasting=True)


def _start(arguments: Sequence[str]) -> None:
    """Runs the peer, or with several devices one of its ranks, or the launcher that starts these."""
    place = launch.Place.here()
    try:
        flags = parse(arguments)
        devices = launch.devices(flags.device, place)
        if place and not flags.state_dir:
            raise UserError("a peer of several ranks needs --state-dir, so that it finds its checkpoint again")
        if flags.state_dir and launch.ATTEMPT not in os.environ:  # ranks of our own launcher: it has looked
            state.require_meant(flags.state_dir, _says_run(flags))
    except UserError:
        if place is None or place.rank == 0:
            raise
        raise SystemExit(2) from None  # rank 0 says it
    if place is not None:
        flags.device, flags.restarted = devices[place.local_rank], place.restarts > 0
        compile_caches.keep_in(Path(flags.state_dir).absolute())
        launch.rank(flags, place, lambda island: asyncio.run(_main(flags, island)))
    elif len(devices) > 1:
        flags.state_dir = flags.state_dir or str(state.new_path())
        raise SystemExit(launch.island(arguments, flags, devices))
    else:
        asyncio.run(_main(flags))


async def _main(flags: argparse.Namespace, island: Island | None = None) -> None:
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
        loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, LOADING), _load, flags)
        key, clock = folder.path / "identity.key", SwarmClock()
        command.stage("opening the network (libp2p)")
        transport = await _listen(flags, folder, key, clock)
        try:
            named = flags.join
            access = await reach_swarm(flags, folder, transport, clock)
            await refuse_copy(access, access.signer(own), transport, named)
            if not loading.done():
                command.stage("loading torch and the training code")
            await loading
            from decentral import prepare

            request, claimed = await prepare.claim_layers(flags, folder, access.signer(own), transport, access)
            host = await prepare.prepare(flags, folder, transport, access, request, claimed)
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
        return await Libp2p.start(key, kept, flags.announce, clock, command.stage)
    except ports.PortTaken as error:
        if kept == wanted:
            raise
        said = str(error).removesuffix(f"; {ports.TAKEN}")
        flags.warnings.append(f"{said}, where this peer listened before; it listens at a free port instead")
    return await Libp2p.start(key, wanted, flags.announce, clock, command.stage)


def _metrics_server(flags: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return the server of --metrics, which has its port before anything is settled. Raises UserError if it cannot."""
    if not flags.metrics:
        return nullcontext()
    from decentral.observe.metrics_server import bound

    return bound(flags.metrics)


def _says_run(flags: argparse.Namespace) -> bool:
    """Return whether the flags say which run to begin or to join."""
    named = flags.config, flags.set, flags.join, flags.private, flags.invite
    return any(named) or named_by(flags) != NOTHING_NAMED


def _raise_file_limit() -> None:
    """Lets this process open as many files as the system allows it: each stream to another peer is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _load(flags: argparse.Namespace) -> None:
    """Loads the rest of the program, and proves the kernels of gossip."""
    from decentral import prepare

    flags.proven = prepare.prove_kernels(flags.device)


def _forget_start(flags: argparse.Namespace, folder: state.StateFolder) -> None:
    """Makes ranks that were started again go on from the folder, whatever the user's line said of the start."""
    if folder.read_run():
        flags.config, flags.set, flags.private, flags.invite = None, [], False, None
    if AddressBook.load(folder.path / "peers.json").known:
        flags.join = []  # that peer may be gone by now


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.peer", description="One peer of a swarm that trains together.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer of the swarm")
    wait = "try --join's addresses for so long, where a peer there may start later; default 0"
    parser.add_argument("--join-wait", type=float, default=0.0, metavar="SECONDS", help=wait)
    parser.add_argument("--invite", metavar="FILE", help="this peer's invitation, where the swarm is private")
    parser.add_argument("--private", action="store_true", help="begin a swarm that only invited peers join")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--data", metavar="PATH", help="this peer's own text or tokens, where the run needs them")
    parser.add_argument("--data-glob", metavar="PATTERN", help="which files of a folder; for text: default **/*.txt")
    parser.add_argument("--data-column", metavar="NAME", help="the column of text in rows of data; default text")
    parser.add_argument("--data-part", metavar="K/N", help="read the K-th of N parts of streamed data, no other peer's")
    parser.add_argument("--tokenizer", metavar="PATH", help="this peer's own file or folder of the run's tokenizer")
    parser.add_argument("--model-from", metavar="DIR", help="a Hugging Face folder whose weights the run starts from")
    code = "package.module:function of the model, which is imported and called here"
    parser.add_argument("--trust-model-code", metavar="NAME", help=code)
    parser.add_argument("--state-dir", metavar="DIR", help="identity, journal, checkpoints; default: a new one")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N, or several: cuda:0,cuda:1")
    parser.add_argument("--memory", type=command.size, metavar="BYTES", help="for the model; default: the device's")
    parser.add_argument("--listen", action="append", metavar="MULTIADDR", help="where to listen")
    parser.add_argument("--announce", action="append", metavar="MULTIADDR", help="where others reach us")
    parser.add_argument("--region", help="a name for where this peer is, for the planner")
    parser.add_argument("--throttle", type=float, metavar="F", help="be F times slower than the device is")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of this peer")
    parser.add_argument("--plain", action="store_true", help="a line every few seconds instead of the live view")
    add_dashboard_flag(parser)
    parser.add_argument("--metrics", type=command.host_port, metavar="[HOST:]PORT", help="serve metrics for Prometheus")
    parser.add_argument(
        "--log", type=command.log_names, metavar="NAMES", help="curves for tensorboard, wandb (offline)"
    )
    parser.set_defaults(restarted=False, island=None)
    flags = parser.parse_args(argv)
    flags.of_peer = _of_peer(flags)
    for one in fields(flags.of_peer):
        setattr(flags, one.name, getattr(flags.of_peer, one.name))
    if not 1 <= flags.throttle <= 1e4:
        raise UserError(f"--throttle expects a factor of 1 to 10000; got {flags.throttle:g}")
    if not 0 <= flags.join_wait <= MAX_JOIN_WAIT_S:
        raise UserError(f"--join-wait expects seconds up to {MAX_JOIN_WAIT_S:g}; got {flags.join_wait:g}")
    if flags.stop_after:
        Amount.parse(flags.stop_after)
    if flags.metrics:
        command.require_extra("--metrics", "prometheus-client", "prometheus_client", "metrics")
    for name in flags.log:
        command.require_extra(f"--log {name}", name, name, name)
    _check_record(flags)
    return flags


def _of_peer(flags: argparse.Namespace) -> state.PeerFlags:
    """Return the flags that say what the peer is: those given, else those that its folder keeps. Raises UserError."""
    kept = state.StateFolder(Path(flags.state_dir)).read_flags() if flags.state_dir else state.PeerFlags()
    named = ((one.name, getattr(flags, one.name)) for one in fields(kept))
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in named if value is not None
    }
    return replace(kept, **given)


def _check_record(flags: argparse.Namespace) -> None:
    """Raises UserError where these flags would make a record that all other peers refuse, so that none sees us."""
    if flags.region != plain_text(flags.region):
        raise UserError(f"--region expects at most {SHOWN_CHARS} printable characters, no brackets; {flags.region!r}")
    for name in ("announce", "listen"):
        given: tuple[str, ...] = getattr(flags, name)
        if len(given) > records.MOST_ADDRESSES or any(len(one) > records.ADDRESS_CHARS for one in given):
            most = f"{records.MOST_ADDRESSES} addresses of at most {records.ADDRESS_CHARS} characters"
            raise UserError(f"--{name} expects {most}; it has {len(given)}, the longest of {max(map(len, given))}")


if __name__ == "__main__":
    sys.exit(main())
