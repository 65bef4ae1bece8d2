"""python -m decentral.invite: invitations to a private swarm, and their end.

python -m decentral.invite --state-dir DIR --for ann --until 30d --may train --out ann.invite
python -m decentral.invite --state-dir DIR --list
python -m decentral.invite --state-dir DIR --revoke ann.invite

DIR is the state folder in which `python -m decentral.peer --private` began the swarm. The peer there may run meanwhile.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from decentral.comm.wire.invitations import FOR_EVER, ID_BYTES, MAX_HOLDER_CHARS, Permission
from decentral.comm.wire.private_swarm import revoked_key
from decentral.commands import shared
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds
from decentral.peers.membership.revocation_watch import COPY_S
from decentral.peers.startup import invitation_files
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.visit import known_addresses, visit

UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
MOST_S = 10 * 365 * 86400.0
VISIT_S = 600.0  # how long the founder's own invitation lasts with which it announces revocations


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: argparse.Namespace) -> None:
    with FounderFile.open(Path(flags.state_dir)) as founder:
        if flags.list:
            _list(founder)
        elif flags.revoke:
            _revoke(founder, flags)
        else:
            _invite(founder, flags)


def _invite(founder: FounderFile, flags: argparse.Namespace) -> None:
    out, now = Path(flags.out), time.time()
    if out.exists():
        raise UserError(f"--out {out} is there already; choose another file")
    holding = founder.invite(flags.holder, now + flags.until, Permission(flags.may))
    invitation_files.write_holding(out, holding)
    one = holding.invitation
    print(f"invitation {one.text()} for {one.holder} {invitation_files.described(one, now)}, in {out}")
    print(f"send {out} as you would send a password: whoever has it takes part as {one.holder}")
    print(f"join with: python -m decentral.peer --join ADDR --invite {out}")


def _list(founder: FounderFile) -> None:
    print(f"run {founder.keys.run}: {len(founder.invited)} invitations")
    now = time.time()
    for one in founder.invited:
        over = (
            "revoked" if bytes.fromhex(one["id"]) in founder.revoked else "expired" if one["until"] <= now else "valid"
        )
        until = datetime.fromtimestamp(one["until"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        print(f"{one['id']}  {over:7}  {one['may']:6}  until {until}  {one['for']}")


def _revoke(founder: FounderFile, flags: argparse.Namespace) -> None:
    """Notes it, and announces the list to the swarm. What was noted is announced again by the next call."""
    addresses = flags.join or known_addresses(Path(flags.state_dir))
    founder.catch_up(invitation_files.kept_revocations(Path(flags.state_dir)))
    founder.revoke(_number(flags.revoke), time.time())
    invitation_files.keep_revocations(Path(flags.state_dir), founder.latest().packed)
    if not addresses:
        raise UserError(
            "revoked here, but no address of a running peer is known: give --join ADDR, so that others hear"
        )
    reached = asyncio.run(_announce(founder, addresses))
    invitation_files.keep_revocations(Path(flags.state_dir), founder.latest().packed)
    print(f"revoked; {reached} took the founder's list {founder.number}, and within a minute all of the swarm has it")


async def _announce(founder: FounderFile, addresses: Sequence[str]) -> str:
    """Stores the list in the swarm's DHT, as a visitor. Raises UserError if no peer takes it."""
    holding = founder.own_holding(Permission.LOOK, time.time() + VISIT_S)
    async with visit(addresses, holding) as swarm:
        key, now = revoked_key(swarm.run), swarm.clock()
        for subkey, found in (await swarm.directory.fetch(key)).items():
            with suppress(ProtocolError):
                founder.catch_up(swarm.own.open(key, PeerId(subkey), found, now)[0])
        value = swarm.own.seal(key, founder.latest().packed, now + COPY_S)
        if not await swarm.directory.store_at_others(key, swarm.own.peer, value, now + COPY_S):
            raise UserError("revoked here, but no peer of the swarm took the list: try again with --join ADDR")
        return f"{len(swarm.contacts)} peer" + ("s" if len(swarm.contacts) > 1 else "")


def _number(text: str) -> bytes:
    """The id of an invitation, as such or in its file. Raises UserError."""
    if len(text) == 2 * ID_BYTES and all(char in "0123456789abcdef" for char in text):
        return bytes.fromhex(text)
    return invitation_files.read_holding(Path(text)).invitation.id


def _duration(text: str) -> Seconds:
    """Seconds in a text such as 30d, 12h or 2w; `never` is no end. Raises ValueError, as argparse wants."""
    if text == "never":
        return FOR_EVER - time.time()
    value = float(text[:-1]) * UNITS_S.get(text[-1:], 0.0)
    if not 0 < value <= MOST_S:
        raise ValueError("out of bounds")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(prog="python -m decentral.invite", description="Invitations to a private swarm.")
    parser.add_argument("--state-dir", required=True, metavar="DIR", help="where the private swarm was begun")
    parser.add_argument("--for", dest="holder", metavar="NAME", help="for whom the invitation is")
    parser.add_argument(
        "--until", type=_duration, default="30d", metavar="TIME", help="12h, 30d, 8w or never; default 30d"
    )
    parser.add_argument("--may", choices=[one.value for one in Permission], default="train", help="default: train")
    parser.add_argument("--out", metavar="FILE", help="where to write the invitation, which is a secret")
    parser.add_argument("--list", action="store_true", help="show the invitations that were made")
    parser.add_argument("--revoke", metavar="ID|FILE", help="end an invitation, and tell the swarm")
    parser.add_argument("--join", action="append", default=[], metavar="ADDR", help="a peer that hears of it")
    flags = parser.parse_args(argv)
    if bool(flags.holder) + bool(flags.list) + bool(flags.revoke) != 1:
        raise UserError("give one of --for NAME --out FILE, --list, --revoke ID|FILE (see --help)")
    if flags.holder and not flags.out:
        raise UserError("--for NAME needs --out FILE, where the invitation is written")
    if flags.holder and flags.holder != plain_text(flags.holder, MAX_HOLDER_CHARS):
        raise UserError(f"--for expects at most {MAX_HOLDER_CHARS} printable characters, no brackets")
    return flags


if __name__ == "__main__":
    sys.exit(main())
