"""How the folders become packages: docs/ARCHITECTURE.md, "Why the links"."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "scheduler", "peers", "configs")
ROOMS = {
    "comm": ("wire", "gossip", "routes", "rounds", "net"),
    "peers": ("membership", "joining", "placement", "planning", "node", "hosts"),
    "scheduler": ("shared", "sync", "throughput"),
}
PACKAGES = {
    "decentral",
    "decentral.algorithms",
    "decentral.commands.checks",
    "decentral.core",
    "decentral.dashboard",
    "decentral.view",
    "decentral.serving",
    "decentral.train",
    "decentral.sim",
    *(f"decentral.{name}" for name in LINKED),
    *(f"decentral.{folder}.{room}" for folder, rooms in ROOMS.items() for room in rooms),
}


def setuptools() -> dict[str, Any]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, Any] = tables["tool"]["setuptools"]
    return found


def test_the_packages_are_listed_once_each() -> None:
    assert sorted(setuptools()["packages"]) == sorted(PACKAGES)


def test_the_folders_at_the_top_install_under_decentral() -> None:
    expected = {"decentral": "decentral", **{f"decentral.{name}": name for name in LINKED}}
    assert setuptools()["package-dir"] == expected


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_decentral_is_relative_and_points_to_the_folder_at_the_top(name: str) -> None:
    link = ROOT / "decentral" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_at_the_top_and_its_rooms_have_no_init_file(name: str) -> None:
    assert not list((ROOT / name).rglob("__init__.py"))


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {Path("decentral"), *(Path(name) for name in LINKED)}
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert modules
    for module in modules:
        package = ".".join(module.relative_to(ROOT).parent.parts).removeprefix("decentral.")
        assert package == "decentral" or f"decentral.{package}" in PACKAGES, f"{module} is not packaged"


def test_every_shipped_config_is_package_data() -> None:
    patterns = setuptools()["package-data"]["decentral.configs"]
    packed = {path for pattern in patterns for path in (ROOT / "configs").glob(pattern)}
    assert packed == {path for path in (ROOT / "configs").rglob("*") if path.is_file()}
