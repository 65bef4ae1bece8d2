"""Stream a data set, tokenise it and pack it into micro-batches: `data.kind: huggingface`.

    parts in this peer's order -> pieces -> tokens, packed with separators -> shuffled sequences of `context` -> batches

Start reading at `StreamReader`. In chats and completions (`data.format`) the loss counts only some tokens; all other
tokens are masked as targets. A chat or completion that fits into one sequence is not split between two sequences:
separators fill up the sequence before it, and the loss does not count these separators. Sequences in which the loss
counts no token are left out.

Each peer shuffles the order of the parts of `Documents` for each epoch. So a peer reads a part only once in an epoch,
and two peers read the same part at the same time only by chance. With `data.part: k/n` a peer reads only every n-th
part, so n peers with different k have no part in common.

A thread reads the next block of about TOKENS_AT_ONCE tokens during training, and shuffles the block's sequences. The
file `data-position.json` contains the position of the current block, and the number of sequences of the block that
training may have used. The file is written before sequences are used, with the number rounded up to the next eighth of
the block. So a peer that restarts skips some sequences, but never repeats a sequence.

Shapes: B sequences of a micro-batch, T positions (`context`), N sequences of a block.
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

from decentral.core import config, foreign_file, rng, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.data import conversations, tokenizer
from decentral.data.corpora import Reading, batch_of
from decentral.data.documents import Documents, State, TextPiece
from decentral.data.tokenizer import TextTokenizer

MOST_TOKEN_CHARS = 8  # a sequence of text is assumed to need at most this many characters for each token
MOST_SAVED_BYTES = 1 << 20
POSITION_FORMAT = 2  # version of data-position.json; a release that divides the data in another way increases it
TOKENS_AT_ONCE = 1 << 18  # a block of shuffled sequences has about this many tokens; fewer at the end of an epoch
MARKS = 8  # the position is saved this many times in each block, so a restart skips at most an eighth of a block
Tokens = npt.NDArray[np.uint32]
Learned = npt.NDArray[np.bool_]
"""For each token, whether the loss counts it as a target."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a peer's data at which a block of sequences begins."""

    epoch: int = 0
    part: int = 0  # number of parts of this epoch that were read to the end
    state: State | None = None  # position within the current part; an argument of `Documents.read`
    read: int = 0  # number of rows of the part's shard before `state`; an argument of `Documents.read`
    number: int = 0


@dataclass(frozen=True, slots=True)
class SequenceBlock:
    """A block of shuffled sequences, the position at which it begins, and that at which the next block begins."""

    tokens_NT: Tokens  # T is `context` + 1, since the target of each token is the next token
    learned_NT: Learned
    begin: Position
    end: Position


class TextStream:
    """A streamed data set as a source of micro-batches; it implements `TrainingData`."""

    def __init__(self, data: config.DataConfig, model: config.ModelConfig) -> None:
        """Load the tokenizer that `data` names, or else the tokenizer of the model that the run starts from.

        Raises:
            UserError: If the tokenizer or its chat template cannot be read, or the tokenizer has more tokens than the
                model's vocabulary.
        """
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
        """Return inputs_BT and targets_BT, int64 on the CPU: the first sequences of the held-out text.

        Every call returns the same sequences. If the held-out text is too short for so many, those of plain text begin
        at random positions and overlap, and those of chats and completions are repeated.

        Raises:
            UserError: If the held-out text is too short for one sequence, or no held-out chat or completion has a token
                that the loss counts.
        """
        wanted, packer, documents = sequences * self.context + 1, self.packer(), self.documents()
        for piece in documents.held_out():
            packer.add([piece])
            if packer.count >= wanted:
                break
        tokens, learned = packer.take()
        if packer.pads:
            tokens_NT, learned_NT = _sequences(tokens, learned, self.context)
            if not len(tokens_NT):
                few = "must have at least two documents to train on, since one of them is held out; it has fewer"
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
        """Return words for an error message if chats without a trainable turn were left out, else an empty string."""
        writes = "the chat template must write such a turn after the prompt that add_generation_prompt=True produces"
        none = f"; none of the {documents.unlearned} chats read has a trainable assistant turn: {writes}"
        return none if documents.unlearned else ""

    def packer(self) -> "TokenPacker":
        """Return a packer for this data. For chats, the template and not the packer adds tokens before a text."""
        tokenizer = replace(self.tokenizer, before=()) if self.data.format == "chat" else self.tokenizer
        return TokenPacker(tokenizer, self.context if self.data.format != "text" else None)

    def documents(self, readers: int = 1) -> Documents:
        """Open the data set, divided into parts for `readers` readers, and return it."""
        least = 1 if self.data.format != "text" else MOST_TOKEN_CHARS * (self.context + 2)  # enough for one sequence
        return Documents(self.data, readers=readers, tokenizer=self.path, least_held_out=least)

    def micro_batches(self, reading: Reading) -> "StreamReader":
        """Return a reader of micro-batches. It begins at the position saved in the peer's folder, if there is one."""
        return StreamReader(self, reading)


