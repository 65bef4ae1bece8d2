"""Write times and durations for people, as short texts."""

from datetime import datetime

from decentral.core.units import Seconds

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def clock_time(t: Seconds) -> str:
    """Return a Unix time as date and time of this machine's time zone, such as `2026-11-28 03:46:23`."""
    return f"{datetime.fromtimestamp(t):%Y-%m-%d %H:%M:%S}"


def duration(seconds: Seconds) -> str:
    """Return a duration with one or two units: `47 s`, `4 min`, `2 h 5 min`, `3 d`; a negative one as `0 s`."""
    whole = max(0, round(seconds))
    if whole < 2 * MINUTE_S:
        return f"{whole} s"
    if whole < 2 * HOUR_S:
        return f"{whole // MINUTE_S} min"
    if whole < 2 * DAY_S:
        return f"{whole // HOUR_S} h" + (f" {rest} min" if (rest := whole % HOUR_S // MINUTE_S) else "")
    return f"{whole // DAY_S} d" + (f" {rest} h" if (rest := whole % DAY_S // HOUR_S) else "")


def precise(seconds: Seconds) -> str:
    """Return a duration with its sign: `3.14 s` or `-3 s` below a minute, and in the units of `duration` above."""
    if abs(seconds) < MINUTE_S:
        return f"{seconds:.3g} s"
    return "-" * (seconds < 0) + duration(abs(seconds))


def ago(t: Seconds, now: Seconds) -> str:
    """Return how long ago a time was, such as `4 min ago`; both are Unix times."""
    return f"{duration(now - t)} ago"
