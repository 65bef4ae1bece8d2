"""python -m decentral.audit: whether each layer counted each micro-batch once, or not at all, by the peers' journals.

How that is found is in core/journal/micro_batch_counts.py. A journal is what its peer says of itself. So this finds
errors, and peers that contradict each other; it proves nothing about one that writes whatever fits.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.core.journal.events import AppliedLine, CountedLine, JournalEvent, LostLine, StartedLine, UncountedLine
from decentral.core.journal.file import deleted, read
from decentral.core.journal.lines import JOURNAL_LINES, Recorded, name_of
from decentral.core.journal.micro_batch_counts import audit
from decentral.core.peer_folders import changed_at, journals_in, newest_of_each_peer
from decentral.core.units import plural

NOTHING_TRAVELLED = (
    "no micro-batch went through several peers, as where each peer holds the whole model; there is nothing to audit"
)
Line = Recorded[JournalEvent]
COUNTED_EVENTS = {name_of(kind) for kind in (StartedLine, CountedLine, UncountedLine, AppliedLine, LostLine)}


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    found = [journal for folder in flags.folders for journal in journals(Path(folder))]
    lines = [list(well_formed(journal)) for journal in found]
    counted = [line.event for own in lines for line in own if isinstance(line.event, CountedLine)]
    layers = max((one.last for line in counted for one in line.of), default=0)
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


def well_formed(journal: Path) -> Iterator[Line]:
    """The lines of a journal, which somebody else may have written. Raises UserError where one cannot be counted."""
    for line in read(journal):
        found = JOURNAL_LINES.parse(line)
        if found is None and str(line["event"]) in COUNTED_EVENTS:
            what = f"a line {line['event']!r} is not what a peer writes"
            raise UserError(f"{journal}: {what}, so nothing can be said of it")
        if found is not None:
            yield found


def gaps(paths: Sequence[Path], journals: Sequence[Sequence[Line]]) -> str:
    """What the journals do not say any more, as text: lines that a disk has refused, and files that were deleted."""
    lost = sum(line.event.lines for own in journals for line in own if isinstance(line.event, LostLine))
    gone = sum(map(deleted, paths))
    parts = [f"{lost} lines were lost"] * bool(lost) + [f"{gone} full files were deleted"] * bool(gone)
    return ", ".join(parts)


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