class StreamReader:
    """A callable that returns the micro-batches of one peer or rank. A thread reads the next block in advance."""

    def __init__(self, stream: TextStream, reading: Reading) -> None:
        """Open the data at the saved position and start the thread. Raises UserError if the data cannot be opened."""
        self.stream, self.reading = stream, reading
        self.documents = stream.documents(stream.share[1] * reading.ranks)
        self.mark = PositionFile.of(stream, reading, self.documents.opened.fingerprint)
        stream.warnings += [said for said in (self.mark.warning, self.documents.opened.left_out) if said]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._next: Future[SequenceBlock] = self._thread.submit(self._read, self.mark.position)
        self._drawn = 0
        self._here: SequenceBlock | None = None

    def __call__(self, number: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT of the next sequences, int64 on the CPU.

        Args:
            number: Not used, because the sequences are returned in the order in which they are read.
            sequences: Number of sequences to return, B.

        Raises:
            UserError: If the data can no longer be read, or have no text to train on for this peer.
        """
        drawn: list[Tokens] = []
        learned: list[Learned] = []
        while len(drawn) < sequences:
            if self._here is None or self._drawn >= len(self._here.tokens_NT):
                self._turn()
            assert self._here is not None
            upto = min(len(self._here.tokens_NT), self._drawn + sequences - len(drawn))
            self.mark.cover(self._here, upto)
            drawn += list(self._here.tokens_NT[self._drawn : upto])
            learned += list(self._here.learned_NT[self._drawn : upto])
            self._drawn = upto
        return batch_of(np.stack(drawn), np.stack(learned))

    def _turn(self) -> None:
        """Wait for the thread to read the next block, make it the current block, and start reading another block."""
        self._here = self._next.result()
        self._drawn = self.mark.drawn_of(self._here)
        self._next = self._thread.submit(self._read, self._here.end)

    def _read(self, begin: Position) -> SequenceBlock:
        context, packer, at = self.stream.context, self.stream.packer(), begin
        for pieces, position in self._pieces(begin):
            packer.add(pieces)
            at = position
            if packer.count > context and (packer.count >= TOKENS_AT_ONCE or position.epoch > begin.epoch):
                break
        tokens, learned = packer.take()
        tokens_NT, learned_NT = _sequences(tokens, learned, context)
        chance = rng.arrays(self.reading.seed, "windows", self.reading.peer, self.reading.rank, begin.number)
        order = chance.permutation(len(tokens_NT))
        return SequenceBlock(tokens_NT[order], learned_NT[order], begin, _numbered(at, begin.number + 1))

    def _pieces(self, at: Position) -> Iterator[tuple[Sequence[TextPiece], Position]]:
        """Yield batches of pieces from position `at` on, epoch after epoch, and the position after each batch.

        Raises:
            UserError: If a whole epoch has no piece to train on.
        """
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
        """Return the numbers of this rank's parts in the order in which this rank reads the parts in one epoch."""
        reading, (ours, shares) = self.reading, self.stream.share
        parts = np.arange(self.documents.parts)[ours - 1 :: shares][reading.rank :: reading.ranks]
        chance = rng.arrays(reading.seed, "parts", reading.peer, reading.rank, epoch)
        return [int(part) for part in chance.permutation(parts)]


class TokenPacker:
    """A buffer that concatenates the tokens of pieces.

    A separator stands between two pieces that are not consecutive pieces of one document. A document begins with the
    tokens that the tokenizer puts before a text, and ends with a separator.
    """

    def __init__(self, tokenizer: TextTokenizer, context: int | None = None) -> None:
        """Begin with an empty buffer.

        Args:
            tokenizer: The tokenizer, with its separator.
            context: Number of targets in a sequence. If set, a document that fits into one sequence is not
                split between two, and separators fill up the last one. None: pack plain text without such separators.
        """
        self.tokenizer, self.context, self.count = tokenizer, context, 0
        self._parts: list[Tokens] = []
        self._learned: list[Learned] = []
        self._next: int | None = None  # the `TextPiece.at` that would continue the open document; None if none is open

    @property
    def pads(self) -> bool:
        """Whether separators fill up sequences, so that documents are not split."""
        return self.context is not None

    def add(self, pieces: Sequence[TextPiece]) -> None:
        """Tokenise the pieces and append their tokens, with separators where they are needed."""
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
        """Empty the buffer; return its tokens, and for each token whether the loss counts it."""
        if self.context is not None and self.count:
            self._put_separators((1 - self.count) % self.context, learned=False)
        tokens = np.concatenate([*self._parts, np.zeros(0, np.uint32)])
        learned = np.concatenate([*self._learned, np.zeros(0, np.bool_)])
        self._parts, self._learned, self.count = [], [], 0
        return tokens, learned

    def _tokens(self, pieces: Sequence[TextPiece]) -> Iterator[tuple[Tokens, Learned]]:
        """Yield each piece's tokens, and for each token whether the loss counts any character of the token."""
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
        """Fill up the current sequence with separators if a document of `tokens` tokens does not fit into the rest.

        An empty sequence is not filled. The rest includes the first token of the next sequence, because this token
        is also the last target of the current sequence.
        """
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
    """A reader's saved position: the file `data-position.json` for rank 0, else `data-position-RANK.json`."""

    path: Path | None
    key: str  # names the data and the order of reading; a saved position with another key is ignored
    warning: str | None = None  # why a saved position was ignored, for the user
    position: Position = field(default_factory=Position)
    drawn: int = 0  # number of sequences of the block that may have been trained on; a restart skips them

    @classmethod
    def of(cls, stream: TextStream, reading: Reading, fingerprint: str) -> "PositionFile":
        """Return the position saved in the reader's folder, or the beginning if no position for these data is saved.

        Args:
            stream: The data and their settings.
            reading: The reader, with its folder.
            fingerprint: Hash of the content of the data.
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
            found = strict_json.loads(foreign_file.read_text(made.path, MOST_SAVED_BYTES))
            if found["key"] == key:
                made.position, made.drawn = Position(**found["position"]), int(found["drawn"])
            else:
                made.warning = again
        except (OSError, ValueError, TypeError, KeyError):
            made.warning = again
        return made

    def drawn_of(self, block: SequenceBlock) -> int:
        """Return the number of sequences of a block that this peer may have used before it restarted, and must skip."""
        return self.drawn if block.begin == self.position else 0

    def cover(self, block: SequenceBlock, upto: int) -> None:
        """Save the number of sequences of a block that may be used: `upto`, rounded up to an eighth of the block.

        Call this before the sequences are used. A disk error is ignored: training continues without a saved position.
        """
        if block.begin == self.position and upto <= self.drawn:
            return
        step = -(-len(block.tokens_NT) // MARKS)
        self.position, self.drawn = block.begin, -(-upto // step) * step
        if self.path is not None:
            content: JsonObject = {"key": self.key, "position": asdict(self.position), "drawn": self.drawn}
            with suppress(OSError):
                write_atomically(self.path, json.dumps(content).encode())


def _sequences(tokens: Tokens, learned: Learned, context: int) -> tuple[Tokens, Learned]:
    """Return tokens_NT and learned_NT, T = `context` + 1, of all sequences with a target that the loss counts."""
    count = max(0, (len(tokens) - 1) // context)
    at_NT = np.arange(count)[:, None] * context + np.arange(context + 1)
    some = learned[at_NT][:, 1:].any(axis=1)
    return tokens[at_NT][some], learned[at_NT][some]


def _numbered(at: Position, number: int) -> Position:
    return Position(at.epoch, at.part, at.state, at.read, number)
