"""python -m decentral.export: the swarm's model as a folder that Hugging Face's transformers loads.

gather   all layers from checkpoints (--state-dir), or from live peers (--join), which serve them as to a newcomer
average  each layer over the peers that hold it
write    config.json, model.safetensors, and the tokenizer: of bytes, or that of --tokenizer or of the peers' own flags
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral import command, state
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_CHUNK_BYTES, Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import AskError, Transport
from decentral.core import config
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Fragment, Layout
from decentral.core.synthetic import Blob
from decentral.invitation_files import read_holding
from decentral.peers.joining.fetch import PIECE_BYTES, PIECE_DEADLINE_S, Incoming
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord
from decentral.train import compress, huggingface, replicas, update_rules
from decentral.train.inner import fragments_of
from decentral.train.replicas import Weights
from decentral.train.sections import unpack
from decentral.visit import VisitedSwarm, visit

MOST_HOLDERS = 16  # of a layer are asked for it: more would change the average by little
EXPORT_LOOKS = 10  # lookups in the DHT, until some peer's record is there
EXPORT_LOOK_S = 1.0
WEIGHTS = ("phi", "theta")  # the names of the weights in a donor's blob, by algorithm


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    run, holders = asyncio.run(from_swarm(flags.join, flags.invite)) if flags.join else from_folders(flags.state_dir)
    weights = replicas.average(holders)
    like = flags.tokenizer or run.tokenizer
    files = huggingface.write(Path(flags.out), run, replicas.layers_with(run, weights), Path(like) if like else None)
    counts = [sum(index in own for own in holders) for index in weights]
    held = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters, each the mean of {held} peers")
    print(f"wrote {', '.join(files)} in {flags.out}")
    if "tokenizer.json" not in files:
        print("no tokenizer: this run's tokens are not bytes; name the one that made them with --tokenizer PATH")


def from_folders(paths: Sequence[str]) -> tuple[config.Config, list[Weights]]:
    """The weights in peers' state folders, or in a folder of such, as decentral.local makes it. Raises UserError."""
    folders = [found for path in paths for found in _state_folders(Path(path))]
    runs = [state.StateFolder(folder).read_run() for folder in folders]
    if len({run[1].digest() for run in runs if run is not None}) > 1:
        raise UserError("--state-dir: these folders belong to different runs; give those of one run")
    if any(run is not None and run[1].model.layers is not None for run in runs):
        raise UserError("--state-dir: this run's model is code; only the built-in model can be exported as a Llama")
    holders = [found for found in map(replicas.read, folders) if found is not None]
    if not holders or runs[0] is None:
        raise UserError(f"--state-dir {' '.join(paths)}: no checkpoint there; a peer writes one when it stops")
    return runs[0][1], holders


def _state_folders(path: Path) -> list[Path]:
    found = [path] if (path / "run.json").exists() else sorted(run.parent for run in path.glob("*/run.json"))
    if not found:
        raise UserError(f"--state-dir {path}: no peer's state folder, nor a folder of such")
    return found


async def from_swarm(join: Sequence[str], invite: str | None = None) -> tuple[config.Config, list[Weights]]:
    """The weights that live peers give to a newcomer. Raises UserError if no peer answers or trains."""
    async with visit(join, read_holding(Path(invite)) if invite else None) as swarm:
        live = await look(swarm)
        for holder, record in live.items():
            swarm.transport.learn(holder, record.addresses)
        return swarm.config, await gather(swarm.transport, swarm.run, swarm.config, live)


async def look(swarm: VisitedSwarm) -> dict[PeerId, PeerRecord]:
    """The peers that train, from their records in the DHT. Raises UserError if there are none."""
    for _ in range(EXPORT_LOOKS):
        found = await records.lookup(
            swarm.directory, swarm.run, swarm.config.swarm.shards, swarm.clock(), swarm.own.open
        )
        live = {holder: record for holder, record in found.items() if record.phase == "training"}
        if live and all(contact in live for contact in swarm.contacts):
            return live
        await asyncio.sleep(EXPORT_LOOK_S)
    if not live:
        raise UserError(f"run {swarm.run} has no peers that train")
    return live


async def gather(
    transport: Transport, run: RunId, settings: config.Config, live: dict[PeerId, PeerRecord]
) -> list[Weights]:
    """Fetches each fragment from its holders, MOST_HOLDERS at most. A holder that fails is left out."""
    layouts = donated_layouts(settings)
    shares: dict[PeerId, list[tuple[Fragment, Layout]]] = {holder: [] for holder in sorted(live)}
    for fragment, layout in layouts:
        able = [p for p in shares if live[p].first <= fragment.first and fragment.last <= live[p].last]
        for holder in able[:MOST_HOLDERS]:
            shares[holder].append((fragment, layout))
    found = await asyncio.gather(*(_weights_of(transport, run, holder, share) for holder, share in shares.items()))
    return [weights for weights in found if weights]


async def _weights_of(
    transport: Transport, run: RunId, holder: PeerId, share: Sequence[tuple[Fragment, Layout]]
) -> Weights:
    weights: Weights = {}
    try:
        for fragment, layout in share:
            blob = await _fetch(transport, run, holder, Incoming(fragment, layout))
            vectors = unpack(compress, layout, blob)
            weights[fragment.index] = next(vectors[name] for name in WEIGHTS if name in vectors)
    except (AskError, ProtocolError):
        pass  # the fragments that came whole count; other holders have the rest
    return weights


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
    return [(one, update_rules.layout_of(donated, one.parameters, compress)) for one in fragments_of(settings)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.export", description="A swarm's model for transformers.")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a live peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    parser.add_argument("--state-dir", nargs="+", default=[], metavar="DIR", help="peers' state folders")
    parser.add_argument("--format", choices=["huggingface"], default="huggingface", help="of the folder")
    tokenizer = "file or folder of the tokenizer to put in; default: that of the stopped peers"
    parser.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write the model")
    flags = parser.parse_args(argv)
    if bool(flags.join) == bool(flags.state_dir):
        raise UserError("expected either --join ADDR of a live peer, or --state-dir DIR... of stopped ones")
    return flags


if __name__ == "__main__":
    sys.exit(main())
