"""python -m decentral.invite: make, list and revoke invitations to a private swarm.

python -m decentral.invite --state-dir DIR --for ann --until 30d --may train --out ann.invite
python -m decentral.invite --state-dir DIR --list
python -m decentral.invite --state-dir DIR --revoke ann.invite

DIR is the state folder in which `python -m decentral.peer --private` began the swarm. That peer may be running.
"""

import argparse
import asyncio
import math
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import FOR_EVER, ID_BYTES, MAX_HOLDER_CHARS, Permission
from decentral.comm.wire.messages import PeerRecords, RecordsQuery
from decentral.comm.wire.private_swarm import revoked_key
from decentral.comm.wire.transport import AskError
from decentral.commands import shared
from decentral.core import quantities
from decentral.core.at_once import at_once
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds, plural
from decentral.peers.membership import records
from decentral.peers.membership.revocation_watch import COPY_S
from decentral.peers.membership.swarm_size import key_of
from decentral.peers.startup import invitation_files
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.visit import VisitedSwarm, known_addresses, visit

MOST_TOLD = 1024  # this command sends the list to at most this many peers, which pass it on to the others
TELLING_S = 60.0  # after this time no more peers are told, since each hostile peer could name another one
VISIT_S = 600.0  # lifetime of the invitation that this command makes for itself, to announce revocations to the swarm


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
    out, now = Path(flags.out or _file_of(flags.holder)), time.time()
    if out.exists():
        raise UserError(f"--out {out} exists already; choose another file")
    holding = founder.invite(flags.holder, now + flags.until, Permission(flags.may))
    invitation_files.write_holding(out, holding)
    one = holding.invitation
    print(f"invitation {one.text()} for {one.holder} {invitation_files.described(one, now)}, in {out}")
    print(f"send {out} as you would send a password: whoever has it takes part as {one.holder}")
    print(f"join with: python -m decentral.peer --join ADDR --invite {out}")


def _file_of(holder: str) -> str:
    """Return the name of the file for this person's invitation, without characters that have a meaning in paths."""
    plain = re.sub(r"[^\w.-]", "-", holder).lstrip(".-")
    return f"{plain or 'peer'}.invite"


def _list(founder: FounderFile) -> None:
    print(f"run {founder.keys.run}: {plural(len(founder.invited), 'invitation')}")
    now = time.time()
    for one in founder.invited:
        over = (
            "revoked" if bytes.fromhex(one["id"]) in founder.revoked else "expired" if one["until"] <= now else "valid"
        )
        ends = f"{datetime.fromtimestamp(one['until'], UTC):until %Y-%m-%d %H:%M UTC}"
        until = "without an end" if one["until"] >= FOR_EVER else ends
        print(f"{one['id']}  {over:7}  {one['may']:6}  {until}  {one['for']}")


def _revoke(founder: FounderFile, flags: argparse.Namespace) -> None:
    """Add the invitation to the founder's revocation list, and announce the list to the swarm.

    If the announcement fails, the list stays in the state folder, and the next call announces it.
    """
    addresses = flags.join or known_addresses(Path(flags.state_dir))
    founder.catch_up(invitation_files.kept_revocations(Path(flags.state_dir)))
    founder.revoke(_number(flags.revoke), time.time())
    invitation_files.keep_revocations(Path(flags.state_dir), founder.latest().packed)
    if not addresses:
        raise UserError("revoked in this folder only, because no running peer's address is known; give --join ADDR")
    told = asyncio.run(_announce(founder, addresses))
    invitation_files.keep_revocations(Path(flags.state_dir), founder.latest().packed)
    print(f"revoked: {told} confirmed the founder's list {founder.number}; members pass it on to those that did not")


async def _announce(founder: FounderFile, addresses: Sequence[str]) -> str:
    """Give the founder's revocation list to the swarm's peers and to its DHT; return how many peers confirmed it.

    The result is text, such as "3 of 4 peers".

    Raises:
        UserError: If no peer confirms that it has the list.
    """
    holding, number = founder.own_holding(Permission.LOOK, time.time() + VISIT_S), -1
    async with visit(addresses, holding) as swarm:
        until = swarm.clock() + TELLING_S
        # If founder.json is an old copy, peers may have another list. It is merged into ours, which is then sent again.
        while number != founder.number:
            number = founder.number
            asked, confirmed = await _tell(swarm, founder, until)
        if not confirmed:
            raise UserError("revoked in this folder only, because no peer took the list; try again with --join ADDR")
        key, expires = revoked_key(swarm.run), swarm.clock() + COPY_S
        value = swarm.own.seal(key, founder.latest().packed, expires)
        await swarm.directory.store_at_others(key, swarm.own.peer, value, expires)
        return f"{confirmed} of {plural(asked, 'peer')}"


