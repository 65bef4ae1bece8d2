"""python -m decentral.audit: whether each layer counted each micro-batch once, or not at all, by the peers' journals.

A `counted` line says which micro-batches' gradients went into an optimizer's step, and through which layers. No two
executions of a micro-batch, which has the origin peer's id and number, may count in the same layer. If together they
cover all layers, the micro-batch counted everywhere. If not, it counted in part: a peer died after others had counted
it, or was told too late.

An `applied` line says how many tokens an optimizer's step took into each fragment's weights. What a peer has counted,
its steps must have taken: of each of its lives, layer by layer, whatever it counts beyond that is a claim without
weights behind it, but for the last few lines, whose steps may have died with the process.

A journal is what its peer says of itself. So this finds errors, and peers that contradict each other; it proves nothing
about one that writes whatever fits.
"""

import argparse
import itertools
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.core.journal.file import deleted, read
from decentral.core.line_fields import MOST_LAYERS
from decentral.core.peer_folders import changed_at, journals_in, newest_of_each_peer
from decentral.core.strict_json import JsonFields, JsonObject
from decentral.core.units import plural

NOTHING_TRAVELLED = (
    "no micro-batch went through several peers, as where each peer holds the whole model; there is nothing to audit"
)
NOT_TAKEN_YET = 8  # `counted` lines whose steps may not have been taken when a process ended: one for each sealed sum

_Count = Annotated[int, Strict(), Field(ge=0)]
_Layer = Annotated[int, Strict(), Field(ge=0, le=MOST_LAYERS)]
_Execution = tuple[Annotated[str, Strict()], _Count, _Layer, _Layer, _Count]  # origin peer, number, layers, tokens
_READ: dict[str, tuple[str, TypeAdapter[Any]]] = {  # the field of an event's lines that is read here, and its form
    "counted": ("of", TypeAdapter(list[_Execution])),
    "uncounted": ("of", TypeAdapter(list[_Execution])),
    "applied": ("of", TypeAdapter(list[tuple[_Layer, _Layer, _Count]])),
    "lost": ("lines", TypeAdapter(_Count)),
}
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)

Span = tuple[int, int]
MicroBatch = tuple[str, int]
"""The origin peer, and its number for the micro-batch."""


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    found = [journal for folder in flags.folders for journal in journals(Path(folder))]
    lines = [list(well_formed(journal)) for journal in found]
    counted = [line for own in lines for line in own if line["event"] == "counted"]
    layers = max((one[3] for line in counted for one in line["of"]), default=0)
    result = audit(lines, layers)
    print(
        f"{plural(len(found), 'journal')}: {NOTHING_TRAVELLED}"
        if not counted and not result.dropped
        else f"{plural(len(found), 'journal')}: {result.everywhere} micro-batches counted once in all {layers} layers "
        f"({result.tokens:,} tokens), {result.in_part} in a part of them, {len(result.twice)} twice; "
        f"{result.dropped} executions' gradients thrown away"
        + (f"; {result.unapplied:,} tokens counted that no step took" if result.unapplied else "")
    )
    if not result.sound:
        raise SystemExit(1)
    missing = gaps(found, lines)
    if missing:
        print(f"not known whether that is all: {missing}")
        raise SystemExit(1)


def well_formed(journal: Path) -> Iterator[JsonObject]:
    """The lines of a journal, which somebody else may have written. Raises UserError for one that no peer writes."""
    for line in read(journal):
        field_read, form = _READ.get(str(line["event"]), ("event", _ANYTHING))
        try:
            form.validate_python(line.get(field_read))
        except ValidationError:
            what = f"`{field_read}` of a line {line['event']!r}"
            raise UserError(f"{journal}: {what} is not what a peer writes, so nothing can be said of it") from None
        yield line


def gaps(paths: Sequence[Path], journals: Sequence[Sequence[JsonFields]]) -> str:
    """What the journals do not say any more, as text: lines that a disk has refused, and files that were deleted."""
    lost = sum(line["lines"] for own in journals for line in own if line["event"] == "lost")
    gone = sum(map(deleted, paths))
    parts = [f"{lost} lines were lost"] * bool(lost) + [f"{gone} full files were deleted"] * bool(gone)
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CountAudit:
    """How many micro-batches were counted everywhere, in part or twice."""

    everywhere: int
    in_part: int
    twice: tuple[MicroBatch, ...]  # those that some layer counted twice
    dropped: int  # executions whose gradients were thrown away
    tokens: int  # tokens of the micro-batches that counted everywhere
    unapplied: int = 0  # tokens that a peer counted in a layer, and took no optimizer's step with

    @property
    def sound(self) -> bool:
        return not self.twice and not self.unapplied

    def figures(self) -> dict[str, int]:
        figures = {"everywhere": self.everywhere, "in_part": self.in_part, "twice": len(self.twice)}
        return figures | {"thrown_away": self.dropped, "tokens": self.tokens}


