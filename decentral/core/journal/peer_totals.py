"""What the lines of one peer's journal add up to: its lives, its training, its exchanges, its traffic.

The page, reports, the summary of a local swarm, the doctor, curves and the simulator's statistics all add up here.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from decentral.core.ids import PeerId, RunId
from decentral.core.journal import events
from decentral.core.journal.field_kinds import Outcome
from decentral.core.journal.lines import recorded
from decentral.core.reasons import known_reason
from decentral.core.strict_json import JsonFields
from decentral.core.time_spent import NO_TIME, TimeSpent
from decentral.core.units import Seconds

MOST_LIVES = 200  # of one peer: of more, the oldest ones count as one
NO_FACTS = events.PeerFacts(
    peer=PeerId(""), run=RunId(""), addresses=(), device="", throttle=1.0, kernels="", region="", first=0, last=0
)  # of a journal whose start is not kept


@dataclass(slots=True)
class Life:
    """From a start of the peer's process to its end. `ended`: why; "": it was killed, or trains still."""

    began: Seconds  # Unix time
    last: Seconds
    joined: Seconds | None = None
    ended: str = ""

    def hear(self, t: Seconds) -> None:
        self.last = max(self.last, t)

    def join(self, t: Seconds) -> None:
        self.joined = self.joined or t

    def end(self, reason: str) -> None:
        self.ended = reason or "stopped"


@dataclass(slots=True)
class ExchangeTotals:
    """Counts of exchanges by outcome and reason. Reasons that this program does not know count as `other`."""

    ended: Counter[tuple[Outcome, str]] = field(default_factory=Counter)  # by outcome and reason
    done_s: Seconds = 0.0  # that those done took, together

    def take(self, line: events.ExchangeLine) -> None:
        """Count one more."""
        self.ended[line.outcome, known_reason(line.reason)] += 1
        self.done_s += line.seconds if line.outcome == "done" else 0.0

    @property
    def outcomes(self) -> Counter[str]:
        """The exchanges by outcome."""
        found = Counter[str]()
        for (outcome, _), count in self.ended.items():
            found[outcome] += count
        return found

    @property
    def reasons(self) -> Counter[str]:
        """Why exchanges failed, or were made alone."""
        return self._reasons("solo", "failed")

    @property
    def failures(self) -> Counter[str]:
        """Why exchanges failed."""
        return self._reasons("failed")

    def _reasons(self, *outcomes: Outcome) -> Counter[str]:
        found = Counter[str]()
        for (outcome, reason), count in self.ended.items():
            if outcome in outcomes and reason:
                found[reason] += count
        return found

    def __add__(self, other: "ExchangeTotals") -> "ExchangeTotals":
        return ExchangeTotals(self.ended + other.ended, self.done_s + other.done_s)


@dataclass(slots=True)
class WorkDone:
    """What a peer has trained, exchanged and moved: in one life, or in several."""

    step: int = 0  # the latest
    stepped_at: Seconds = 0.0  # when its line was written
    loss: float | None = None  # of that line; None: none was finite
    first_held_out: float | None = None
    tokens: int = 0
    micro_batches: int = 0
    spent: TimeSpent = NO_TIME  # by the training thread
    exchanges: ExchangeTotals = field(default_factory=ExchangeTotals)
    sent_bytes: int = 0
    received_bytes: int = 0

    def take(self, t: Seconds, event: events.JournalEvent | None) -> None:
        """Take the next line of the same life."""
        match event:
            case events.StepLine():
                self.step, self.stepped_at, self.loss = event.step, t, event.loss
                self.tokens += event.tokens
                self.micro_batches += event.micro_batches
                self.spent += TimeSpent.by_kind({"training": event.seconds, **event.aside})
            case events.ExchangeLine():
                self.exchanges.take(event)
            case events.TrafficLine():
                self.sent_bytes = max(self.sent_bytes, event.sent_bytes)
                self.received_bytes = max(self.received_bytes, event.received_bytes)
            case events.EvalLine():
                self.first_held_out = event.loss if self.first_held_out is None else self.first_held_out

    def __add__(self, later: "WorkDone") -> "WorkDone":
        """The work of both; the other one came later."""
        return WorkDone(
            later.step or self.step,
            later.stepped_at or self.stepped_at,
            later.loss if later.step else self.loss,
            later.first_held_out if self.first_held_out is None else self.first_held_out,
            self.tokens + later.tokens,
            self.micro_batches + later.micro_batches,
            self.spent + later.spent,
            self.exchanges + later.exchanges,
            self.sent_bytes + later.sent_bytes,
            self.received_bytes + later.received_bytes,
        )


@dataclass(slots=True)
class PeerTotals:
    """The sums of one peer's journal. Lines before its first `started` line count as a life of their own."""

    facts: events.PeerFacts = NO_FACTS  # what the peer last said of itself
    lives: list[Life] = field(default_factory=list)
    starts: int = 0  # how many lives it had
    earlier: WorkDone = field(default_factory=WorkDone)  # in the lives before the present one
    work: WorkDone = field(default_factory=WorkDone)  # in the present life

    @classmethod
    def of(cls, lines: Iterable[JsonFields]) -> "PeerTotals":
        """Add up a journal, leaving out lines that cannot be read."""
        totals = cls()
        for line in recorded(lines):
            totals.take(line.t, line.event)
        return totals

    def take(self, t: Seconds, event: events.JournalEvent | None) -> None:
        """Take the next line; None: of an event that this version does not know."""
        if isinstance(event, events.PeerFacts):
            self.facts = event
        if isinstance(event, events.StartedLine) or not self.lives:
            self.begin(t)
        self.lives[-1].hear(t)
        match event:
            case events.JoinedLine():
                self.lives[-1].join(t)
            case events.StoppedLine(reason=reason):
                self.lives[-1].end(reason)
            case _:
                self.work.take(t, event)

    def begin(self, t: Seconds) -> None:
        """Begin a new life."""
        self.earlier, self.work = self.earlier + self.work, WorkDone()
        self.lives.append(Life(t, t))
        self.starts += 1
        if len(self.lives) > MOST_LIVES:
            oldest, following = self.lives[:2]
            self.lives[:2] = [replace(following, began=oldest.began, joined=oldest.joined or following.joined)]

    @property
    def whole(self) -> WorkDone:
        """The work of all lives."""
        return self.earlier + self.work

    @property
    def tokens(self) -> int:
        """The tokens of all lives."""
        return self.earlier.tokens + self.work.tokens
