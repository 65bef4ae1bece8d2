"""python -m decentral.peer: one peer, which starts a swarm, joins one, or goes on where its state folder stopped.

reach_swarm   say hello to the swarm, and learn the run and its config
claim_layers  choose the layers to hold, if the memory does not take the whole model (decentral/claim_span.py)
prepare       load data and model, resume the checkpoint, measure the device
train         until Ctrl-C or --stop-after; then save and leave
"""

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

if __name__ == "__main__":  # Ctrl-C while the libraries below load, which takes seconds: there is nothing to save yet
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))

from decentral import __version__, command, launch, state, view
from decentral.claim_span import ClaimedSpan, RoutedModel, SpanRequest, WallClock, claim, stage_config
from decentral.comm.net.libp2p import HivemindDirectory, Libp2p
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.transport import AskError
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal import Journal
from decentral.core.units import Amount
from decentral.peers.hosts.host import Host, clock
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import Profile
from decentral.peers.node.node import Node
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_move import MemoryBudget
from decentral.peers.planning import swarm_plans
from decentral.train import checkpoint, compress, data, measure, memory
from decentral.train.compute import Compute, ComputeSetup
from decentral.train.island import Assignment, Island
from decentral.train.kernel_choice import best_kernels
from decentral.train.step import ALONE
from decentral.visit import say_hello

STEPS_REPORTED_S = 0.2  # how often, at most
RECONNECT_S = 10.0  # a peer that is alone tries the addresses that it knows this often


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = sys.argv[1:] if argv is None else argv
    return command.run(lambda: _start(arguments))


def _start(arguments: Sequence[str]) -> None:
    """Runs the peer, or with several devices one of its ranks, or the launcher that starts these."""
    place = launch.Place.here()
    try:
        flags = parse(arguments)
        devices = launch.devices(flags.device, place)
        if place and not flags.state_dir:
            raise UserError("a peer of several ranks needs --state-dir, so that it finds its checkpoint again")
    except UserError:
        if place is None or place.rank == 0:
            raise
        raise SystemExit(2) from None  # rank 0 says it
    if place is not None:
        flags.device, flags.restarted = devices[place.local_rank], place.restarts > 0
        launch.rank(flags, place, lambda island: asyncio.run(_main(flags, island)))
    elif len(devices) > 1:
        flags.state_dir = flags.state_dir or str(state.new_path())
        raise SystemExit(launch.island(arguments, flags, devices))
    else:
        asyncio.run(_main(flags))


async def _main(flags: argparse.Namespace, island: Island | None = None) -> None:
    """One peer: alone, or as rank 0 of its island."""
    flags.island = island
    with state.StateFolder.claim(flags.state_dir) as folder:
        if flags.restarted:
            _forget_start(flags, folder)
        own = Identity.load_or_create(folder.path / "identity.key")
        device = measure.choose(flags.device, "auto", 1.0, 0.0).device
        flags.proving = asyncio.create_task(asyncio.to_thread(best_kernels, device, compress))  # while libp2p starts
        transport = await Libp2p.start(folder.path / "identity.key", folder.listen(flags.listen), flags.announce)
        try:
            access = await reach_swarm(flags, folder, transport)
            request, claimed = await claim_layers(flags, folder, own, access)
            host = await prepare(flags, folder, transport, access, request, claimed)
            await train(flags, folder, host)
        finally:
            await transport.close()


def _forget_start(flags: argparse.Namespace, folder: state.StateFolder) -> None:
    """Makes ranks that were started again go on from the folder, whatever the user's line said of the start."""
    if folder.read_run():
        flags.config, flags.set = None, []
    if AddressBook.load(folder.path / "peers.json").known:
        flags.join = []  # that peer may be gone by now


@dataclass(frozen=True, slots=True)
class SwarmAccess:
    """The run that this peer is in, and how it reaches the other peers."""

    run: RunId
    config: config.Config
    contacts: tuple[PeerId, ...]
    directory: HivemindDirectory
    addresses: tuple[str, ...]


