"""Gather a run's weights from the peers of a live swarm or from state folders, for a command that uses the weights.

Start reading at `from_swarm` and `from_folders`. Live peers get the same requests that a joining peer sends. The caller
says how many copies of each fragment (a range of layers) to fetch, each from another peer. The peers with the most
layers are asked first, and a peer that fails is replaced by another holder. The run's config determines the size of
each fragment before memory is allocated, and a piece of more bytes is refused (peers/joining/fetch.py).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import unpack
from decentral.comm.gossip import update_rules
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_CHUNK_BYTES, Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import AskError, Transport
from decentral.core import config
from decentral.core.at_once import at_once
from decentral.core.errors import ProtocolError, UserError
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.peer_folders import newest_of_each_peer, state_folders
from decentral.core.plain_text import plain_text
from decentral.core.sampling import MOST_HOLDERS
from decentral.core.synthetic import Blob
from decentral.engine import checkpoint, measure, memory
from decentral.engine.fragment import fragments_of
from decentral.peers.joining.fetch import PIECE_BYTES, PIECE_DEADLINE_S, Incoming
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.peers.startup import state
from decentral.peers.startup.invitation_files import read_holding
from decentral.peers.startup.visit import VisitedSwarm, visit
from decentral.serving import replicas
from decentral.serving.replicas import Weights

RECORD_LOOKS = 10  # records of training peers are looked up in the DHT at most this many times
RECORD_LOOK_S = 1.0  # pause between two look-ups of training peers' records in the DHT
LAG_SHARE, LAG_STEPS = 0.1, 20  # weights that lag by more than both limits (share of the steps, steps) are left out
NAMED_RUNS = 4  # an error names at most this many runs, and counts the rest
NAMED_HOLDERS = 4  # an error names at most this many holders of weights, and counts the rest


@dataclass(slots=True)
class HolderWeights:
    """The weights gathered from one peer or one state folder, by fragment."""

    name: str
    weights: Weights = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # fragment -> learning-rate step of its weights
    trouble: str = ""  # why the peer did not send all wanted fragments, or "" if it did

    def fail(self, reason: str) -> None:
        """Record why the peer did not send all wanted fragments."""
        self.trouble = reason or "failed"


@dataclass(frozen=True, slots=True)
class GatheredRun:
    """A run's config, the weights of its holders, and a line of text for each folder that was not used."""

    run: RunId
    config: config.Config
    holders: list[HolderWeights]
    left_out: tuple[str, ...] = ()

    def average(self) -> Weights:
        """Return, for each fragment, the mean of its weights over the holders that gave the fragment."""
        return replicas.average([one.weights for one in self.holders])


def whose(holders: Sequence[HolderWeights]) -> str:
    """Return a text that names the holders of the weights, and the swarm's step that each holder claims."""
    named = [f"{one.name} at {_steps(one)}" for one in holders[:NAMED_HOLDERS]]
    more = f" and {len(holders) - NAMED_HOLDERS} more" if len(holders) > NAMED_HOLDERS else ""
    copies = max(Counter(index for one in holders for index in one.weights).values())
    mean = f", each layer the mean of up to {copies}" if copies > 1 else ""
    return f"weights of {', '.join(named)}{more}{mean}"


def _steps(holder: HolderWeights) -> str:
    """Return the learning-rate steps of a peer's fragments as text: one, or a range if the fragments differ."""
    first, last = min(holder.steps.values()), max(holder.steps.values())
    return f"learning-rate step {first}" if first == last else f"learning-rate steps {first} to {last}"


