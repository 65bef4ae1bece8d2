"""Imports point down: docs/ARCHITECTURE.md has the floors, this holds them.

0 core; 1 the machines of comm, scheduler, train; 2 peers and algorithms; 3 drivers; 4 commands and the simulator. A
module imports from its own top folder and from floors below, never from a sibling. Within a folder the rooms have an
order too. What must not be known to a module must not come in through what it imports, either.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "scheduler", "peers", "configs")
FLOORS = {
    "core": 0,
    "configs": 0,
    "comm": 1,
    "scheduler": 1,
    "train": 1,
    "peers": 2,
    "algorithms": 2,
    "sim": 4,
    "dashboard": 4,
    "checks": 4,
    "observe": 4,
    "pictures": 4,
    "serving": 4,
}
DRIVERS = {"comm.net": 3, "peers.hosts": 3}
ROOMS = {  # of a folder, from below: a room imports from those before it, and from itself
    "comm": ["wire", "gossip", "routes", "rounds", "net"],
    "peers": ["membership", "joining", "placement", "planning", "node", "hosts"],
    "scheduler": ["shared", "sync", "throughput"],
}
OUTSIDE = {"asyncio", "socket", "threading", "time", "random"}  # not on floors 0 to 2 ...
MAY = {  # ... but for these
    "core.rng": {"random"},
    "train.compute": {"time", "threading"},
    "train.counters": {"time"},
    "train.job_phases": {"time", "threading"},
    "train.stage_runner": {"time"},
    "train.step": {"time"},
    "train.measure": {"time"},
}
ALLOWED = {
    "torch": {"train", "algorithms", "sim", "launch", "observe.scalar_logs"},
    "hivemind": {"comm.net.daemon", "comm.net.libp2p", "comm.net.libp2p_directory"},
    "cupy": {"train.kernels_cuda"},
}  # who may use it, by module or package
WITHOUT_TORCH = ["peers.node.node", "peers.hosts.host", "comm.net.virtual_network", "comm.net.libp2p"]


def modules() -> dict[str, Path]:
    """Every module by its name below `decentral`; a command has no dot in it."""
    found = {path: path.relative_to(ROOT / "decentral") for path in (ROOT / "decentral").rglob("*.py")}
    own = {path: name for path, name in found.items() if name.parts[0] not in LINKED}  # rglob may follow links
    own |= {path: path.relative_to(ROOT) for folder in LINKED for path in (ROOT / folder).rglob("*.py")}
    return {".".join(name.with_suffix("").parts): path for path, name in sorted(own.items())}


MODULES = modules()


def floor(module: str) -> int:
    for driver, level in DRIVERS.items():
        if module == driver or module.startswith(driver + "."):
            return level
    package = module.split(".")[0]
    return 4 if package in MODULES and package != "__init__" else FLOORS.get(package, 0)


@cache
def imports(module: str) -> list[str]:
    """Dotted names of all that the module imports, wherever in it: `from x import y` as `x.y`."""
    return _names(ast.walk(ast.parse(MODULES[module].read_text())))


@cache
def loads(module: str) -> frozenset[str]:
    """Dotted names of all that is loaded when the module is: by itself, and by what it loads."""
    found, left = set[str](), [module]
    while left:
        body = ast.parse(MODULES[left.pop()].read_text()).body
        for name in _names(body):
            ours = _module(name)
            if ours is not None and ours not in found:
                left.append(ours)
            found.add(ours or name)
    return frozenset(found)


def _names(nodes: object) -> list[str]:
    names = []
    for node in nodes:  # type: ignore[attr-defined]
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _module(name: str) -> str | None:
    """Which of our modules that is, or has that name in it."""
    parts = name.split(".")[1:] if name.startswith("decentral.") else []
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in MODULES), None)


def room(module: str) -> tuple[str, str] | None:
    """Folder and room; None for a module that is in no room."""
    parts = module.split(".")
    return (parts[0], parts[1]) if len(parts) == 3 else None


def users_of(library: str) -> set[str]:
    return {module for module in MODULES if any(name.split(".")[0] == library for name in imports(module))}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_folder_and_from_below(module: str) -> None:
    ours = floor(module)
    for other in [name.removeprefix("decentral.") for name in imports(module) if name.startswith("decentral.")]:
        same = other.split(".")[0] == module.split(".")[0] or ours == 4
        assert floor(other) < ours or (same and floor(other) == ours), other


@pytest.mark.parametrize("module", [module for module in MODULES if module.split(".")[0] in ROOMS])
def test_a_room_imports_from_the_rooms_below_it(module: str) -> None:
    ours = room(module)
    assert ours is not None, "every module of these folders is in a room"
    order = ROOMS[ours[0]]
    for other in filter(None, map(_module, imports(module))):
        theirs = room(other)
        if theirs is not None and theirs[0] == ours[0]:
            assert order.index(theirs[1]) <= order.index(ours[1]), other


@pytest.mark.parametrize("module", [module for module in MODULES if floor(module) <= 2])
def test_time_chance_and_the_network_stay_outside_the_lower_floors(module: str) -> None:
    names = {name.split(".")[0] for name in imports(module) if name != "random.Random"}  # a type is no chance
    assert names & OUTSIDE <= MAY.get(module, set())


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_used_where_it_belongs_and_nowhere_else(library: str) -> None:
    users = users_of(library)
    assert users
    for user in users:
        prefixes = {".".join(user.split(".")[:count]) for count in range(1, 4)}
        assert prefixes & ALLOWED[library], user


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_a_node_and_its_drivers_load_without_torch(module: str) -> None:
    assert "torch" not in {name.split(".")[0] for name in loads(module)}
