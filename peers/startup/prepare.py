"""Prepare and run a peer that has reached its swarm: choose its layers, load data and model, and train.

claim_layers  chooses the peer's layers, if the whole model does not fit into memory (scheduler/placement/claim_span.py)
prepare       loads data and model, resumes the checkpoint, measures the device
train         runs the peer until Ctrl-C or --stop-after, then saves and leaves

Importing this module takes about a second, so peers/startup/start_peer.py does it while libp2p starts.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decentral import __version__
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.comm.gossip.outer_kernels import OuterKernels
from decentral.comm.net.keep_daemon import keep_daemon
from decentral.comm.wire.network import PeerNetwork
from decentral.comm.wire.private_swarm import may_train
from decentral.comm.wire.transport import AskError
from decentral.commands import shared
from decentral.core.config import Config
from decentral.core.errors import ExitCode, UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import DIVERGED
from decentral.core.journal.events import ErrorLine, IslandLine, StartedLine, StepLine
from decentral.core.journal.file import Journal, recent
from decentral.core.journal.lines import recorded
from decentral.core.layer_work import UNMEASURED, share
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.own_inputs import NO_UPLOAD
from decentral.core.peer_folders import JOURNAL
from decentral.core.peer_names import machine_name
from decentral.core.plain_text import plain_text
from decentral.core.rank_place import Split
from decentral.core.units import MiB, plural
from decentral.data import corpora as data
from decentral.data import run_inputs
from decentral.engine import accelerator, checkpoint, launch, measure, memory
from decentral.engine.checkpoint import DamagedCheckpoint
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.island import Assignment
from decentral.engine.layer_times import LayerTrial, layer_costs
from decentral.engine.step import ALONE, Device
from decentral.peers.membership import records
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import PeerRecord, Profile
from decentral.peers.membership.revocation_watch import NO_MEMBER
from decentral.peers.membership.statements import newest_records
from decentral.peers.membership.swarm_size import Look, SwarmStart
from decentral.peers.runtime.host import NOTHING_TO_SAVE, Host
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.setup import NodeSetup
from decentral.peers.startup import invitation_files, state
from decentral.peers.startup.flags import PeerStart, StartFlags
from decentral.peers.startup.lost_peers import look_for_the_lost
from decentral.peers.startup.reach_swarm import SwarmAccess
from decentral.scheduler.placement.claim_span import (
    ClaimedSpan,
    RoutedModel,
    SpanRequest,
    claim,
    silent_peers,
    stage_config,
)
from decentral.scheduler.placement.move import MemoryBudget
from decentral.store.places import checked_place
from decentral.store.uploader import UploadSettings, uploads_running
from decentral.view import terminal
from decentral.view.event_hooks import HookedJournal, hooks_running
from decentral.view.page.child import DashboardProcess
from decentral.view.page.record_lines import feed_page, watch_for_page

if TYPE_CHECKING:
    from decentral.view.metrics_server import MetricsServer

ADDRESSES_S = 15.0  # this machine's addresses are checked at this interval
LAST_LINES_BYTES = 1 * MiB  # this many bytes at the end of a journal are searched for the peer's last record
STEPS_REPORTED_S = 0.2  # the training thread waits at least this long between two reports of steps to the event loop


def prove_kernels(device: str) -> tuple[OuterKernels, str]:
    """Return the fastest gossip kernels that work on the device named by --device, and the reason for the choice.

    Raises:
        UserError: If the device does not exist.
    """
    return best_kernels(measure.choose(device).device, blockwise)


async def claim_layers(start: PeerStart, access: SwarmAccess) -> tuple[SpanRequest, ClaimedSpan]:
    """Choose this peer's layers and claim them in the DHT; return the inputs of the choice, and the claimed layers.

    A peer that restarts keeps the layers of its checkpoint.

    Raises:
        UserError: If `train.upload` does not name a folder or store to which checkpoints can be uploaded; if this
            machine cannot build the model; if no part of the model fits into memory, or not the largest part and the
            peer begins a run without --memory; or if the invitation is to donate, and this peer would hold the whole
            model or the run is synchronous.
    """
    _uploads(access.config, start.flags.peer)
    memory.check_machine(access.config, (0, 0), measure.machine_bytes())
    shared.starting("choosing which layers this peer holds")
    own, wanted = access.signer(start.own), start.flags.peer.memory
    device = measure.choose(start.device)
    try:
        kept = checkpoint.span(start.folder.path)
    except DamagedCheckpoint as error:
        _without(error, start, access)
        kept = None
    if start.island:
        device = replace(device, ranks=start.island)
        split, memory_bytes = launch.choose_parts(wanted, access.config, kept, device, start.flags.peer.split)
        start.island.decide(split)
    else:
        memory_bytes = wanted or measure.memory_bytes(device.device)
    originates = may_train(access.private, own.peer)
    request = SpanRequest(access.config, access.run, own, access.addresses, memory_bytes, kept, originates)
    needs = memory.needs_on(access.config, device)
    if not (wanted or access.contacts or kept):
        memory.check_first(needs, memory_bytes)
    silent = partial(silent_peers, access.network)
    claimed = await claim(request, needs, access.directory, silent, access.clock)
    if not originates and (claimed.span is None or access.config.synchronous):
        limits = "donors need a part of the model (give less --memory), and a run that is not synchronous"
        raise UserError(f"this peer's invitation is to donate: {limits}; or ask the founder for an invitation to train")
    memory.check_machine(access.config, claimed.span, measure.machine_bytes())
    return request, claimed


def _not_compiled(wanted: bool, device: Device) -> list[str]:
    """Return a warning if layers are `wanted` compiled and this device could compile them, but its compiler fails."""
    if wanted and accelerator.has_streams(device.device):
        failure = accelerator.compile_failure(device.device)
        return [f"train.compile: this peer trains without torch.compile: {failure}"] if failure else []
    return []


async def prepare(
    start: PeerStart, access: SwarmAccess, request: SpanRequest, claimed: ClaimedSpan, kernels: OuterKernels
) -> Host:
    """Load data and model, resume the checkpoint, measure the device, and return a host that is ready to run.

    Raises:
        UserError: If the device, the data or the checkpoint cannot be used.
    """
    run, own, flags, folder = access.config, request.own, start.flags, start.folder
    device = measure.choose(start.device, flags.peer.throttle, run.train.emulated_micro_batch_s)
    device = replace(device, ranks=start.island or ALONE)
    sharded = device.ranks.sharded
    memory.choose_what_is_kept(run, claimed.span is None and not sharded, device.ranks.size if sharded else 1)
    run_inputs.check(run, begun=request.kept is not None)
    shared.starting(f"loading the data ({run.data.kind})")
    corpus = data.load(run.data, run.model)
    expected = bool(access.contacts) or request.kept is not None
    computing = ComputeSetup(run, own.peer, corpus, blockwise, device, folder.path, claimed.span)
    shared.starting("building the model")
    computing = replace(computing, state_expected=expected, kernels=kernels, report_s=STEPS_REPORTED_S)
    compute, restored = _built(start, access, replace(computing, memory_bytes=claimed.memory_bytes))
    start.warnings.extend([*corpus.warnings, *_not_compiled(run.train.compile, device)])
    needs = memory.needs_on(memory.with_micro_batch(run, compute.sequences), device)
    if run.train.micro_batch == "auto":  # claimed with one sequence
        begin, end = compute.fragments[0].index, compute.fragments[-1].index + 1
        claimed = replace(claimed, capacity=needs.capacity(begin, end, claimed.memory_bytes))
    swarm = Look(access.directory, access.run, own.peer)
    await swarm.measure()
    profile, last = _profile(flags.peer, folder, compute, claimed), _last_record(folder.path, access.run, own.peer)
    setup = NodeSetup(
        config=run,
        run=access.run,
        own=own,
        fragments=compute.fragments,
        state_layouts=compute.gossip.state_layouts(),
        layers=compute.span.model_layers,
        profile=profile,
        addresses=access.addresses,
        contacts=access.contacts,
        restored_step=compute.lr_step if restored else None,
        stop_after=flags.stop_after,
        routes=stage_config(request, _model(compute, needs, profile), compute.fragments, claimed.capacity),
        memory_budget=MemoryBudget(needs, claimed.memory_bytes, compute.span.all_state_layouts()),
        retained=compute.retained_states(),
        secret=secrets.randbits(128),
        versions=compute.counters.versions,
        private=access.private,
        start=SwarmStart(max(1.0, swarm.peers)),
        seen=last.standing.seen if last else (),
        trained_tokens=last.tokens if last else 0,
    )
    records.require_valid(records.first_record(setup.run, setup.addresses, setup.profile))
    path, now = folder.path / JOURNAL, access.clock
    journal = HookedJournal(path, now, flags.hooks) if flags.hooks else Journal(path, now)
    book = AddressBook.load(folder.path / "peers.json")
    keep = partial(invitation_files.keep_revocations, folder.path)
    return Host(Node(setup), access.network, access.directory, compute, journal, book, now, keep_revocations=keep)


def _built(start: PeerStart, access: SwarmAccess, computing: ComputeSetup) -> tuple[Compute, bool]:
    """Build the model on all ranks of this peer; return rank 0's `Compute`, and whether it has resumed a checkpoint."""
    island, run = start.island, computing.config
    assigned = Assignment(run, computing.peer, 1, Split.COPIES, computing.folder)
    if island and island.sharded:  # all ranks build their parts together
        sequences = run.train.micro_batch if run.train.micro_batch != "auto" else 1
        island.assign(replace(assigned, micro_batch=sequences, split=island.split))
    compute = Compute(computing)
    try:
        restored = compute.resume()
    except DamagedCheckpoint as error:
        _without(error, start, access)
        restored = False
    else:
        start.warnings.extend([] if restored else _lost(computing.folder, bool(access.contacts)))
    if island and not island.sharded:  # the other ranks get the weights of this rank
        island.assign(replace(assigned, micro_batch=compute.sequences))
        island.wrap(compute.span)
    return compute, restored


