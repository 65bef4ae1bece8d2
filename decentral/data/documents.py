"""Text of a data set, streamed: pieces of documents, in parts that are read one after another.

    files or a name -> shards (row groups, files) -> parts of a shard -> rows -> pieces of documents

A row's column of text is a document; of a text file, all of it is; of chats and completions, data/conversations.py
makes one of each row. Only documents of text that are very long are cut (data/pieces.py). What is held out follows
from a document's text alone, or that of the piece, so that no peer trains on what another one holds out, whatever files
each has, and copies of a text are on one side.

Where there are few shards, each is read in several parts, of which part p of P has the rows p, P + p, 2 P + p and so
on; of a text file, such pieces. Rows of other parts are neither parsed nor rendered. A part is what one peer reads at a
time: data/stream.py says in which order.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.strict_json import Json, JsonFields, JsonObject
from decentral.data import chat_rows, conversations, data_files, pieces
from decentral.data.conversations import Ranges
from decentral.data.data_files import LEAST_PARTS

if TYPE_CHECKING:
    import pyarrow

PIECE_CHARS = 16 * 1024  # of a long document, usually; the first of these sizes that gives enough pieces
FINER = (PIECE_CHARS, PIECE_CHARS // 4, PIECE_CHARS // 16, PIECE_CHARS // 64)
ENOUGH_PIECES = 32  # of a data set, to hold a share of them out
PIECES_OF_SHARD, PIECES_OF_ROW = 1 << 60, 1 << 20
ROWS_AT_ONCE, LINES_AT_ONCE = 64, 4096
HASHES = 1 << 64
_SPACE = re.compile(r"\s*")
State = JsonObject
"""Where reading is in a shard: plain JSON. That of `datasets`, or as the reader of the kind of files writes it."""
END_OF_ONE_VALUE: State = {}  # of a file that is read as a whole


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document, or a stretch of one."""

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
    read: int  # rows of the shard so far, or pieces of a text file, of all parts


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read together, numbered in their shard, and where reading goes on."""

    rows: list[tuple[int, Json]]
    state: State
    read: int


@dataclass(frozen=True, slots=True)
class HoldingOut:
    """The usual length of a piece in characters, and the 64-bit hash below which a piece is held out."""

    piece_chars: int
    below: int

    def holds(self, text: str) -> bool:
        """Return whether the piece, or what identifies it, is held out."""
        return _hash(text) < self.below


@dataclass(frozen=True, slots=True)
class Selection:
    """What to read of a shard: from where on, which of its rows, and which of their pieces."""

    shard: int
    piece_chars: int = PIECE_CHARS
    holding_out: HoldingOut | None = None  # of which the pieces are read that are held out, or the others; None: all
    held_out: bool = False
    lane: int = 0  # of the shard's `lanes`: row n is in lane n % lanes, and of a text file piece n
    lanes: int = 1
    state: State | None = None  # where reading begins; None: where the shard does
    read: int = 0  # rows before that place, or pieces of a text file, of all lanes

    def takes(self, number: int) -> bool:
        """Return whether the row, or piece, of this number in the shard is in the lane."""
        return number % self.lanes == self.lane

    def wants(self, text: str) -> bool:
        """Return whether a piece with this text, or identity, is read."""
        return self.holding_out is None or self.holding_out.holds(text) == self.held_out


class Documents:
    """A data set as parts that are read one after another, in any order, and again. Not thread-safe."""

    def __init__(
        self,
        data: config.DataConfig,
        least_parts: int = LEAST_PARTS,
        readers: int = 1,
        tokenizer: str | None = None,
        least_held_out: int = 1,
    ) -> None:
        """Open the data set.

        Args:
            data: Names it, and says what its rows are.
            least_parts: Parts to read the data set in, at least.
            readers: Readers among which the parts are divided.
            tokenizer: The folder whose chat template renders chats.
            least_held_out: Characters to hold out at least, even if that exceeds `data.held_out`; never more than half
                of the documents.

        Raises:
            UserError: If the set cannot be opened.
        """
        self.data, self.tokenizer, self.least_held_out = data, tokenizer, least_held_out
        self.opened = data_files.opened(data)
        self.shards = int(self.opened.set.num_shards)
        self.per_shard = parts_of_a_shard(self.shards, least_parts, readers)
        self.parts = self.shards * self.per_shard
        self.unlearned = 0  # chats, or prompts, that were read, and of which nothing is learned
        self._parsed: tuple[int, list[Json]] = (-1, [])  # the shard that was parsed as a whole, and its rows

    @cached_property
    def holding_out(self) -> HoldingOut:
        """Decide what is held out, from the beginning of the data; a small data set is read to its end."""
        share, enough = self.data.held_out, min(ENOUGH_PIECES, math.ceil(1 / self.data.held_out))
        below, hashes = int(share * HASHES), dict[int, int]()
        for piece_chars in FINER:
            hashes, held_out, trained = {}, 0, False
            for text in self._identities(piece_chars):
                number = _hash(text)
                held_out += len(text) if number < below and number not in hashes else 0
                hashes[number] = len(text)
                trained = trained or number >= below
                if len(hashes) >= enough and held_out >= self.least_held_out and trained:
                    return HoldingOut(piece_chars, below)
            if len(hashes) >= enough:
                break
        held_out = 0
        for number in sorted(hashes)[: len(hashes) // 2]:
            if number >= below and held_out >= self.least_held_out:
                break
            held_out, below = held_out + hashes[number], max(below, number + 1)
        below = min(below, max(hashes, default=0))  # one at least is trained on
        return HoldingOut(piece_chars, below)

    def read(self, part: int, state: State | None = None, read: int = 0) -> Iterator[Batch]:
        """The training pieces of a part, from its beginning or from a batch's `state` and `read` on.

        Raises UserError where the data cannot be read.
        """
        shard, lane = divmod(part, self.per_shard)
        own = Selection(shard, self.holding_out.piece_chars, self.holding_out, lane=lane, lanes=self.per_shard)
        yield from self._batches(replace(own, state=state, read=read))

    def held_out(self) -> Iterator[TextPiece]:
        """All pieces that are held out, in the order of the data."""
        return self._all(self.holding_out.piece_chars, self.holding_out)

    def all_pieces(self) -> Iterator[TextPiece]:
        """All pieces, in the order of the data."""
        return self._all(PIECE_CHARS, None)

    def _all(self, piece_chars: int, holding_out: HoldingOut | None) -> Iterator[TextPiece]:
        """The pieces that are held out; without `holding_out`, all."""
        for shard in range(self.shards):
            for batch in self._batches(Selection(shard, piece_chars, holding_out, held_out=True)):
                yield from batch.pieces

    def _identities(self, piece_chars: int) -> Iterator[str]:
        """Yield the texts whose hashes decide what is held out, in the order of the data."""
        for shard in range(self.shards):
            everything = Selection(shard, piece_chars)
            if self.opened.kind == "text":
                for batch in self._pieces_of_file(everything):
                    yield from (piece.text for piece in batch.pieces)
                continue
            for rows in self._rows(everything):
                for number, row in rows.rows:
                    found = self._read(shard, number, row)
                    if isinstance(found, str):
                        yield from pieces.cut(found, piece_chars)
                    elif found is not None:
                        with self._naming(shard, number):
                            identity = found.identity
                        yield identity

    def _batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the pieces of the selected rows, or of the text file, in batches."""
        if self.opened.kind == "text":
            yield from self._pieces_of_file(selection)
            return
        for rows in self._rows(selection):
            found = (self._pieces_of_row(selection, number, row) for number, row in rows.rows)
            yield Batch(tuple(itertools.chain.from_iterable(found)), rows.state, rows.read)

    def _pieces_of_row(self, selection: Selection, number: int, row: Json) -> Iterator[TextPiece]:
        shard = selection.shard
        found, at = self._read(shard, number, row), shard * PIECES_OF_SHARD + number * PIECES_OF_ROW
        if isinstance(found, str):
            texts = pieces.cut(found, selection.piece_chars)
            for place, text in enumerate(texts):
                if selection.wants(text):
                    yield TextPiece(text, at + place, not place, place + 1 == len(texts))
        elif found is not None:
            with self._naming(shard, number):
                if not selection.wants(found.identity):
                    return
                made = conversations.document(found, self.tokenizer)
            self.unlearned += made is None
            if made is not None:
                yield TextPiece(_encodable(made.text), at, True, True, made.learned)

    def _read(self, shard: int, number: int, row: Json) -> conversations.Example | None:
        """Parse a row. Raises UserError, naming line and file, if it is not in `data.format`."""
        row = {"text": row} if isinstance(row, str) else row
        with self._naming(shard, number):
            if not isinstance(row, Mapping):
                keys = " or ".join(conversations.needed_columns(self.data))
                raise ValueError(f"expected a JSON object with the key {keys}; got {chat_rows.kind(row)}")
            if not number:
                self._check_columns(row)
            found = conversations.read(self.data, row)
        return _encodable(found) or None if isinstance(found, str) else found

    def _check_columns(self, names: JsonFields) -> None:
        """Raise ValueError if a row has none of the columns that `data.format` needs."""
        needed = conversations.needed_columns(self.data)
        if any(name in names for name in needed):
            return
        fits = conversations.format_of(names)
        right = "name the right one with --data-column" if len(needed) == 1 else f"expected {' or '.join(needed)}"
        remedy = f"set data.format={fits}" if fits not in (None, self.data.format) else right
        raise ValueError(f"it has no column {needed[0]}; it has {', '.join(map(str, names))}; {remedy}")

    @contextmanager
    def _naming(self, shard: int, number: int) -> Iterator[None]:
        """Raise UserError that names the row, where the work on it raises ValueError or RecursionError."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"data: {self._place(shard, number)}: {error}") from None
        except RecursionError:
            raise UserError(f"data: {self._place(shard, number)}: its values are nested too deeply") from None

    def _place(self, shard: int, number: int) -> str:
        """Return where the user finds a row: line or row number, and file or part."""
        if len(self.opened.files) == self.shards:
            lines = self.opened.kind == "json" and self._parsed[0] != shard
            return f"{'line' if lines else 'row'} {number + 1} of {self.opened.files[shard]}"
        return f"row {number + 1} of part {shard + 1} of {self.shards} of {self.data.path}"

    # Rows

    def _rows(self, selection: Selection) -> Iterator[Rows]:
        """Yield the rows of the selection's lane, in batches."""
        state, read = selection.state, selection.read
        if state == END_OF_ONE_VALUE:
            return
        json_rows = self.opened.kind == "json"
        for table, after in self._tables(selection.shard, state, ROWS_AT_ONCE):
            if json_rows:
                lines = table.column("text")
                if not read and state is None and _is_one_value(lines.to_pylist()):
                    yield from self._rows_of_one_value(selection)
                    return
                yield Rows(list(self._parsed_lines(selection, lines, read)), after, read := read + len(lines))
            else:
                own = [place for place in range(len(table)) if selection.takes(read + place)]
                rows = self._rows_of_table(table, own)
                yield Rows(
                    [(read + place, row) for place, row in zip(own, rows, strict=True)],
                    after,
                    read := read + len(table),
                )

    def _parsed_lines(
        self, selection: Selection, lines: "pyarrow.ChunkedArray", read: int
    ) -> Iterator[tuple[int, Json]]:
        own = [place for place in range(len(lines)) if selection.takes(read + place)]
        for place, line in zip(own, lines.take(own).to_pylist() if own else (), strict=True):
            if line.strip():
                try:
                    yield read + place, json.loads(line)
                except (ValueError, RecursionError) as error:
                    named = self._place(selection.shard, read + place)
                    raise UserError(f"data: {named} is no JSON ({error})") from None

    def _rows_of_one_value(self, selection: Selection) -> Iterator[Rows]:
        """Yield the rows of a file that is one JSON list, or objects over several lines; it is read whole."""
        shard = selection.shard
        if self._parsed[0] != shard:
            lines = (table.column("text").to_pylist() for table, _ in self._tables(shard, None, LINES_AT_ONCE))
            try:
                self._parsed = shard, list(_values("\n".join(itertools.chain.from_iterable(lines))))
            except (ValueError, RecursionError) as error:
                raise UserError(f"data: {self.opened.files[shard]} is no JSON ({error})") from None
        rows = self._parsed[1]
        own = [(number, row) for number, row in enumerate(rows) if selection.takes(number)]
        yield Rows(own, END_OF_ONE_VALUE, len(rows))

    def _rows_of_table(self, table: "pyarrow.Table", own: Sequence[int]) -> list[JsonObject]:
        names = [name for name in table.column_names if name in conversations.columns(self.data)]
        if not names:
            return [dict.fromkeys(table.column_names)] * len(own)
        features = self.opened.set.features
        mixed = features is not None and any(
            "Json(" in str(features.get(name)) for name in names
        )  # columns of several types
        rows = table.select(names).take(own).to_pylist() if own else []
        rows = [features.decode_example(row) for row in rows] if mixed else rows
        return [{name: _without_nulls(value) for name, value in row.items()} for row in rows]

    def _tables(self, shard: int, state: State | None, size: int) -> "Iterator[tuple[pyarrow.Table, State]]":
        """Yield the shard as tables of at most `size` rows, each with the state after it. Raises UserError."""
        rows = self.opened.set.shard(num_shards=self.shards, index=shard).with_format("arrow")
        files = self.opened.files
        try:
            if state is not None:
                rows.load_state_dict(state)
            for table in rows.iter(batch_size=size):
                yield table, rows.state_dict()
        except UserError:
            raise
        except Exception as error:  # the readers of the formats raise what they like
            raise data_files.unreadable(files[shard] if len(files) == self.shards else self.data.path, error) from None

    # Files of text

    def _pieces_of_file(self, selection: Selection) -> Iterator[Batch]:
        """Yield the selected pieces of a text file, which is one document.

        A batch's state is that of the lines in which the next piece begins.
        """
        state, read = selection.state, selection.read
        at, skip = (state["at"], state["skip"]) if state else (None, 0)
        open_lines: list[str] = []  # of the piece whose end is not known yet
        origins: list[
            tuple[State | None, int, int]
        ] = []  # of these lines: of their table the state, and from where to where
        before, whole = at, not read

        def batch(texts: Sequence[str], ends: bool) -> Batch:
            numbered = list(enumerate(map(_encodable, texts), read))
            last = numbered[-1][0] if numbered and ends else None
            own = [(number, text) for number, text in numbered if selection.takes(number) and selection.wants(text)]
            first = selection.shard * PIECES_OF_SHARD
            made = (TextPiece(text, first + number, not number, number == last) for number, text in own)
            begin, skipped, _ = origins[0] if origins else (before, 0, 0)
            return Batch(tuple(made), {"at": begin, "skip": skipped}, read + len(texts))

        for table, after in self._tables(selection.shard, at, LINES_AT_ONCE):
            lines = table.column("text").to_pylist()
            open_lines += lines[skip:]
            origins.append((before, skip, len(lines)))
            before, skip = after, 0
            if whole and sum(map(len, open_lines)) <= pieces.UNCUT * selection.piece_chars:
                continue
            whole = False
            texts, open_lines = pieces.cut_lines(open_lines, selection.piece_chars)
            origins = _last(origins, len(open_lines))
            made = batch(texts, ends=False)
            read = made.read
            yield made
        if open_lines:
            texts, origins = ["".join(open_lines)], []
            yield batch(texts, ends=True)


