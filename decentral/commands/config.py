"""python -m decentral.config: print every key of a config with its meaning, default, unit and range, as YAML.

The output is itself a valid config, with every key at its default. The documentation site shows it, too.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from decentral.commands import shared
from decentral.core.config import Config
from decentral.core.config_keys import Key, keys_of
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean

HEAD = """\
# Every key of a config, at its default. A file of your own needs only the keys in which it differs.
# Start a run with it: python -m decentral.peer FILE; or change one key: --set gossip.window_s=2
"""
COMMENT_COLUMNS = 100  # comments in a printed config are wrapped at this column


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    print(everything() if flags.explain is None else explained(flags.explain), end="")


def everything() -> str:
    """Return the config of all defaults as YAML, with a comment above each key."""
    return f"{HEAD}\n" + _yaml(keys_of(Config))


def explained(path: str) -> str:
    """Return one key as YAML with its comment, or a section with all keys in it.

    Raises:
        UserError: If there is no such key; the error names the nearest key.
    """
    known = keys_of(Config)
    found = [key for key in known if f"{key.path}.".startswith(f"{path}.")]
    if not found:
        raise UserError(f"--explain: unknown key {path}{did_you_mean(path, [key.path for key in known])}")
    return textwrap.dedent(_yaml(found))


def _yaml(keys: Iterable[Key]) -> str:
    return "\n".join(line for key in keys for line in (*_lines(key), ""))


def _lines(key: Key) -> Iterator[str]:
    *sections, name = key.path.split(".")
    margin = "  " * len(sections)
    facts = [f"Unit: {key.unit}."] * bool(key.unit) + [f"Range: {key.allowed}"] * bool(key.allowed)
    yield from comment((key.meaning, " ".join(facts)), margin)
    yield f"{margin}{'# ' * key.is_idle}{name}: {key.default}".rstrip()


def comment(texts: Iterable[str], margin: str) -> Iterator[str]:
    """Yield the lines of a YAML comment, wrapped at COMMENT_COLUMNS: each text that is not empty begins a line.

    Args:
        texts: The texts.
        margin: Spaces before each `#`.
    """
    for text in filter(None, texts):
        yield from textwrap.wrap(
            " ".join(text.split()),  # YAML has line ends that textwrap keeps, such as U+2028
            COMMENT_COLUMNS,
            initial_indent=f"{margin}# ",
            subsequent_indent=f"{margin}# ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    does = "Print a config with every key at its default, and each key's meaning, unit and range."
    parser = shared.Parser(prog="python -m decentral.config", description=does)
    parser.add_argument("--explain", metavar="KEY", help="print only this key or section, such as gossip.window_s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