def _lost(folder: Path, joins: bool) -> list[str]:
    """Return a warning if this folder has no checkpoint, but a journal of training steps; `joins`: others were reached.

    Only the end of the journal is read.
    """
    events = [line.event for line in recorded(recent(folder / JOURNAL, LAST_LINES_BYTES))]
    step = next((event.step for event in reversed(events) if isinstance(event, StepLine)), 0)
    then = "it fetches the swarm's weights" if joins else "it starts with fresh weights"
    lost = f"no checkpoint in {folder}, though this peer has trained {plural(step, 'step')}; {then}"
    return [lost] if step else []


def _last_record(folder: Path, run: RunId, peer: PeerId) -> PeerRecord | None:
    """Return the last record of this run that an earlier process of this peer wrote to its journal, if there is one."""
    events = (line.event for line in recorded(recent(folder / JOURNAL, LAST_LINES_BYTES)))
    record = newest_records(events)[0].get(peer)
    return record if record is not None and record.run == run else None


def _without(error: DamagedCheckpoint, start: PeerStart, access: SwarmAccess) -> None:
    """Rename a damaged checkpoint and add a warning; the peer then fetches its state from the swarm.

    Raises:
        DamagedCheckpoint: If no other peer was reached, or the checkpoint cannot be renamed.
    """
    if not access.contacts:
        raise error
    try:
        start.warnings.append(error.set_aside())
    except OSError:
        raise error from None


