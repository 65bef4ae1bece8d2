"""`decentral COMMAND` and the help of each command: the table names what there is, and every example parses."""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from decentral import __main__, __version__, commands
from decentral.commands.table import CALL, COMMANDS, examples, module_of

FOLDER = Path(commands.__file__).parent


def flags_of(name: str) -> list[list[str]]:
    """What stands behind the command's name in each of its examples."""
    return [shlex.split(line.removeprefix(f"{CALL}{name}")) for line in examples(f"{CALL}{name}")]


def defines(module: Path, *names: str) -> bool:
    tree = ast.parse(module.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} >= set(names)


def test_every_module_with_a_parser_and_a_main_is_a_command_of_the_table() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py") if defines(path, "main", "parse")}

    assert modules == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_command_parses(name: str) -> None:
    assert flags_of(name)
    for flags in flags_of(name):
        module_of(name).parse(
            [flag.replace("QmYourPeer", "QmViNS8YCd6cZzwyBLzHbkQVrWBD2AQpKcr1cceozqQ5RN") for flag in flags]
        )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        __main__.main([name, "--help"])
    help_text = capsys.readouterr().out
    assert help_text.endswith("".join(f"\n  {line}" for line in examples(f"{CALL}{name}")) + "\n")


def test_whoever_calls_decentral_is_shown_that_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/decentral"])
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["audit", "--help"])
    assert CALL not in capsys.readouterr().out
    assert __main__.main(["audit"]) == 2
    assert "(see decentral audit --help)" in capsys.readouterr().err


def test_the_overview_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)


def test_a_command_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["per"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a command, one of peer, local" in line


HEAVY = ("torch", "numba", "scipy", "hivemind", "matplotlib")
HELP_OF_EACH = f"""
import contextlib, io, json, sys
from decentral.commands.table import COMMANDS, module_of
from decentral.core import config

def loaded():
    return [name for name in {HEAVY} if name in sys.modules]

config.Config()
said = {{"Config()": loaded()}}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        module_of(name).main(["--help"])
    said[name] = loaded()
print(json.dumps(said))
"""


def test_a_config_and_the_help_of_every_command_load_no_large_library() -> None:
    """One process for all: where one of them loads a library, it is found in those that come after, too."""
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {name: [] for name in ("Config()", *COMMANDS)}


def test_the_help_of_commands_that_compute_nothing_loads_no_numpy() -> None:
    """numpy costs a tenth of a second of processor time, and help must take at most half a second."""
    names = sorted(COMMANDS.keys() - {"estimate", "plan", "compare", "new", "tokenize", "report"})
    code = "import sys; from decentral.commands.table import module_of"
    code += f"; [module_of(name) for name in {names}]; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


WRONG = [
    ("peer", ["nosuch"]),
    ("peer", ["--set", "gossip.windows_s=2"]),
    ("peer", ["--join", "nowhere"]),
    ("peer", ["--device", "abacus"]),
    ("local", ["--set", "gossip.windows_s=2"]),
    ("local", ["--device", "abacus"]),
    ("estimate", ["--peers", "4x4091"]),
    ("estimate", ["--peers", "4090", "--model", "nosuch"]),
    ("dashboard", ["--join", "nowhere"]),
    ("plan", ["nosuch"]),
    ("plan", ["--join", "nowhere"]),
    ("simulate", ["nosuch"]),
    ("simulate", ["--faults", "crash"]),
    ("generate", ["x", "--state-dir", "gone"]),
    ("generate", ["x", "--model", "gone"]),
    ("generate", ["x", "--join", "nowhere"]),
    ("export", ["--state-dir", "gone", "--out", "out"]),
    ("doctor", ["--join", "nowhere"]),
    ("ledger", ["--join", "nowhere"]),
]
WRONG_OF_EACH = f"""
import contextlib, io, json, sys
from decentral.commands.table import module_of

said = []
for name, flags in {WRONG}:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = module_of(name).main(flags)
    said.append([name, flags, code, len(error.getvalue().splitlines())])
    said[-1].append([one for one in {HEAVY} if one in sys.modules])
print(json.dumps(said))
"""


def test_wrong_flags_are_refused_in_one_line_before_a_large_library_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRONG_OF_EACH], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout) == [[name, flags, 2, 1, []] for name, flags in WRONG]
    assert not list(tmp_path.iterdir())


def test_the_version_comes_from_one_place_and_loads_no_libraries() -> None:
    code = "import sys; from decentral import __main__; __main__.main(['--version'])"
    code += "; import json; print(json.dumps([m for m in ('torch', 'numpy', 'hivemind') if m in sys.modules]))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == f"decentral {__version__}"
    assert json.loads(said[1]) == []