async def _tell(swarm: VisitedSwarm, founder: FounderFile, until: Seconds) -> tuple[int, int]:
    """Send the list to each peer that the swarm's peers name; return how many peers are known, and how many confirmed.

    The contacts always get the list. After the Unix time `until`, no other peer gets it.

    If a peer has another list that the founder has signed, the founder's next list includes it.
    """
    latest = founder.latest().packed
    query = Envelope(RecordsQuery(swarm.run, b"", (), 0, latest))  # with 0, each answer has the peer's list
    known, waiting, confirmed = set(swarm.contacts), list(swarm.contacts), 0
    while waiting:
        answers = [one for one in await at_once(_answer(swarm, peer, query) for peer in waiting) if one]
        confirmed, waiting = confirmed + sum(answer.revoked == latest for answer in answers), []
        for answer in answers:
            founder.catch_up(answer.revoked)
        for name, sealed in (one for answer in answers for one in answer.records):
            peer = PeerId(name)
            if peer in known or len(known) >= MOST_TOLD:
                continue
            with suppress(ProtocolError):
                body, _ = swarm.own.open(key_of(swarm.run, peer), peer, sealed, swarm.clock())
                swarm.transport.learn(peer, records.unpack(body).addresses)
                known.add(peer)
                waiting.append(peer)
        if swarm.clock() >= until:
            break
    return len(known), confirmed


async def _answer(swarm: VisitedSwarm, peer: PeerId, query: Envelope) -> PeerRecords | None:
    """Return the peer's answer to the query; None if the peer cannot be asked or sends another kind of message."""
    from decentral.peers.membership.record_gossip import RECORDS_DEADLINE_S  # loads numpy

    with suppress(AskError):
        answer = (await swarm.transport.ask(peer, query, RECORDS_DEADLINE_S, 0)).envelope.message
        return answer if isinstance(answer, PeerRecords) else None
    return None


def _number(text: str) -> bytes:
    """Return an invitation's id; `text` is the id in hex digits, or the path of the invitation's file.

    Raises:
        UserError: If the text is not an id, and the file cannot be read as an invitation.
    """
    if len(text) == 2 * ID_BYTES and all(char in "0123456789abcdef" for char in text):
        return bytes.fromhex(text)
    return invitation_files.read_holding(Path(text)).invitation.id


def _until(text: str) -> Seconds:
    """Return the seconds from now in a text such as 30d, 12h or never; for a date, the seconds until its end in UTC.

    Raises:
        ArgumentTypeError: If the text has another form, or the date is over.
    """
    if text == "never":
        return math.inf
    with suppress(ValueError):
        end = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
        if (left_s := end.timestamp() - time.time()) <= 0:
            raise argparse.ArgumentTypeError(f"expected a future date; got {text}")
        return left_s
    with suppress(argparse.ArgumentTypeError):
        if text[-1:].isalpha():  # a bare number would be seconds, which nobody means
            return quantities.duration_s(text)
    forms = "12h, 30d, 8w (at most ten years), a date such as 2030-12-31, or never"
    raise argparse.ArgumentTypeError(f"expected {forms}; got {text!r}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Make, list and revoke invitations to a private swarm."
    parser = shared.Parser(prog="python -m decentral.invite", description=about)
    parser.add_argument("--state-dir", required=True, metavar="DIR", help="state folder of the peer that began it")
    parser.add_argument("--for", dest="holder", metavar="NAME", help="name of the person who is invited")
    until = "lifetime of the invitation: 12h, 30d, 8w or never, or its last day (UTC): 2030-12-31; default 30d"
    parser.add_argument("--until", type=_until, default="30d", metavar="TIME", help=until)
    may = "what the invitation allows; default: train"
    parser.add_argument("--may", choices=[one.value for one in Permission], default="train", help=may)
    out = "file to write the invitation to, which is a secret; default NAME.invite in this folder"
    parser.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument("--list", action="store_true", help="list the invitations that were made")
    parser.add_argument("--revoke", metavar="ID|FILE", help="revoke an invitation, and tell the swarm")
    shared.add_join_flag(parser, "with --revoke: address of a running peer to tell")
    flags = parser.parse_args(argv)
    if bool(flags.holder) + bool(flags.list) + bool(flags.revoke) != 1:
        raise UserError("give one of --for NAME, --list, --revoke ID|FILE (see --help)")
    if flags.holder and flags.holder != plain_text(flags.holder, MAX_HOLDER_CHARS):
        raise UserError(
            f"--for expects up to {MAX_HOLDER_CHARS} printable characters, no brackets; got {flags.holder!r}"
        )
    return flags


if __name__ == "__main__":
    sys.exit(main())
