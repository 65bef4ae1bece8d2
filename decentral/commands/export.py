"""python -m decentral.export: write the swarm's model as a folder that Hugging Face's transformers or peft loads.

gather   Read all layers from checkpoints (--state-dir), or download them from running peers (--join).
average  Average each layer over the peers that hold it. Peers that lag far behind are left out. If a peer's folder was
         copied, only the newest copy counts.
write    Write config.json, model.safetensors, and a tokenizer: that of --tokenizer, else of --model-from, else bytes.
         For a run that trains adapters (`model.lora`), write adapter_config.json and adapter_model.safetensors for
         peft; --format huggingface merges the adapters into the model's weights instead.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.core.plain_text import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    with shared.loading():
        from decentral.model import adapter_folder, huggingface
        from decentral.serving import gather_weights, replicas
    own = OwnInputs(model_folder=flags.model_from)
    if flags.join:
        found = asyncio.run(gather_weights.from_swarm(flags.join, flags.invite))
    else:
        found = gather_weights.from_folders(flags.state_dir, own)
    run, weights = found.config.with_own(own), found.average()
    adapters = flags.format == "peft" or (flags.format is None and run.model.lora is not None)
    layers, out = replicas.layers_with(run, weights, frozen=not adapters), Path(flags.out)
    if adapters:
        files = adapter_folder.write(out, run, layers)
    else:
        like = flags.tokenizer or run.tokenizer
        files = huggingface.write(out, run, layers, Path(like) if like else None)
    counts = [sum(index in one.weights for one in found.holders) for index in weights]
    peers = "peer" if max(counts) == 1 else "peers"
    held = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters, each the mean of {held} {peers}")
    for line in [gather_weights.whose(found.holders), *(f"left out: {one}" for one in found.left_out)]:
        print(printable(line, shared.ERROR_CHARS))
    print(f"wrote {', '.join(files)} in {flags.out}")
    if not adapters and "tokenizer.json" not in files:
        print("no tokenizer was written: this run's tokens are not bytes; give its tokenizer with --tokenizer PATH")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Write a swarm's model as a folder for transformers."
    parser = shared.Parser(prog="python -m decentral.export", description=about)
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a running peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    parser.add_argument("--state-dir", nargs="+", default=[], metavar="DIR", help="state folders of stopped peers")
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
