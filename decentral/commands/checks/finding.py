"""The result of a check: one line for the user, and a remedy if something is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class FindingState(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARN = "warn"  # a peer works, but worse than it could
    WRONG = "wrong"  # a peer cannot start, join or average
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its state, what it saw, and a remedy."""

    check: str
    state: FindingState
    seen: str  # what the check saw, in one line; it may quote other peers, so it is escaped when it is shown
    remedy: str = ""


def ok(check: str, seen: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, FindingState.OK, seen)


def warn(check: str, seen: str, remedy: str) -> Finding:
    """Return a finding that a peer works, but worse than it could."""
    return Finding(check, FindingState.WARN, seen, remedy)


def wrong(check: str, seen: str, remedy: str) -> Finding:
    """Return a finding that a peer cannot start, join or average."""
    return Finding(check, FindingState.WRONG, seen, remedy)


def unknown(check: str, seen: str, remedy: str = "") -> Finding:
    """Return a finding that the check could not be made; `remedy` says how to make the check possible."""
    return Finding(check, FindingState.UNKNOWN, seen, remedy)


def any_wrong(findings: Iterable[Finding]) -> bool:
    """Return whether some finding keeps a peer from starting, joining or averaging."""
    return any(finding.state == FindingState.WRONG for finding in findings)
