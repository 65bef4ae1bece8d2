"""Train one model together on unequal devices in different places, by asynchronous gossip.

`python -m decentral.NAME` runs `decentral/commands/NAME.py`, because that folder is searched for modules too. Import a
command as `decentral.commands.NAME` only: Python would load it once more under the shorter name.
"""

import sys
from pathlib import Path
from types import TracebackType

__version__ = "0.1.0"
__path__.append(str(Path(__file__).with_name("commands")))


def _say_unless_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[0] == "-m":  # Ctrl-C ends a command quietly while it imports what it needs
    sys.excepthook = _say_unless_interrupted
