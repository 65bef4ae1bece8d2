"""Lays out the pages of the documentation's site: `python -m docs.stage FOLDER`; `make docs` then builds it.

README.md becomes the first page, CONTRIBUTING.md and docs/ stay as they are, and COMMANDS.md is made from what each
command's --help prints. Links between pages lead to where the pages are then; a link to anything else, such as a source
file, becomes its text.
"""

import os
import re
import shutil
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path, PurePosixPath

from decentral.commands.table import COMMANDS, module_of

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HELP_COLUMNS = "100"


def stage(folder: Path) -> None:
    """Writes all pages into the folder, which it makes."""
    places = pages()
    for source, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(relinked((ROOT / source).read_text(), source, places))
        else:
            shutil.copy(ROOT / source, target)
    (folder / "COMMANDS.md").write_text(commands())


def pages() -> dict[PurePosixPath, PurePosixPath]:
    """Where each page and each picture is in the checkout, and where it will be on the site."""
    docs = sorted(path for kind in ("*.md", "*.png", "*.svg") for path in (ROOT / "docs").rglob(kind))
    found = {PurePosixPath("README.md"): "index.md", PurePosixPath("CONTRIBUTING.md"): "CONTRIBUTING.md"}
    found |= {PurePosixPath(page.relative_to(ROOT)): str(page.relative_to(ROOT / "docs")) for page in docs}
    return {source: PurePosixPath(place) for source, place in found.items()}


def relinked(text: str, source: PurePosixPath, places: dict[PurePosixPath, PurePosixPath]) -> str:
    """The page with its links as they have to be on the site."""

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in target:
            return match[0]
        named = places.get(PurePosixPath(os.path.normpath(source.parent / path)))
        if named is None:
            return label
        return f"[{label}]({os.path.relpath(named, places[source].parent)}{hash_sign}{anchor})"

    return LINK.sub(link, text)


def commands() -> str:
    """A page with the help of every command."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parts = ["# Commands", "`decentral NAME` is short for `python -m decentral.NAME`."]
    for name, one in COMMANDS.items():
        parts += [f"## {name}", f"{one.does[0].upper()}{one.does[1:]}.", f"```text\n{help_of(name)}\n```"]
    return "\n\n".join(parts) + "\n"


def help_of(name: str) -> str:
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        module_of(name).parse(["--help"])
    return printed.getvalue().strip()


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
