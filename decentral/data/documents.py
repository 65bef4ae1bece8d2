"""Stream a data set's text as pieces of documents, divided into parts that can be read in any order.

    files or a name -> shards (row groups, files) -> parts of a shard -> rows -> pieces of documents

Start reading at `Documents`. A document is the text column of a row, a text file, or a chat or completion that
`conversations` renders as text. Only very long documents are cut into several pieces (`pieces.cut`). The hash of a
piece decides whether the piece is held out. So either all copies of a text are held out or no copy is, and peers with
different files hold out the same texts.

If the data set has few shards, each shard has several parts. Part p of P contains the rows p, P + p, 2 P + p, ... of
the shard; for a text file, it contains the pieces with these numbers. Reading a part does not parse or render the rows
of other parts. A peer reads one part at a time; `StreamReader` chooses the order.
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

PIECE_CHARS = 16 * 1024
# Usual lengths of a piece; the next shorter one is used if the data have fewer than ENOUGH_PIECES pieces.
FINER = (PIECE_CHARS, PIECE_CHARS // 4, PIECE_CHARS // 16, PIECE_CHARS // 64)
ENOUGH_PIECES = 32  # with fewer distinct pieces, the held-out share of the data could be far from the configured share
PIECES_OF_SHARD, PIECES_OF_ROW = 1 << 60, 1 << 20  # `TextPiece.at` grows by these for each shard and row
ROWS_AT_ONCE, LINES_AT_ONCE = 64, 4096
HASHES = 1 << 64
_SPACE = re.compile(r"\s*")
State = JsonObject
"""Position in a shard, as plain JSON: the state of a `datasets` stream, or for a text file {"at": ..., "skip": ...}."""
END_OF_ONE_VALUE: State = {}  # stands for the position after the last row of a JSON file that is one value


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document, or one of the consecutive pieces of a long document."""

    text: str
    at: int  # number of the piece: consecutive in a document, and unique in the data
    begins: bool = False
    ends: bool = False  # whether the document ends with this piece; False if that is not known yet
    learned: Ranges | None = None  # the loss counts only these characters; None means all characters


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that were read together, and the position in the shard after the last of these pieces."""

    pieces: tuple[TextPiece, ...]
    state: State
    read: int  # number of rows (text file: pieces) of the shard before `state`, whichever reader they belong to


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read together, and the position in the shard after the last of these rows."""

    rows: list[tuple[int, Json]]  # each entry is (index of the row in the shard, row)
    state: State
    read: int  # number of rows of the shard before `state`, whichever reader they belong to


@dataclass(frozen=True, slots=True)
class HoldingOut:
    """The rule by which the hash of a piece decides whether the piece is held out."""

    piece_chars: int
    below: int

    def holds(self, text: str) -> bool:
        """Return whether a piece is held out. `text` is the piece's text, or the `identity` of a chat or completion."""
        return _hash(text) < self.below


@dataclass(frozen=True, slots=True)
class Selection:
    """The pieces of a shard to read: training or held-out pieces in one lane (every n-th row), from a position on."""

    shard: int
    piece_chars: int = PIECE_CHARS
    holding_out: HoldingOut | None = None  # decides which pieces are held out; without a rule all pieces are read
    held_out: bool = False
    lane: int = 0  # `lanes` readers share a shard: this one takes each row (text file: piece) n with n % lanes == lane
    lanes: int = 1
    state: State | None = None
    read: int = 0  # number of rows (text file: pieces) of the shard before `state`, of all lanes

    def takes(self, number: int) -> bool:
        """Return whether row `number` of the shard (text file: piece `number`) is in the selected lane."""
        return number % self.lanes == self.lane

    def wants(self, text: str) -> bool:
        """Return whether a piece is selected. `text` is the piece's text, or the `identity` of a chat or completion."""
        return self.holding_out is None or self.holding_out.holds(text) == self.held_out


