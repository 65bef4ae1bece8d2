"""What a command does where its output cannot be written: its reader, its terminal or the room on the disk is gone."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, and a terminal that was closed: for ever


class OutputGone(Exception):
    """The output that is a command's result cannot be written; `nobody_reads`: its reader has closed the pipe."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written ({error.strerror})")
        self.nobody_reads = error.errno == errno.EPIPE


class Output:
    """A text stream whose only error is `OutputGone`; it has none where the command's work outlasts its output."""

    def __init__(self, stream: TextIO | None, lasting: bool) -> None:
        """`stream`: None if it is closed."""
        self._stream, self._lasting = stream or StringIO(), lasting

    def write(self, text: str) -> int:
        """Write the text, as the stream's own `write` does. Raises OutputGone unless lasting."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Write what waits in buffers. Raises OutputGone unless lasting."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        if not self._lasting:
            self._give_up()
            raise OutputGone(error) from None
        if error.errno in GONE:
            self._give_up()

    def close(self) -> None:
        """Write what waits in buffers for the last time. Raises OutputGone unless lasting."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up()  # else Python tries again when it ends
            if not self._lasting:
                raise OutputGone(error) from None

    def _give_up(self) -> None:
        """Let all that is written from now on, and what waits in buffers, go nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def outputs(lasting: bool) -> Iterator[None]:
    """Replace stdout and stderr by `Output` streams within the block, and flush them at its end.

    Args:
        lasting: Whether to go on when stdout cannot be written.

    Raises:
        OutputGone: If stdout cannot be written and not lasting.
    """
    own = sys.stdout, sys.stderr
    streams = [Output(own[0], lasting), Output(own[1], lasting=True)]
    sys.stdout, sys.stderr = cast(list[TextIO], streams)
    try:
        try:
            yield
        finally:
            for stream in streams:
                stream.close()
    finally:
        sys.stdout, sys.stderr = own
