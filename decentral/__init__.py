"""Train one model together on unequal devices in different places, by asynchronous gossip.

`python -m decentral.NAME` runs `decentral/commands/NAME.py`, because that folder is searched for modules too. Import a
command as `decentral.commands.NAME` only: Python would load it once more under the shorter name.
"""

from pathlib import Path

__version__ = "0.1.0"
__path__.append(str(Path(__file__).with_name("commands")))
