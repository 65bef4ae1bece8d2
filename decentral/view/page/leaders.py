"""Compute what each peer has contributed, for the live page, from the signed records that the page reads."""

from dataclasses import dataclass, field

from decentral.core.credit import Credit, Statement, contributions
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.journal.events import StatementLine
from decentral.core.latest import keep_latest
from decentral.core.peer_names import titled
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import Json
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerRecord
from decentral.peers.membership.statements import opened, statement_of

MOST_STATEMENTS = 4096  # the statements of at most this many peers are kept
LEADERS_SHOWN = 20
EVERY_S = 5.0  # contributions are computed at most once in this time, because this reads all statements
LEADER_ROW = (  # browsers get a contribution as a list of these values
    *("peer", "title", "tokens", "share", "hours", "served_bytes", "passed", "failed", "witnesses", "claimed_tokens"),
)


@dataclass(slots=True)
class Leaders:
    """The newest statement of each peer, and the peers that have contributed most."""

    run: str = ""  # name of the run whose records count; "" before the first record
    rows: list[list[Json]] = field(default_factory=list)  # a LEADER_ROW for each of at most LEADERS_SHOWN peers
    _statements: dict[PeerId, Statement] = field(default_factory=dict)
    _changed: bool = False
    _computed_at: Seconds = 0.0

    def take(self, peer: PeerId, record: PeerRecord) -> None:
        """Replace a peer's statement by the statement in `record`, if the record is newer and of the same run."""
        known = self._statements.get(peer)
        if record.run != (self.run or record.run) or (known is not None and known.time >= record.time):
            return
        self.run = record.run
        keep_latest(self._statements, peer, statement_of(record), MOST_STATEMENTS)
        self._changed = True

    def read(self, line: StatementLine) -> None:
        """Take the record in a journal's line; ignore a record that is not valid."""
        try:
            self.take(line.peer, opened(line))
        except ProtocolError:
            return

    def tick(self, now: Seconds) -> None:
        """Compute the contributions again if there are newer statements, but at most once in EVERY_S seconds."""
        if not self._changed or now < self._computed_at + EVERY_S:
            return
        self._changed, self._computed_at = False, now
        self.rows = [_row(one) for one in contributions(self._statements)[:LEADERS_SHOWN]]


def _row(one: Credit) -> list[Json]:
    """Return the values of LEADER_ROW, ready for JSON."""
    return [
        *(plain_text(one.peer), titled(PeerId(one.peer), one.name), one.tokens, one.share, one.hours),
        *(one.served_bytes, one.passed, one.failed, one.witnesses, one.claimed_tokens),
    ]