def from_folders(paths: Sequence[str], own: OwnInputs = NOTHING_NAMED) -> GatheredRun:
    """Return the weights in the checkpoints of peers' state folders.

    If several folders are copies of one peer's folder, only the newest is read. A fragment that is far behind the
    newest checkpoint of the same fragment is left out. Files and code that a folder's config names are not read.

    Args:
        paths: State folders, or folders of state folders as `decentral.local` makes them.
        own: The files that the user named.

    Raises:
        UserError: If no folder has a checkpoint, a checkpoint is damaged, the folders belong to different runs, or the
            run's model is a user's own code.
    """
    folders = state_folders(paths)
    kept = {folder: found for folder in folders if (found := state.StateFolder(folder).look_at_run()) is not None}
    _require_one_run({folder: run for folder, (run, _) in kept.items()})
    runs = [(run, settings.built_in(own)) for run, settings in kept.values()]
    if len({settings.digest() for _, settings in runs}) > 1:
        raise UserError("--state-dir: the folders' configs differ, though all name one run; give fewer folders")
    steps = {folder: step for folder in folders if (step := checkpoint.lr_step(folder)) is not None}
    newest = newest_of_each_peer(steps)
    holders = [_of_folder(folder, steps[folder]) for folder in steps if newest[folder] == folder]
    if not holders or not runs:
        raise UserError(f"--state-dir {' '.join(paths)} has no checkpoint; a peer writes a checkpoint when it stops")
    pairs = ((folder, peer) for folder, peer in newest.items() if folder != peer)
    copies = [
        f"{copy} at learning-rate step {steps[copy]}: a copy of {peer}, which is at {steps[peer]}"
        for copy, peer in pairs
    ]
    left_out = [*copies, *leave_out_laggards(holders)]
    run, settings = runs[0]
    return GatheredRun(run, settings, [one for one in holders if one.weights], tuple(left_out))


def _require_one_run(runs: Mapping[Path, RunId]) -> None:
    """Raise UserError if these state folders belong to several runs, even to runs with the same config."""
    first = {run: folder for folder, run in reversed(list(runs.items()))}
    if len(first) > 1:
        named = [f"{plain_text(run)} in {folder}" for run, folder in sorted(first.items())]
        more = f" and {len(named) - NAMED_RUNS} more" if len(named) > NAMED_RUNS else ""
        found = ", ".join(named[:NAMED_RUNS]) + more
        raise UserError(f"--state-dir: expected folders of one run, found {found}; give fewer folders")


def _of_folder(folder: Path, step: int) -> HolderWeights:
    weights = replicas.read(folder) or {}
    return HolderWeights(str(folder), weights, dict.fromkeys(weights, step))


def leave_out_laggards(holders: Sequence[HolderWeights]) -> list[str]:
    """Delete the fragments of holders that lag behind; return one line of text for each such holder.

    A fragment lags if its step is more than LAG_STEPS steps, and more than LAG_SHARE of the newest step, behind the
    newest step of the same fragment.
    """
    newest = {index: max(one.steps.get(index, 0) for one in holders) for one in holders for index in one.steps}
    said = []
    for one in holders:
        late = [
            index
            for index, step in one.steps.items()
            if newest[index] - step > max(LAG_STEPS, LAG_SHARE * newest[index])
        ]
        if late:
            said.append(
                f"{one.name} at learning-rate step {one.steps[late[0]]}: far behind step {newest[late[0]]} of others"
            )
        for index in late:
            del one.weights[index], one.steps[index]
    return said


async def from_swarm(join: Sequence[str], invite: str | None, copies: int = MOST_HOLDERS) -> GatheredRun:
    """Return the weights of a live swarm, fetched from its peers.

    Args:
        join: Addresses of peers.
        invite: Path of an invitation file, for a private swarm.
        copies: Number of holders from which to fetch each fragment; reduced if this machine's memory is too small.

    Raises:
        UserError: If no peer answers or trains, a layer cannot be fetched from any peer, or the model is too large for
            this machine's memory.
    """
    async with visit(join, read_holding(Path(invite)) if invite else None) as swarm:
        return await of_visited(swarm, copies, measure.machine_bytes())


async def of_visited(swarm: VisitedSwarm, copies: int, machine_bytes: int) -> GatheredRun:
    """Return the weights of a live swarm to which a connection exists, in at most `machine_bytes` of memory.

    Raises:
        UserError: If no peer trains, a layer cannot be fetched from any peer, or the model needs more memory.
    """
    live = await look(swarm)
    copies = memory.copies_that_fit(swarm.config, copies, machine_bytes)
    for holder, record in live.items():
        swarm.transport.learn(holder, record.addresses)
    here = [peer for peer in swarm.contacts if peer in live]
    order = sorted(live, key=lambda peer: (live[peer].first - live[peer].last, peer not in here, peer))
    holders = await gather(swarm.transport, swarm.run, swarm.config, {peer: live[peer] for peer in order}, copies)
    return GatheredRun(swarm.run, swarm.config, holders)


