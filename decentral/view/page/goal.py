"""Follow how far the peers are towards their goal, `--stop-after`, from the lines of their journals.

Start reading at `GoalView`. The text of a goal comes from a journal, which somebody else may have written.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from decentral.core.errors import UserError
from decentral.core.journal.events import JoinedLine, JournalEvent, StartedLine, StepLine
from decentral.core.journal.field_kinds import MOST_NUMBER
from decentral.core.strict_json import JsonObject
from decentral.core.units import Amount, Seconds


@dataclass(slots=True)
class GoalView:
    """One peer's goal and progress since its last start. All times are Unix time."""

    goal: Amount | None = None
    joined: Seconds | None = None
    step: int = 0
    tokens: int = 0  # number of training tokens since the start
    _before: int | None = None  # step of the first line about steps since the start; None before that line

    def take(self, t: Seconds, event: JournalEvent | None) -> None:
        """Update from a line of the peer's journal, written at time `t`."""
        match event:
            case StartedLine():
                self.goal, self.joined, self.tokens, self._before = amount_of(event.stop_after), None, 0, None
            case JoinedLine():
                self.joined = t
            case StepLine():
                self.step, self.tokens = event.step, self.tokens + event.tokens
                self._before = event.step if self._before is None else self._before

    def towards(self, now: Seconds) -> tuple[float, Seconds | None] | None:
        """Return the share of the goal that is done, 0 to 1, and the seconds left at the mean pace (None: not known).

        The result is None without a goal, or before the peer trains.
        """
        if self.goal is None or self.joined is None:
            return None
        if self.goal.kind == "s":
            return towards_time(self.goal.value, self.joined, now)
        done, before = (self.step, self._before) if self.goal.kind == "steps" else (self.tokens, 0)
        pace = (done - (done if before is None else before)) / max(1e-3, now - self.joined)
        share = min(1.0, done / self.goal.value)
        return share, max(0.0, self.goal.value - done) / pace if pace else None


def amount_of(text: str) -> Amount | None:
    """Return the amount in a text such as `90s`; None for any other text, or an amount of MOST_NUMBER and more."""
    with suppress(UserError):
        if text and (found := Amount.parse(text)).value < MOST_NUMBER:
            return found
    return None


def towards_time(goal_s: Seconds, since: Seconds, now: Seconds) -> tuple[float, Seconds]:
    """Return the share of a goal in seconds that has passed since `since`, 0 to 1, and the seconds left."""
    done_s = max(0.0, now - since)
    return min(1.0, done_s / goal_s), max(0.0, goal_s - done_s)


def goal_json(text: str, progress: Iterable[tuple[float, Seconds | None]]) -> JsonObject:
    """Return a goal of several peers as JSON: its text, the smallest share that a peer has done, the longest time left.

    The result is {} if no peer is on its way to the goal.
    """
    known = list(progress)
    if not known:
        return {}
    times = [left_s for _, left_s in known if left_s is not None]
    return {"text": text, "share": round(min(share for share, _ in known), 3), "left_s": round(max(times, default=-1))}
