"""Imports point down: docs/ARCHITECTURE.md has the floors, this holds them.

0 core; 1 the machines of comm, scheduler, train; 2 peers; 3 drivers; 4 commands and the simulator. A module imports
from its own package and from floors below, never from a sibling.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"core": 0, "configs": 0, "comm": 1, "scheduler": 1, "train": 1, "peers": 2, "sim": 4}
DRIVERS = {"comm.libp2p", "comm.loopback", "comm.streams", "comm.virtual", "comm.virtual_directory"}
DRIVERS |= {"peers.host", "peers.virtual"}
OUTSIDE = {"asyncio", "socket", "threading", "time", "random"}  # not on floors 0 to 2 ...
MAY = {  # ... but for these
    "core.rng": {"random"},
    "train.compute": {"time"},
    "train.hops": {"time"},
    "train.step": {"time"},
    "train.measure": {"time"},
}
ALLOWED = {
    "torch": {"train", "comm.compress", "sim", "simulate"},
    "hivemind": {"comm.libp2p"},
}  # who may use it, by module or package


def modules() -> dict[str, Path]:
    """Every module by its name below `decentral`; a command has no dot in it."""
    own = ("core", "train", "sim")
    folders = {"": ROOT / "decentral", **{f"{name}.": ROOT / "decentral" / name for name in own}}
    folders |= {f"{name}.": ROOT / name for name in ("comm", "scheduler", "peers", "configs")}
    return {prefix + path.stem: path for prefix, folder in folders.items() for path in sorted(folder.glob("*.py"))}


MODULES = modules()


def floor(module: str) -> int:
    if any(module == driver or module.startswith(driver + ".") for driver in DRIVERS):
        return 3
    package = module.split(".")[0]
    return 4 if package in MODULES and package != "__init__" else FLOORS.get(package, 0)


@cache
def imports(module: str) -> list[str]:
    """Dotted names of all that the module imports, `from x import y` as `x.y`."""
    names = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def users_of(library: str) -> set[str]:
    return {module for module in MODULES if any(name.split(".")[0] == library for name in imports(module))}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_package_and_from_below(module: str) -> None:
    ours = floor(module)
    for other in [name.removeprefix("decentral.") for name in imports(module) if name.startswith("decentral.")]:
        same = other.split(".")[0] == module.split(".")[0] or ours == 4
        assert floor(other) < ours or (same and floor(other) == ours), other


@pytest.mark.parametrize("module", [module for module in MODULES if floor(module) <= 2])
def test_time_chance_and_the_network_stay_outside_the_lower_floors(module: str) -> None:
    names = {name.split(".")[0] for name in imports(module) if name != "random.Random"}  # a type is no chance
    assert names & OUTSIDE <= MAY.get(module, set())


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_used_where_it_belongs_and_nowhere_else(library: str) -> None:
    users = users_of(library)
    assert users
    assert {user for user in users if not {user, user.split(".")[0]} & ALLOWED[library]} == set()


def test_cupy_is_known_to_one_file_at_most() -> None:
    assert len(users_of("cupy")) <= 1
