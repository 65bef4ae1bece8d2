"""The event and the effect that all state machines share. A machine is `handle(event, now) -> list[Effect]`.

A machine's `wake_at` is the time at which it wants a timer event (`Woke`). A machine has no socket, thread, tensor or
clock. It returns an effect for each action of its host, and receives the outcome later as an event
(comm/wire/transport.py). The same machine therefore runs over libp2p, in memory, and in virtual time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.core.journal.events import JournalEvent
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class Woke:
    """Timer event: the time in the machine's `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Log:
    """Effect: write an event to the journal."""

    event: JournalEvent


def earliest(times: Iterable[Seconds | None]) -> Seconds | None:
    """Return the earliest time, ignoring None; None if all are None or there are no times."""
    return min([time for time in times if time is not None], default=None)
