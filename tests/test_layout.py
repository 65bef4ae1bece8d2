"""How the folders become packages: docs/ARCHITECTURE.md, "Why the links"."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.test_rooms import MODULES

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "scheduler", "peers", "configs")


def setuptools() -> dict[str, Any]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, Any] = tables["tool"]["setuptools"]
    return found


def package(module: str) -> str:
    """Return the package that a module is in, by the module's name below `decentral`."""
    return ".".join(["decentral", *module.split(".")[:-1]])


def test_every_folder_with_modules_is_a_listed_package_and_no_other_is() -> None:
    expected = {*map(package, MODULES), *(f"decentral.{name}" for name in LINKED)}
    assert sorted(setuptools()["packages"]) == sorted(expected)


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


def test_every_other_folder_with_modules_says_in_its_init_file_what_it_holds() -> None:
    own = {path.parent for module, path in MODULES.items() if module.split(".")[0] not in LINKED}
    assert [folder for folder in own if not (folder / "__init__.py").is_file()] == []


def test_every_shipped_config_is_package_data() -> None:
    patterns = setuptools()["package-data"]["decentral.configs"]
    packed = {path for pattern in patterns for path in (ROOT / "configs").glob(pattern)}
    assert packed == {path for path in (ROOT / "configs").rglob("*") if path.is_file()}
