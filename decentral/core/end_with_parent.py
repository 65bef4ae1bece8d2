"""End a process when the thread that started it ends, even if SIGKILL ended that thread; only on Linux.

    python end_with_parent.py PID PROGRAM ARGUMENTS...     runs PROGRAM, which is killed when its parent PID ends

The file imports nothing of decentral, so that it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h: send a signal when the parent ends


def end_with_parent(by: signal.Signals) -> None:
    """Make Linux send this process the signal `by` when the thread that started it ends; elsewhere do nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(by))


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before `end_with_parent` was called
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])
