"""Check from peers' journals that no layer was trained twice on the same micro-batch. Start reading at `audit`.

A `counted` line says which micro-batches' gradients an optimizer step used, and in which layers: there the
micro-batch counts. A micro-batch is named by its origin peer and number. Two executions of a micro-batch must not count
in the same layer. If the executions cover all layers, the micro-batch counted everywhere. If not, it counted in part: a
peer died after other peers had counted the micro-batch, or a peer learned too late that the micro-batch was committed.

An `applied` line says on how many tokens an optimizer step has trained each fragment. A life of a peer lasts from one
start of its process to the next. In each life and each layer, the tokens in `counted` lines must not exceed the tokens
in `applied` lines; any excess is reported as unapplied. The last `counted` lines of a life are exempt, since the
process may have ended before the steps that they announced.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from decentral.core.journal import events
from decentral.core.journal.lines import Recorded

# After a process was killed, this many of its last `counted` lines may lack an `applied` line. The number must be above
# config.SEALED_SUMS.
NOT_TAKEN_YET = 8

Span = tuple[int, int]
MicroBatch = tuple[str, int]
"""(origin peer, number of the micro-batch at that peer)."""


@dataclass(frozen=True, slots=True)
class CountAudit:
    """How many micro-batches counted in all layers, in only some layers, or twice in a layer."""

    everywhere: int  # number of micro-batches that counted in all layers
    in_part: int  # number of micro-batches that counted in only some layers
    twice: tuple[MicroBatch, ...]  # micro-batches that some layer counted twice
    dropped: int  # number of stage executions whose gradients were discarded
    tokens: int  # number of tokens in the micro-batches that counted in all layers
    unapplied: int = 0  # counted tokens that no step used: the maximum over layers, summed over processes

    @property
    def sound(self) -> bool:
        """Whether no micro-batch counted twice in a layer, and optimizer steps applied all counted tokens."""
        return not self.twice and not self.unapplied

    def figures(self) -> dict[str, int]:
        """Return the counts by name, for a report; `unapplied` is left out."""
        figures = {"everywhere": self.everywhere, "in_part": self.in_part, "twice": len(self.twice)}
        return figures | {"thrown_away": self.dropped, "tokens": self.tokens}


@dataclass(slots=True)
class MicroBatchCounts:
    """The layers in which each micro-batch counted, collected from journals line by line."""

    spans: dict[MicroBatch, list[Span]] = field(default_factory=dict)
    tokens: dict[MicroBatch, int] = field(default_factory=dict)
    dropped: int = 0

    def take(self, event: events.JournalEvent | None) -> None:
        """Add a `counted` or `uncounted` event of any peer; ignore None and all other events."""
        match event:
            case events.UncountedLine():
                self.dropped += len(event.of)
            case events.CountedLine():
                for one in event.of:
                    self.spans.setdefault((one.origin, one.number), []).append((one.first, one.last))
                    self.tokens[one.origin, one.number] = one.tokens

    def result(self, layers: int) -> CountAudit:
        """Return the counts so far, for a model of `layers` layers; `unapplied` is left at 0."""
        twice = {name for name, held in self.spans.items() if overlap(held)}
        everywhere = [name for name, held in self.spans.items() if name not in twice and covered(held) == layers]
        in_part = len(self.spans) - len(everywhere) - len(twice)
        tokens = sum(self.tokens[name] for name in everywhere)
        return CountAudit(len(everywhere), in_part, tuple(sorted(twice)), self.dropped, tokens)


@dataclass(slots=True)
class LifeClaims:
    """Tokens per layer in one life of a peer (one run of its process), in `counted` lines and in `applied` lines."""

    counted: Counter[int] = field(default_factory=Counter)
    applied: Counter[int] = field(default_factory=Counter)
    tells: bool = False  # whether an `applied` line has come; older versions wrote none, and then nothing is compared
    _last: deque[events.CountedLine] = field(default_factory=lambda: deque(maxlen=NOT_TAKEN_YET))

    def take(self, event: events.JournalEvent | None) -> None:
        """Add the next `counted`, `applied` or `lost` event of the life; ignore None and all other events."""
        match event:
            case events.AppliedLine():
                self.tells = True
                for first, last, tokens in event.of:
                    self.applied.update(dict.fromkeys(range(first, last), tokens))
            case events.CountedLine():
                self.counted.update(_by_layer(event))
                self._last.append(event)
            case events.LostLine():  # `counted` or `applied` lines may be lost: start the comparison again
                for kept in (self.counted, self.applied, self._last):
                    kept.clear()

    @property
    def unapplied(self) -> int:
        """Counted tokens that no step applied: the maximum over layers. The last NOT_TAKEN_YET lines are left out."""
        open_claims = sum(map(_by_layer, self._last), Counter[int]())
        claims = self.counted - open_claims if self.tells else Counter[int]()
        return max((self.counted - self.applied - open_claims)[layer] for layer in claims) if claims else 0


def _by_layer(line: events.CountedLine) -> Counter[int]:
    """Return the number of tokens in a `counted` line for each layer."""
    found: Counter[int] = Counter()
    for one in line.of:
        found.update(dict.fromkeys(range(one.first, one.last), one.tokens))
    return found


def audit(journals: Iterable[Iterable[Recorded[events.JournalEvent]]], layers: int) -> CountAudit:
    """Return the counts over the journals of all peers, one iterable per peer, for a model of `layers` layers."""
    counts, unapplied = MicroBatchCounts(), 0
    for journal in journals:
        life = LifeClaims()
        for line in journal:
            counts.take(line.event)
            if isinstance(line.event, events.StartedLine):
                unapplied += life.unapplied
                life = LifeClaims()
            life.take(line.event)
        unapplied += life.unapplied
    return replace(counts.result(layers), unapplied=unapplied)


def overlap(spans: Sequence[Span]) -> bool:
    """Return whether some layer is in two of the spans [first, last)."""
    return any(after[0] < before[1] for before, after in itertools.pairwise(sorted(spans)))


def covered(spans: Sequence[Span]) -> int:
    """Return the number of layers in the spans [first, last), which must not overlap."""
    return sum(last - first for first, last in spans)
