"""What all machines share. A machine is `handle(event, now) -> list[Effect]`, plus `wake_at`.

A machine holds no socket, thread, tensor or clock. Whatever must happen outside is an effect that it returns, and the
outcome arrives later as an event (comm/wire/transport.py). So the same code runs over libp2p, in memory, and in virtual
time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.core.journal.events import JournalEvent
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that a machine asked for with `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Log:
    """Effect: write an event to the journal."""

    event: JournalEvent


def earliest(times: Iterable[Seconds | None]) -> Seconds | None:
    """The least of the times that are not None; None if all are."""
    return min([time for time in times if time is not None], default=None)