def _last(origins: Sequence[tuple[State | None, int, int]], lines: int) -> list[tuple[State | None, int, int]]:
    """Return the origins that cover the last `lines` lines."""
    found: list[tuple[State | None, int, int]] = []
    for state, begin, end in reversed(origins):
        if lines <= 0:
            break
        begin = max(begin, end - lines)
        lines -= end - begin
        found.insert(0, (state, begin, end))
    return found


def parts_of_a_shard(shards: int, least_parts: int, readers: int) -> int:
    """The fewest with which each reader gets as many parts as the others, or so many that one more is little.

    A shard is read once for each of its parts, so more of them cost time.
    """
    enough = itertools.count(-(-least_parts // shards))
    return next(n for n in enough if shards * n % readers == 0 or shards * n >= LEAST_PARTS * readers)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


def _encodable(text: str) -> str:
    """Return the text with lone surrogates replaced: JSON can contain them, UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not _is_utf8(text) else text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_one_value(lines: Sequence[str]) -> bool:
    """Return whether these first lines begin a JSON list or a multi-line object, not one row a line."""
    first = next((line.strip() for line in lines if line.strip()), "")
    return first.startswith("[") or first == "{"


def _values(text: str) -> Iterator[Json]:
    """Yield the JSON values of a text one after another, with lists unpacked. Raises ValueError."""
    decoder, at, end = json.JSONDecoder(), 0, len(text.rstrip())
    while at < end:
        value, at = decoder.raw_decode(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
        yield from value if isinstance(value, list) else [value]


def _without_nulls(value: Json) -> Json:
    """Drop keys whose value is null: a table gives each row the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
