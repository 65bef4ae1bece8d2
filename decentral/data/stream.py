"""Micro-batches from a data set that is streamed and tokenised on the way: `data.kind: huggingface`.

    parts in this peer's order -> pieces -> tokens, packed with a separator -> windows of `context`, shuffled -> batches

Of chats and completions (`data.format`) some tokens are not learned: as targets they are masked. There a document that
fits into a window is in one: the rest of the window before it is filled with separators, which are not learned. Windows
without anything to learn are left out.

Each peer reads the parts (data/documents.py) in an order of its own, drawn anew for each epoch, so no peer reads a
part twice in an epoch, and two peers read the same one only by chance: as often as their shares of the data overlap.
With `data.part: k/n` a peer reads only every n-th part, and n peers with different k never meet.

About TOKENS_AT_ONCE tokens are read together, while those before are trained on, and their windows drawn in a random
order. The position is where they began, and how many windows may have been drawn. It is on the disk before they are, in
steps of an eighth: a peer that is killed goes on a little further on, and trains on nothing twice.

Shapes: B sequences, T positions (`context`), N windows.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from decentral.core import config, rng, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.data import conversations, tokenizer
from decentral.data.documents import Documents, State, TextPiece
from decentral.data.source import Reading, batch_of
from decentral.data.tokenizer import TextTokenizer

MOST_TOKEN_CHARS = 8  # of a token of text, on average
POSITION_FORMAT = 2  # of data-position.json: another one was written by another release, whose parts are others
TOKENS_AT_ONCE = 1 << 18  # that are read together, or all of an epoch; but at least one window
MARKS = 8  # in which the windows that were read together are marked as drawn
Tokens = npt.NDArray[np.uint32]
Learned = npt.NDArray[np.bool_]
"""Of tokens, which are learned."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the windows begin that are read together."""

    epoch: int = 0
    part: int = 0  # how many parts of this epoch are over
    state: State | None = None  # in the part, as `Documents.read` takes it
    read: int = 0
    number: int = 0  # how many windows were read together before, as their order needs another seed


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows that were read together, shuffled, and where the next ones begin."""

    tokens_NT: Tokens  # with one position more
    learned_NT: Learned
    begin: Position
    end: Position


class TextStream:
    """A data set as a source of micro-batches."""

    def __init__(self, data: config.DataConfig, model: config.ModelConfig) -> None:
        """Raises UserError if the data or the tokenizer cannot be read, or do not fit the model."""
        path = data.tokenizer or model.start_from
        assert path is not None
        self.data, self.context, self.path = data, model.context, path
        self.tokenizer = tokenizer.load(path)
        self.digest = conversations.digest(data, path, self.tokenizer.digest)
        if self.tokenizer.size > model.vocabulary:
            fits = f"--set model.vocabulary={self.tokenizer.size} would fit"
            if model.start_from is not None or model.weights is not None:
                fits = "use the model's own tokenizer, or enlarge the model with transformers' resize_token_embeddings"
            tokens = f"--tokenizer {path} has {self.tokenizer.size} tokens"
            raise UserError(f"data: {tokens}, but model.vocabulary is {model.vocabulary}; {fits}")
        ours, shares = data.part.split("/") if data.part else (1, 1)
        self.share = int(ours), int(shares)
        self.warnings: list[str] = []

    def evaluation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT, int64 on the CPU: the first windows of the held-out text, every time the same.

        Where there is less text, some are drawn from it again, at other places. Raises UserError if it is too short.
        """
        wanted, packer, documents = sequences * self.context + 1, self.packer(), self.documents()
        for piece in documents.held_out():
            packer.add([piece])
            if packer.count >= wanted:
                break
        tokens, learned = packer.take()
        if packer.pads:
            tokens_NT, learned_NT = _windows(tokens, learned, self.context)
            if not len(tokens_NT):
                few = "must have at least two documents to train on, one of them to hold out; it has fewer"
                raise UserError(f"data: {self.data.path} {few}{self.why_nothing(documents)}")
            again = np.arange(sequences) % len(tokens_NT)
            return batch_of(tokens_NT[again], learned_NT[again])
        if len(tokens) <= self.context + 1:
            need = f"{len(tokens)} tokens of it are held out, and {self.context + 2} are needed"
            raise UserError(f"data: {self.data.path}: {need}; lower model.context, or give more text")
        starts = np.arange(sequences) * self.context
        if len(tokens) < wanted:
            starts = rng.arrays(0, "held-out").integers(len(tokens) - self.context, size=sequences)
        return batch_of(np.stack([tokens[start : start + self.context + 1] for start in starts]))

    @staticmethod
    def why_nothing(documents: Documents) -> str:
        """Return why no chat that was read can be trained on; "" if there was none."""
        writes = "the chat template must write such a turn after the prompt that add_generation_prompt=True produces"
        none = f"; none of the {documents.unlearned} chats read has a trainable assistant turn: {writes}"
        return none if documents.unlearned else ""

    def packer(self) -> "TokenPacker":
        """Return a packer for this data; for chats it adds no leading tokens, since the template writes them."""
        tokenizer = replace(self.tokenizer, before=()) if self.data.format == "chat" else self.tokenizer
        return TokenPacker(tokenizer, self.context if self.data.format != "text" else None)

    def documents(self, readers: int = 1) -> Documents:
        """The data set, divided among so many readers."""
        least = 1 if self.data.format != "text" else MOST_TOKEN_CHARS * (self.context + 2)  # for one window at least
        return Documents(self.data, readers=readers, tokenizer=self.path, least_held_out=least)

    def micro_batches(self, reading: Reading) -> "StreamReader":
        """This peer's micro-batches, from where it was."""
        return StreamReader(self, reading)


