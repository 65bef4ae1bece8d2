"""Add up one peer's journal: its lives, training, exchanges and traffic. Start reading at `PeerTotals`.

A life lasts from one start of the peer's process to its end. The dashboard, reports, the summary of a local swarm,
the doctor and the simulator's statistics all use these sums.
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

MOST_LIVES = 200  # at most this many runs of a peer's process are listed; the oldest are merged, to bound the memory
# The facts about a peer before a `started` or `continued` line of its journal has been read.
NO_FACTS = events.PeerFacts(
    peer=PeerId(""), run=RunId(""), addresses=(), device="", throttle=1.0, kernels="", region="", first=0, last=0
)


@dataclass(slots=True)
class Life:
    """One life of a peer, from the start of its process to its end. All times are Unix time, seconds."""

    began: Seconds
    last: Seconds  # Unix time of the latest line that the process wrote
    joined: Seconds | None = None
    ended: str = ""  # why the process ended; "" if it was killed, or still runs

    def hear(self, t: Seconds) -> None:
        """Extend the life to Unix time `t`, at which one of its lines was written."""
        self.last = max(self.last, t)

    def join(self, t: Seconds) -> None:
        """Note that the peer joined at time `t`, if it had not joined before."""
        self.joined = self.joined or t

    def end(self, reason: str) -> None:
        """Note why the process ended."""
        self.ended = reason or "stopped"


@dataclass(slots=True)
class ExchangeTotals:
    """Counts of exchanges by outcome and reason. Reasons that this version does not know count as `other`."""

    ended: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    done_s: Seconds = 0.0  # total duration of the exchanges that ended as `done`

    def take(self, line: events.ExchangeLine) -> None:
        """Count one more exchange."""
        self.ended[line.outcome, known_reason(line.reason)] += 1
        self.done_s += line.seconds if line.outcome == "done" else 0.0

    @property
    def outcomes(self) -> Counter[str]:
        """The number of exchanges by outcome."""
        found = Counter[str]()
        for (outcome, _), count in self.ended.items():
            found[outcome] += count
        return found

    @property
    def reasons(self) -> Counter[str]:
        """The number of failed and solo exchanges by reason."""
        return self._reasons("solo", "failed")

    @property
    def failures(self) -> Counter[str]:
        """The number of failed exchanges by reason."""
        return self._reasons("failed")

    def _reasons(self, *outcomes: Outcome) -> Counter[str]:
        found = Counter[str]()
        for (outcome, reason), count in self.ended.items():
            if outcome in outcomes and reason:
                found[reason] += count
        return found

    def __add__(self, other: "ExchangeTotals") -> "ExchangeTotals":
        """Return the sums of both objects' counts and seconds."""
        return ExchangeTotals(self.ended + other.ended, self.done_s + other.done_s)


@dataclass(slots=True)
class WorkDone:
    """Totals of a peer's training, exchanges and traffic, over one run of its process or several runs."""

    step: int = 0
    stepped_at: Seconds = 0.0
    loss: float | None = None  # mean loss of the latest `step` line, nats per token; None if no loss was finite
    first_held_out: float | None = None  # loss of the first `eval` line
    tokens: int = 0
    micro_batches: int = 0
    spent: TimeSpent = NO_TIME
    exchanges: ExchangeTotals = field(default_factory=ExchangeTotals)
    sent_bytes: int = 0
    received_bytes: int = 0

    def take(self, t: Seconds, event: events.JournalEvent | None) -> None:
        """Add the next event of one run of the process. The event's line was written at Unix time `t`."""
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
        """Return this work and `later` added up; step and loss are from `later` if `later` has steps."""
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
    """The sums of one peer's journal. Lines before its first `started` line count as a separate life."""

    facts: events.PeerFacts = NO_FACTS
    lives: list[Life] = field(default_factory=list)
    starts: int = 0
    earlier: WorkDone = field(default_factory=WorkDone)  # work in all runs of the process before the latest run
    work: WorkDone = field(default_factory=WorkDone)  # work in the latest run of the process

    @classmethod
    def of(cls, lines: Iterable[JsonFields]) -> "PeerTotals":
        """Return the sums of a journal; lines that are not valid are ignored."""
        totals = cls()
        for line in recorded(lines):
            totals.take(line.t, line.event)
        return totals

    def take(self, t: Seconds, event: events.JournalEvent | None) -> None:
        """Add the next line, written at Unix time `t`; `event` is None if this version does not know the event."""
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
        """Begin a new life at Unix time `t`, and merge the two oldest lives if there are more than MOST_LIVES."""
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