@dataclass(slots=True)
class MicroBatchCounts:
    """What journals say of micro-batches, added up line by line."""

    spans: dict[MicroBatch, list[Span]] = field(default_factory=dict)
    tokens: dict[MicroBatch, int] = field(default_factory=dict)
    dropped: int = 0

    def add(self, event: str, fields: JsonFields) -> None:
        if event == "uncounted":
            self.dropped += len(fields["of"])
        elif event == "counted":
            for origin, number, first, last, count in fields["of"]:
                self.spans.setdefault((origin, number), []).append((first, last))
                self.tokens[origin, number] = count

    def result(self, layers: int) -> CountAudit:
        """The counts so far, for a model of so many layers."""
        twice = tuple(sorted(name for name, held in self.spans.items() if overlap(held)))
        everywhere = [name for name, held in self.spans.items() if name not in twice and covered(held) == layers]
        in_part = len(self.spans) - len(everywhere) - len(twice)
        return CountAudit(len(everywhere), in_part, twice, self.dropped, sum(self.tokens[name] for name in everywhere))


@dataclass(slots=True)
class LifeClaims:
    """What one life of a peer has counted, and what its optimizer's steps have taken, in tokens by layer."""

    counted: Counter[int] = field(default_factory=Counter)
    applied: Counter[int] = field(default_factory=Counter)
    tells: bool = False  # whether its journal says what its steps took
    _last: deque[JsonFields] = field(default_factory=lambda: deque(maxlen=NOT_TAKEN_YET))

    def add(self, event: str, fields: JsonFields) -> None:
        if event == "applied":
            self.tells = True
            for first, last, tokens in fields["of"]:
                self.applied.update(dict.fromkeys(range(first, last), tokens))
        elif event == "counted":
            self.counted.update(_by_layer(fields))
            self._last.append(fields)
        elif event == "lost":  # lines that a full disk took, of either kind: what is compared begins anew
            for kept in (self.counted, self.applied, self._last):
                kept.clear()

    @property
    def unapplied(self) -> int:
        """The tokens that were counted in some layer and not taken, the last lines aside: of the worst layer."""
        open_claims = sum(map(_by_layer, self._last), Counter[int]())
        claims = self.counted - open_claims if self.tells else Counter[int]()
        return max((self.counted - self.applied - open_claims)[layer] for layer in claims) if claims else 0


def _by_layer(counted: JsonFields) -> Counter[int]:
    """The tokens of a `counted` line in each layer."""
    found: Counter[int] = Counter()
    for _, _, first, last, tokens in counted["of"]:
        found.update(dict.fromkeys(range(first, last), tokens))
    return found


def audit(journals: Iterable[Iterable[JsonFields]], layers: int) -> CountAudit:
    """Counts all lines of all peers' journals, over all their lives."""
    counts, unapplied = MicroBatchCounts(), 0
    for journal in journals:
        life = LifeClaims()
        for line in journal:
            counts.add(line["event"], line)
            if line["event"] == "started":
                unapplied += life.unapplied
                life = LifeClaims()
            life.add(line["event"], line)
        unapplied += life.unapplied
    return replace(counts.result(layers), unapplied=unapplied)


def overlap(spans: Sequence[Span]) -> bool:
    """Whether some layer is in two of the spans."""
    return any(after[0] < before[1] for before, after in itertools.pairwise(sorted(spans)))


def covered(spans: Sequence[Span]) -> int:
    """The number of layers in spans that do not overlap."""
    return sum(last - first for first, last in spans)


def journals(folder: Path) -> list[Path]:
    """Return the journals in a peer's state folder, or in a folder of such: of a peer and its backups the newest one.

    Raises UserError if there are none.
    """
    found = journals_in(folder)
    if not found:
        raise UserError(f"{folder} has no journal.jsonl; give peers' state folders, or a folder of such")
    newest = newest_of_each_peer({journal.parent: changed_at(journal) for journal in found})
    return [journal for journal in found if newest[journal.parent] == journal.parent]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Was every micro-batch counted once? Of runs in which peers hold parts of the model, not all of it."
    parser = shared.Parser(prog="python -m decentral.audit", description=about)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="peers' state folders, or a folder of such")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