def _model(compute: Compute, needs: MemoryNeeds, profile: Profile) -> RoutedModel:
    size = compute.setup.config.train.micro_batch
    most = size if isinstance(size, int) else measure.LARGEST
    if compute.setup.device.ranks.sharded:
        most = 0  # no other peer's micro-batch passes through here, since that needs all layers on one rank
    return RoutedModel(compute.span.cuts, most, needs.activations, compute.span.forms, profile.costs)


def _profile(flags: state.PeerFlags, folder: state.StateFolder, compute: Compute, claimed: ClaimedSpan) -> Profile:
    """Return the device's profile, read from the state folder (same device, model and version) or measured now.

    While `compute` waits for state from other peers, no speed is measured: the profile has speed 0 until the peer
    trains.
    """
    device, span, run = compute.setup.device, compute.span, compute.setup.config
    first, last = span.fragments[0].first, span.fragments[-1].last
    part = f" {first}-{last}" if len(span.fragments) < len(span.cuts) else ""
    ranks = f" {device.ranks.size} ranks" if device.ranks.size > 1 else ""
    if device.ranks.sharded:
        ranks += f" with parts, {device.ranks.readers} reading"
    key = f"{__version__} {device} {run.digest()}{part}{ranks}"
    measured = folder.read_profile(key)
    if measured is None and compute.awaits_state:
        measured = measure.without_speed(device)  # the first training steps will measure the speed
    elif measured is None:
        shared.starting("measuring the device")
        forward = device.ranks.begin(span, compute.counters, measuring=True)
        work = share(span.cuts, first, last)
        measured = measure.measure(forward, run.model, device, compute.sequences, work)
        held = memory.needs_on(run, device).span_bytes(span.fragments[0].index, span.fragments[-1].index + 1, 0)
        trial = LayerTrial(run, span.cuts, device, compute.sequences, measured.flops, claimed.memory_bytes - held)
        costs = UNMEASURED if device.ranks.sharded else layer_costs(trial, dict(enumerate(span.layers, first)))
        part_of_time = share(span.cuts, first, last, costs)
        measured = replace(measured, tokens_per_s=part_of_time * measured.tokens_per_s, costs=costs)
        folder.write_profile(key, measured)
    return Profile(
        device=plain_text(measured.device),
        memory_bytes=claimed.memory_bytes,
        flops=measured.flops,
        tokens_per_s=measured.tokens_per_s,
        region=flags.region,
        name=machine_name() if flags.name is None else flags.name,
        software=f"decentral {__version__}",
        costs=measured.costs,
        alone=device.ranks.sharded or not claimed.capacity,
    )


