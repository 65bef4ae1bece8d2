"""Make child processes stop in an orderly way when the command that started them ends, even if SIGKILL ends it.

The command has the writing end of a pipe, and never writes to it; the system closes this end when the command ends.
A child has the reading end, and sends itself SIGTERM when the pipe closes. On SIGTERM, a peer saves and leaves.
This works on every POSIX system, and also for a child that is still loading its libraries when the command ends.
"""

import os
import signal
import threading
from functools import cache
from typing import Any

VARIABLE = "DECENTRAL_LIFELINE"  # environment variable with the file descriptor of the pipe's reading end


@cache
def _pipe() -> tuple[int, int]:
    return os.pipe()


def tied(environment: dict[str, str]) -> dict[str, Any]:
    """Return options of subprocess.Popen for a child that gets SIGTERM when this process ends.

    The child must call `heed`. The option `env` is a copy of `environment`, in which VARIABLE names the pipe.
    """
    reading, _ = _pipe()
    return {"pass_fds": (reading,), "env": {**environment, VARIABLE: str(reading)}}


def heed() -> None:
    """Start a daemon thread that sends this process SIGTERM when its parent ends, if the parent used `tied`.

    A second call does nothing.
    """
    reading = os.environ.pop(VARIABLE, None)  # removed, so that child processes do not inherit it
    if reading is not None:
        os.set_inheritable(int(reading), False)
        threading.Thread(target=_wait, args=(int(reading),), name="lifeline", daemon=True).start()


def _wait(reading: int) -> None:
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)
