"""Train one model on many unequal devices in different places, by asynchronous gossip.

`python -m decentral.NAME` runs `decentral/commands/NAME.py`, because the package also searches that folder for modules.
Import a command only as `decentral.commands.NAME`: as `decentral.NAME` Python would load the module a second time.
"""

import sys
from pathlib import Path
from types import TracebackType

__version__ = "0.1.0"
__path__.append(str(Path(__file__).with_name("commands")))


def _say_unless_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[0] == "-m":  # print no traceback at Ctrl-C while `python -m decentral.NAME` starts
    sys.excepthook = _say_unless_interrupted
