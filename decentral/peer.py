"""python -m decentral.peer: one peer. Starts a swarm, joins one, or goes on where this state folder stopped.

meet     start libp2p, reach the swarm, learn the run and its config
place    choose the layers to hold, where the memory does not take the whole model (decentral/claim_span.py)
prepare  load data and model, resume the checkpoint, measure the device
train    until Ctrl-C or --stop-after; save; leave
"""

import argparse
import asyncio
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__":  # Ctrl-C while the libraries below load, which takes seconds: there is nothing to save yet
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))

from decentral import __version__, command, state, view
from decentral.claim_span import Placed, RoutedModel, WallClock, Wish, choose_place, stage_config
from decentral.comm.net.libp2p import HivemindDirectory, Libp2p
from decentral.comm.wire import compress
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
from decentral.train import checkpoint, data, measure, memory
from decentral.train.compute import Compute, ComputeSetup
from decentral.visit import greet

MEET_AGAIN_S = 10.0  # a peer that has met nobody tries its old addresses this often


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return command.run(lambda: asyncio.run(_main(parse(argv))))


async def _main(flags: argparse.Namespace) -> None:
    with state.Folder.claim(flags.state_dir) as folder:
        own = Identity.load_or_create(folder.path / "identity.key")
        transport = await Libp2p.start(folder.path / "identity.key", folder.listen(flags.listen), flags.announce)
        try:
            met = await meet(flags, folder, transport)
            wish, placed = await place(flags, folder, own, met)
            host = await prepare(flags, folder, transport, met, wish, placed)
            await train(flags, folder, host)
        finally:
            await transport.close()


@dataclass(frozen=True, slots=True)
class Met:
    """The run that this peer is in, and how it reaches the others."""

    run: RunId
    config: config.Config
    contacts: tuple[PeerId, ...]
    directory: HivemindDirectory
    addresses: tuple[str, ...]


async def meet(flags: argparse.Namespace, folder: state.Folder, transport: Libp2p) -> Met:
    kept = folder.read_run()
    if kept and (flags.config or flags.set):
        raise UserError(f"{folder.path} belongs to run {kept[0]}, whose config is settled; leave CONFIG and --set out")
    if flags.join and (flags.config or flags.set):
        raise UserError("with --join the config comes from the swarm; leave CONFIG and --set out")
    contacts, welcome = await greet(flags.join, transport, kept[0] if kept else RunId(""))
    if kept:
        run, settings = kept
        contacts += await _old_acquaintances(folder, transport)
    elif welcome:
        run, settings = RunId(welcome.run), config.from_canonical(welcome.config)
    else:
        settings = config.load(flags.config, flags.set)
        run = RunId(f"{settings.name}-{secrets.token_hex(3)}")
    folder.write_run(run, settings)
    addresses = await transport.addresses()
    folder.write_listen(addresses)
    directory = await transport.directory(
        [*records.keys(run, settings.swarm.shards), swarm_plans.key_of(run)], contacts
    )
    return Met(run, settings, tuple(dict.fromkeys(contacts)), directory, addresses)


async def _old_acquaintances(folder: state.Folder, transport: Libp2p) -> list[PeerId]:
    """Whoever of those we knew before the restart is still, or again, where it was."""

    async def reach(addresses: tuple[str, ...]) -> PeerId | None:
        for address in addresses:
            try:
                return await transport.connect(address)
            except (AskError, UserError):
                continue
        return None

    known = AddressBook.load(folder.path / "peers.json").known
    reached = await asyncio.gather(*(reach(addresses) for addresses in known.values()))
    return [peer for peer in reached if peer is not None]


async def place(flags: argparse.Namespace, folder: state.Folder, own: Identity, met: Met) -> tuple[Wish, Placed]:
    """The layers that we hold. A peer that comes back keeps what its checkpoint has, if it still fits."""
    device = measure.choose(flags.device, met.config.train.dtype, 1.0, 0.0)
    memory_bytes = flags.memory or measure.memory_bytes(device)
    kept = checkpoint.span(folder.path)
    wish = Wish(met.config, met.run, own, met.addresses, memory_bytes, kept)
    return wish, await choose_place(wish, memory.needs(met.config), met.directory, WallClock())


