"""Suggest the known name nearest to a mistyped one, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, ignoring case; None if none is near."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NEAR?` with the known name nearest to `name`, or "" if none is near."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def listed(name: str, known: Iterable[str]) -> str:
    """Return the known names, and the one nearest to `name` if one is near: `a, b; did you mean a?`."""
    names = list(known)
    return f"{', '.join(names)}{did_you_mean(name, names)}"
