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

from decentral import command, gather_weights
from decentral.core.errors import UserError
from decentral.train import huggingface, replicas


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    if flags.join:
        found = asyncio.run(gather_weights.from_swarm(flags.join, flags.invite))
    else:
        found = gather_weights.from_folders(flags.state_dir)
    run, weights = found.config, found.average()
    like = flags.tokenizer or run.tokenizer
    files = huggingface.write(Path(flags.out), run, replicas.layers_with(run, weights), Path(like) if like else None)
    counts = [sum(index in one.weights for one in found.holders) for index in weights]
    held = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters, each the mean of {held} peers")
    print(f"wrote {', '.join(files)} in {flags.out}")
    if "tokenizer.json" not in files:
        print("no tokenizer: this run's tokens are not bytes; name the one that made them with --tokenizer PATH")


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
