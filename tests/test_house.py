"""The limits of the product's code: sizes, one definition for each name, and docstrings where folders meet.

The limits apply to the product's modules as tests/test_rooms.py lists them, and neither to tests nor to benchmarks. An
exception is an entry of EXCEPTIONS, with the reason for which the code is better as it is.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.test_rooms import MODULES, tree

FILE_LINES = 450
FUNCTION_LINES = 60
TIES = {  # of the whole product, at most; none of these numbers may grow
    "attributes of other objects that are assigned": 55,
    "arguments with a star": 36,
    "uses of Any": 61,
    "fields that are functions": 20,
}
SEAMS = {"core", "model", "data", "comm", "engine", "scheduler", "peers", "sim"}  # what they use has docstrings
EXCEPTIONS: dict[str, str] = {  # "module", "module.Class" or "module.function" -> why no limit applies to it
    "core.config": "a list of keys, in which a reader looks one up",
    "core.jobs": "a list of plain values, in which a reader looks one up",
    "core.journal.events": "a list of plain values, in which a reader looks one up",
    "comm.wire.messages": "a list of plain values, in which a reader looks one up",
}

READS_OF_THIS_SYSTEM = {  # module -> what it reads by itself; files of others are opened by core/foreign_file.py alone
    "comm.net.libp2p": "/proc",
    "commands.checks.running_peer": "/proc",
    "commands.local_peer": "the output of its own processes",
    "core.config": "the configs of the package",
    "core.peer_folders": "/proc",
    "engine.control_groups": "/proc and /sys",
    "engine.device_check": "/proc",
    "engine.measure": "/proc",
    "peers.runtime.host": "/proc",
    "peers.startup.running_peers": "/proc",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def classes(module: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef))


def functions(module: str) -> Iterator[Function]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, Function))


def constants(module: str) -> Iterator[tuple[str, str]]:
    """Public names in upper case that the module assigns, each with the expression that is its value."""
    for node in tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value) | ast.AnnAssign(target=ast.Name(name), value=value):
                if name.isupper() and not name.startswith("_") and value is not None:
                    yield name, ast.unparse(value)


def ties(node: ast.AST) -> Iterator[str]:
    """What ties this piece of code to others in a way that neither a signature nor an import shows."""
    assigned: list[ast.expr]
    match node:
        case ast.Assign(targets=targets):
            assigned = targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            assigned = [target]
        case ast.Call(args=arguments, keywords=keywords):
            stars = [one for one in arguments if isinstance(one, ast.Starred)] + [
                one for one in keywords if not one.arg
            ]
            yield from ["arguments with a star"] * len(stars)
            return
        case ast.Name("Any"):
            yield "uses of Any"
            return
        case ast.ClassDef(body=body):
            for field in body:
                if isinstance(field, ast.AnnAssign) and "Callable" in ast.unparse(field.annotation):
                    yield "fields that are functions"
            return
        case _:
            return
    for one in assigned:
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) not in ("self", "cls"):
            yield "attributes of other objects that are assigned"


def folder(module: str) -> str:
    return module.split(".")[0]


def seam_uses(module: str) -> set[tuple[str, str]]:
    """The (module, name) pairs that a module uses of other folders: `from m import name`, and `m.name`."""
    imported: dict[str, str] = {}  # modules by the names that they have in this one
    used = set[tuple[str, str]]()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("decentral"):
            source = (node.module or "").removeprefix("decentral").removeprefix(".")
            for alias in node.names:
                below = f"{source}.{alias.name}".removeprefix(".")
                if below in MODULES:
                    imported[alias.asname or alias.name] = below
                used.add((source, alias.name))
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            used.add((imported[node.value.id], node.attr))
    return {(source, name) for source, name in used if source in MODULES and folder(source) != folder(module)}


def seam_names() -> dict[str, set[str]]:
    """By module: the names of it that another folder uses."""
    names = defaultdict[str, set[str]](set)
    for user in MODULES:
        for source, name in seam_uses(user) if folder(user) in SEAMS else ():
            names[source].add(name)
    return names


def repeated(found: Iterator[tuple[str, str]]) -> dict[str, set[str]]:
    """Of (name, place) pairs, the names that several places have."""
    places = defaultdict[str, set[str]](set)
    for name, place in found:
        places[name].add(place)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def test_a_file_is_no_longer_than_its_limit() -> None:
    lines = {module: path.read_text().count("\n") for module, path in MODULES.items() if module not in EXCEPTIONS}
    assert {module: count for module, count in lines.items() if count > FILE_LINES} == {}


def test_a_function_fits_a_screen() -> None:
    named = {f"{module}.{node.name}": node for module in MODULES for node in functions(module)}
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in named.items() if name not in EXCEPTIONS}
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES} == {}


def test_no_tie_is_added() -> None:
    found = Counter(tie for module in MODULES for node in ast.walk(tree(module)) for tie in ties(node))
    assert {tie: count for tie, count in found.items() if count > TIES[tie]} == {}


def reads(module: str) -> bool:
    """Whether a module opens a file for reading: by `read_text`, `read_bytes`, or `open` with a mode that begins so."""
    for node in ast.walk(tree(module)):
        match node:
            case ast.Call(func=ast.Attribute(attr="read_text" | "read_bytes") as called):
                if ast.unparse(called.value) != "foreign_file":
                    return True
            case ast.Call(func=ast.Attribute(attr="open") | ast.Name("open"), args=[*_, ast.Constant(str(mode))]):
                if mode.startswith("r"):
                    return True
    return False


def test_files_of_others_are_opened_by_the_one_helper() -> None:
    assert {module for module in MODULES if reads(module)} == set(READS_OF_THIS_SYSTEM)


def test_a_module_says_what_it_is() -> None:
    assert [module for module in MODULES if not ast.get_docstring(tree(module))] == []


def test_a_function_that_another_folder_uses_has_a_docstring() -> None:
    used = seam_names()
    public = [
        (f"{module}.{node.name}", ast.get_docstring(node))
        for module in MODULES
        for node in (tree(module).body if folder(module) in SEAMS else ())
        if isinstance(node, Function) and node.name in used[module]
    ]
    assert [name for name, docstring in public if not docstring] == []


def test_a_public_class_is_defined_once() -> None:
    defined = ((node.name, module) for module in MODULES for node in classes(module) if not node.name.startswith("_"))
    assert repeated(defined) == {}


def test_a_public_constant_has_one_value() -> None:
    assert repeated(one for module in MODULES for one in constants(module)) == {}


def test_no_module_waits_so_that_a_cancellation_can_be_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 loses one that comes with the result; `asyncio.timeout` does not."""
    assert [module for module, path in MODULES.items() if "asyncio.wait_for(" in path.read_text()] == []


def test_an_exception_names_code_that_is_there() -> None:
    defined = {f"{module}.{node.name}" for module in MODULES for node in [*classes(module), *functions(module)]}
    assert set(EXCEPTIONS) <= defined | set(MODULES)
