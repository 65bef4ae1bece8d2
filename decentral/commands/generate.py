"""python -m decentral.generate: text from the swarm's model, computed on this machine.

    python -m decentral.generate --join ADDR "text"            of a live swarm: one peer's weights, or a mean of several
    python -m decentral.generate --state-dir DIR "text"        of peers that have stopped, or are training here
    python -m decentral.generate --model FOLDER "text"         of a Hugging Face folder, such as decentral.export writes

The text and what goes on from it are streamed to standard output; whose weights they are, at which step, and the seed
go to standard error. Strangers trained the model: characters that a terminal would obey are shown as `?`.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.commands import shared
from decentral.commands.table import COMMANDS
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.core.plain_text import printable, printable_lines
from decentral.core.sampling import Sampling
from decentral.peers.joining.fetch import MOST_HOLDERS

MOST_GENERATED = 1 << 20  # that one call may generate
HOTTEST = 100.0  # temperature: all tokens are about as likely as each other


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)), interrupted=COMMANDS["generate"].interrupted)


def _main(flags: argparse.Namespace) -> None:
    with shared.loading(COMMANDS["generate"].interrupted):
        from decentral.engine import measure
        from decentral.serving import decoding, gather_weights, loaded_model
    device = measure.choose(flags.device, "auto", 1.0, 0.0)
    if flags.model:
        model = loaded_model.of_folder(Path(flags.model), flags.tokenizer)
    else:
        if flags.join:
            found = asyncio.run(gather_weights.from_swarm(flags.join, flags.invite, flags.peers))
        else:
            found = gather_weights.from_folders(flags.state_dir, OwnInputs(model_folder=flags.model_from))
        model = loaded_model.of_run(found, flags.tokenizer, flags.model_from)
    prompt = model.codec.encode(flags.text) or [model.codec.start]
    if max(prompt) >= model.config.vocabulary:
        known = f"the model knows those below {model.config.vocabulary}"
        raise UserError(f"the prompt has token {max(prompt)}, and {known}; use the model's own tokenizer")
    decoding.check_memory(model.config, len(prompt), flags.max_tokens, measure.memory_bytes(device.device))
    seed = secrets.randbits(loaded_model.SEED_BITS) if flags.seed is None else flags.seed
    print(printable(f"{model.source}; seed {seed}", shared.ERROR_CHARS), file=sys.stderr, flush=True)
    _say_what_is_forgotten(model.config.most_positions, len(prompt), flags.max_tokens)
    sampling = Sampling(flags.temperature, flags.top_p, seed, flags.max_tokens, model.codec.size)
    decode = model.codec.decoder()
    for token in prompt:  # the decoder has to know what comes before, and the text is shown as it was given
        decode(token)
    _show(flags.text)
    for generated in decoding.generate(model.layers, prompt, sampling, device):
        if generated in model.codec.ends:
            break
        _show("" if generated is None else decode(generated))
    _show("\n")


def _say_what_is_forgotten(most: int, prompt: int, tokens: int) -> None:
    if prompt > most:
        print(f"the prompt has {prompt} tokens and the model reads at most {most}; only the last {max(1, most // 2)} "
              "of the prompt are used", file=sys.stderr, flush=True)  # fmt: skip
    elif prompt + tokens > most:
        print(f"the model reads at most {most} tokens; beyond them, generation continues from the last "
              f"{max(1, most // 2)} tokens only", file=sys.stderr, flush=True)  # fmt: skip


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(printable_lines(text).encode(encoding, "replace").decode(encoding), end="", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. Raises UserError."""
    usual = Sampling()
    parser = shared.Parser(prog="python -m decentral.generate", description="Text from a swarm's model.")
    parser.add_argument("text", help="what the model goes on from; may be empty")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a live peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    peers = f"with --join: the mean of so many peers' weights, at most {MOST_HOLDERS}; default: one peer's"
    parser.add_argument("--peers", type=int, default=1, metavar="N", help=peers)
    folders = "a peer's state folder, or a folder of such; may be repeated"
    parser.add_argument("--state-dir", action="append", default=[], metavar="DIR", help=folders)
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder, such as decentral.export writes")
    parser.add_argument("--tokenizer", metavar="PATH", help="its file or folder, where tokens are not bytes")
    adapted = "the folder that the run's adapters started from; default: that of the stopped peers"
    parser.add_argument("--model-from", metavar="DIR", help=adapted)
    parser.add_argument("--max-tokens", type=int, default=usual.tokens, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=usual.temperature, help="0: the likeliest token, always")
    parser.add_argument("--top-p", type=float, default=usual.top_p, help="draws from the likeliest tokens only")
    parser.add_argument("--seed", type=int, help="the same one gives the same text; default: a new one")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|cuda:N", help="where to compute")
    flags = parser.parse_args(argv)
    if sum(map(bool, (flags.join, flags.state_dir, flags.model))) != 1:
        raise UserError("expected one of --join ADDR of a live peer, --state-dir DIR, and --model FOLDER")
    bounds = {
        "--peers": (flags.peers, 1, MOST_HOLDERS),
        "--max-tokens": (flags.max_tokens, 1, MOST_GENERATED),
        "--temperature": (flags.temperature, 0, HOTTEST),
        "--top-p": (flags.top_p, 0, 1),
        "--seed": (flags.seed or 0, 0, (1 << 64) - 1),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise UserError(f"{name} must be between {least} and {most}; it is {value}")
    return flags


if __name__ == "__main__":
    sys.exit(main())
