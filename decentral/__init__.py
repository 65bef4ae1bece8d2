"""Train one model on many unequal devices in different places, by asynchronous gossip.

`python -m decentral.NAME` runs `decentral/commands/NAME.py`, because the package also searches that folder for modules.
Import a command only as `decentral.commands.NAME`: as `decentral.NAME` Python would load the module a second time.
"""

import os
import sys
from pathlib import Path
from types import TracebackType

__version__ = "0.1.0"
__path__.append(str(Path(__file__).with_name("commands")))

if sys.platform == "win32":
    print("decentral needs Linux or macOS: on Windows, run it in WSL 2 (wsl --install)", file=sys.stderr)
    sys.exit(2)
if sys.platform == "linux":
    # hivemind's own choice for tensors that processes share, "file_system", starts a process. On a busy machine that
    # process answers too late, and `datasets` then fails to open a data set.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")


def _say_unless_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[0] == "-m":  # print no traceback at Ctrl-C while `python -m decentral.NAME` starts
    sys.excepthook = _say_unless_interrupted
