"""What a step has measured: a line of JSON for each figure, so that a step that is cut off keeps what it has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SAID = 300  # characters of an error


class Notes:
    """The figures of one step. They are written to a file, and printed for the log."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, name: str, value: object) -> None:
        """Write a figure that JSON can hold."""
        line = json.dumps({name: value})
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def attempt(self, name: str, call: Callable[[], object]) -> None:
        """Write what the call returns, or `{"failed": reason}` if it raises, and go on."""
        try:
            self.put(name, call())
        except Exception as error:
            self.put(name, {"failed": said(error)})


def said(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_SAID]


def read(path: Path) -> dict[str, Any]:
    """Return the figures of a step by name; none if it has written none. A last line that was cut off is left out."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            found.update(json.loads(line))
    return found
