"""A run's weights for a command that uses them: from live peers, which give them as to a newcomer, or from folders.

Each fragment is asked of as many peers as the caller wants copies, those first that hold most of the model. One that
fails is replaced by another holder. Nothing is made before the config says how large it is, and no piece is taken that
is larger (peers/joining/fetch.py).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
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
from decentral.core.peer_folders import newest_of_each_peer
from decentral.core.plain_text import plain_text
from decentral.core.synthetic import Blob
from decentral.engine import checkpoint, measure, memory
from decentral.engine.fragment import fragments_of
from decentral.peers.joining.fetch import MOST_HOLDERS, PIECE_BYTES, PIECE_DEADLINE_S, Incoming
from decentral.peers.membership.records import PeerRecord
from decentral.peers.startup import state
from decentral.peers.startup.invitation_files import read_holding
from decentral.peers.startup.visit import VisitedSwarm, visit
from decentral.serving import replicas
from decentral.serving.replicas import Weights

RECORD_LOOKS = 10  # lookups in the DHT, until some peer's record is there
RECORD_LOOK_S = 1.0
LAG_SHARE, LAG_STEPS = 0.1, 20  # a checkpoint so far behind the newest one, in both, would spoil the mean
NAMED_HOLDERS = 4  # of more peers it is said how many there are
WEIGHTS = ("phi", "theta")  # the names of the weights in a donor's blob, by algorithm


@dataclass(slots=True)
class HolderWeights:
    """A peer's weights, as far as it gave them, or a state folder's."""

    name: str  # the peer's id, or the folder
    weights: Weights = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # the swarm's step that each fragment was at, as the peer says
    trouble: str = ""  # why it gave no more

    def fail(self, reason: str) -> None:
        self.trouble = reason or "failed"


@dataclass(frozen=True, slots=True)
class GatheredRun:
    """A run's config, the holders that gave some of its weights, and a line for each folder that is left out."""

    run: RunId
    config: config.Config
    holders: list[HolderWeights]
    left_out: tuple[str, ...] = ()

    def average(self) -> Weights:
        """Return the mean of each fragment over the peers that gave it."""
        return replicas.average([one.weights for one in self.holders])


def whose(holders: Sequence[HolderWeights]) -> str:
    """Return whose weights these are, and at which of the swarm's steps, as the holders say."""
    named = [f"{one.name} at {_steps(one)}" for one in holders[:NAMED_HOLDERS]]
    more = f" and {len(holders) - NAMED_HOLDERS} more" if len(holders) > NAMED_HOLDERS else ""
    copies = max(Counter(index for one in holders for index in one.weights).values())
    mean = f", each layer the mean of up to {copies}" if copies > 1 else ""
    return f"weights of {', '.join(named)}{more}{mean}"


def _steps(holder: HolderWeights) -> str:
    """Return the steps of a peer's fragments as text; they differ where it trained while they were fetched."""
    first, last = min(holder.steps.values()), max(holder.steps.values())
    return f"step {first}" if first == last else f"steps {first} to {last}"


def from_folders(paths: Sequence[str], own: OwnInputs = NOTHING_NAMED) -> GatheredRun:
    """Return the weights in peers' state folders, or in a folder of such, as decentral.local makes it.

    A peer counts once: of its folder and copies of it the newest is taken. A fragment's checkpoints that are far older
    than its newest one are left out. Raises UserError.

    `own`: what the user names in the place of what the peers' users did.
    """
    folders = [found for path in paths for found in _state_folders(Path(path))]
    runs = [state.StateFolder(folder).read_run(own) for folder in folders]
    if len({run[1].digest() for run in runs if run is not None}) > 1:
        raise UserError("--state-dir: these folders belong to different runs; give those of one run")
    if any(run is not None and run[1].model.layers is not None for run in runs):
        raise UserError("--state-dir: this run's model is code; only the built-in model's weights are read")
    steps = {folder: step for folder in folders if (step := checkpoint.lr_step(folder)) is not None}
    newest = newest_of_each_peer(steps)
    holders = [_of_folder(folder, steps[folder]) for folder in steps if newest[folder] == folder]
    if not holders or runs[0] is None:
        raise UserError(f"--state-dir {' '.join(paths)}: no checkpoint there; a peer writes one when it stops")
    pairs = ((folder, peer) for folder, peer in newest.items() if folder != peer)
    copies = [f"{copy} at step {steps[copy]}: a copy of {peer}, which is at step {steps[peer]}" for copy, peer in pairs]
    left_out = [*copies, *leave_out_laggards(holders)]
    run, settings = runs[0]
    return GatheredRun(run, settings, [one for one in holders if one.weights], tuple(left_out))


def _of_folder(folder: Path, step: int) -> HolderWeights:
    weights = replicas.read(folder) or {}
    return HolderWeights(str(folder), weights, dict.fromkeys(weights, step))


def leave_out_laggards(holders: Sequence[HolderWeights]) -> list[str]:
    """Take from these holders each fragment that another holds far newer; return a line for each of the holders."""
    newest = {index: max(one.steps.get(index, 0) for one in holders) for one in holders for index in one.steps}
    said = []
    for one in holders:
        late = [
            index
            for index, step in one.steps.items()
            if newest[index] - step > max(LAG_STEPS, LAG_SHARE * newest[index])
        ]
        if late:
            said.append(f"{one.name} at step {one.steps[late[0]]}: far behind step {newest[late[0]]} of others")
        for index in late:
            del one.weights[index], one.steps[index]
    return said