async def reach_swarm(flags: argparse.Namespace, folder: state.StateFolder, transport: Libp2p) -> SwarmAccess:
    """The run is the folder's, else the swarm's at --join, else a new one. Raises UserError."""
    kept = folder.read_run()
    if kept and (flags.config or flags.set):
        raise UserError(f"{folder.path} belongs to run {kept[0]}, whose config is settled; leave CONFIG and --set out")
    if flags.join and (flags.config or flags.set):
        raise UserError("with --join the config comes from the swarm; leave CONFIG and --set out")
    contacts, welcome = await say_hello(flags.join, transport, kept[0] if kept else RunId(""))
    if kept:
        run, settings = kept
        contacts += await _reconnect(folder, transport)
    elif welcome:
        run, settings = RunId(welcome.run), config.from_canonical(welcome.config)
    else:
        settings = config.load(flags.config, flags.set)
        run = RunId(f"{settings.name}-{secrets.token_hex(3)}")
    folder.write_run(run, settings)
    addresses = await transport.addresses()
    folder.write_listen(addresses)
    keys = [*records.keys(run, settings.swarm.shards), swarm_plans.key_of(run)]
    directory = await transport.directory(keys, contacts)
    return SwarmAccess(run, settings, tuple(dict.fromkeys(contacts)), directory, addresses)


async def _reconnect(folder: state.StateFolder, transport: Libp2p) -> list[PeerId]:
    """Connects to the peers that are where they were before this peer restarted."""
    known = AddressBook.load(folder.path / "peers.json").known
    reached = await asyncio.gather(*(_connect(transport, addresses) for addresses in known.values()))
    return [peer for peer in reached if peer is not None]


async def _connect(transport: Libp2p, addresses: Sequence[str]) -> PeerId | None:
    """The peer at the first of these addresses that answers."""
    for address in addresses:
        with suppress(AskError, UserError):
            return await transport.connect(address)
    return None


async def claim_layers(
    flags: argparse.Namespace, folder: state.StateFolder, own: Identity, access: SwarmAccess
) -> tuple[SpanRequest, ClaimedSpan]:
    """Claims this peer's layers. A peer that comes back keeps those of its checkpoint. Raises UserError."""
    device = measure.choose(flags.device, access.config.train.dtype, 1.0, 0.0)
    kept = checkpoint.span(folder.path)
    if flags.island:
        memory_bytes = launch.model_bytes(flags.memory, access.config, kept, flags.island)
    else:
        memory_bytes = flags.memory or measure.memory_bytes(device.device)
    request = SpanRequest(access.config, access.run, own, access.addresses, memory_bytes, kept)
    needs = memory.needs(access.config, gossip_apart=device.device.type == "cuda")
    return request, await claim(request, needs, access.directory, WallClock())


async def prepare(
    flags: argparse.Namespace,
    folder: state.StateFolder,
    transport: Libp2p,
    access: SwarmAccess,
    request: SpanRequest,
    claimed: ClaimedSpan,
) -> Host:
    """Builds the node and its host. Raises UserError if the device, the data or the checkpoint cannot be used."""
    run, own = access.config, request.own
    device = measure.choose(flags.device, run.train.dtype, flags.throttle, run.train.emulated_micro_batch_s)
    device = replace(device, ranks=flags.island or ALONE)
    if claimed.span is not None:
        memory.give_back_what_is_freed()
    else:
        memory.keep_what_is_freed()
    corpus = data.load(run.data, run.model)
    expected = bool(access.contacts) or request.kept is not None
    computing = ComputeSetup(run, own.peer, corpus, compress, device, folder.path, claimed.span)
    kernels, flags.kernels = await flags.proving
    compute = Compute(replace(computing, state_expected=expected, kernels=kernels, report_s=STEPS_REPORTED_S))
    restored = compute.resume()
    if flags.island:
        flags.island.assign(Assignment(run.canonical(), own.peer, compute.micro_batch), compute.span)
    setup = NodeSetup(
        config=run,
        run=access.run,
        own=own,
        fragments=compute.fragments,
        state_layouts=compute.gossip.state_layouts(),
        layers=compute.span.model_layers,
        profile=_profile(flags, folder, compute, claimed.memory_bytes),
        addresses=access.addresses,
        contacts=access.contacts,
        restored_step=compute.lr_step if restored else None,
        stop_after=Amount.parse(flags.stop_after) if flags.stop_after else None,
        routes=stage_config(request, _model(compute), compute.fragments, claimed.capacity),
        memory_budget=MemoryBudget(memory.needs(run), claimed.memory_bytes, compute.span.all_state_layouts()),
        retained=compute.retained_states(),
        versions=compute.counters.versions,
    )
    now = clock()
    journal, book = Journal(folder.path / "journal.jsonl", now), AddressBook.load(folder.path / "peers.json")
    return Host(Node(setup), transport, access.directory, compute, journal, book, now)


