"""From a peer's flags, and what it has learned of its swarm, to a running host.

claim_layers  choose the layers to hold, if the memory does not take the whole model (scheduler/placement/claim_span.py)
prepare       load data and model, resume the checkpoint, measure the device
train         until Ctrl-C or --stop-after; then save and leave

To load this module takes about a second: decentral/commands/peer.py does it while libp2p starts.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

from decentral import __version__
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.comm.gossip.outer_kernels import OuterKernels
from decentral.comm.net.keep_daemon import keep_daemon
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import NETWORK_ERRORS
from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import may_train
from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.core.jobs import DIVERGED
from decentral.core.journal.events import ErrorLine, IslandLine, StartedLine
from decentral.core.journal.file import Journal
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.plain_text import plain_text
from decentral.core.units import Amount
from decentral.data import corpora as data
from decentral.data import run_inputs
from decentral.engine import checkpoint, launch, measure, memory
from decentral.engine.checkpoint import DamagedCheckpoint
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.island import Assignment
from decentral.engine.step import ALONE
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import Profile
from decentral.peers.membership.revocation_watch import NO_MEMBER
from decentral.peers.membership.swarm_size import Look, SwarmStart
from decentral.peers.runtime.host import NOTHING_TO_SAVE, Host
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.peers.startup import invitation_files, state
from decentral.peers.startup.lost_peers import look_for_the_lost
from decentral.peers.startup.reach_swarm import SwarmAccess
from decentral.scheduler.placement.claim_span import (
    ClaimedSpan,
    RealClock,
    RoutedModel,
    SpanRequest,
    claim,
    silent_peers,
    stage_config,
)
from decentral.scheduler.placement.move import MemoryBudget
from decentral.view import terminal
from decentral.view.page.record_lines import feed_page, watch_for_page

ADDRESSES_S = 15.0  # between two looks at this machine's addresses
STEPS_REPORTED_S = 0.2  # how often, at most


def prove_kernels(device: str) -> tuple[OuterKernels, str]:
    """The kernels of gossip for the device that --device names, and the reason. Raises UserError if it is not there."""
    return best_kernels(measure.choose(device, "auto", 1.0, 0.0).device, blockwise)


async def claim_layers(
    flags: argparse.Namespace, folder: state.StateFolder, own: Signer, transport: Libp2p, access: SwarmAccess
) -> tuple[SpanRequest, ClaimedSpan]:
    """Claims this peer's layers. A peer that comes back keeps those of its checkpoint. Raises UserError."""
    shared.stage("choosing which layers this peer holds")
    device = measure.choose(flags.device, access.config.train.dtype, 1.0, 0.0)
    try:
        kept = checkpoint.span(folder.path)
    except DamagedCheckpoint as error:
        _without(error, flags, access)
        kept = None
    if flags.island:
        memory_bytes = launch.model_bytes(flags.memory, access.config, kept, flags.island)
    else:
        memory_bytes = flags.memory or measure.memory_bytes(device.device)
    originates = may_train(access.private, own.peer)
    request = SpanRequest(access.config, access.run, own, access.addresses, memory_bytes, kept, originates)
    needs = memory.needs_on(access.config, device)
    silent = partial(silent_peers, transport)
    claimed = await claim(request, needs, access.directory, silent, RealClock(access.clock))
    if not originates and (claimed.span is None or access.config.synchronous):
        limits = "a part of the model (give less --memory), in a run that is not synchronous"
        raise UserError(f"this peer's invitation is to donate: it may hold {limits}; ask for one to train")
    memory.check_machine(access.config, claimed.span, measure.machine_bytes())
    return request, claimed


async def prepare(
    flags: argparse.Namespace,
    folder: state.StateFolder,
    transport: Libp2p,
    access: SwarmAccess,
    request: SpanRequest,
    claimed: ClaimedSpan,
    proven: tuple[OuterKernels, str],
) -> Host:
    """Build the node and its host. Raise UserError if the device, the data or the checkpoint cannot be used."""
    run, own = access.config, request.own
    device = measure.choose(flags.device, run.train.dtype, flags.throttle, run.train.emulated_micro_batch_s)
    device = replace(device, ranks=flags.island or ALONE)
    if claimed.span is not None:
        memory.give_back_what_is_freed()
    else:
        memory.keep_what_is_freed()
    run_inputs.check(run, begun=request.kept is not None)
    shared.stage(f"loading the data ({run.data.kind})")
    corpus = data.load(run.data, run.model)
    expected = bool(access.contacts) or request.kept is not None
    computing = ComputeSetup(run, own.peer, corpus, blockwise, device, folder.path, claimed.span)
    kernels, flags.kernels = proven
    shared.stage("building the model")
    compute = Compute(replace(computing, state_expected=expected, kernels=kernels, report_s=STEPS_REPORTED_S))
    flags.warnings.extend(corpus.warnings)
    try:
        restored = compute.resume()
    except DamagedCheckpoint as error:
        _without(error, flags, access)
        restored = False
    if flags.island:
        flags.island.assign(Assignment(run, own.peer, compute.micro_batch, folder.path), compute.span)
    needs, swarm = memory.needs_on(run, device), Look(access.directory, access.run, own.peer)
    await swarm.measure()
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
        routes=stage_config(request, _model(compute, needs), compute.fragments, claimed.capacity),
        memory_budget=MemoryBudget(needs, claimed.memory_bytes, compute.span.all_state_layouts()),
        retained=compute.retained_states(),
        secret=secrets.randbits(128),
        versions=compute.counters.versions,
        private=access.private,
        start=SwarmStart(max(1.0, swarm.peers)),
    )
    records.require_valid(records.first_record(setup.run, setup.addresses, setup.profile))
    now = access.clock
    journal, book = Journal(folder.path / "journal.jsonl", now), AddressBook.load(folder.path / "peers.json")
    keep = partial(invitation_files.keep_revocations, folder.path)
    return Host(Node(setup), transport, access.directory, compute, journal, book, now, keep_revocations=keep)


