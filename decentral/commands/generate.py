"""python -m decentral.generate: generate text from the swarm's model on this machine.

    python -m decentral.generate --join ADDR "text"            with the weights of one or more peers of a running swarm
    python -m decentral.generate --state-dir DIR "text"        with the weights of peers on this machine
    python -m decentral.generate --model FOLDER "text"         with a Hugging Face folder, as decentral.export writes it

The prompt and the text that follows it are streamed to standard output. The peers whose weights were used, their steps
and the seed go to standard error. Since strangers trained the model, control characters are shown as `?`.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.commands import shared
from decentral.core.device_names import CHOICES, valid_device
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from decentral.core.peer_folders import state_folders
from decentral.core.plain_text import printable, printable_lines
from decentral.core.sampling import MOST_HOLDERS, Sampling

MOST_GENERATED = 1 << 20
HOTTEST = 100.0  # highest --temperature; at this value all tokens are about equally likely


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    state_folders(flags.state_dir)  # before torch is loaded
    if flags.model and not Path(flags.model).is_dir():
        raise UserError(f"--model {flags.model}: there is no such folder; give a Hugging Face model's folder")
    with shared.loading():
        from decentral.engine import measure
        from decentral.serving import decoding, gather_weights, loaded_model
    device = measure.choose(flags.device)
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
        known = f"the model has only tokens below {model.config.vocabulary}"
        raise UserError(f"the tokenizer gave token {max(prompt)}, but {known}; use the model's own tokenizer")
    decoding.check_memory(
        model.config, len(prompt), flags.max_tokens, measure.memory_bytes(device.device), device.dtype
    )
    seed = secrets.randbits(loaded_model.SEED_BITS) if flags.seed is None else flags.seed
    print(printable(f"{model.source}; seed {seed}", shared.ERROR_CHARS), file=sys.stderr, flush=True)
    _say_what_is_forgotten(model.config.most_positions, len(prompt), flags.max_tokens)
    sampling = Sampling(
        temperature=flags.temperature, top_p=flags.top_p, seed=seed, tokens=flags.max_tokens, below=model.codec.size
    )
    decode = model.codec.decoder()
    for token in prompt:  # the decoder needs the prompt as context; the text that it returns is not used
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
    print(printable_lines(text), end="", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    usual = Sampling()
    parser = shared.Parser(prog="python -m decentral.generate", description="Generate text from a swarm's model.")
    parser.add_argument("text", help="the prompt, which the model continues; may be empty")
    shared.add_join_flag(parser, "address of a running peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    peers = f"with --join: use the mean of N peers' weights, at most {MOST_HOLDERS}; default: 1"
    parser.add_argument("--peers", type=int, default=1, metavar="N", help=peers)
    folders = "a peer's state folder, or a folder of state folders; may be repeated"
    parser.add_argument("--state-dir", action="append", default=[], metavar="DIR", help=folders)
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder, such as decentral.export writes")
    parser.add_argument("--tokenizer", metavar="PATH", help="file or folder of the tokenizer, unless tokens are bytes")
    adapted = "folder of the base model, for a run that trains adapters"
    parser.add_argument("--model-from", metavar="DIR", help=adapted)
    limit = "most tokens to generate; default: %(default)s"
    parser.add_argument("--max-tokens", type=int, default=usual.tokens, metavar="N", help=limit)
    hot = "0: always the likeliest token; default: %(default)s"
    parser.add_argument("--temperature", type=float, default=usual.temperature, help=hot)
    top = "sample only from the likeliest tokens with this total probability; default: %(default)s"
    parser.add_argument("--top-p", type=float, default=usual.top_p, help=top)
    parser.add_argument("--seed", type=int, help="the same seed gives the same text; default: a random one")
    parser.add_argument("--device", type=valid_device, default="auto", help=f"where to compute: {CHOICES}")
    flags = parser.parse_args(argv)
    if sum(map(bool, (flags.join, flags.state_dir, flags.model))) != 1:
        raise UserError("expected exactly one of --join ADDR of a running peer, --state-dir DIR, or --model FOLDER")
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
