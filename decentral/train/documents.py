"""Text of a data set, streamed with Hugging Face's `datasets`: Parquet, JSON, Arrow, text files, or a name on the hub.

    files or a name -> shards (row groups, files) -> parts of a shard -> pieces of documents

A row's column of text is a document; of a text file, all of it is; of chats and completions, train/conversations.py
makes one of each row. Documents are cut into pieces of PIECE_CHARS, which
are held out or trained on as a whole. Which pieces are held out follows from their text alone, so that no peer trains
on what another one holds out, whatever files each has, and copies of a text are on one side.

Where there are few shards, each is read in several parts, of which part p of P has the pieces p, P + p, 2 P + p and so
on. A part is what one peer reads at a time: train/text_stream.py says in which order.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentral.core import config
from decentral.core.errors import UserError
from decentral.train import conversations
from decentral.train.conversations import Document, Ranges

PIECE_CHARS = 16 * 1024
PIECES_OF_SHARD = 1 << 40  # of a shard
LEAST_PARTS = 32  # of a data set
ROWS_AT_ONCE, LINES_AT_ONCE = 64, 4096
READERS = {  # of files, by the ends of their names; the packed modules of datasets that read them
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
PACKED = (".gz", ".zst", ".bz2", ".xz")
HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")  # owner/name, or owner/name:subset
State = dict[str, Any]
"""Where `datasets` is in a shard: plain JSON."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of one document."""

    text: str
    at: int  # the piece before it in its document has one less
    begins: bool = False  # whether it is known that a document begins here
    ends: bool = False
    learned: Ranges | None = None  # of the piece's characters, as in a Document


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that were read together, and where reading goes on."""

    pieces: tuple[TextPiece, ...]
    state: State
    read: int  # pieces of the shard so far, of all parts


class Documents:
    """A data set as parts that are read one after another, in any order, and again. Not thread-safe."""

    def __init__(
        self,
        data: config.DataConfig,
        least_parts: int = LEAST_PARTS,
        readers: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        """`readers`: among so many the parts are divided. `tokenizer`: the folder whose chat template renders chats.

        Raises UserError if the set cannot be opened.
        """
        assert data.path is not None
        self.data, self.tokenizer = data, tokenizer
        self.kind, self.set = _opened(data, data.path)
        shards = int(self.set.num_shards)
        self.per_shard = parts_of_a_shard(shards, least_parts, readers)
        self.parts = shards * self.per_shard
        self.shards = shards

    def read(self, part: int, state: State | None = None, read: int = 0) -> Iterator[Batch]:
        """The training pieces of a part, from its beginning or from a batch's `state` and `read` on.

        Raises UserError where the data cannot be read.
        """
        for batch in self._batches(part // self.per_shard, state, read):
            lane = part % self.per_shard
            first = batch.read - len(batch.pieces)
            ours = [one for at, one in enumerate(batch.pieces, first) if at % self.per_shard == lane]
            yield Batch(tuple(one for one in ours if not self.is_held_out(one)), batch.state, batch.read)

    def held_out(self) -> Iterator[TextPiece]:
        """All pieces that are held out, in the order of the data."""
        return filter(self.is_held_out, self.all_pieces())

    def all_pieces(self) -> Iterator[TextPiece]:
        """All pieces, in the order of the data."""
        for shard in range(self.shards):
            for batch in self._batches(shard, None, 0):
                yield from batch.pieces

    def is_held_out(self, piece: TextPiece) -> bool:
        found = hashlib.blake2b(piece.text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(found) < self.data.held_out * 2**64

    def _batches(self, shard: int, state: State | None, read: int) -> Iterator[Batch]:
        rows = self.set.shard(num_shards=self.shards, index=shard).with_format("arrow")
        size = LINES_AT_ONCE if self.kind == "text" else ROWS_AT_ONCE
        try:
            if state is not None:
                rows.load_state_dict(state)
            for table in rows.iter(batch_size=size):
                found = self._documents(table)
                at = shard * PIECES_OF_SHARD + read
                pieces = tuple(_joined(found, at) if self.kind == "text" else _cut(found, at))
                read += len(pieces)
                yield Batch(pieces, rows.state_dict(), read)
        except UserError:
            raise
        except Exception as error:  # the readers of the formats raise what they like
            raise _unreadable(self.data, error) from None

    def _documents(self, table: Any) -> list[Document]:
        """One of each row that has something to learn. Raises UserError where a row is not what `data.format` says."""
        names = conversations.columns(self.data)
        if missing := [name for name in names if name not in table.column_names]:
            there = ", ".join(table.column_names)
            raise UserError(f"data.column: {self.data.path} has no column {missing[0]}; it has {there}")
        rows = [row for row in zip(*(table.column(name).to_pylist() for name in names), strict=True) if row[-1]]
        if self.data.format == "text" and not all(isinstance(text, str) for (text,) in rows):
            kind = table.schema.field(names[0]).type
            raise UserError(f"data.column: {names[0]} of {self.data.path} is {kind}; expected text")
        made = (conversations.document(self.data, row, self.tokenizer) for row in rows)
        return [one for one in made if one is not None]


def parts_of_a_shard(shards: int, least_parts: int, readers: int) -> int:
    """The fewest with which each reader gets as many parts as the others, or so many that one more is little.

    A shard is read once for each of its parts, so more of them cost time.
    """
    enough = itertools.count(-(-least_parts // shards))
    return next(n for n in enough if shards * n % readers == 0 or shards * n >= LEAST_PARTS * readers)


def library() -> Any:
    """The module `datasets`, silent and without telemetry. Raises UserError where it is not installed."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
    except ImportError:
        raise UserError("data.kind huggingface needs the package datasets: pip install 'decentral[hf]'") from None
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets


def files_of(path: str, glob: str | None) -> tuple[str, list[str]]:
    """The kind of a file, or of all files of a folder (that match `glob`), and their sorted paths. Raises UserError."""
    root = Path(path)
    try:
        found = sorted(one for one in root.glob(glob or "**/*") if one.is_file()) if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {glob!r} is no pattern below {root} ({error})") from None
    kinds = {one: kind for one in found if (kind := _kind(one))}
    if not kinds:
        matching = f" and matches {glob}" if glob else ""
        raise UserError(f"data: no file at {root} is one of {', '.join(READERS)}{matching}")
    if len(set(kinds.values())) > 1:
        there = ", ".join(sorted(set(kinds.values())))
        raise UserError(f"data: {root} has files of several kinds ({there}); choose with data.glob")
    return next(iter(kinds.values())), [str(one) for one in kinds]


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return READERS.get(suffixes[-1]) if suffixes else None


def _opened(data: config.DataConfig, path: str) -> tuple[str, Any]:
    """The kind of the files, and the set as shards: `datasets` reads it as it is asked for rows."""
    load = library().load_dataset
    if Path(path).exists():
        kind, files = files_of(path, data.glob)
        options: dict[str, Any] = {"keep_linebreaks": True} if kind == "text" else {}
        name, where = kind, {"data_files": files, **options}
    elif HUB_NAME.match(path):
        name, _, subset = path.partition(":")
        kind, where = "hub", {"name": subset or None, "data_files": data.glob}
    else:
        raise UserError(f"data: {path} is not here, nor is it a name of the hub, such as owner/name")
    try:
        found = load(name, split="train", streaming=True, **where)
        return kind, found.reshard() if found.num_shards < LEAST_PARTS else found
    except Exception as error:  # of the network, of the hub, of the formats
        raise _unreadable(data, error) from None


def _unreadable(data: config.DataConfig, error: Exception) -> UserError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"data: {data.path} cannot be read ({said[:200]})")


def _cut(documents: list[Document], at: int) -> Iterator[TextPiece]:
    """Documents as pieces, the first of which is number `at`."""
    for one in documents:
        for begin in range(0, len(one.text), PIECE_CHARS):
            end = begin + PIECE_CHARS
            learned = None if one.learned is None else tuple((low - begin, high - begin) for low, high in one.learned)
            yield TextPiece(one.text[begin:end], at, begin == 0, end >= len(one.text), learned)
            at += 1


def _joined(lines: list[Document], at: int) -> Iterator[TextPiece]:
    """Lines of one file as pieces: the file is the document, and its end is not known here."""
    whole = "".join(line.text for line in lines)
    for number, begin in enumerate(range(0, len(whole), PIECE_CHARS), at):
        yield TextPiece(whole[begin : begin + PIECE_CHARS], number, begins=number % PIECES_OF_SHARD == 0)
