"""Make child processes stop in order when the command that started them ends, even by SIGKILL.

The command holds the writing end of a pipe to which nothing is ever written; the system closes it with the process. A
child that has the reading end then sends itself SIGTERM, which a peer takes as a notice from its host. This works on
every POSIX system, and also for a child that is still loading its libraries when the command ends.
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
    """Watch for the end of the parent and then send this process SIGTERM, if the parent used `tied`.

    Starts a daemon thread, and returns at once. A second call does nothing.
    """
    reading = os.environ.pop(VARIABLE, None)  # what this process starts has no such descriptor
    if reading is not None:
        os.set_inheritable(int(reading), False)
        threading.Thread(target=_wait, args=(int(reading),), name="lifeline", daemon=True).start()


def _wait(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
