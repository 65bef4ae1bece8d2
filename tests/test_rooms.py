"""Which modules may import from which, and know which libraries: docs/ARCHITECTURE.md, "Rooms", says why.

Rooms are folders in an order: a module imports from its own room and from those before it. What a module may know of
tensors, sockets, threads, the clock and chance is a matter of the module, not of its room, because a machine stands
beside its numerics. A machine does not load such a library by what it imports, either.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "scheduler", "peers", "configs")
ROOMS = [
    "core",
    "model",
    "data",
    "store",
    "comm.wire",
    "comm.codecs",
    "comm.gossip",
    "comm.pipeline",
    "comm.rounds",
    "comm.net",
    "engine",
    "scheduler.topology",
    "scheduler.sync",
    "scheduler.spans",
    "scheduler.partners",
    "scheduler.throughput",
    "peers.membership",
    "peers.joining",
    "scheduler.placement",
    "peers.runtime",
    "peers.startup",
    "serving",
    "sim.network",
    "sim",
    "view",
    "view.page",
    "commands.checks",
    "commands.estimates",
    "commands",
]
SHAPE = "the section `model` of a config stands with the models; it loads no torch"
LIVE = "a rule reads and corrects the live weights of a fragment, which have no Protocol yet"
LINES = "the lines and signals of commands, which print and end alike whichever room does it"
VIEW = "puts a whole peer together, with what its user sees"
EXCEPTIONS = {  # (module, what it imports from a later room) -> why
    ("core.config", "model.families"): SHAPE,
    ("core.config", "model.shape"): SHAPE,
    ("core.received", "model.families"): SHAPE,
    ("model.huggingface", "data.tokenizer"): "a folder of Hugging Face holds its tokenizer, too",
    ("comm.gossip.pull_rule", "engine.fragment"): LIVE,
    ("comm.gossip.update_rules", "engine.fragment"): LIVE,
    ("comm.rounds.synchronous_rule", "engine.fragment"): LIVE,
    ("comm.rounds.synchronous_rule", "engine.inner"): LIVE,
    ("engine.launch", "commands.shared"): LINES,
    ("peers.startup.prepare", "commands.shared"): LINES,
    ("peers.startup.reach_swarm", "commands.shared"): LINES,
    ("peers.startup.start_peer", "commands.shared"): LINES,
    ("serving.endpoint", "commands.shared"): LINES,
    ("serving.served_model", "commands.shared"): LINES,
    ("view.page.address", "commands.shared"): LINES,
    ("view.terminal", "commands.shared"): LINES,
    ("peers.startup.flags", "view.event_hooks"): VIEW,
    ("peers.startup.flags", "view.page.address"): VIEW,
    ("peers.startup.prepare", "view.event_hooks"): VIEW,
    ("peers.startup.prepare", "view.metrics_server"): VIEW,
    ("peers.startup.prepare", "view.page.child"): VIEW,
    ("peers.startup.prepare", "view.page.record_lines"): VIEW,
    ("peers.startup.prepare", "view.scalar_logs"): VIEW,
    ("peers.startup.prepare", "view.terminal"): VIEW,
    ("peers.startup.start_peer", "view.metrics_server"): VIEW,
    ("peers.startup.start_peer", "view.page.address"): VIEW,
    ("peers.startup.start_peer", "view.page.child"): VIEW,
}
KNOWS = {  # a library -> by room, the modules that use it; no others do
    "torch": {
        "model": "adapter_folder bottleneck decoder huggingface lora rotary start_weights undrawn",
        "data": "corpora stream",
        "comm.codecs": "blockwise sections",
        "comm.gossip": (
            "allreduce cuda_source influence kernel_choice kernels_cpu kernels_cuda "
            "outer_kernels pull_rule trust update_rules"
        ),
        "comm.pipeline": "activations",
        "comm.rounds": "synchronous_rule",
        "engine": (
            "accelerator checkpoint compute device_check fragment gossip_jobs inner island launch layer_times "
            "look_ahead measure memory muon optimizers owned_rules sharded shards span stage_runner step tensor_file"
        ),
        "serving": "decoding loaded_model replicas",
        "sim": "fault_injector liars real_training surrogate surrogate_model sweep",
        "sim.invariants": "convergence gossip",
        "view": "scalar_logs",
        "commands.estimates": "own_speed peer_devices",
        "commands": "simulation",
    },
    "cupy": {
        "comm.gossip": "kernels_cuda",
    },
    "numba": {
        "core": "compiled",
    },
    "scipy": {
        "scheduler.sync": "step_needs",
        "scheduler.partners": "mixing",
        "scheduler.throughput": "bound max_flow milp planned_in_flight routing sparse_rows",
    },
    "hivemind": {
        "comm.net": "daemon libp2p libp2p_directory libp2p_services dht_calls dht_values",
    },
    "asyncio": {
        "core": "at_once",
        "store": "uploader",
        "comm.net": "daemon dialler libp2p libp2p_directory names streams uplink",
        "peers.runtime": "clock host",
        "peers.startup": "copied_identity lost_peers prepare reach_swarm start_peer",
        "serving": "endpoint gather_weights served_model",
        "sim.network": "network_faults",
        "view": "event_hooks metrics_server scalar_logs",
        "view.page": "connections follow record_lines server visitor",
        "commands.checks": "swarm",
        "commands": "dashboard doctor export generate invite ledger peer plan",
    },
    "socket": {
        "comm.net": "names ports",
        "view": "callers metrics_server webhook",
        "view.page": "address child connections",
        "commands": "dashboard",
    },
    "threading": {
        "engine": "compute muon shards threads",
        "peers.runtime": "host",
        "view": "event_hooks metrics_server scalar_logs webhook",
        "commands": "lifeline shared",
    },
    "time": {
        "store": "fetching sending",
        "comm.net": "libp2p streams",
        "engine": "compute inner layer_times measure stage_runner step threads",
        "peers.runtime": "clock host",
        "peers.startup": "reach_swarm",
        "serving": "replies served_model",
        "commands.checks": "disk",
        "commands.estimates": "own_speed",
        "commands": "dashboard invite local plan ps push simulation stop",
    },
    "random": {
        "core": "rng",
        "comm.net": "libp2p libp2p_directory",
        "peers.startup": "lost_peers",
    },
}
OUTSIDE = {
    "torch",
    "cupy",
    "hivemind",
    "asyncio",
    "socket",
    "threading",
    "time",
}  # of a machine, and of what it imports
WITHOUT_TORCH = (
    "peers.runtime.host",
    "sim.network.virtual_network",
    "comm.net.libp2p",
    "commands.compare",
    "commands.config",
    "commands.estimate",
    "commands.new",
    "commands.push",
)


def modules() -> dict[str, Path]:
    """Return the file of every module, by the module's name below `decentral`."""
    found = {path: path.relative_to(ROOT / "decentral") for path in (ROOT / "decentral").rglob("*.py")}
    own = {path: name for path, name in found.items() if name.parts[0] not in LINKED}  # rglob may follow links
    own |= {path: path.relative_to(ROOT) for folder in LINKED for path in (ROOT / folder).rglob("*.py")}
    return {".".join(name.with_suffix("").parts): path for path, name in sorted(own.items())}