class StreamReader:
    """Gives a peer's micro-batches. It reads ahead in a thread of its own."""

    def __init__(self, stream: TextStream, reading: Reading) -> None:
        self.stream, self.reading = stream, reading
        self.documents = stream.documents(stream.share[1] * reading.ranks)
        self.mark = PositionFile.of(stream, reading, self.documents.opened.fingerprint)
        stream.warnings += [said for said in (self.mark.warning, self.documents.opened.left_out) if said]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._next: Future[Windows] = self._thread.submit(self._read, self.mark.position)
        self._drawn = 0
        self._here: Windows | None = None

    def __call__(self, number: int, sequences: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT of the next windows, int64 on the CPU; `number` names them, and changes nothing.

        Raises UserError if the data cannot be read any more.
        """
        windows: list[Tokens] = []
        learned: list[Learned] = []
        while len(windows) < sequences:
            if self._here is None or self._drawn >= len(self._here.tokens_NT):
                self._turn()
            assert self._here is not None
            upto = min(len(self._here.tokens_NT), self._drawn + sequences - len(windows))
            self.mark.cover(self._here, upto)
            windows += list(self._here.tokens_NT[self._drawn : upto])
            learned += list(self._here.learned_NT[self._drawn : upto])
            self._drawn = upto
        return batch_of(np.stack(windows), np.stack(learned))

    def _turn(self) -> None:
        """Goes on with the windows that were read meanwhile."""
        self._here = self._next.result()
        self._drawn = self.mark.drawn_of(self._here)
        self._next = self._thread.submit(self._read, self._here.end)

    def _read(self, begin: Position) -> Windows:
        context, packer, at = self.stream.context, self.stream.packer(), begin
        for pieces, position in self._pieces(begin):
            packer.add(pieces)
            at = position
            if packer.count > context and (packer.count >= TOKENS_AT_ONCE or position.epoch > begin.epoch):
                break
        tokens, learned = packer.take()
        tokens_NT, learned_NT = _windows(tokens, learned, context)
        chance = rng.arrays(self.reading.seed, "windows", self.reading.peer, self.reading.rank, begin.number)
        order = chance.permutation(len(tokens_NT))
        return Windows(tokens_NT[order], learned_NT[order], begin, _numbered(at, begin.number + 1))

    def _pieces(self, at: Position) -> Iterator[tuple[Sequence[TextPiece], Position]]:
        """Pieces from there on, epoch after epoch, each time with the position after them. Raises UserError if an
        epoch has none."""
        epoch, part, state, read, some = at.epoch, at.part, at.state, at.read, False
        while True:
            order = self._order(epoch)
            for number in range(part, len(order)):
                for batch in self.documents.read(order[number], state, read):
                    some |= bool(batch.pieces)
                    yield batch.pieces, Position(epoch, number, batch.state, batch.read)
                state, read = None, 0
            if not some and part == 0:
                raise self._nothing_to_train_on()
            epoch, part = epoch + 1, 0
            yield (), Position(epoch)

    def _nothing_to_train_on(self) -> UserError:
        none = f"data: {self.stream.data.path} has no text to train on for this peer"
        return UserError(none + self.stream.why_nothing(self.documents))

    def _order(self, epoch: int) -> list[int]:
        """This rank's parts in their order for one epoch."""
        reading, (ours, shares) = self.reading, self.stream.share
        parts = np.arange(self.documents.parts)[ours - 1 :: shares][reading.rank :: reading.ranks]
        chance = rng.arrays(reading.seed, "parts", reading.peer, reading.rank, epoch)
        return [int(part) for part in chance.permutation(parts)]


class TokenPacker:
    """Tokens of pieces one after another; a separator stands wherever the text does not go on, and what the tokenizer
    puts before a text stands where a document begins.

    With `context` a document that fits into a window of so many targets is in one, and the last window is whole.
    """

    def __init__(self, tokenizer: TextTokenizer, context: int | None = None) -> None:
        self.tokenizer, self.context, self.count = tokenizer, context, 0
        self._parts: list[Tokens] = []
        self._learned: list[Learned] = []
        self._next: int | None = None  # the piece with which the text goes on

    @property
    def pads(self) -> bool:
        """Whether windows are filled up."""
        return self.context is not None

    def add(self, pieces: Sequence[TextPiece]) -> None:
        for piece, (tokens, learned) in zip(pieces, self._tokens(pieces), strict=True):
            if self._next is not None and (piece.begins or piece.at != self._next):
                self._put_separators(1, learned=not self.pads)
            if piece.begins:
                before = self.tokenizer.before
                self._make_room(len(before) + len(tokens) + 1)
                self._put(np.array(before, np.uint32), np.full(len(before), not self.pads))
            self._put(tokens, learned)
            if piece.ends:
                last = piece.learned is None or any(high > len(piece.text) for _, high in piece.learned)
                self._put_separators(1, learned=last)
            self._next = None if piece.ends else piece.at + 1

    def take(self) -> tuple[Tokens, Learned]:
        """Hands over what has come since the last time."""
        if self.context is not None and self.count:
            self._put_separators((1 - self.count) % self.context, learned=False)
        tokens = np.concatenate([*self._parts, np.zeros(0, np.uint32)])
        learned = np.concatenate([*self._learned, np.zeros(0, np.bool_)])
        self._parts, self._learned, self.count = [], [], 0
        return tokens, learned

    def _tokens(self, pieces: Sequence[TextPiece]) -> Iterator[tuple[Tokens, Learned]]:
        """Of each piece; a token is learned if some of its characters are."""
        if not self.pads:
            for tokens in self.tokenizer.tokens([piece.text for piece in pieces]):
                yield tokens, np.ones(len(tokens), np.bool_)
            return
        for piece in pieces:
            tokens, offsets = self.tokenizer.tokens_and_offsets(piece.text)
            learned = np.full(len(tokens), piece.learned is None)
            for low, high in piece.learned or ():
                learned |= (offsets[:, 1] > low) & (offsets[:, 0] < high)
            yield tokens, learned

    def _make_room(self, tokens: int) -> None:
        """Fills the window up unless it has room for so many tokens more, or is a new one. A window's last target is
        the next one's first input."""
        used = self.count % self.context if self.context is not None else 0
        if self.context is not None and used and used + tokens > self.context + 1:
            self._put_separators(self.context - used, learned=False)

    def _put_separators(self, count: int, learned: bool) -> None:
        self._put(np.full(count, self.tokenizer.separator, np.uint32), np.full(count, learned))

    def _put(self, tokens: Tokens, learned: Learned) -> None:
        self._parts.append(tokens)
        self._learned.append(learned)
        self.count += len(tokens)


@dataclass(slots=True)
class PositionFile:
    """A reader's position on the disk: `data-position.json`, with the rank of an island's other ranks."""

    path: Path | None
    key: str  # of the data and the order in which they are read: another one begins anew
    warning: str | None = None  # why a position that is there does not count
    position: Position = field(default_factory=Position)
    drawn: int = 0  # of the windows there, at most

    @classmethod
    def of(cls, stream: TextStream, reading: Reading, fingerprint: str) -> "PositionFile":
        """Return the folder's position if it belongs to these data, else the beginning.

        `fingerprint`: of the content of the data.
        """
        data, rank = stream.data, f"-{reading.rank}" if reading.rank else ""
        facts = [fingerprint, data.column, data.format, data.held_out, data.part, stream.context, stream.digest]
        key = json.dumps([POSITION_FORMAT, *facts, reading.seed, reading.peer, reading.ranks])
        made = cls(reading.folder / f"data-position{rank}.json" if reading.folder else None, key)
        if made.path is None or not made.path.exists():
            return made
        again = (
            f"{made.path} belongs to other contents or settings of {data.path}, or to another release; reading starts "
            "over and repeats text that this peer has trained on"
        )
        try:
            found = strict_json.loads(made.path.read_text())
            if found["key"] == key:
                made.position, made.drawn = Position(**found["position"]), int(found["drawn"])
            else:
                made.warning = again
        except (OSError, ValueError, TypeError, KeyError):
            made.warning = again
        return made

    def drawn_of(self, windows: Windows) -> int:
        """How many of these windows were drawn in an earlier life."""
        return self.drawn if windows.begin == self.position else 0

    def cover(self, windows: Windows, upto: int) -> None:
        """Marks so many of these windows as drawn, and the rest of their eighth. A full disk is no reason to stop."""
        if windows.begin == self.position and upto <= self.drawn:
            return
        step = -(-len(windows.tokens_NT) // MARKS)
        self.position, self.drawn = windows.begin, -(-upto // step) * step
        if self.path is not None:
            content: JsonObject = {"key": self.key, "position": asdict(self.position), "drawn": self.drawn}
            with suppress(OSError):
                write_atomically(self.path, json.dumps(content).encode())


def _windows(tokens: Tokens, learned: Learned, context: int) -> tuple[Tokens, Learned]:
    """tokens_NT and learned_NT of all windows with something to learn, each with one position more."""
    count = max(0, (len(tokens) - 1) // context)
    at_NT = np.arange(count)[:, None] * context + np.arange(context + 1)
    some = learned[at_NT][:, 1:].any(axis=1)
    return tokens[at_NT][some], learned[at_NT][some]


def _numbered(at: Position, number: int) -> Position:
    return Position(at.epoch, at.part, at.state, at.read, number)
