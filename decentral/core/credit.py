"""Credit each peer with the work that others measured of it. Start reading at `contributions`.

A peer's claims about itself do not count. Each peer is a witness of the others: it measures how far a partner's gossip
windows move the weights, which layers the hops of its routes computed, and how many bytes came from each peer. It
publishes these measurements in its signed record (`SeenWork`). docs/SECURITY.md ("Who did what") has the limits.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field, Strict

from decentral.core.ids import SUFFIX_CHARS, PeerId, suffix
from decentral.core.journal.field_kinds import GivenCount
from decentral.core.units import Seconds

MOST_WITNESSED = 12  # a record has the work of at most this many other peers, to stay below its limit of 12 KiB
EXPLAINED_TIMES = 1.25  # a claim of at most this many times the explained tokens is believed: windows differ by chance
IMPLAUSIBLE_TIMES = 1000.0  # a window longer than this many times ours is an attack, so `times` is capped at this
LONG_WATCHED = 0.95  # a witness that met a peer for at least this share of its hours counts as one that met it in all

Ending = Annotated[str, Strict(), Field(max_length=SUFFIX_CHARS, pattern=r"^[!-~]*$")]
Few = Annotated[int, Strict(), Field(ge=0, lt=1 << 32)]


class SeenWork(NamedTuple):
    """What one peer, the witness, has measured of another peer's work since the witness first started."""

    peer: Ending  # the last characters of the other peer's id
    claimed: GivenCount  # number of tokens on which the peer trained in `met_s`, as its windows claim
    explained: GivenCount  # the same tokens as estimated from how far the windows move the weights (`explained_tokens`)
    carried: GivenCount  # tokens of the witness's micro-batches, times the share of the layers that the peer computed
    met_s: Few  # seconds for which the peer's windows reached the witness; long pauses are left out
    served_bytes: GivenCount  # bytes that the witness received from the peer
    passed: Few  # number of the peer's windows that were merged, plus audits that found its gradients right
    failed: Few  # number of its windows refused as worthless or false, plus audits that found its gradients wrong

    @property
    def tokens_per_s(self) -> float:
        """The peer's tokens/s in `met_s`: from `claimed`, or from `explained` if the claim is not believed.

        A claim is believed if it is at most EXPLAINED_TIMES times `explained`.
        """
        believed = self.claimed <= EXPLAINED_TIMES * self.explained
        return (self.claimed if believed else self.explained) / max(1, self.met_s)


NOTHING_SEEN = SeenWork("", 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signed record of a peer says about the peer itself and, in `seen`, about other peers."""

    time: Seconds  # Unix time at which the peer wrote the record
    name: str
    claimed_tokens: int
    seen: Sequence[SeenWork] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """What a peer has contributed to a run, as other peers (its witnesses) have measured and published it."""

    peer: str  # the peer's id, or only the end of the id if no record of the peer is known
    name: str
    tokens: int  # credited tokens; a token trained in only some layers counts by the share of the layers
    share: float  # the peer's share of all peers' credited tokens, 0 to 1
    hours: float
    served_bytes: int
    passed: int
    failed: int
    witnesses: int  # number of peers that measured this peer; a lone witness's measurements count in full
    claimed_tokens: int  # number of tokens on which the peer itself says it has trained; not counted in `tokens`


def explained_tokens(own: float, times: float) -> float:
    """Return the largest number of tokens that can explain windows `times` times as long (L2 norm) as our own windows.

    Our own windows have `own` tokens.

    A peer that takes r >= 1 times as many steps moves its weights sqrt(r) times as far if all steps are noise, and r
    times as far if all point in one direction. The result assumes noise for longer windows and one direction for
    shorter ones, so that no honest peer is credited with less than it trained.
    """
    times = min(times, IMPLAUSIBLE_TIMES)
    return own * max(times, times * times)


def contributions(statements: Mapping[PeerId, Statement]) -> list[Credit]:
    """Return what each peer has contributed, in decreasing order of credited tokens, then by id.

    A peer's hours are the second largest of its witnesses' values; of two, the larger, since the other may have been
    away. Its tokens are the witnesses' lower median (`_in_hours`), or the confirmed `carried` tokens if those are more.
    Each other value is `confirmed`. So with three or more witnesses, no single witness decides. What a peer says of its
    own work is ignored. The order of the statements does not matter.

    Args:
        statements: The latest statement of each peer.
    """
    said: dict[str, dict[PeerId, SeenWork]] = defaultdict(dict)
    known = {suffix(peer): peer for peer in statements}
    for witness, statement in sorted(statements.items()):
        for row in statement.seen:
            if row.peer != suffix(witness):
                said[row.peer].setdefault(witness, row)
    found = [
        _credited(known.get(end, end), statements.get(known.get(end, PeerId(""))), [*said[end].values()])
        for end in {*said, *known}
    ]
    total = sum(one.tokens for one in found) or 1
    ranked = sorted(found, key=lambda one: (-one.tokens, one.peer))
    return [replace(one, share=round(one.tokens / total, 6)) for one in ranked]


def _credited(peer: str, own: Statement | None, rows: Sequence[SeenWork]) -> Credit:
    hours = sorted(row.met_s for row in rows if row.met_s)
    met_s = hours[-2 if len(hours) > 2 else -1] if hours else 0
    return Credit(
        peer=peer,
        name=own.name if own else "",
        tokens=max(round(_in_hours(rows, met_s)), confirmed(row.carried for row in rows)),
        share=0.0,
        hours=round(met_s / 3600, 4),
        served_bytes=confirmed(row.served_bytes for row in rows),
        passed=confirmed(row.passed for row in rows),
        failed=confirmed(row.failed for row in rows),
        witnesses=len(rows),
        claimed_tokens=own.claimed_tokens if own else 0,
    )


def _in_hours(rows: Sequence[SeenWork], met_s: Seconds) -> float:
    """Return the tokens of a peer's `met_s` seconds: the lower median of its witnesses' values, weighted by their time.

    The value of a witness that was there for LONG_WATCHED of the time is the tokens that it saw; of another, its speed
    times `met_s`. Witnesses publish at different times: if a long one's speed were multiplied by another's newer hours,
    the tokens of a peer that becomes slower would fall from one look to the next.
    """
    values = [
        (row.tokens_per_s * row.met_s, met_s)
        if row.met_s >= LONG_WATCHED * met_s
        else (row.tokens_per_s * met_s, row.met_s)
        for row in rows
        if row.met_s
    ]
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def confirmed(figures: Iterable[int]) -> int:
    """Return the sum of witnesses' values, in which the largest counts as at most the sum of all others.

    A lone value counts in full.
    """
    rising = sorted(figures)
    if len(rising) < 2:
        return sum(rising)
    rest = sum(rising[:-1])
    return rest + min(rising[-1], rest)


def latest(statements: Iterable[tuple[PeerId, Statement]]) -> dict[PeerId, Statement]:
    """Return the newest statement of each peer. Older statements are not needed, because a witness's sums only grow."""
    found: dict[PeerId, Statement] = {}
    for peer, statement in statements:
        if peer not in found or found[peer].time < statement.time:
            found[peer] = statement
    return found
