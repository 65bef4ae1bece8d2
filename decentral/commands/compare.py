"""python -m decentral.compare DIR DIR [...]: compare runs by their journals: losses, settings, and who trained what.

    python -m decentral.compare muon adamw           two folders of state folders, or state folders of peers
    python -m decentral.compare muon adamw --json    the same as JSON, with the curves

Losses are compared at equal tokens and after equal time; time in which no peer ran is left out. Peers whose folders are
not given are not counted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.commands import audit, shared
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.peers.startup.state import StateFolder
from decentral.view.run_comparison import MOST_COMPARED, ComparedRun, RunComparison, kind_for, text_of
from decentral.view.run_history import RunHistory, history_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    journals = {folder: audit.journals(Path(folder)) for folder in flags.folders}
    histories = {folder: _history(folder, found) for folder, found in journals.items()}
    kind = kind_for(list(histories.values()))
    runs = [ComparedRun.of(one, history, _settings(journals[one]), kind) for one, history in histories.items()]
    found = RunComparison.of(runs)
    print(strict_json.dumps(found.fields(), indent=1) if flags.json else text_of(found))


def _history(folder: str, journals: Sequence[Path]) -> RunHistory:
    """Return what the journals in a folder say. Raise UserError if none of them has a valid line."""
    history = history_of((journal.parent.name, journal) for journal in journals)
    if not history.peers:
        raise UserError(f"{folder}: its journals have no valid line; give the state folders of peers that ran")
    return history


def _settings(journals: Sequence[Path]) -> str:
    """Return the run's config as text, from the run.json beside one of the journals; "" if there is no run.json."""
    kept = (StateFolder(journal.parent).look_at_run() for journal in journals)
    return next((run[1].canonical() for run in kept if run is not None), "")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Compare runs: losses at equal tokens and time, settings that differ, and who trained what."
    parser = shared.Parser(prog="python -m decentral.compare", description=about)
    folder = "for each run: a peer's state folder, or a folder of state folders"
    parser.add_argument("folders", nargs="+", metavar="DIR", help=folder)
    parser.add_argument("--json", action="store_true", help="print the comparison, with the curves, as JSON")
    flags = parser.parse_args(argv)
    if len(set(flags.folders)) < len(flags.folders):
        raise UserError("expected different folders; one is given twice")
    if not 2 <= len(flags.folders) <= MOST_COMPARED:
        raise UserError(f"expected the folders of 2 to {MOST_COMPARED} runs; got {len(flags.folders)}")
    return flags


if __name__ == "__main__":
    sys.exit(main())
