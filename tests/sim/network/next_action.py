"""When the next action on an agenda is due: tests let time run from one action to the next."""

from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda


def next_at(agenda: Agenda) -> Seconds | None:
    """The time of the next action that has not been called off; None if there is none."""
    timers = [*agenda._near, *(timer for bundle in agenda._later.values() for timer in bundle)]
    return min((float(when) for when, _, action in timers if action is not None), default=None)