class Documents:
    """A data set that is divided into parts. The parts can be read in any order and repeatedly. Not thread-safe."""

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
            data: Path or name of the data set, and the format of its rows.
            least_parts: Smallest number of parts.
            readers: Number of readers among which the caller divides the parts.
            tokenizer: The folder whose chat template renders chats; None: the data have no chats.
            least_held_out: Pieces with at least this many characters in total are held out, even if `data.held_out`
                asks for fewer. But at most half of the pieces are held out.

        Raises:
            UserError: If the data set cannot be opened.
        """
        self.data, self.tokenizer, self.least_held_out = data, tokenizer, least_held_out
        self.opened = data_files.opened(data)
        self.shards = int(self.opened.set.num_shards)
        self.per_shard = parts_of_a_shard(self.shards, least_parts, readers)
        self.parts = self.shards * self.per_shard
        self.unlearned = 0  # number of chats and completions read so far in which the loss counts no text
        self._parsed: tuple[int, list[Json]] = (-1, [])  # (number, rows) of the shard that was last parsed as a whole

    @cached_property
    def holding_out(self) -> HoldingOut:
        """The rule that decides which pieces are held out.

        The first access reads the data until there are enough pieces to choose from; it reads a small data set to the
        end. If the data set has two or more different pieces, at least one piece is held out, and at least one is not.
        """
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
        below = min(below, max(hashes, default=0))  # at least one piece must be left for training
        return HoldingOut(piece_chars, below)

    def read(self, part: int, state: State | None = None, read: int = 0) -> Iterator[Batch]:
        """Yield the training pieces of part number `part` in batches. Raises UserError if the data cannot be read.

        To continue after a batch, pass the batch's `state` and `read`.
        """
        shard, lane = divmod(part, self.per_shard)
        own = Selection(shard, self.holding_out.piece_chars, self.holding_out, lane=lane, lanes=self.per_shard)
        yield from self._batches(replace(own, state=state, read=read))

    def held_out(self) -> Iterator[TextPiece]:
        """Yield all held-out pieces, in the order of the data."""
        return self._all(self.holding_out.piece_chars, self.holding_out)

    def all_pieces(self) -> Iterator[TextPiece]:
        """Yield all pieces, in the order of the data."""
        return self._all(PIECE_CHARS, None)

    def _all(self, piece_chars: int, holding_out: HoldingOut | None) -> Iterator[TextPiece]:
        """Yield the held-out pieces of all shards; if `holding_out` is None, all pieces."""
        for shard in range(self.shards):
            for batch in self._batches(Selection(shard, piece_chars, holding_out, held_out=True)):
                yield from batch.pieces

    def _identities(self, piece_chars: int) -> Iterator[str]:
        """Yield the text of each piece, or the `identity` of each chat or completion, in the order of the data."""
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
        """Yield the selected pieces of one shard, in batches."""
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
        """Return a row's content; None if the row is empty. Raises UserError if the row is not in `data.format`."""
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
        raise ValueError(f"the row has no column {needed[0]}; it has {', '.join(map(str, names))}; {remedy}")

    @contextmanager
    def _naming(self, shard: int, number: int) -> Iterator[None]:
        """Convert a ValueError or RecursionError of the `with` block into a UserError that names the row."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"data: {self._place(shard, number)}: {error}") from None
        except RecursionError:
            raise UserError(f"data: {self._place(shard, number)}: its values are nested too deeply") from None

    def _place(self, shard: int, number: int) -> str:
        """Return words that tell the user where a row is: its line or row number, and its file or shard."""
        if len(self.opened.files) == self.shards:
            lines = self.opened.kind == "json" and self._parsed[0] != shard
            return f"{'line' if lines else 'row'} {number + 1} of {self.opened.files[shard]}"
        return f"row {number + 1} of part {shard + 1} of {self.shards} of {self.data.path}"

    def _rows(self, selection: Selection) -> Iterator[Rows]:
        """Yield the rows in the selected lane, in batches."""
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
                    raise UserError(f"data: {named} is not JSON ({error})") from None

    def _rows_of_one_value(self, selection: Selection) -> Iterator[Rows]:
        """Parse a whole JSON file that is one list or has rows of several lines, and yield the selected rows."""
        shard = selection.shard
        if self._parsed[0] != shard:
            lines = (table.column("text").to_pylist() for table, _ in self._tables(shard, None, LINES_AT_ONCE))
            try:
                self._parsed = shard, list(_values("\n".join(itertools.chain.from_iterable(lines))))
            except (ValueError, RecursionError) as error:
                raise UserError(f"data: {self.opened.files[shard]} is not JSON ({error})") from None
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
        )  # `datasets` stores columns of mixed types as JSON text, which must be decoded
        rows = table.select(names).take(own).to_pylist() if own else []
        rows = [features.decode_example(row) for row in rows] if mixed else rows
        return [{name: _without_nulls(value) for name, value in row.items()} for row in rows]

    def _tables(self, shard: int, state: State | None, size: int) -> "Iterator[tuple[pyarrow.Table, State]]":
        """Yield tables of up to `size` rows, and the position after each table. Raises UserError on a read error."""
        rows = self.opened.set.shard(num_shards=self.shards, index=shard).with_format("arrow")
        try:
            if state is not None:
                rows.load_state_dict(state)
            for table in rows.iter(batch_size=size):
                yield table, rows.state_dict()
        except UserError:
            raise
        except Exception as error:
            path = self.opened.files[shard] if len(self.opened.files) == self.shards else self.data.path
            raise data_files.unreadable(path, error) from None

    def _pieces_of_file(self, selection: Selection) -> Iterator[Batch]:
        """Yield the selected pieces of a text file, which is one document.

        A `Batch.state` {"at": P, "skip": N} says that the next piece begins N lines after position P of `datasets`.
        """
        state, read = selection.state, selection.read
        at, skip = (state["at"], state["skip"]) if state else (None, 0)
        open_lines: list[str] = []  # lines at the end that may continue in the next table, and are not in a piece yet
        # For each table with open lines: (position of the table, index of its first open line, number of its lines).
        origins: list[tuple[State | None, int, int]] = []
        before, whole = at, not read

        def batch(texts: Sequence[str], ends: bool) -> Batch:
            numbered = enumerate(map(_encodable, texts), read)
            last = read + len(texts) - 1 if ends else None
            own = [(number, text) for number, text in numbered if selection.takes(number) and selection.wants(text)]
            place = selection.shard * PIECES_OF_SHARD
            made = (TextPiece(text, place + number, not number, number == last) for number, text in own)
            begin, skipped, _ = origins[0] if origins else (before, 0, 0)
            return Batch(tuple(made), {"at": begin, "skip": skipped}, read + len(texts))

        tables = self._tables(selection.shard, at, LINES_AT_ONCE)
        upcoming = next(tables, None)
        while upcoming is not None:
            (table, after), upcoming = upcoming, next(tables, None)
            lines = table.column("text").to_pylist()
            open_lines += lines[skip:]
            origins.append((before, skip, len(lines)))
            before, skip = after, 0
            if whole and sum(map(len, open_lines)) <= pieces.UNCUT * selection.piece_chars:
                continue
            whole = False
            texts, open_lines = pieces.cut_lines(open_lines, selection.piece_chars)
            origins = _last(origins, len(open_lines))
            yield (made := batch(texts, ends=upcoming is None and not open_lines))
            read = made.read
        if open_lines:
            texts, origins = ["".join(open_lines)], []
            yield batch(texts, ends=True)


def _last(origins: Sequence[tuple[State | None, int, int]], lines: int) -> list[tuple[State | None, int, int]]:
    """Return the part of `origins` with the last `lines` lines. Item: (position of a table, first line, end line)."""
    found: list[tuple[State | None, int, int]] = []
    for state, begin, end in reversed(origins):
        if lines <= 0:
            break
        begin = max(begin, end - lines)
        lines -= end - begin
        found.insert(0, (state, begin, end))
    return found


def parts_of_a_shard(shards: int, least_parts: int, readers: int) -> int:
    """Return the smallest number of parts per shard that gives the readers equal or nearly equal numbers of parts.

    The numbers are nearly equal if each reader has at least LEAST_PARTS parts. More parts cost time, because reading a
    part reads the whole shard. The data set has at least `least_parts` parts in total.
    """
    enough = itertools.count(-(-least_parts // shards))
    return next(n for n in enough if shards * n % readers == 0 or shards * n >= LEAST_PARTS * readers)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


def _encodable(text: str) -> str:
    """Return the text with lone surrogates replaced, because JSON may contain surrogates but UTF-8 must not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_one_value(lines: Sequence[str]) -> bool:
    """Return whether a JSON file that begins with these lines is one list or has rows of several lines."""
    first = next((line.strip() for line in lines if line.strip()), "")
    return first.startswith("[") or first == "{"


def _values(text: str) -> Iterator[Json]:
    """Yield the JSON values in a text, and the items of a list instead of the list. Raises ValueError if not JSON."""
    decoder, at, end = json.JSONDecoder(), 0, len(text.rstrip())
    while at < end:
        value, at = decoder.raw_decode(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
        yield from value if isinstance(value, list) else [value]


def _without_nulls(value: Json) -> Json:
    """Remove keys whose value is null, because a table stores null for each key that only other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
