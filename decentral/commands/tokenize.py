"""python -m decentral.tokenize: text, JSON, Parquet or Arrow to a file of tokens, which `data.kind: tokens` maps.

    python -m decentral.tokenize my-text --train 8192 --out words.bin        # also makes words.tokenizer/
    python -m decentral.tokenize a.parquet --tokenizer my-model --out words.bin

read      documents, streamed (decentral/data/documents.py)
train     with --train a byte-level BPE tokenizer of so many tokens, on at most --train-bytes of the text
write     each document's tokens and a separator, as uint16 or, where the vocabulary is larger, uint32
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from decentral.commands import shared
from decentral.core import config
from decentral.core.atomic_file import replacing, write_atomically
from decentral.core.errors import UserError
from decentral.data import tokenizer
from decentral.data.documents import Documents, TextPiece
from decentral.data.token_file import Description, describe

SEPARATOR = "<|endoftext|>"  # of a tokenizer that is trained here
PIECES_AT_ONCE = 256
LEAST_VOCABULARY = 257  # all bytes, and the separator


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    out, parts = Path(flags.out), [Documents(_data(flags, path), least_parts=1) for path in flags.input]
    for one in parts:
        if one.opened.left_out:
            print(f"warning: {one.opened.left_out}", file=sys.stderr)
    chosen = flags.tokenizer
    if flags.train:
        place = out.with_suffix(".tokenizer")
        train(_pieces(parts), flags.train, flags.train_bytes, place)
        chosen = str(place)
        print(f"wrote a tokenizer of {flags.train} tokens in {place}")
    found = tokenizer.load(chosen, flags.separator)
    width = 2 if found.size <= 1 << 16 else 4
    count = write(_pieces(parts), found, out, width)
    print(f"wrote {count:,} tokens in {out}; to train on them:")
    print(f"    --set data.kind=tokens --data {out} --set data.token_bytes={width} --set model.vocabulary={found.size}")


def _data(flags: argparse.Namespace, path: str) -> config.DataConfig:
    tree = {"kind": "huggingface", "path": path, "glob": flags.glob, "column": flags.column}
    return config.validated({"data": tree}).data


def _pieces(parts: Sequence[Documents]) -> Iterator[TextPiece]:
    """All text, what a run would hold out included: a file of tokens holds stretches of itself out."""
    return itertools.chain.from_iterable(one.all_pieces() for one in parts)


def train(pieces: Iterator[TextPiece], size: int, most_bytes: int, place: Path) -> None:
    """Trains a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909) and writes its folder. Raises UserError."""
    library = tokenizer.library()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=sys.stderr.isatty()
    )
    made.train_from_iterator(_first(pieces, most_bytes), trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SEPARATOR}
    files = {
        tokenizer.TOKENIZER_FILE: made.to_str(pretty=True),
        tokenizer.TOKENIZER_SETTINGS: json.dumps(settings, indent=1),
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(place / name, text.encode())
    except OSError as error:
        raise UserError(f"--out: {place} cannot be written ({error.strerror})") from None


def _first(pieces: Iterator[TextPiece], most_bytes: int) -> Iterator[str]:
    left = most_bytes
    for piece in pieces:
        yield piece.text
        left -= len(piece.text.encode(errors="replace"))
        if left <= 0:
            return


def write(pieces: Iterator[TextPiece], found: tokenizer.TextTokenizer, out: Path, width: int) -> int:
    """Write the tokens and their description; return how many. Raises UserError, and leaves an old file then."""
    from decentral.data.stream import TokenPacker  # loads torch

    packer, count = TokenPacker(found), 0
    dtype = np.uint16 if width == 2 else np.uint32
    try:
        with replacing(out) as file:
            while some := list(itertools.islice(pieces, PIECES_AT_ONCE)):
                packer.add(some)
                tokens, _ = packer.take()
                file.write(tokens.astype(dtype).tobytes())
                count += len(tokens)
        describe(out, Description(found.digest, width, found.size, count))
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose a file that can be written") from None
    return count


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(prog="python -m decentral.tokenize", description="Text to a file of tokens.")
    kinds = "a file or folder of Parquet, JSON, Arrow or text, or a data set's name on the hub"
    parser.add_argument("input", nargs="+", metavar="INPUT", help=kinds)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file of tokens to write")
    parser.add_argument("--tokenizer", metavar="PATH", help="file or folder of a Hugging Face tokenizer")
    parser.add_argument("--train", type=int, metavar="N", help="instead: train a BPE tokenizer of N tokens")
    most = "train it on at most so much text; default 256MB"
    parser.add_argument("--train-bytes", type=shared.size, default=256_000_000, metavar="BYTES", help=most)
    parser.add_argument(
        "--separator", metavar="TOKEN", help="between documents; default: the tokenizer's end of a text"
    )
    parser.add_argument("--column", default="text", metavar="NAME", help="the column of text; default text")
    parser.add_argument("--glob", metavar="PATTERN", help="which files of a folder")
    flags = parser.parse_args(argv)
    if (flags.tokenizer is None) == (flags.train is None):
        raise UserError("expected either --tokenizer PATH, or --train N to make one")
    if flags.train is not None and flags.train < LEAST_VOCABULARY:
        raise UserError(
            f"--train expects at least {LEAST_VOCABULARY} tokens: all bytes, and {SEPARATOR}; got {flags.train}"
        )
    return flags


if __name__ == "__main__":
    sys.exit(main())
