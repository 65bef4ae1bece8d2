"""Turn failures to write to stdout or stderr into `OutputGone`: the reader or terminal is gone, or the disk is full."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO, TextIOWrapper
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO)  # permanent errors: the pipe has no reader, or the terminal is closed


class OutputGone(Exception):
    """Raised when a command's result cannot be written to stdout."""

    def __init__(self, error: OSError) -> None:
        """Make the error from the OSError; attribute `nobody_reads` says whether the reader has closed the pipe."""
        super().__init__(f"the output cannot be written ({error.strerror})")
        self.nobody_reads = error.errno == errno.EPIPE


class Output:
    """A wrapper of stdout or stderr. A failed write raises `OutputGone`, or is ignored if `lasting`."""

    def __init__(self, stream: TextIO | None, lasting: bool) -> None:
        """Wrap a stream.

        Args:
            stream: The stream; None: the stream is closed, so all text is discarded.
            lasting: Whether the command goes on without an error if the stream cannot be written.
        """
        self._stream, self._lasting = stream or StringIO(), lasting

    def write(self, text: str) -> int:
        """Write a text and return its length. Raise OutputGone if the stream cannot be written, unless lasting."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream. Raise OutputGone if the stream cannot be written, unless lasting."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped stream, such as `flush`."""
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        if not self._lasting:
            self._give_up()
            raise OutputGone(error) from None
        if error.errno in GONE:
            self._give_up()

    def close(self) -> None:
        """Flush the stream for the last time. Raise OutputGone if it cannot be written, unless lasting."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up()  # otherwise Python would flush the broken stream again at exit
            if not self._lasting:
                raise OutputGone(error) from None

    def _give_up(self) -> None:
        """Redirect the stream to /dev/null: discard buffered text and all later text."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Unpadded:
    """A text stream that removes the blanks at the ends of lines, with which rich pads the last cell of a table."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, which must not be a terminal: there, color codes may follow the blanks."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text that ends at the end of a line, and return its length before blanks are removed."""
        self._stream.write(re.sub(" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the wrapped stream, such as `flush`."""
        return getattr(self._stream, name)


@contextmanager
def outputs(lasting: bool) -> Iterator[None]:
    """Replace stdout and stderr by `Output` streams within the block, and flush them when it ends.

    Args:
        lasting: Whether the command goes on if stdout cannot be written. It always goes on without stderr.

    Raises:
        OutputGone: If stdout cannot be written, unless `lasting`.
    """
    own = sys.stdout, sys.stderr
    if isinstance(own[0], TextIOWrapper):
        own[0].reconfigure(errors="replace")  # print ? for characters that the terminal's encoding lacks
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
