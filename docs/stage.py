"""Lay out the pages of the documentation's site: `python -m docs.stage FOLDER`; `make docs` then builds it.

README.md becomes the first page; CONTRIBUTING.md and docs/ stay as they are. Five pages are generated: COMMANDS.md
from what each command's --help prints, CONFIG.md from what `decentral config` prints, METRICS.md from the table of
metrics, REASONS.md from the comments behind the reasons, and MAP.md from the first sentence of each module (`python -m
docs.stage --map` prints it). On the site, a link to a page leads to that page, a link to the source of a generated page
leads to the generated page, and a link to anything else becomes its text.
"""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path, PurePosixPath

from decentral.commands.config import everything
from decentral.commands.table import COMMANDS, module_of
from decentral.view.metrics import METRICS

ROOT = Path(__file__).parent.parent
PRODUCT = ("decentral", "comm", "scheduler", "peers")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HELP_COLUMNS = "100"


def stage(folder: Path) -> None:
    """Write all pages into the folder, and make it."""
    places = pages()
    linked = places | {PurePosixPath(source): PurePosixPath(place) for source, (place, _) in GENERATED.items()}
    for source, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(relinked((ROOT / source).read_text(), source, linked))
        else:
            shutil.copy(ROOT / source, target)
    for name, text in GENERATED.values():
        (folder / name).write_text(text())


def pages() -> dict[PurePosixPath, PurePosixPath]:
    """Return the place on the site of each page and each picture, by its place in the checkout."""
    docs = sorted(path for kind in ("*.md", "*.png", "*.svg") for path in (ROOT / "docs").rglob(kind))
    found = {PurePosixPath("README.md"): "index.md", PurePosixPath("CONTRIBUTING.md"): "CONTRIBUTING.md"}
    found |= {PurePosixPath(page.relative_to(ROOT)): str(page.relative_to(ROOT / "docs")) for page in docs}
    return {source: PurePosixPath(place) for source, place in found.items()}


def relinked(text: str, source: PurePosixPath, places: dict[PurePosixPath, PurePosixPath]) -> str:
    """Return the page with its links as they have to be on the site."""

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
    """Return a page with the help of every command."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parts = ["# Commands", "`decentral NAME` is short for `python -m decentral.NAME`."]
    for name, one in COMMANDS.items():
        parts += [f"## {name}", f"{one.does[0].upper()}{one.does[1:]}.", f"```text\n{help_of(name)}\n```"]
    return "\n\n".join(parts) + "\n"


def help_of(name: str) -> str:
    """Return what a command's --help prints."""
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        module_of(name).parse(["--help"])
    return printed.getvalue().strip()


def config() -> str:
    """Return a page with every key of the config."""
    return f"# Config\n\n```yaml\n{everything()}```\n"


def metrics() -> str:
    """Return a page with every metric of a peer."""
    lines = ["# Metrics", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for one in METRICS:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.shown_name}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(lines) + "\n"


def reasons() -> str:
    """Return a page with every reason and the comment behind it, by group."""
    lines = ["# Reasons", "", "| reason | meaning |", "|---|---|"]
    for line in (ROOT / "decentral/core/reasons.py").read_text().splitlines():
        if group := re.fullmatch(r" {4}# Reasons (about .+)", line):
            lines.append(f"| **{group[1]}** | |")
        elif found := re.fullmatch(r' {4}[A-Z_]+ = "([a-z-]+)"  # (.+)', line):
            lines.append(f"| `{found[1]}` | {found[2]} |")
    return "\n".join(lines) + "\n"


def file_map() -> str:
    """Return a page with a line for each module of the product, by folder."""
    lines, folder = ["# File map"], Path()
    for module in modules():
        if module.parent != folder:
            folder = module.parent
            lines += ["", f"## `{folder}/`", ""]
        lines.append(f"- `{module}`: {first_sentence((ROOT / module).read_text())}")
    return "\n".join(lines) + "\n"


def modules() -> Iterator[Path]:
    """Yield the path of each module, without the links to other folders in `decentral/`."""
    for top in PRODUCT:
        for path in sorted((ROOT / top).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            module = path.relative_to(ROOT)
            if path.name != "__init__.py" and not (top == "decentral" and (ROOT / top / module.parts[1]).is_symlink()):
                yield module


def first_sentence(source: str) -> str:
    """Return the first sentence of a module's docstring; "" if it has none."""
    first_paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(first_paragraph.split()))[0]


GENERATED = {  # source in the checkout -> its page on the site, and what returns that page's text
    "decentral/commands/table.py": ("COMMANDS.md", commands),
    "decentral/core/config.py": ("CONFIG.md", config),
    "decentral/core/reasons.py": ("REASONS.md", reasons),
    "decentral/view/metrics.py": ("METRICS.md", metrics),
    "docs/stage.py": ("MAP.md", file_map),
}

if __name__ == "__main__":
    if sys.argv[1] == "--map":
        print(file_map(), end="")
    else:
        stage(Path(sys.argv[1]))
