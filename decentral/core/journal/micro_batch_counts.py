"""Whether each layer counted each micro-batch once, or not at all, by what peers' journals say.

A `counted` line says which micro-batches' gradients went into an optimizer's step, and through which layers. No two
executions of a micro-batch, which has the origin peer's id and number, may count in the same layer. If together they
cover all layers, the micro-batch counted everywhere. If not, it counted in part: a peer died after others had counted
it, or was told too late.

An `applied` line says how many tokens an optimizer's step took into each fragment's weights. What a peer has counted,
its steps must have taken: of each of its lives, layer by layer, whatever it counts beyond that is a claim without
weights behind it, but for the last few lines, whose steps may have died with the process.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from decentral.core.journal import events
from decentral.core.journal.lines import Recorded

NOT_TAKEN_YET = 8  # `counted` lines whose steps may not have been taken when a process ended: one for each sealed sum

Span = tuple[int, int]
MicroBatch = tuple[str, int]
"""The origin peer, and its number for the micro-batch."""


@dataclass(frozen=True, slots=True)
class CountAudit:
    """How many micro-batches were counted everywhere, in part or twice."""

    everywhere: int
    in_part: int
    twice: tuple[MicroBatch, ...]  # those that some layer counted twice
    dropped: int  # executions whose gradients were thrown away
    tokens: int  # tokens of the micro-batches that counted everywhere
    unapplied: int = 0  # tokens that a peer counted in a layer, and took no optimizer's step with

    @property
    def sound(self) -> bool:
        return not self.twice and not self.unapplied

    def figures(self) -> dict[str, int]:
        figures = {"everywhere": self.everywhere, "in_part": self.in_part, "twice": len(self.twice)}
        return figures | {"thrown_away": self.dropped, "tokens": self.tokens}


@dataclass(slots=True)
class MicroBatchCounts:
    """What journals say of micro-batches, added up line by line."""

    spans: dict[MicroBatch, list[Span]] = field(default_factory=dict)
    tokens: dict[MicroBatch, int] = field(default_factory=dict)
    dropped: int = 0

    def take(self, event: events.JournalEvent | None) -> None:
        """Take a line of any peer."""
        match event:
            case events.UncountedLine():
                self.dropped += len(event.of)
            case events.CountedLine():
                for one in event.of:
                    self.spans.setdefault((one.origin, one.number), []).append((one.first, one.last))
                    self.tokens[one.origin, one.number] = one.tokens

    def result(self, layers: int) -> CountAudit:
        """The counts so far, for a model of so many layers."""
        twice = tuple(sorted(name for name, held in self.spans.items() if overlap(held)))
        everywhere = [name for name, held in self.spans.items() if name not in twice and covered(held) == layers]
        in_part = len(self.spans) - len(everywhere) - len(twice)
        return CountAudit(len(everywhere), in_part, twice, self.dropped, sum(self.tokens[name] for name in everywhere))


@dataclass(slots=True)
class LifeClaims:
    """What one life of a peer has counted, and what its optimizer's steps have taken, in tokens by layer."""

    counted: Counter[int] = field(default_factory=Counter)
    applied: Counter[int] = field(default_factory=Counter)
    tells: bool = False  # whether its journal says what its steps took
    _last: deque[events.CountedLine] = field(default_factory=lambda: deque(maxlen=NOT_TAKEN_YET))

    def take(self, event: events.JournalEvent | None) -> None:
        """Take the next line of the same life."""
        match event:
            case events.AppliedLine():
                self.tells = True
                for first, last, tokens in event.of:
                    self.applied.update(dict.fromkeys(range(first, last), tokens))
            case events.CountedLine():
                self.counted.update(_by_layer(event))
                self._last.append(event)
            case events.LostLine():  # lines that a full disk took, of either kind: what is compared begins anew
                for kept in (self.counted, self.applied, self._last):
                    kept.clear()

    @property
    def unapplied(self) -> int:
        """The tokens that were counted and that no step took, in the worst layer, without the last lines."""
        open_claims = sum(map(_by_layer, self._last), Counter[int]())
        claims = self.counted - open_claims if self.tells else Counter[int]()
        return max((self.counted - self.applied - open_claims)[layer] for layer in claims) if claims else 0


def _by_layer(line: events.CountedLine) -> Counter[int]:
    """Return, for each layer, the tokens that a `counted` line claims in it."""
    found: Counter[int] = Counter()
    for one in line.of:
        found.update(dict.fromkeys(range(one.first, one.last), one.tokens))
    return found


def audit(journals: Iterable[Iterable[Recorded[events.JournalEvent]]], layers: int) -> CountAudit:
    """Count all lines of all peers' journals, over all their lives."""
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
    """Whether some layer is in two of the spans."""
    return any(after[0] < before[1] for before, after in itertools.pairwise(sorted(spans)))


def covered(spans: Sequence[Span]) -> int:
    """The number of layers in spans that do not overlap."""
    return sum(last - first for first, last in spans)
