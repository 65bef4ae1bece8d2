"""Ties the processes that a command starts to its own life: they leave in order when it has ended, however it ended.

The command holds the writing end of a pipe, of which nothing is ever written; the system closes it with the process. A
process that was given the other end gets SIGTERM then, as a notice from its host. This works on every system, and also
for a process that is still loading its libraries when the command ends.
"""

import os
import signal
import threading
from functools import cache
from typing import Any

VARIABLE = "DECENTRAL_LIFELINE"  # in the environment: the descriptor of the pipe's reading end


@cache
def _pipe() -> tuple[int, int]:
    return os.pipe()


def tied(environment: dict[str, str]) -> dict[str, Any]:
    """Return the options of subprocess.Popen, `env` included, for a process that leaves when this one has ended."""
    reading, _ = _pipe()
    return {"pass_fds": (reading,), "env": {**environment, VARIABLE: str(reading)}}


def heed() -> None:
    """Send this process SIGTERM once the process that has started it has ended, if that one wants it so."""
    reading = os.environ.pop(VARIABLE, None)  # what this process starts has no such descriptor
    if reading is not None:
        os.set_inheritable(int(reading), False)
        threading.Thread(target=_wait, args=(int(reading),), name="lifeline", daemon=True).start()


def _wait(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