MODULES = modules()


@cache
def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module of the product, which all tests of one process share."""
    return ast.parse(MODULES[module].read_text())


@cache
def loaded_first(module: str) -> list[str]:
    """Return the dotted names of what a module loads by itself when it is imported."""
    return _names(tree(module).body)


@cache
def imports(path: Path) -> list[str]:
    """Return the dotted names of all that a file imports, wherever in it: `from x import y` as `x.y`."""
    return _names(ast.walk(ast.parse(path.read_text())))


@cache
def loads(module: str) -> frozenset[str]:
    """Return the names of all that is loaded when the module is: by itself, and by what it loads."""
    found, left = set[str](), [module]
    while left:
        for name in loaded_first(left.pop()):
            ours = _module(name)
            if ours is not None and ours not in found:
                left.append(ours)
            found.add(ours or name)
    return frozenset(found)


def _names(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
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


def room(module: str) -> str:
    """Return the innermost room in which a module stands. Raises StopIteration where it is in none."""
    parts = module.split(".")
    return next(name for count in range(len(parts) - 1, 0, -1) if (name := ".".join(parts[:count])) in ROOMS)


def from_later_rooms() -> set[tuple[str, str]]:
    """Return the pairs (module, what it imports) that the order of rooms forbids."""
    found = set()
    for module in in_rooms():
        for other in filter(None, map(_module, imports(MODULES[module]))):
            if other in in_rooms() and ROOMS.index(room(other)) > ROOMS.index(room(module)):
                found.add((module, other))
    return found


def in_rooms() -> list[str]:
    """Return all modules but for `decentral/__init__.py` and `decentral/__main__.py`, which are in no room."""
    return [module for module in MODULES if module not in ("__init__", "__main__")]


def machines() -> list[str]:
    """Return the modules with a class that decides what an event means: `handle(self, event, now, ...)`."""
    return [module for module in MODULES if any(map(_handles, ast.walk(tree(module))))]


def _handles(node: ast.AST) -> bool:
    arguments = [one.arg for one in node.args.args] if isinstance(node, ast.FunctionDef) else []
    return getattr(node, "name", "") == "handle" and arguments[:3] == ["self", "event", "now"]


def used(module: str) -> set[str]:
    """Return the libraries that a module imports by itself. `random.Random` is a type, and no chance."""
    return {name.split(".")[0] for name in imports(MODULES[module]) if name != "random.Random"}


def test_every_module_is_in_a_room() -> None:
    for module in in_rooms():
        assert room(module)


def test_a_module_imports_from_its_own_room_and_from_those_before_it() -> None:
    assert sorted(from_later_rooms() - set(EXCEPTIONS)) == []


def test_an_exception_is_needed() -> None:
    assert sorted(set(EXCEPTIONS) - from_later_rooms()) == []


@pytest.mark.parametrize("library", KNOWS)
def test_a_library_is_used_by_the_modules_that_may_know_it_and_by_no_other(library: str) -> None:
    known = [f"{room}.{name}" for room, names in KNOWS[library].items() for name in names.split()]
    found = sorted(module for module in MODULES if library in used(module))
    assert found == sorted(known), f"KNOWS of tests/test_rooms.py must name the modules that use {library}"


@pytest.mark.parametrize("machine", machines())
def test_a_machine_knows_no_tensor_socket_thread_or_clock(machine: str) -> None:
    assert OUTSIDE & {name.split(".")[0] for name in loads(machine)} == set()


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_needs_no_tensor_loads_without_torch(module: str) -> None:
    assert "torch" not in {name.split(".")[0] for name in loads(module)}


def test_no_machine_loads_torch_or_compiles_when_it_is_imported() -> None:
    """The same at run time, where libraries load others."""
    code = f"import importlib, json, sys\nfor name in {machines()}: importlib.import_module('decentral.' + name)\n"
    code += "print(json.dumps([name for name in ('torch', 'cupy', 'hivemind', 'numba') if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_command_is_imported_by_one_name() -> None:
    """`decentral.peer` is for `python -m`; imported, it would be a second copy of `decentral.commands.peer`."""
    commands = {path.stem for path in (ROOT / "decentral" / "commands").iterdir() if path.suffix != ".pyc"}
    commands -= {path.stem for path in (ROOT / "decentral").iterdir()}
    everywhere = [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert "peer" in commands
    for path in everywhere:
        for name in imports(path):
            assert not (name.startswith("decentral.") and name.split(".")[1] in commands), f"{path}: {name}"
