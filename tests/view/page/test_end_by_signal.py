"""The page's process ends in an orderly way by SIGTERM, also where a script has started it in the background."""

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

# A shell that starts a command with `&` lets it ignore Ctrl-C.
BACKGROUND = "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
BACKGROUND += "runpy.run_module('decentral.dashboard', run_name='__main__', alter_sys=True)"


def test_a_page_in_the_background_ends_by_sigterm_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BACKGROUND, str(tmp_path), "--at", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert page.stderr is not None
        address = page.stdout.readline().removeprefix("the page: ").strip()
        with urllib.request.urlopen(address) as answer:
            assert answer.status == 200
        page.send_signal(signal.SIGTERM)
        assert page.stderr.read() == ""
        assert page.wait() == 0
