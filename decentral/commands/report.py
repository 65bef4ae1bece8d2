"""python -m decentral.report DIR: write an HTML page about a run, from the journals of its peers.

python -m decentral.report swarm                   all peers whose state folders are in swarm/; writes report.html
python -m decentral.report ann/ bob/ -o run.html   these two peers

The page is one HTML file without scripts, which opens in any browser without a network.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.commands import audit, shared
from decentral.core.errors import UserError, writing
from decentral.core.units import plural
from decentral.view.canvas import can_draw
from decentral.view.report import NO_CHARTS, page_of
from decentral.view.run_history import history_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    found = [journal for folder in flags.folders for journal in audit.journals(Path(folder))]
    with shared.if_interrupted("nothing written"):
        run = history_of((journal.parent.name, journal) for journal in found)
    if not run.peers:
        raise UserError(f"none of the {len(found)} journals has a valid line; give the state folders of peers that ran")
    with writing("-o", flags.out):
        Path(flags.out).write_text(page_of(run), encoding="utf-8")
    print(f"{flags.out}: {plural(len(run.peers), 'peer')}, {run.tokens:,.0f} tokens")
    if not can_draw():
        print(NO_CHARTS, file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Write a page about a run from its journals."
    parser = shared.Parser(prog="python -m decentral.report", description=about)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="peers' state folders, or a folder of state folders")
    out = "the HTML file to write; default report.html"
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help=out)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