async def train(
    start: PeerStart,
    access: SwarmAccess,
    host: Host,
    kernels: str,
    page: DashboardProcess | None,
    metrics_server: "MetricsServer | None",
) -> None:
    """Run the host until it stops, and show its progress; `kernels` says which gossip kernels are used, and why.

    Raises:
        SystemExit: With 1 after an error or a failed checkpoint, with 2 after divergence.
        UserError: If this peer's membership of a private swarm has ended.
    """
    node, setup, flags, folder = host.node, host.node.setup, start.flags, start.folder
    live = sys.stdout.isatty() and not flags.plain
    shown: terminal.Display = terminal.LiveDisplay() if live else terminal.LineDisplay()
    terminal.say(f"kernels of gossip: {kernels}")
    shown.introduce(node, folder.path)
    terminal.say(terminal.openness(setup, folder.path))
    if page:
        terminal.say(f"the page: {page.url}")
    for warning in start.warnings:
        terminal.say(f"warning: {warning}")
    host.journal.write(_started(setup, flags, kernels))
    for warning in start.warnings:
        host.journal.write(ErrorLine(reason=warning))
    if start.island:
        host.journal.write(IslandLine(ranks=tuple(asdict(member) for member in start.island.members)))
    for name in launch.notices() if start.island else shared.ending_signals():
        asyncio.get_running_loop().add_signal_handler(name, host.stop, "interrupted")
    works = (
        _show(host, shown),
        look_for_the_lost(host, access.network, access.directory, flags.join),
        _revive(host, access.network),
        _watch_addresses(host, access.network),
        *((feed_page(host, page), watch_for_page(host, page)) if page else ()),
    )
    tasks = [asyncio.create_task(work) for work in works]
    try:
        async with _observed(start, host, metrics_server):
            reason = await host.run()
    finally:
        for task in tasks:
            task.cancel()
        shown.close()
        host.journal.close()
    terminal.farewell(node, folder.path, reason, host.unsaved)
    _exit(reason, host.unsaved)