async def look(swarm: VisitedSwarm) -> dict[PeerId, PeerRecord]:
    """Look up the records of the swarm's training peers in the DHT, and return them by peer.

    Look up at most RECORD_LOOKS times, until the records include all peers in `swarm.contacts`.

    Raises:
        UserError: If the last lookup finds no peer that trains.
    """
    for _ in range(RECORD_LOOKS):
        found = await swarm.records()
        live = {holder: record for holder, record in found.items() if record.phase == PeerPhase.TRAINING}
        if live and all(contact in live for contact in swarm.contacts):
            return live
        await asyncio.sleep(RECORD_LOOK_S)
    if not live:
        raise UserError(f"run {swarm.run} has no training peers now; try again when a peer trains")
    return live


async def gather(
    transport: Transport,
    run: RunId,
    settings: config.Config,
    live: dict[PeerId, PeerRecord],
    copies: int = MOST_HOLDERS,
) -> list[HolderWeights]:
    """Fetch each fragment of a run's model from `copies` of its holders, or from fewer if others fail.

    Args:
        transport: The connections to the peers.
        run: The run's id.
        settings: The run's config.
        live: Records of the training peers, in the order in which to ask them.
        copies: Number of holders from which to fetch each fragment.

    Returns:
        The peers that gave at least one fragment.

    Raises:
        UserError: If a fragment cannot be fetched from any peer.
    """
    layouts, weights = donated_layouts(settings), update_rules.weights_section(settings.gossip)
    asked = {fragment.index: _in_turn(fragment, live) for fragment, _ in layouts}
    found = {peer: HolderWeights(peer) for peer in live}
    while True:
        shares: dict[PeerId, list[tuple[Fragment, Layout]]] = {}
        for fragment, layout in layouts:
            here = sum(fragment.index in one.weights for one in found.values())
            able = (peer for peer in asked[fragment.index] if not found[peer].trouble)
            for peer in (peer for _, peer in zip(range(copies - here), able, strict=False)):
                shares.setdefault(peer, []).append((fragment, layout))
        if not shares:
            break
        await at_once(_give(transport, run, found[peer], share, weights) for peer, share in shares.items())
    given = [one for one in found.values() if one.weights]
    for fragment in replicas.missing(settings, {index: one.weights[index] for one in given for index in one.weights}):
        why = "; ".join(f"peer {one.name}: {plain_text(one.trouble)}" for one in found.values() if one.trouble)
        layers = f"layers {fragment.first} to {fragment.last - 1}"
        raise UserError(f"no peer gave {layers} of the model ({why or 'no peer holds them'}); try again later")
    return given


def _in_turn(fragment: Fragment, live: dict[PeerId, PeerRecord]) -> Iterator[PeerId]:
    """Return an iterator over the peers in `live` that hold a fragment; the caller asks each peer at most once."""
    return iter([peer for peer, record in live.items() if record.covers(fragment)])


async def _give(
    transport: Transport, run: RunId, holder: HolderWeights, share: Sequence[tuple[Fragment, Layout]], weights: str
) -> None:
    """Fetch fragments from one peer, and store their section `weights` in `holder`, or the reason if the peer fails."""
    try:
        for fragment, layout in share:
            incoming = Incoming(fragment, layout)
            blob = await _fetch(transport, run, PeerId(holder.name), incoming)
            holder.weights[fragment.index] = unpack(blockwise, layout, blob)[weights]
            holder.steps[fragment.index] = incoming.step
    except (AskError, ProtocolError) as error:
        holder.fail(str(error))


async def _fetch(transport: Transport, run: RunId, holder: PeerId, incoming: Incoming) -> Blob:
    """Fetch one fragment's state from a peer, piece by piece.

    Raises AskError if the peer does not answer, ProtocolError if its answer is not valid.
    """
    while not incoming.complete():
        offset = incoming.next_offset()
        assert offset is not None
        question = StateRequest(run, incoming.fragment.index, offset, PIECE_BYTES)
        answer = await transport.ask(holder, Envelope(question), PIECE_DEADLINE_S, MAX_CHUNK_BYTES)
        message = answer.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            raise ProtocolError(message.reason if isinstance(message, Refused) else "unexpected", "no state came")
        incoming.take(holder, message, answer.envelope.blob)
    return incoming.hand_over()


def donated_layouts(settings: config.Config) -> list[tuple[Fragment, Layout]]:
    """Return each fragment of the run's model, with the layout of the fragment's state as a donor sends it."""
    donated = update_rules.donated(settings.gossip)
    return [(one, update_rules.layout_of(donated, one.parameters, blockwise)) for one in fragments_of(settings)]
