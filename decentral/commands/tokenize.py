"""python -m decentral.tokenize: turn text or rows of text into a file of tokens for `data.kind: tokens`.

    python -m decentral.tokenize my-text --train 8192 --out words.bin        # also makes words.tokenizer/
    python -m decentral.tokenize a.parquet --tokenizer my-model --out words.bin

read      Stream the documents (decentral/data/documents.py).
train     With --train N, train a byte-level BPE tokenizer of N tokens on at most --train-bytes of the text.
write     Write the tokens of each document, followed by a separator. A token is a uint16, or a uint32 if the vocabulary
          has more than 65,536 tokens.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from decentral.commands import shared
from decentral.core import config, quantities
from decentral.core.atomic_file import replacing, write_atomically
from decentral.core.choices import READERS
from decentral.core.errors import UserError
from decentral.data import tokenizer
from decentral.data.documents import Documents, TextPiece
from decentral.data.token_file import Description, describe

SEPARATOR = "<|endoftext|>"  # the token between documents, if this command trains the tokenizer
PIECES_AT_ONCE = 256  # pieces of text that are tokenized together, to bound the memory
LEAST_VOCABULARY = 257  # a vocabulary needs all 256 bytes and the separator


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
    with shared.if_interrupted(f"{out} is not written"):
        count = write(_pieces(parts), found, out, width)
    print(f"wrote {count:,} tokens in {out}; to train on them:")
    print(f"    --set data.kind=tokens --data {out} --set model.vocabulary={found.size}")


def _data(flags: argparse.Namespace, path: str) -> config.DataConfig:
    tree = {"kind": "huggingface", "path": path, "glob": flags.glob, "column": flags.column}
    return config.validated({"data": tree}).data


def _pieces(parts: Sequence[Documents]) -> Iterator[TextPiece]:
    """Yield all pieces of all data sets. No piece is held out, because a run holds out a part of the token file."""
    return itertools.chain.from_iterable(one.all_pieces() for one in parts)


def train(pieces: Iterator[TextPiece], size: int, most_bytes: int, place: Path) -> None:
    """Train a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909), and write it to a folder.

    Args:
        pieces: The text.
        size: Number of tokens in the vocabulary.
        most_bytes: Bytes of text after which training stops reading.
        place: The folder for the tokenizer's files.

    Raises:
        UserError: If the tokenizers library is missing, or the folder cannot be written.
    """
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
        raise UserError(f"--out: {place} cannot be written ({error.strerror}); choose another place") from None


def _first(pieces: Iterator[TextPiece], most_bytes: int) -> Iterator[str]:
    left = most_bytes
    for piece in pieces:
        yield piece.text
        left -= len(piece.text.encode(errors="replace"))
        if left <= 0:
            return


def write(pieces: Iterator[TextPiece], found: tokenizer.TextTokenizer, out: Path, width: int) -> int:
    """Write a file of tokens and its description, and return the number of tokens.

    Args:
        pieces: The text.
        found: The tokenizer.
        out: The file to write.
        width: Bytes of each token, 2 or 4.

    Raises:
        UserError: If the file cannot be written; an old file at `out` is then kept.
    """
    from decentral.data.stream import TokenPacker

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
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Turn text into a file of tokens."
    parser = shared.Parser(prog="python -m decentral.tokenize", description=about)
    kinds = f"a file ({', '.join(READERS)}), a folder of them, or the name of a data set on the Hugging Face hub"
    parser.add_argument("input", nargs="+", metavar="INPUT", help=kinds)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file of tokens to write")
    parser.add_argument("--tokenizer", metavar="PATH", help="file or folder of a Hugging Face tokenizer")
    parser.add_argument("--train", type=int, metavar="N", help="train a BPE tokenizer of N tokens instead")
    most = "with --train: train on at most this much text; default 256MB"
    parser.add_argument("--train-bytes", type=quantities.size_bytes, default=256_000_000, metavar="BYTES", help=most)
    between = "the token between documents; default: the tokenizer's end-of-text token"
    parser.add_argument("--separator", metavar="TOKEN", help=between)
    parser.add_argument("--column", default="text", metavar="NAME", help="the column with the text; default text")
    parser.add_argument("--glob", metavar="PATTERN", help="the files of a folder to read, such as **/*.txt")
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
