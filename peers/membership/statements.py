"""Read the signed records in journals, from which contributions are added up (core/credit.py).

Whoever gives us a journal may have written anything into it. So a record counts for the peer that has signed it,
whichever journal contains it, and a record that is malformed or not signed by the named peer is refused.
"""

import base64
from collections.abc import Iterable

from decentral.comm.wire import identity
from decentral.core.credit import Statement
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import JournalEvent, StatementLine
from decentral.core.reasons import Reason
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord


def statement_of(record: PeerRecord) -> Statement:
    """Return what a peer's record says about the work of the peer and of others."""
    return Statement(record.time, record.profile.name, record.tokens, record.standing.seen)


def opened(line: StatementLine) -> PeerRecord:
    """Return the record in a journal's line.

    Raises:
        ProtocolError: If the record is too large or malformed, is not signed by the peer that the line names, or is
            signed for another run or for something else than a record of a peer.
    """
    try:
        sealed = base64.b64decode(line.record, validate=True)
    except ValueError:
        raise ProtocolError(Reason.GARBAGE, "the record is not base64") from None
    record = records.unpack(identity.open_kept(line.key, line.peer, sealed))
    if not line.key.startswith(f"{record.run}/peers"):
        raise ProtocolError(Reason.RUN, f"the record of run {record.run} is signed for {line.key}")
    return record


def last_record(events: Iterable[JournalEvent | None], peer: PeerId) -> PeerRecord | None:
    """Return the last valid record of this peer among a journal's events; None if there is none."""
    own = [event for event in events if isinstance(event, StatementLine) and event.peer == peer]
    for line in reversed(own):
        try:
            return opened(line)
        except ProtocolError:
            continue
    return None


def statements_in(
    events: Iterable[JournalEvent | None],
) -> tuple[list[tuple[RunId, PeerId, Statement]], int]:
    """Return the statements in a journal's events, each with its run and its peer, and how many lines were refused."""
    found, refused = list[tuple[RunId, PeerId, Statement]](), 0
    for event in events:
        if isinstance(event, StatementLine):
            try:
                record = opened(event)
            except ProtocolError:
                refused += 1
                continue
            found.append((RunId(record.run), event.peer, statement_of(record)))
    return found, refused
