"""Processes that tests start and talk to through pipes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def piped(*command: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run a command until the block ends, and kill it then: a test that fails in the block does not wait for it."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
