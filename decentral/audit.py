"""python -m decentral.audit: whether each layer counted each micro-batch once, or not at all, by the peers' journals.

A `counted` line says which micro-batches' gradients went into an optimizer's step, and through which layers. No two
executions of a micro-batch, which has the origin peer's id and number, may count in the same layer. If together they
cover all layers, the micro-batch counted everywhere. If not, it counted in part: a peer died after others had counted
it, or was told too late.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentral import command
from decentral.core.errors import UserError
from decentral.core.journal import deleted, read

Span = tuple[int, int]
MicroBatch = tuple[str, int]
"""The origin peer, and its number for the micro-batch."""


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    found = [journal for folder in flags.folders for journal in journals(Path(folder))]
    lines = [list(read(journal)) for journal in found]
    counted = [line for own in lines for line in own if line["event"] == "counted"]
    layers = max((one[3] for line in counted for one in line["of"]), default=0)
    result = audit(lines, layers)
    print(
        f"{len(found)} journals: {result.everywhere} micro-batches counted once in all {layers} layers "
        f"({result.tokens:,} tokens), {result.in_part} in a part of them, {len(result.twice)} twice; "
        f"{result.dropped} executions' gradients thrown away"
    )
    if not result.sound:
        raise SystemExit(1)
    missing = gaps(found, lines)
    if missing:
        print(f"not known whether that is all: {missing}")
        raise SystemExit(1)


def gaps(paths: Sequence[Path], journals: Sequence[Sequence[Mapping[str, Any]]]) -> str:
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

    @property
    def sound(self) -> bool:
        return not self.twice

    def figures(self) -> dict[str, int]:
        figures = {"everywhere": self.everywhere, "in_part": self.in_part, "twice": len(self.twice)}
        return figures | {"thrown_away": self.dropped, "tokens": self.tokens}


@dataclass(slots=True)
class MicroBatchCounts:
    """What journals say of micro-batches, added up line by line."""

    spans: dict[MicroBatch, list[Span]] = field(default_factory=dict)
    tokens: dict[MicroBatch, int] = field(default_factory=dict)
    dropped: int = 0

    def add(self, event: str, fields: Mapping[str, Any]) -> None:
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


def audit(journals: Iterable[Iterable[Mapping[str, Any]]], layers: int) -> CountAudit:
    """Counts all lines of all peers' journals, over all their lives."""
    counts = MicroBatchCounts()
    for line in itertools.chain.from_iterable(journals):
        counts.add(line["event"], line)
    return counts.result(layers)


def overlap(spans: Sequence[Span]) -> bool:
    """Whether some layer is in two of the spans."""
    return any(after[0] < before[1] for before, after in itertools.pairwise(sorted(spans)))


def covered(spans: Sequence[Span]) -> int:
    """The number of layers in spans that do not overlap."""
    return sum(last - first for first, last in spans)


def journals(folder: Path) -> list[Path]:
    """The journals in a peer's state folder, or in a folder of such. Raises UserError if there are none."""
    own = folder / "journal.jsonl"
    found = [own] if own.exists() else sorted(folder.glob("*/journal.jsonl"))
    if not found:
        raise UserError(f"{folder} has no journal.jsonl; give peers' state folders, or a folder of such")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.audit", description="Was every micro-batch counted once?")
    parser.add_argument("folders", nargs="+", metavar="DIR", help="peers' state folders, or a folder of such")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