def _state_folders(path: Path) -> list[Path]:
    found = [path] if (path / "run.json").exists() else sorted(run.parent for run in path.glob("*/run.json"))
    if not found:
        raise UserError(f"--state-dir {path}: no peer's state folder, nor a folder of such")
    return found


async def from_swarm(join: Sequence[str], invite: str | None, copies: int = MOST_HOLDERS) -> GatheredRun:
    """The weights that live peers give to a newcomer, each from so many of its holders at most, or from fewer where
    this machine's memory has no room for as many.

    Raises UserError if no peer answers or trains, if nobody gives some layer, or if the model is too large for this
    machine.
    """
    async with visit(join, read_holding(Path(invite)) if invite else None) as swarm:
        return await of_visited(swarm, copies, measure.machine_bytes())


async def of_visited(swarm: VisitedSwarm, copies: int, machine_bytes: int) -> GatheredRun:
    """The same of a swarm that is visited already. `machine_bytes`: the memory that it may take here."""
    live = await look(swarm)
    copies = memory.copies_that_fit(swarm.config, copies, machine_bytes)
    for holder, record in live.items():
        swarm.transport.learn(holder, record.addresses)
    here = [peer for peer in swarm.contacts if peer in live]
    order = sorted(live, key=lambda peer: (live[peer].first - live[peer].last, peer not in here, peer))
    holders = await gather(swarm.transport, swarm.run, swarm.config, {peer: live[peer] for peer in order}, copies)
    return GatheredRun(swarm.run, swarm.config, holders)


async def look(swarm: VisitedSwarm) -> dict[PeerId, PeerRecord]:
    """The peers that train, from their records in the DHT. Raises UserError if there are none."""
    for _ in range(RECORD_LOOKS):
        found = await swarm.records()
        live = {holder: record for holder, record in found.items() if record.phase == "training"}
        if live and all(contact in live for contact in swarm.contacts):
            return live
        await asyncio.sleep(RECORD_LOOK_S)
    if not live:
        raise UserError(f"run {swarm.run} has no peers that train")
    return live


async def gather(
    transport: Transport,
    run: RunId,
    settings: config.Config,
    live: dict[PeerId, PeerRecord],
    copies: int = MOST_HOLDERS,
) -> list[HolderWeights]:
    """Fetches each fragment from its first holders in `live`, and from further ones where these fail.

    Raises UserError if nobody gives some fragment.
    """
    layouts = donated_layouts(settings)
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
        await at_once(_give(transport, run, found[peer], share) for peer, share in shares.items())
    given = [one for one in found.values() if one.weights]
    for fragment in replicas.missing(settings, {index: one.weights[index] for one in given for index in one.weights}):
        why = "; ".join(f"peer {one.name}: {plain_text(one.trouble)}" for one in found.values() if one.trouble)
        layers = f"layers {fragment.first} to {fragment.last - 1}"
        raise UserError(f"nobody gave {layers} of the model ({why or 'nobody holds them'}); try again later")
    return given


def _in_turn(fragment: Fragment, live: dict[PeerId, PeerRecord]) -> Iterator[PeerId]:
    """The fragment's holders, each once."""
    return iter([peer for peer, record in live.items() if record.covers(fragment)])


async def _give(
    transport: Transport, run: RunId, holder: HolderWeights, share: Sequence[tuple[Fragment, Layout]]
) -> None:
    """Asks a peer for its share of the fragments. Those that came whole count, whatever happens to the others."""
    try:
        for fragment, layout in share:
            incoming = Incoming(fragment, layout)
            blob = await _fetch(transport, run, PeerId(holder.name), incoming)
            vectors = unpack(blockwise, layout, blob)
            holder.weights[fragment.index] = next(vectors[name] for name in WEIGHTS if name in vectors)
            holder.steps[fragment.index] = incoming.step
    except (AskError, ProtocolError) as error:
        holder.fail(str(error))


async def _fetch(transport: Transport, run: RunId, holder: PeerId, incoming: Incoming) -> Blob:
    """Fetches one fragment's state piece by piece, as a newcomer does. Raises AskError or ProtocolError."""
    while not incoming.complete():
        offset = incoming.next_offset()
        assert offset is not None
        question = StateRequest(run, incoming.fragment.index, offset, PIECE_BYTES)
        answer = await transport.ask(holder, Envelope(question), PIECE_DEADLINE_S, MAX_CHUNK_BYTES)
        message = answer.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            raise ProtocolError(message.reason if isinstance(message, Refused) else "unexpected", "no piece of state")
        incoming.take(holder, message, answer.envelope.blob)
    return incoming.hand_over()


def donated_layouts(settings: config.Config) -> list[tuple[Fragment, Layout]]:
    """Each fragment of the run's model, and the layout of the state that a donor gives of it."""
    donated = update_rules.donated(settings.gossip)
    return [(one, update_rules.layout_of(donated, one.parameters, blockwise)) for one in fragments_of(settings)]
