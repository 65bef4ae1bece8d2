"""The documentation as a site: its builder finds no page, link or anchor that is missing, and its links stay inside."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from decentral.commands.config import everything
from decentral.commands.table import COMMANDS
from docs import stage

ROOT = Path(__file__).parent.parent
ZENSICAL = Path(sys.executable).parent / "zensical"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    stage.stage(folder / "build" / "pages")
    shutil.copy(ROOT / "zensical.toml", folder)
    return folder / "build" / "pages"


def named(nav: list[Any]) -> set[str]:
    """The pages of a nav, at all its levels."""
    found: set[str] = set()
    for entry in nav:
        for target in entry.values():
            found |= {target} if isinstance(target, str) else named(target)
    return found


@pytest.mark.skipif(not ZENSICAL.exists(), reason="zensical is not installed here")
def test_the_site_builds_without_a_warning(pages: Path) -> None:
    folder = pages.parent.parent
    done = subprocess.run([ZENSICAL, "build", "--strict"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "site" / "index.html").exists()


def test_every_page_has_a_place_in_the_nav(pages: Path) -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert named(nav) == {str(page.relative_to(pages)) for page in pages.rglob("*.md")}


def test_every_command_s_help_is_on_the_site(pages: Path) -> None:
    text = (pages / "COMMANDS.md").read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(COMMANDS)
    assert text.count("\nexamples:\n") == len(COMMANDS)


def test_every_key_of_the_config_is_on_the_site(pages: Path) -> None:
    assert everything() in (pages / "CONFIG.md").read_text()


def test_the_pictures_of_the_pages_are_on_the_site(pages: Path) -> None:
    shown = [
        page.parent / name
        for page in pages.rglob("*.md")
        for name in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    ]
    assert shown
    assert not [picture for picture in shown if not picture.is_file()]


def test_a_link_to_a_source_file_becomes_its_text() -> None:
    page = PurePosixPath("docs/results/a.md")
    places = {page: PurePosixPath("results/a.md"), PurePosixPath("README.md"): PurePosixPath("index.md")}
    text = "[code](../../decentral/commands/peer.py), [first](../../README.md#two-commands), [there](#here), [out](http://x)"
    assert (
        stage.relinked(text, page, places) == "code, [first](../index.md#two-commands), [there](#here), [out](http://x)"
    )


def test_a_link_to_the_source_of_a_generated_page_leads_to_that_page(pages: Path) -> None:
    assert "[file map](MAP.md)" in (pages / "ARCHITECTURE.md").read_text()
    assert "[all commands](COMMANDS.md)" in (pages / "index.md").read_text()
    assert "(METRICS.md)" in (pages / "OBSERVING.md").read_text()
    assert "(REASONS.md)" in (pages / "PROTOCOL.md").read_text()