def _model(compute: Compute) -> RoutedModel:
    size = compute.setup.config.train.micro_batch
    most = size if isinstance(size, int) else measure.LARGEST
    return RoutedModel(compute.span.cuts, most, memory.needs(compute.setup.config).activations, compute.span.layout)


def _profile(flags: argparse.Namespace, folder: state.StateFolder, compute: Compute, memory_bytes: int) -> Profile:
    """The device's profile: measured once for this device, model and version, then read from the state folder."""
    device = compute.setup.device
    part = f" {compute.span.share}" if compute.span.share < 1 else ""
    ranks = f" {device.ranks.size} ranks" if device.ranks.size > 1 else ""
    key = f"{__version__} {device} {compute.setup.config.digest()}{part}{ranks}"
    measured = folder.read_profile(key)
    if measured is None and compute.awaits_state:
        measured = measure.without_speed(device)  # its first steps tell its speed, and need not wait for a measurement
    elif measured is None:
        model = compute.setup.config.model
        forward = device.ranks.begin(compute.span, compute.counters, measuring=True)
        measured = measure.measure(forward, model, device, compute.micro_batch, compute.span.share)
        folder.write_profile(key, measured)
    found = Profile(**asdict(measured), region=flags.region, software=f"decentral {__version__}")
    return replace(found, memory_bytes=memory_bytes)  # --memory says how much of it is for the model


async def train(flags: argparse.Namespace, folder: state.StateFolder, host: Host) -> None:
    """Runs the host until it stops, and shows what it does. Exits with 1 if it stopped with an error."""
    node, setup = host.node, host.node.setup
    shown: view.Display = view.LiveDisplay() if sys.stdout.isatty() and not flags.plain else view.LineDisplay()
    print(f"kernels of gossip: {flags.kernels}", flush=True)
    shown.introduce(node, folder.path)
    facts = {"peer": setup.own.peer, "run": setup.run, "addresses": setup.addresses, "device": setup.profile.device}
    host.journal.write("started", **facts, throttle=flags.throttle, kernels=flags.kernels)
    if flags.island:
        host.journal.write("island", ranks=[asdict(member) for member in flags.island.members])
    loop = asyncio.get_running_loop()
    ending = (signal.SIGINT,) if flags.island else (signal.SIGINT, signal.SIGTERM)  # a launcher ends ranks by SIGTERM
    for name in ending:
        loop.add_signal_handler(name, host.stop, "interrupted")
    tasks = [asyncio.create_task(_show(host, shown)), asyncio.create_task(_reconnect_when_alone(host))]
    try:
        reason = await host.run()
    finally:
        for task in tasks:
            task.cancel()
        shown.close()
        host.journal.close()
    view.farewell(node, folder.path, reason)
    if reason.startswith("error"):
        raise SystemExit(1)


async def _show(host: Host, shown: view.Display) -> None:
    while True:
        await asyncio.sleep(shown.interval_s)
        shown.update(host.node, host.now())


async def _reconnect_when_alone(host: Host) -> None:
    """A swarm that was down comes together again: a peer that is alone keeps looking where the others were."""
    transport, directory = host.transport, host.directory
    assert isinstance(transport, Libp2p)
    assert isinstance(directory, HivemindDirectory)
    while True:
        await asyncio.sleep(RECONNECT_S)
        if host.node.roster.live:
            continue
        for addresses in list(host.book.known.values()):
            if peer := await _connect(transport, addresses):
                await directory.meet(peer)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.peer", description="One peer of a swarm that trains together.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer of the swarm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--state-dir", metavar="DIR", help="identity, journal, checkpoints; default: a new one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, or several: cuda:0,cuda:1")
    parser.add_argument("--memory", type=command.size, metavar="BYTES", help="for the model; default: the device's")
    parser.add_argument("--listen", action="append", default=[], metavar="MULTIADDR", help="where to listen")
    parser.add_argument("--announce", action="append", default=[], metavar="MULTIADDR", help="where others reach us")
    parser.add_argument("--region", default="", help="a name for where this peer is, for the planner")
    parser.add_argument("--throttle", type=float, default=1.0, metavar="F", help="be F times slower than the device is")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of this peer")
    parser.add_argument("--plain", action="store_true", help="a line every few seconds instead of the live view")
    parser.set_defaults(restarted=False, island=None)
    flags = parser.parse_args(argv)
    if not 1 <= flags.throttle <= 1e4:
        raise UserError(f"--throttle expects a factor of 1 to 10000; got {flags.throttle:g}")
    if flags.stop_after:
        Amount.parse(flags.stop_after)
    return flags


if __name__ == "__main__":
    sys.exit(main())