def _without(error: DamagedCheckpoint, flags: argparse.Namespace, access: SwarmAccess) -> None:
    """Lets the peer start from the swarm instead. Where nobody is there the user has to decide: raises UserError."""
    if not access.contacts:
        raise error
    try:
        flags.warnings.append(error.set_aside())
    except OSError:
        raise error from None


def _model(compute: Compute, needs: MemoryNeeds) -> RoutedModel:
    size = compute.setup.config.train.micro_batch
    most = size if isinstance(size, int) else measure.LARGEST
    return RoutedModel(compute.span.cuts, most, needs.activations, compute.span.forms)


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
        shared.stage("measuring the device")
        model = compute.setup.config.model
        forward = device.ranks.begin(compute.span, compute.counters, measuring=True)
        measured = measure.measure(forward, model, device, compute.micro_batch, compute.span.share)
        folder.write_profile(key, measured)
    return Profile(
        device=plain_text(measured.device),
        memory_bytes=memory_bytes,  # --memory says how much of it is for the model
        flops=measured.flops,
        tokens_per_s=measured.tokens_per_s,
        region=flags.region,
        software=f"decentral {__version__}",
    )


async def train(flags: argparse.Namespace, folder: state.StateFolder, host: Host) -> None:
    """Run the host until it stops, and show its progress.

    Raises:
        SystemExit: 1 after an error or a failed save, 2 after divergence.
        UserError: If this peer is no member of the swarm any more.
    """
    node, setup = host.node, host.node.setup
    shown: terminal.Display = (
        terminal.LiveDisplay() if sys.stdout.isatty() and not flags.plain else terminal.LineDisplay()
    )
    terminal.say(f"kernels of gossip: {flags.kernels}")
    shown.introduce(node, folder.path)
    terminal.say(terminal.openness(setup, folder.path))
    if flags.page:
        terminal.say(f"the page: {flags.page.url}")
    for warning in flags.warnings:
        terminal.say(f"warning: {warning}")
    started = StartedLine(
        peer=setup.own.peer,
        run=setup.run,
        addresses=setup.addresses,
        device=setup.profile.device,
        throttle=flags.throttle,
        kernels=flags.kernels,
        region=setup.profile.region,
        first=setup.fragments[0].first,
        last=setup.fragments[-1].last,
    )
    host.journal.write(started)
    for warning in flags.warnings:
        host.journal.write(ErrorLine(reason=warning))
    if flags.island:
        host.journal.write(IslandLine(ranks=tuple(asdict(member) for member in flags.island.members)))
    loop = asyncio.get_running_loop()
    for name in launch.notices() if flags.island else shared.ending_signals():
        loop.add_signal_handler(name, host.stop, "interrupted")
    tasks = [
        asyncio.create_task(work)
        for work in (_show(host, shown), look_for_the_lost(host, flags.join), _revive(host), _watch_addresses(host))
    ]
    if flags.page:
        tasks += [asyncio.create_task(work(host, flags.page)) for work in (feed_page, watch_for_page)]
    try:
        async with _observed(flags, host):
            reason = await host.run()
    finally:
        for task in tasks:
            task.cancel()
        shown.close()
        host.journal.close()
    terminal.farewell(node, folder.path, reason, host.unsaved)
    if reason.startswith(NO_MEMBER):
        raise UserError(reason.removeprefix(f"{NO_MEMBER}: "))
    if reason.startswith(DIVERGED):
        raise SystemExit(2)  # the user can mend it; whatever starts peers again would let this one diverge again
    if reason.startswith("error") or host.unsaved not in ("", NOTHING_TO_SAVE):
        raise SystemExit(1)


@asynccontextmanager
async def _observed(flags: argparse.Namespace, host: Host) -> AsyncIterator[None]:
    """Lets others look on while the host runs, as the flags say."""
    async with AsyncExitStack() as stack:
        if flags.metrics:
            from decentral.view.metrics_server import metrics_served

            url = await stack.enter_async_context(metrics_served(flags.metrics_server, host))
            terminal.say(f"metrics for Prometheus at {url}")
        if flags.log:
            from decentral.view.scalar_logs import scalars_logged

            await stack.enter_async_context(scalars_logged(flags.log, host))
        yield


async def _show(host: Host, shown: terminal.Display) -> None:
    while True:
        await asyncio.sleep(shown.interval_s)
        shown.update(host.node, host.now(), host.troubles())


async def _watch_addresses(host: Host) -> None:
    """Tell the others when this machine has other addresses: another network, a new lease, a relay that was found."""
    transport, known = host.transport, host.node.setup.addresses
    assert isinstance(transport, Libp2p)
    while True:
        await asyncio.sleep(ADDRESSES_S)
        with suppress(*NETWORK_ERRORS):  # the daemon may be starting again
            found = records.publishable(await transport.addresses())
            if records.has_moved(known, found):
                known = found
                told = host.node.own_record.move_to(found)
                host.journal.write(told.event)


async def _revive(host: Host) -> None:
    """Keep the libp2p daemon running; stop the peer if it cannot be restarted."""
    transport = host.transport
    assert isinstance(transport, Libp2p)
    host.stop(f"error: {await keep_daemon(transport, host.now, partial(host.watch.note, 'libp2p'))}")
