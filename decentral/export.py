"""python -m decentral.export: the swarm's model as a folder that Hugging Face's transformers loads, or peft.

gather   all layers from checkpoints (--state-dir), or from live peers (--join), which serve them as to a newcomer
average  each layer over the peers that hold it; of folders, each peer's newest, without those that lag far behind
write    config.json, model.safetensors, and the tokenizer: of bytes, or that of --tokenizer or of the peers' own flags
         peft: adapter_config.json and adapter_model.safetensors of a run that trains adapters (`model.lora`); with
         --format huggingface they become a part of the model's weights
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral import command
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.core.plain_text import printable


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    with command.loading():
        from decentral import gather_weights
        from decentral.train import adapter_folder, huggingface, replicas
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
        print(printable(line, command.ERROR_CHARS))
    print(f"wrote {', '.join(files)} in {flags.out}")
    if not adapters and "tokenizer.json" not in files:
        print("no tokenizer: this run's tokens are not bytes; name the one that made them with --tokenizer PATH")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.export", description="A swarm's model for transformers.")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a live peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    parser.add_argument("--state-dir", nargs="+", default=[], metavar="DIR", help="peers' state folders")
    form = "of the folder; default: peft where the run trains adapters, else huggingface, which has them merged"
    parser.add_argument("--format", choices=["huggingface", "peft"], help=form)
    folder = "the folder that the run's adapters started from; default: that of the stopped peers"
    parser.add_argument("--model-from", metavar="DIR", help=folder)
    tokenizer = "file or folder of the tokenizer to put in; default: that of the stopped peers"
    parser.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write the model")
    flags = parser.parse_args(argv)
    if bool(flags.join) == bool(flags.state_dir):
        raise UserError("expected either --join ADDR of a live peer, or --state-dir DIR... of stopped ones")
    return flags


if __name__ == "__main__":
    sys.exit(main())
