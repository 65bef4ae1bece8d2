"""Machines: `handle(event, now) -> list[Effect]`, plus `wake_at`.

A machine holds no socket, thread, tensor or clock. Whatever must happen outside is an effect that it returns, and the
outcome arrives later as an event. So the same code runs over libp2p, in memory, and in virtual time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from decentral.core.units import Seconds

Effect = object
"""Anything that a host can carry out: the effects of comm/wire/transport.py, the jobs of core/jobs.py, and Log."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that a machine asked for with `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Log:
    """Effect: write a line to the journal."""

    event: str
    fields: dict[str, Any]


def log(event: str, **fields: Any) -> Log:
    """The effect that writes this event and its fields to the journal."""
    return Log(event, fields)


class Machine(Protocol):
    """What decides, and does nothing itself: an event and the time in, effects out."""

    @property
    def wake_at(self) -> Seconds | None:
        """When to send it Woke; None: only another event can move it."""

    def handle(self, event: object, now: Seconds) -> list[Effect]: ...


def earliest(times: Iterable[Seconds | None]) -> Seconds | None:
    """The least of the times that are not None; None if all are."""
    return min((time for time in times if time is not None), default=None)
