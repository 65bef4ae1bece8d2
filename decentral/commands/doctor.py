"""python -m decentral.doctor: why does my peer not start, join or average? Each check gives a remedy.

    python -m decentral.doctor                                     this machine, before it joins anything
    python -m decentral.doctor --join ADDR [--invite FILE]         and a swarm, as a peer from here would meet it
    python -m decentral.doctor --state-dir DIR                     and a peer, while it runs or after it has stopped

Nothing is changed; a file that measures the disk is removed again. Exit codes: 0 nothing is wrong, 1 something is, 2 a
mistake in the flags.

decentral/commands/checks/machine.py     what needs no package that may be missing
decentral/commands/checks/examine.py     everything else, loaded when the packages are there
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path

from decentral.commands import shared
from decentral.commands.checks import machine
from decentral.commands.checks.finding import Finding, FindingState, any_wrong, unknown
from decentral.commands.table import COMMANDS
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.plain_text import printable
from decentral.core.units import plural

SEEN_CHARS = 600  # of what a check says, others' words in it
SHOWN = {FindingState.OK: "ok", FindingState.WARN: "WARN", FindingState.WRONG: "WRONG", FindingState.UNKNOWN: "?"}


def main(argv: Sequence[str] | None = None) -> int:
    found: list[Finding] = []
    code = shared.run(
        lambda: found.extend(asyncio.run(_examine(parse(argv)))), interrupted=COMMANDS["doctor"].interrupted
    )
    return code or int(any_wrong(found))


async def _examine(flags: argparse.Namespace) -> list[Finding]:
    """Makes the checks, and shows each finding as it comes."""
    found = []
    async for finding in findings(flags):
        found.append(finding)
        if not flags.json:
            print(_line(finding), flush=True)
    print(_as_json(found) if flags.json else _remedies(found))
    return found


async def findings(flags: argparse.Namespace) -> AsyncIterator[Finding]:
    """What all checks find that make sense with these flags. Raises UserError for an address that is none."""
    here = machine.python_and_packages()
    for finding in here:
        yield finding
    if any_wrong(here):
        yield unknown("the rest", "not looked at: it needs the packages")
        return
    from decentral.commands.checks import examine

    async for finding in examine.findings(flags):
        yield finding


def _line(finding: Finding) -> str:
    return f"{SHOWN[finding.state]:<6}{finding.check:<14}{printable(finding.seen, SEEN_CHARS)}"


def _remedies(found: Sequence[Finding]) -> str:
    """What to do, the worst first; and one line that says how it is."""
    bad = [one for one in found if one.remedy]
    lines = []
    for state in (FindingState.WRONG, FindingState.WARN, FindingState.UNKNOWN):
        lines += [f"  {one.check}: {printable(one.remedy, SEEN_CHARS)}" for one in bad if one.state == state]
    counts = {state: sum(one.state == state for one in found) for state in FindingState}
    said = f"{counts[FindingState.WRONG]} wrong, {counts[FindingState.WARN]} to look at, {plural(len(found), 'check')}"
    if counts[FindingState.UNKNOWN]:
        said += f", {counts[FindingState.UNKNOWN]} that could not be checked"
    return "\n".join([*(["", "What to do:", *dict.fromkeys(lines)] if lines else []), "", said])


def _as_json(found: Sequence[Finding]) -> str:
    """Others' words are as they came here: a reader has to escape what it shows."""
    return strict_json.dumps({"wrong": any_wrong(found), "findings": [asdict(one) for one in found]}, indent=1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. Those that a peer has mean the same."""
    description = "Why does my peer not start, join or average?"
    parser = shared.Parser(prog="python -m decentral.doctor", description=description)
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="address of a peer of the swarm")
    parser.add_argument("--invite", metavar="FILE", help="the invitation, where the swarm is private")
    parser.add_argument("--state-dir", metavar="DIR", help="of a peer that runs, or ran; or where one shall run")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N, as the peer's")
    parser.add_argument("--listen", action="append", default=[], metavar="MULTIADDR", help="as the peer's")
    parser.add_argument("--announce", action="append", default=[], metavar="MULTIADDR", help="as the peer's")
    parser.add_argument("--json", action="store_true", help="print all findings as JSON, for tools")
    flags = parser.parse_args(argv)
    if flags.state_dir and Path(flags.state_dir).exists() and not Path(flags.state_dir).is_dir():
        raise UserError(f"--state-dir {flags.state_dir} is a file; give the folder of a peer")
    return flags


if __name__ == "__main__":
    sys.exit(main())
