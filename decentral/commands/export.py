"""python -m decentral.export: write the swarm's model as a folder that Hugging Face's transformers or peft loads.

gather   Read all layers from checkpoints (--state-dir), or download them from running peers (--join).
average  Average each layer over the peers that hold it. A layer of a peer is left out, and the output names the peer,
         if it is more than 20 steps, and more than a tenth of the newest step, behind the newest copy of the layer:
         its older weights would pull the mean back. If a peer's folder was copied, only the newest copy counts.
write    Write config.json, model.safetensors, a model card (README.md), and a tokenizer: that of --tokenizer, else of
         --model-from, else bytes.
         For a run that trains adapters (`model.lora`), write adapter_config.json and adapter_model.safetensors for
         peft; --format huggingface merges the adapters into the model's weights instead.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from decentral.commands import shared
from decentral.core import foreign_file
from decentral.core.atomic_file import write_atomically
from decentral.core.config import Config
from decentral.core.errors import UserError, writing
from decentral.core.ids import RunId
from decentral.core.own_inputs import OwnInputs
from decentral.core.peer_folders import journals_in, state_folders
from decentral.core.plain_text import printable
from decentral.core.units import MiB
from decentral.peers.startup.state import StateFolder
from decentral.store.fetching import fetched
from decentral.store.places import is_address

CARD_FILE = "README.md"
MOST_CARD_BYTES = 4 * MiB
EXPORTED = ("model.safetensors", "model-0*", "adapter_model.safetensors")  # patterns of files of weights in a folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    state_folders([text for text in flags.state_dir if not is_address(text)])  # before torch is loaded
    _require_own_folder(Path(flags.out))
    with shared.loading("nothing written"):
        from decentral.model import adapter_folder, huggingface
        from decentral.serving import gather_weights, replicas
    own = OwnInputs(model_folder=flags.model_from)
    with shared.if_interrupted("nothing written"):
        if flags.join:
            found = asyncio.run(gather_weights.from_swarm(flags.join, flags.invite))
        else:
            folders = [_local(text) for text in flags.state_dir]
            found = gather_weights.from_folders(folders, own)
        run, weights = found.config.with_own(own), found.average()
        adapters = flags.format == "peft" or (flags.format is None and run.model.lora is not None)
        layers, out = replicas.layers_with(run, weights, frozen=not adapters), Path(flags.out)
        if adapters:
            files = adapter_folder.write(out, run, layers)
        else:
            like = flags.tokenizer or run.tokenizer
            files = huggingface.write(out, run, layers, Path(like) if like else None)
    steps = [step for one in found.holders for step in one.steps.values()]
    files += _write_card(out, found.run, run, [] if flags.join else folders, max(steps, default=0), adapters)
    counts = [sum(index in one.weights for one in found.holders) for index in weights]
    peers = "peer" if max(counts) == 1 else "peers"
    held = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters, each the mean of {held} {peers}")
    for line in [gather_weights.whose(found.holders), *(f"left out: {one}" for one in found.left_out)]:
        print(printable(line, shared.ERROR_CHARS))
    print(f"wrote {', '.join(files)} in {flags.out}")
    if CARD_FILE in files:
        print(f"{CARD_FILE} names peers and data: read it before you publish the folder")
    if not adapters and "tokenizer.json" not in files:
        print("no tokenizer was written: this run's tokens are not bytes; give its tokenizer with --tokenizer PATH")


def _require_own_folder(out: Path) -> None:
    """Raise UserError if a folder has files, but no model of an earlier export.

    An export would overwrite a user's files of the same names, such as config.json.
    """
    with writing("--out", out, "folder"):
        names = [one.name for one in out.iterdir()] if out.is_dir() else []
    if names and not any(fnmatch(name, pattern) for name in names for pattern in EXPORTED):
        raise UserError(f"--out {out}: this folder has other files; give a new folder, or one of an earlier export")


def _local(text: str) -> str:
    """Download an uploaded checkpoint and return its new folder; if `text` is a path, return it unchanged."""
    return str(fetched(text, "checkpoint", "--state-dir", shared.starting)) if is_address(text) else text


def _write_card(
    out: Path, run: RunId, settings: Config, folders: Sequence[str], step: int, adapters: bool
) -> list[str]:
    """Write the model card, and return the names of written files; [] if the folder has a card that a user has edited.

    Args:
        out: The folder of the export.
        run: The run.
        settings: The run's config.
        folders: Folders with the journals of peers, or with such folders; [] if there are none.
        step: The newest step of the weights.
        adapters: Whether the folder has adapters, which need the model that the run started from.
    """
    from decentral.view import model_card
    from decentral.view.run_history import history_of

    path, journals = out / CARD_FILE, [journal for folder in folders for journal in journals_in(Path(folder))]
    with writing("--out", out, "folder"):
        if path.exists() and model_card.MARK not in foreign_file.read_text(path, MOST_CARD_BYTES):
            return []
        history = history_of((journal.parent.name, journal) for journal in journals)
        names = [StateFolder(journal.parent).data_name() for journal in journals]
        data = tuple(dict.fromkeys(name for name in names if name))
        known = history if history.peers else None
        card = model_card.card_of(model_card.CardFacts(run, settings, known, step, data, adapters))
        write_atomically(path, card.encode())
    return [CARD_FILE]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = (
        "Write a swarm's model, the mean of its peers, as a folder for transformers. Peers more than 20 steps and a "
    )
    about += "tenth behind the newest one are left out, and named."
    parser = shared.Parser(prog="python -m decentral.export", description=about)
    shared.add_join_flag(parser, "address of a running peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    stopped = "state folders of stopped peers, or places of uploaded checkpoints"
    parser.add_argument("--state-dir", nargs="+", default=[], metavar="DIR", help=stopped)
    form = "format of the folder; default: peft if the run trains adapters, else huggingface, which merges adapters"
    parser.add_argument("--format", choices=["huggingface", "peft"], help=form)
    folder = "folder of the model that the run started from, which merging adapters needs"
    parser.add_argument("--model-from", metavar="DIR", help=folder)
    tokenizer = "file or folder of the tokenizer to include; default: that of --model-from"
    parser.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write the model to")
    flags = parser.parse_args(argv)
    if bool(flags.join) == bool(flags.state_dir):
        raise UserError("expected either --join ADDR of a running peer, or --state-dir DIR... of stopped ones")
    return flags


if __name__ == "__main__":
    sys.exit(main())