def _started(setup: NodeSetup, flags: StartFlags, kernels: str) -> StartedLine:
    """Return the journal's line about a start with these flags; `kernels` says which gossip kernels are used."""
    return StartedLine(
        peer=setup.own.peer,
        run=setup.run,
        addresses=setup.addresses,
        device=setup.profile.device,
        throttle=flags.peer.throttle,
        kernels=kernels,
        region=setup.profile.region,
        first=setup.fragments[0].first,
        last=setup.fragments[-1].last,
        name=setup.profile.name,
        stop_after=str(flags.stop_after or ""),
    )


def _exit(reason: str, unsaved: str) -> None:
    """Raise UserError if the membership is over; SystemExit after divergence (MISTAKE) or another fault (FAILED)."""
    if reason.startswith(NO_MEMBER):
        raise UserError(reason.removeprefix(f"{NO_MEMBER}: "))
    if reason.startswith(DIVERGED):
        raise SystemExit(ExitCode.MISTAKE)  # a supervisor is not to restart a peer that would diverge again
    if reason.startswith("error") or unsaved not in ("", NOTHING_TO_SAVE):
        raise SystemExit(ExitCode.FAILED)


@asynccontextmanager
async def _observed(start: PeerStart, host: Host, metrics_server: "MetricsServer | None") -> AsyncIterator[None]:
    """Serve metrics, write logs, run hooks and upload checkpoints, as the user asked, until the context ends."""
    flags, uploads = start.flags, _uploads(host.node.setup.config, start.flags.peer)
    async with AsyncExitStack() as stack:
        if metrics_server:
            from decentral.view.metrics_server import metrics_served

            url = await stack.enter_async_context(metrics_served(metrics_server, host))
            terminal.say(f"metrics for Prometheus at {url}")
        if flags.peer.log:
            from decentral.view.scalar_logs import scalars_logged

            await stack.enter_async_context(scalars_logged(flags.peer.log, host))
        if flags.hooks:
            await stack.enter_async_context(hooks_running(flags.hooks, host.journal, terminal.say))
        if uploads:
            running = uploads_running(start.folder.path, uploads, host.journal, terminal.say)
            await stack.enter_async_context(running)
        yield


def _uploads(run: Config, flags: state.PeerFlags) -> UploadSettings | None:
    """Return where and how to upload checkpoints; None if they are not uploaded.

    Raises:
        UserError: If `train.upload` does not name a folder or store to which checkpoints can be uploaded.
    """
    if (place := run.train.upload) is None or place == NO_UPLOAD:
        return None
    return UploadSettings(checked_place(place, "train.upload"), flags.upload_keep, flags.upload_rate)


async def _show(host: Host, shown: terminal.Display) -> None:
    while True:
        await asyncio.sleep(shown.interval_s)
        shown.update(host.node, host.now(), host.troubles())


async def _watch_addresses(host: Host, transport: PeerNetwork) -> None:
    """Publish this machine's addresses when they change, for example after a new DHCP lease."""
    known = host.node.setup.addresses
    while True:
        await asyncio.sleep(ADDRESSES_S)
        with suppress(AskError):  # the network may be restarting; the next round tries again
            found = records.publishable(await transport.addresses())
            if records.has_moved(known, found):
                known = found
                told = host.node.own_record.move_to(found)
                host.journal.write(told.event)


async def _revive(host: Host, transport: PeerNetwork) -> None:
    """Open the network again whenever its daemon has ended; stop the peer if that fails."""
    host.stop(f"error: {await keep_daemon(transport, host.now, partial(host.watch.note, 'network'))}")
