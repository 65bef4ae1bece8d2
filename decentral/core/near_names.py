"""Names near to one that is not known, for the errors that a user's typing mistake causes."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NEAR?` for the nearest of the known names; "" where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
