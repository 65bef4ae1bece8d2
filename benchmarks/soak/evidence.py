"""What a soak has seen: which peers had which fault, what their journals say, how they ended, and what they used."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]
"""A line of a journal."""

Span = tuple[float, float]
"""Unix times, from the first to the second."""


@dataclass(slots=True)
class Hit:
    """A fault as it happened. Times are unix times; None: not yet, or never."""

    kind: str
    place: int
    began: float
    late_s: float = 0.0  # it waited so long for others to recover
    lifted: float | None = None  # taken back, or the peer was started again
    over: float | None = None  # the peer trains, and where the network was hit exchanges, again
    stalled_s: float = 0.0  # between the two the whole soak stood still for so long

    @property
    def recovered_s(self) -> float | None:
        """How long it took, once the fault had been taken back."""
        return None if self.lifted is None or self.over is None else self.over - self.lifted - self.stalled_s


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended, and how it may."""

    place: int
    number: int
    code: int | None  # None: it had to be killed at the end
    expected: tuple[int, ...]
    said: str = ""  # its last line of output


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process used at a moment."""

    t: float
    place: int
    pid: int
    role: str  # peer, daemon
    age_s: float
    resident_bytes: int
    files: int


@dataclass(slots=True)
class Evidence:
    """All of it. `journals` has the lines of every peer that has lived at a place, in the order of their lives."""

    places: int
    whole: frozenset[int]  # places whose peers hold the whole model
    quiet: Span
    faulty: Span
    tail: Span  # after the last fault: who runs has to exchange
    layers: int
    journals: dict[int, list[list[Line]]] = field(default_factory=dict)
    hits: list[Hit] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    disk_bytes: dict[int, int] = field(default_factory=dict)  # the most at each place, what filled it aside
    tracebacks: list[str] = field(default_factory=list)  # whose, and its text
    stalls: list[Span] = field(default_factory=list)  # this process itself did not run: nothing can be said of then

    def lines(self, place: int, event: str) -> Iterator[Line]:
        for journal in self.journals.get(place, []):
            yield from (line for line in journal if line["event"] == event)

    def everywhere(self, event: str) -> Iterator[tuple[int, Line]]:
        for place in range(self.places):
            yield from ((place, line) for line in self.lines(place, event))


def without(span: Span, cuts: Sequence[Span]) -> list[Span]:
    """What is left of a span."""
    left, begin = list[Span](), span[0]
    for cut_begin, cut_end in sorted(cuts):
        if cut_begin > begin:
            left.append((begin, min(cut_begin, span[1])))
        begin = max(begin, cut_end)
        if begin >= span[1]:
            break
    if begin < span[1]:
        left.append((begin, span[1]))
    return [one for one in left if one[1] > one[0]]
