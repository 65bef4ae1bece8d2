"""Suggest the known name nearest to a mistyped one, for error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NEAR?` with the known name nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
