"""The two kinds of error that are not bugs, `UserError` and `ProtocolError`, and the exit codes of commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """The exit codes of commands. docs/READING.md explains them to users, and deploy/ names them to supervisors."""

    DONE = 0
    FAILED = 1  # a bug, or a bad result that the command has printed
    MISTAKE = 2  # the user can correct it, so neither a supervisor nor `Launcher` starts the command again
    INTERRUPTED = 130  # Ctrl-C came before the command had done its work; shells give this code, too


class UserError(Exception):
    """An error that the user can correct: the command prints its text, one line, and exits with MISTAKE.

    The text says what was expected, what came, and what to do.
    """


@contextmanager
def writing(flag: str, path: str | Path, what: str = "place") -> Iterator[None]:
    """Turn an OSError in the block into a UserError that names the flag and its path.

    Args:
        flag: The flag whose path the block writes, such as `--summary`.
        path: The path that the user gave.
        what: A noun for the error text "choose a {what} that can be written", such as `folder`.

    Raises:
        UserError: If the block raises OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}; choose a {what} that can be written") from None


class ProtocolError(Exception):
    """Raised for a message or a blob that the protocol does not allow. The receiver counts the error and goes on."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Make the error from its reason, a member of `Reason`, and a detail for people."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # one word; the journal counts these errors by reason
        self.detail = detail
