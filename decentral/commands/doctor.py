"""python -m decentral.doctor: find out why a peer does not start, join or average. Each check gives a remedy.

    python -m decentral.doctor                                     checks this machine
    python -m decentral.doctor --join ADDR [--invite FILE]         also checks if a peer here can join
    python -m decentral.doctor --state-dir DIR                     also checks a peer that runs or has stopped

The command changes nothing: it removes the file that it writes to measure the disk. Exit codes: 0 if nothing is wrong,
1 if something is wrong, 2 for wrong flags.

decentral/commands/checks/computer.py    checks that need no optional packages
decentral/commands/checks/examine.py     all other checks, loaded only if the packages are installed
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path

from decentral.commands import shared
from decentral.commands.checks import computer
from decentral.commands.checks.finding import Finding, FindingState, any_wrong, unknown
from decentral.core import strict_json
from decentral.core.device_names import CHOICES
from decentral.core.errors import UserError
from decentral.core.plain_text import printable
from decentral.core.units import plural

SEEN_CHARS = 600  # at most this many characters of a finding are shown, because it may quote other peers
SHOWN = {FindingState.OK: "ok", FindingState.WARN: "WARN", FindingState.WRONG: "WRONG", FindingState.UNKNOWN: "?"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a check found something wrong."""
    found: list[Finding] = []
    code = shared.run(lambda: found.extend(asyncio.run(_examine(parse(argv)))))
    return code or int(any_wrong(found))


async def _examine(flags: argparse.Namespace) -> list[Finding]:
    """Run the checks, print each finding as soon as it is known, and return all findings."""
    found = []
    async for finding in findings(flags):
        found.append(finding)
        if not flags.json:
            print(_line(finding), flush=True)
    print(_as_json(found) if flags.json else _remedies(found))
    return found


async def findings(flags: argparse.Namespace) -> AsyncIterator[Finding]:
    """Yield the findings of all checks that apply with these flags.

    Raises:
        UserError: If an address of --join is not valid, or the state folder cannot be read.
    """
    here = [computer.python(), computer.packages()]
    for finding in here:
        yield finding
    if any_wrong(here):
        yield unknown("other checks", "not made, because they need the packages")
        return
    from decentral.commands.checks import examine

    async for finding in examine.findings(flags):
        yield finding


def _line(finding: Finding) -> str:
    return f"{SHOWN[finding.state]:<6}{finding.check:<14}{printable(finding.seen, SEEN_CHARS)}"


def _remedies(found: Sequence[Finding]) -> str:
    """Return the remedies as text, first for the worst findings, followed by a line with the number of findings."""
    bad = [one for one in found if one.remedy]
    lines = []
    for state in (FindingState.WRONG, FindingState.WARN, FindingState.UNKNOWN):
        lines += [f"  {one.check}: {printable(one.remedy, SEEN_CHARS)}" for one in bad if one.state == state]
    counts = {state: sum(one.state == state for one in found) for state in FindingState}
    warnings = plural(counts[FindingState.WARN], "warning")
    said = f"{plural(len(found), 'check')}: {counts[FindingState.WRONG]} wrong, {warnings}"
    if counts[FindingState.UNKNOWN]:
        said += f", {counts[FindingState.UNKNOWN]} could not be made"
    return "\n".join([*(["", "What to do:", *dict.fromkeys(lines)] if lines else []), "", said])


def _as_json(found: Sequence[Finding]) -> str:
    """Return the findings as JSON. Texts from other peers are not escaped; a program that shows them must do that."""
    return strict_json.dumps({"wrong": any_wrong(found), "findings": [asdict(one) for one in found]}, indent=1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    description = "Find out why a peer does not start, join or average, and what to do."
    parser = shared.Parser(prog="python -m decentral.doctor", description=description)
    shared.add_join_flag(parser, "address of a peer of the swarm")
    parser.add_argument("--invite", metavar="FILE", help="the invitation, if the swarm is private")
    parser.add_argument("--state-dir", metavar="DIR", help="state folder of a peer that runs, has run or will run")
    parser.add_argument("--device", help=f"{CHOICES}, as for decentral.peer")
    multiaddr = "as for decentral.peer"
    parser.add_argument("--listen", action="append", default=[], metavar="MULTIADDR", help=multiaddr)
    parser.add_argument("--announce", action="append", default=[], metavar="MULTIADDR", help=multiaddr)
    parser.add_argument("--json", action="store_true", help="print all findings as JSON, for tools")
    flags = parser.parse_args(argv)
    if flags.state_dir and Path(flags.state_dir).exists() and not Path(flags.state_dir).is_dir():
        raise UserError(f"--state-dir {flags.state_dir} is a file; give a peer's state folder")
    return flags


if __name__ == "__main__":
    sys.exit(main())
