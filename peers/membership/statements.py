"""Read the signed records in journals, from which contributions are added up (core/credit.py).

Whoever gives us a journal may have written anything into it. So a record counts for the peer that has signed it,
whichever journal contains it, and a record that is malformed or not signed by the named peer is refused.
"""

import base64
from collections import deque
from collections.abc import Iterable

from decentral.comm.wire import identity
from decentral.core.credit import Statement
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.journal.events import JournalEvent, StatementLine
from decentral.core.latest import keep_latest
from decentral.core.reasons import Reason
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord

LINES_TRIED = 4
MOST_SIGNERS = 4096


def statement_of(record: PeerRecord) -> Statement:
    """Return what a peer's record says about the work of the peer and of others."""
    return Statement(record.time, record.profile.name, record.tokens, record.standing.seen)


def opened(line: StatementLine) -> PeerRecord:
    """Return the record in a journal's line.

    Raises:
        ProtocolError: If the record is too large or malformed, is not signed by the peer that the line names, or is
            signed for another run or for anything other than a peer's record.
    """
    try:
        sealed = base64.b64decode(line.record, validate=True)
    except ValueError:
        raise ProtocolError(Reason.GARBAGE, "the record is not base64") from None
    record = records.unpack(identity.open_kept(line.key, line.peer, sealed))
    if not line.key.startswith(f"{record.run}/peers"):
        raise ProtocolError(Reason.RUN, f"the record of run {record.run} is signed for {line.key}")
    return record


def newest_records(events: Iterable[JournalEvent | None]) -> tuple[dict[PeerId, PeerRecord], int]:
    """Return the newest valid record of each peer in a journal's events, and the number of invalid records.

    Only the last LINES_TRIED records of each peer are read, and only for the MOST_SIGNERS peers that the journal names
    last. So a hostile journal costs little time and memory.
    """
    lines: dict[PeerId, deque[StatementLine]] = {}
    for event in events:
        if isinstance(event, StatementLine):
            known = lines.get(event.peer) or deque(maxlen=LINES_TRIED)
            known.append(event)
            keep_latest(lines, event.peer, known, MOST_SIGNERS)
    found, refused = dict[PeerId, PeerRecord](), 0
    for peer, tried in lines.items():
        for line in reversed(tried):
            try:
                found[peer] = opened(line)
                break
            except ProtocolError:
                refused += 1
    return found, refused
