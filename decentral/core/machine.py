"""Machines: `handle(event, now) -> list[Effect]`, plus `wake_at`.

A machine holds no socket, thread, tensor or clock. What must happen outside is an effect that it returns; what
came of it arrives later as an event. So one code runs over libp2p, in memory, and in virtual time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decentral.core.units import Seconds

Effect = object
"""Anything a host can carry out: see comm/wire/transport.py and core/jobs.py for the ones there are."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that a machine asked for with `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class Log:
    """Effect: write a line to the journal."""

    event: str
    fields: dict[str, Any]


def log(event: str, **fields: Any) -> Log:
    return Log(event, fields)


def earliest(times: Iterable[Seconds | None]) -> Seconds | None:
    first: Seconds | None = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first
