"""python -m decentral.ledger: show what each peer has contributed to a run, by what other peers measured.

    python -m decentral.ledger --join ADDR         of a running swarm, from its peers' signed records
    python -m decentral.ledger swarm               from the signed records in journals
    python -m decentral.ledger ann bob --json      the same as JSON

What a peer says about itself is shown, but does not count; core/credit.py has the rules.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from decentral.commands import shared
from decentral.core import strict_json
from decentral.core.credit import Credit, Statement, contributions, latest
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.peer_names import titled
from decentral.core.plain_text import plain_text
from decentral.core.units import plural

LEDGER_COLUMNS = ("peer", "tokens", "share", "time", "served", "checks", "witnesses", "claims")
LEGEND = (
    "tokens, share, time: what other peers could measure; nobody measures a peer that is alone, nor its last windows\n"
    "served: bytes that others received; checks: windows and gradients that others found right; witnesses: peers that\n"
    "measured it; -: nobody measured it; claims: tokens by the peer's own word, its work alone included; they do not\n"
    "count here, but `decentral compare` and an export's model card list such tokens"
)
UNSIGNED = (
    "a record of its own here, so its name and claims are missing; a peer writes one each minute, and when it leaves"
)
MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    from decentral.commands.ps import table

    run, statements = asyncio.run(_of_swarm(flags)) if flags.join else of_journals(flags.folders)
    found = contributions(statements)
    if flags.json:
        rows = [asdict(one) | {"name": plain_text(one.name)} for one in found]
        print(strict_json.dumps({"run": run, "contributions": rows}, indent=1))
    else:
        print(f"run {plain_text(run)}: {plural(len(statements), 'peer')} with a signed record")
        claims = sum(one.claimed_tokens for one in found)
        print(table(LEDGER_COLUMNS, [_row(one, one.peer in statements, claims) for one in found]))
        print(LEGEND)
        if unsigned := sum(one.peer not in statements for one in found):
            print(f"{plural(unsigned, 'peer')} without {UNSIGNED}")


def _row(one: Credit, signed: bool, all_claims: int) -> tuple[str, ...]:
    """Return the cells of a peer's line, in the order of LEDGER_COLUMNS.

    Args:
        one: The peer's credit.
        signed: Whether there is a record of its own.
        all_claims: Tokens that all peers claim together.
    """
    from decentral.commands.ps import NO_FIGURE

    own = f"{one.claimed_tokens:,} ({one.claimed_tokens / max(1, all_claims):.1%})"
    who, claims = titled(PeerId(one.peer), one.name), own if signed else NO_FIGURE
    if not one.witnesses:
        return (who, *[NO_FIGURE] * 5, "0", claims)
    checks = f"{one.passed:,}" + (f", {one.failed:,} failed" if one.failed else "")
    time = f"{one.hours:.2f} h" if one.hours >= 1 else f"{60 * one.hours:.1f} min"
    amounts = f"{one.tokens:,}", f"{100 * one.share:.1f}%", time, f"{one.served_bytes / MB:,.1f} MB"
    return (who, *amounts, checks, str(one.witnesses), claims)


async def _of_swarm(flags: argparse.Namespace) -> tuple[RunId, dict[PeerId, Statement]]:
    """Return a running swarm's name, and the statements in its peers' records.

    The import loads libp2p, which takes a second.
    """
    from decentral.peers.membership.statements import statement_of
    from decentral.peers.startup.invitation_files import read_holding
    from decentral.peers.startup.visit import visit

    async with visit(flags.join, read_holding(Path(flags.invite)) if flags.invite else None) as swarm:
        records = await swarm.records()
        return swarm.run, {peer: statement_of(record) for peer, record in records.items()}


def of_journals(folders: Sequence[str]) -> tuple[RunId, dict[PeerId, Statement]]:
    """Return the run and the newest statement of each peer in the journals of these folders.

    Raises:
        UserError: If the journals have no valid statement, or statements of several runs.
    """
    from decentral.commands import audit
    from decentral.core.journal.file import read
    from decentral.core.journal.lines import recorded
    from decentral.peers.membership.statements import newest_records, statement_of

    paths = [journal for folder in folders for journal in audit.journals(Path(folder))]
    read_all = [newest_records(line.event for line in recorded(read(path))) for path in paths]
    if refused := sum(count for _, count in read_all):
        print(f"{plural(refused, 'record')} refused: malformed, or not signed by the peer they name", file=sys.stderr)
    found = [one for records, _ in read_all for one in records.items()]
    runs = sorted({RunId(record.run) for _, record in found})
    if not runs:
        raise UserError("the journals have no signed record yet; a peer writes one each minute and when it leaves")
    if len(runs) > 1:
        raise UserError(f"expected journals of one run, found {', '.join(map(plain_text, runs))}; give fewer folders")
    return runs[0], latest((peer, statement_of(record)) for peer, record in found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Show what each peer has contributed to a run, by what other peers measured."
    parser = shared.Parser(prog="python -m decentral.ledger", description=about)
    parser.add_argument("folders", nargs="*", metavar="DIR", help="peers' state folders, or a folder of state folders")
    shared.add_join_flag(parser, "address of a running swarm's peer")
    parser.add_argument("--invite", metavar="FILE", help="with --join: the invitation to a private swarm")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    flags = parser.parse_args(argv)
    if bool(flags.folders) == bool(flags.join):
        raise UserError("expected --join ADDR of a running peer, or folders with peers' journals")
    return flags


if __name__ == "__main__":
    sys.exit(main())
