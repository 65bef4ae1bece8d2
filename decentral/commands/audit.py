"""python -m decentral.audit: check from peers' journals that no layer counted a micro-batch twice.

The check is in core/journal/micro_batch_counts.py. Each peer writes its own journal. So the audit finds errors, and
contradictions between peers, but it cannot find a peer that forges a consistent journal.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from decentral.commands import shared
from decentral.core.errors import ExitCode, UserError
from decentral.core.journal.events import AppliedLine, CountedLine, JournalEvent, LostLine, StartedLine, UncountedLine
from decentral.core.journal.file import deleted, read
from decentral.core.journal.lines import JOURNAL_LINES, Recorded, name_of
from decentral.core.journal.micro_batch_counts import audit
from decentral.core.near_names import did_you_mean
from decentral.core.peer_folders import changed_at, journals_in, newest_of_each_peer
from decentral.core.units import plural

NOTHING_TRAVELLED = (
    "no micro-batch went through several peers (each peer may hold the whole model); there is nothing to audit"
)
Line = Recorded[JournalEvent]
COUNTED_EVENTS = {name_of(kind) for kind in (StartedLine, CountedLine, UncountedLine, AppliedLine, LostLine)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if the audit fails or journals are incomplete."""
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
        else f"{plural(len(found), 'journal')}: {plural(result.everywhere, 'micro-batch')} counted once "
        f"in all {layers} layers ({result.tokens:,} tokens), {result.in_part} in some of them, "
        f"{len(result.twice)} twice; gradients of {plural(result.dropped, 'execution')} discarded"
        + (f"; {result.unapplied:,} tokens counted but in no optimizer step" if result.unapplied else "")
    )
    if not result.sound:
        raise SystemExit(ExitCode.FAILED)
    missing = gaps(found, lines)
    if missing:
        print(f"the journals are not complete: {missing}")
        raise SystemExit(ExitCode.FAILED)


def well_formed(journal: Path) -> Iterator[Line]:
    """Yield the valid lines of a journal; skip lines that are not valid and that the audit does not need.

    Raises:
        UserError: If a line that the audit needs is not valid.
    """
    for line in read(journal):
        found = JOURNAL_LINES.parse(line)
        if found is None and str(line["event"]) in COUNTED_EVENTS:
            raise UserError(f"{journal} cannot be audited: a line {line['event']!r} is not valid; omit this folder")
        if found is not None:
            yield found


def gaps(paths: Sequence[Path], journals: Sequence[Sequence[Line]]) -> str:
    """Return as text how many journal lines were lost, and how many full journal files were deleted; "" if none."""
    lost = sum(line.event.lines for own in journals for line in own if isinstance(line.event, LostLine))
    gone = sum(map(deleted, paths))
    parts = [f"lost lines: {lost}"] * bool(lost) + [f"deleted full files: {gone}"] * bool(gone)
    return ", ".join(parts)


def journals(folder: Path) -> list[Path]:
    """Return the journals in a peer's state folder, or in a folder of state folders.

    If a peer's state folder was copied, only the copy whose journal changed last is included.

    Raises:
        UserError: If the folder does not exist, or has no journal.
    """
    found = journals_in(folder)
    if not folder.exists():
        near = did_you_mean(folder.name, [one.name for one in folder.absolute().parent.glob("*/")])
        raise UserError(f"{folder} does not exist; give peers' state folders, or a folder of state folders{near}")
    if not found:
        raise UserError(f"{folder} has no journal.jsonl; give peers' state folders, or a folder of state folders")
    newest = newest_of_each_peer({journal.parent: changed_at(journal) for journal in found})
    return [journal for journal in found if newest[journal.parent] == journal.parent]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags. Raise UserError if they are not valid."""
    about = "Check that every micro-batch was counted once, in runs whose peers hold only parts of the model."
    parser = shared.Parser(prog="python -m decentral.audit", description=about)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="peers' state folders, or a folder of state folders")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
