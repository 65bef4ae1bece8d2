"""The two kinds of error that are not a bug of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """An error that the user can mend: the command prints this one line and exits 2.

    The text says what was expected, what came, and what to do.
    """


@contextmanager
def writing(flag: str, path: str | Path, what: str = "place") -> Iterator[None]:
    """Raise UserError where the block cannot write what a flag names; `what` is what the user is to choose instead."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}; choose a {what} that can be written") from None


class ProtocolError(Exception):
    """A message or a blob that the protocol does not allow. It is data: counted, logged, ignored."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # one word, for the journal's counters
        self.detail = detail
