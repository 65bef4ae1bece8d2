"""What a check has found: one line for the user, and what to do where something is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class FindingState(StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, but worse than it could
    WRONG = "wrong"  # a peer does not start, join or average like this
    UNKNOWN = "unknown"  # it could not be found out here


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `seen` may quote other peers and is escaped where it is shown; figures have units."""

    check: str
    state: FindingState
    seen: str
    remedy: str = ""


def ok(check: str, seen: str) -> Finding:
    """All well."""
    return Finding(check, FindingState.OK, seen)


def warn(check: str, seen: str, remedy: str) -> Finding:
    """It works, but worse than it could."""
    return Finding(check, FindingState.WARN, seen, remedy)


def wrong(check: str, seen: str, remedy: str) -> Finding:
    """A peer does not start, join or average like this."""
    return Finding(check, FindingState.WRONG, seen, remedy)


def unknown(check: str, seen: str, remedy: str = "") -> Finding:
    """It could not be found out; the remedy says how it can be."""
    return Finding(check, FindingState.UNKNOWN, seen, remedy)


def any_wrong(findings: Iterable[Finding]) -> bool:
    """Whether something keeps a peer from averaging."""
    return any(finding.state == FindingState.WRONG for finding in findings)
