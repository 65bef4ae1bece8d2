"""A process that is tied to the one which started it gets SIGTERM when that one has ended, however it ended."""

import os
import signal
import subprocess
import sys

import pytest

from tests.patient_time import LIMIT_S
from tests.processes import piped

CHILD = """
import os, signal
from decentral.commands import lifeline

def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece: both children write to one pipe

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until sigwait: one that comes sooner is not lost
lifeline.heed()
lifeline.heed()  # a command's main does again what was done while it was loaded
say(lifeline.VARIABLE in os.environ)
signal.sigwait({signal.SIGTERM})
say("notice")
"""
PARENT = f"""
import os, signal, subprocess, sys
from decentral.commands import lifeline

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True, **lifeline.tied(dict(os.environ)))
signal.pause()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_children_get_notice_when_their_parent_has_ended(end: signal.Signals) -> None:
    with piped(sys.executable, "-c", PARENT) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["False\n"] * 2
        parent.send_signal(end)
        assert parent.communicate(timeout=LIMIT_S)[0] == "notice\n" * 2  # to the end of the pipe: both have ended


def test_a_process_that_nobody_has_tied_is_left_alone() -> None:
    code = "from decentral.commands import lifeline; import threading; lifeline.heed(); print(threading.active_count())"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DECENTRAL")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "1\n"
