"""Run a command as `decentral COMMAND ...`, which does the same as `python -m decentral.COMMAND ...`.

Only the chosen command is imported, so that listing the commands or printing the version does not load torch.
"""

import sys
from collections.abc import Sequence

from decentral import __version__
from decentral.commands import shared
from decentral.commands.table import COMMANDS, module_of
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean

# What people type for a command that has another name.
OTHER_NAMES = {
    **dict.fromkeys(("status", "list", "ls", "peers"), "ps"),
    **dict.fromkeys(("train", "run"), "local (all peers on this machine) or peer (one)"),
    **dict.fromkeys(("start", "join"), "peer"),
    "kill": "stop",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code, which is 2 if there is no such command.

    Without arguments, or with --help or --version, print the overview or the version and return 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return shared.run(lambda: print(overview()))
    if arguments[0] in ("-V", "--version"):
        return shared.run(lambda: print(f"decentral {__version__}"))
    if arguments[0] not in COMMANDS:
        return shared.run(lambda: _unknown(arguments[0]))
    with shared.loading():
        chosen = module_of(arguments[0])
    code: int = chosen.main(arguments[1:])
    return code


def overview() -> str:
    """Return the text of `decentral --help`: one line for each command."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {one.does}" for name, one in COMMANDS.items())
    head = f"decentral {__version__}: train one model on many unequal devices in different places"
    more = "decentral COMMAND --help shows a command's flags and examples."
    return "\n".join([head, "", "usage: decentral COMMAND ...", "", *lines, "", more])


def _unknown(name: str) -> None:
    meant = OTHER_NAMES.get(name.lower())
    hint = f"; did you mean {meant}?" if meant else did_you_mean(name, COMMANDS)
    raise UserError(f"expected a command, one of {', '.join(COMMANDS)}; got {name!r}{hint}")


if __name__ == "__main__":
    sys.exit(main())