async def prepare(
    flags: argparse.Namespace, folder: state.Folder, transport: Libp2p, met: Met, wish: Wish, placed: Placed
) -> Host:
    run, own = met.config, wish.own
    device = measure.choose(flags.device, run.train.dtype, flags.throttle, run.train.emulated_micro_batch_s)
    if placed.span is not None:
        memory.give_back_what_is_freed()
    corpus = data.load(run.data, run.model)
    compute = Compute(ComputeSetup(run, own.peer, corpus, compress, device, folder.path, placed.span))
    restored = compute.resume()
    setup = NodeSetup(
        config=run,
        run=met.run,
        own=own,
        fragments=compute.fragments,
        state_layouts=compute.gossip.state_layouts(),
        layers=compute.span.model_layers,
        profile=_profile(flags, folder, compute, placed.memory_bytes),
        addresses=met.addresses,
        contacts=met.contacts,
        restored_step=compute.lr_step if restored else None,
        stop_after=Amount.parse(flags.stop_after) if flags.stop_after else None,
        routes=stage_config(wish, _model(compute), compute.fragments, placed.capacity),
        memory_budget=MemoryBudget(memory.needs(run), placed.memory_bytes, compute.span.all_state_layouts()),
        retained=compute.retained_states(),
        versions=compute.counters.versions,
    )
    now = clock()
    journal, book = Journal(folder.path / "journal.jsonl", now), AddressBook.load(folder.path / "peers.json")
    return Host(Node(setup), transport, met.directory, compute, journal, book, now)


def _model(compute: Compute) -> RoutedModel:
    size = compute.setup.config.train.micro_batch
    most = size if isinstance(size, int) else measure.LARGEST
    return RoutedModel(compute.span.cuts, most, memory.needs(compute.setup.config).activations, compute.span.layout)


def _profile(flags: argparse.Namespace, folder: state.Folder, compute: Compute, memory_bytes: int) -> Profile:
    """Measured once for this device, model and version; then read from the state folder."""
    device = compute.setup.device
    key = f"{__version__} {device} {compute.setup.config.digest()}" + (
        f" {compute.span.share}" if compute.span.share < 1 else ""
    )
    measured = folder.read_profile(key)
    if measured is None:
        model = compute.setup.config.model
        measured = measure.measure(compute.span.forward, model, device, compute.micro_batch, compute.span.share)
        folder.write_profile(key, measured)
    found = Profile(**dataclasses.asdict(measured), region=flags.region, software=f"decentral {__version__}")
    return dataclasses.replace(found, memory_bytes=memory_bytes)  # no more than --memory is for the model


async def train(flags: argparse.Namespace, folder: state.Folder, host: Host) -> None:
    node = host.node
    setup = node.setup
    shown = view.choose(plain=flags.plain or not sys.stdout.isatty())
    shown.introduce(node, folder.path)
    facts = {"peer": setup.own.peer, "run": setup.run, "addresses": setup.addresses, "device": setup.profile.device}
    host.journal.write("started", **facts, throttle=flags.throttle)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, host.stop, "interrupted")
    beside = [asyncio.create_task(_show(host, shown)), asyncio.create_task(_meet_again(host))]
    try:
        reason = await host.run()
    finally:
        for task in beside:
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


async def _meet_again(host: Host) -> None:
    """A swarm that died finds itself again: whoever is alone keeps looking where the others were."""
    transport, directory = host.transport, host.directory
    assert isinstance(transport, Libp2p)
    assert isinstance(directory, HivemindDirectory)
    while True:
        await asyncio.sleep(MEET_AGAIN_S)
        if host.node.roster.live:
            continue
        for addresses in list(host.book.known.values()):
            for address in addresses:
                try:
                    await directory.meet(await transport.connect(address))
                    break
                except (AskError, UserError):
                    continue


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.peer", description="One peer of a swarm that trains together.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer of the swarm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--state-dir", metavar="DIR", help="identity, journal, checkpoints; default: a new one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--memory", type=command.size, metavar="BYTES", help="for the model; default: the device's")
    parser.add_argument("--listen", action="append", default=[], metavar="MULTIADDR", help="where to listen")
    parser.add_argument("--announce", action="append", default=[], metavar="MULTIADDR", help="where others reach us")
    parser.add_argument("--region", default="", help="a name for where this peer is, for the planner")
    parser.add_argument("--throttle", type=float, default=1.0, metavar="F", help="be F times slower than the device is")
    parser.add_argument("--stop-after", metavar="AMOUNT", help="500steps, 90s or 2e6tokens of this peer")
    parser.add_argument("--plain", action="store_true", help="a line every few seconds instead of the live view")
    flags = parser.parse_args(argv)
    if not 1 <= flags.throttle <= 1e4:
        raise UserError(f"--throttle expects a factor of 1 to 10000; got {flags.throttle:g}")
    if flags.stop_after:
        Amount.parse(flags.stop_after)
    return flags


if __name__ == "__main__":
    sys.exit(main())
