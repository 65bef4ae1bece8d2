"""Every command of the recipes runs, in order, with the sizes and stand-ins that these tables state.

A page's code blocks are one script; `# at NAME` says at which machine the following lines run, which gets the
invitations that lie at the machine before it. In `make test` two pages
run with real peers, and of the others `decentral` checks the flags only; `make night` runs all with real peers.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.commands.table import COMMANDS, module_of
from decentral.core.journal import file as journal
from tests.commands.peer_processes import TINY

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
STAND_IN = Path(__file__).parent / "stand_in.py"
SIZES = {  # what a page says -> what the test runs instead
    "--model 125M": "--model 0.1M",
    "peer small ": f"peer small {shlex.join(TINY)} --set train.micro_batch=4 ",
    "--peers 20 ": "--peers 5 ",
    "--seconds 120": "--seconds 5",
    "--dashboard 0.0.0.0:8420": "--dashboard 127.0.0.1:0",
    "dashboard --join": "dashboard --at 127.0.0.1:0 --join",
    "--max-tokens 50": "--max-tokens 5",
    'run "def main("': 'run --max-tokens 5 "def main("',
    '"Hello"': '"hello"',  # a word of the tiny model
}
MACHINES = """
at() {
    export MACHINE=$1 HOME=$RECIPE/machines/$1
    mkdir -p "$HOME/clone"; cd "$HOME/clone"; CLONE
    cp "$OLDPWD"/*.invite . 2> /dev/null || true
}
at desk
"""


def blocks(page: Path) -> str:
    """The page's indented code, as one script."""
    lines = page.read_text().splitlines()
    return "\n".join(
        line.removeprefix("    ") for line in lines if line.startswith("    ") and not line.startswith("    -")
    )


def script(page: Path) -> str:
    code = blocks(page)
    for said, run in SIZES.items():
        code = code.replace(said, run)
    code = re.sub(r"^# at (\w+)$", r"at \1", code, flags=re.MULTILINE)
    clone = f"{shlex.quote(sys.executable)} {shlex.quote(str(STAND_IN))} cloned"
    return f"set -eu{MACHINES.replace('CLONE', clone)}{code}\n"


def prepare(recipe: Path) -> dict[str, str]:
    """Make the data of a recipe and the stand-ins, and return the variables with which its script runs."""
    (recipe / "books").mkdir()
    (recipe / "books" / "one.txt").write_text("It was the best of times, it was the worst of times.\n" * 4000)
    words = ("hello", "how", "are", "you", "fine", "thanks")
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(one)},
                {"role": "assistant", "content": " ".join(one[::-1])},
            ]
        }
        for one in itertools.product(words, repeat=4)
    ]
    (recipe / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    variables = {**os.environ, "RECIPE": str(recipe), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, STAND_IN, "begin"], env=variables, check=True)
    return variables | {"PATH": f"{recipe / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def run(page: Path, recipe: Path, **more: str) -> str:
    variables = prepare(recipe) | more
    try:
        done = subprocess.run(["bash", "-c", script(page)], env=variables, capture_output=True, text=True, timeout=900)
    finally:
        subprocess.run([sys.executable, STAND_IN, "finish"], env=variables, check=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def calls(recipe: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (recipe / "calls").read_text().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_and_their_flags_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    run(page, tmp_path, RECIPE_DRY="1")
    monkeypatch.chdir(tmp_path)
    for name in ("run", "mine", "peer"):
        (tmp_path / name).mkdir()
    made = calls(tmp_path)
    assert {"peer"} <= {command for command, *_ in made} <= COMMANDS.keys()
    for command, *flags in made:
        module_of(command).parse(flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_ends_with_what_one_sees_and_what_goes_wrong(page: Path) -> None:
    text = page.read_text()
    assert text.index("**What you see**") < text.index("**What usually goes wrong**")
    assert len(text.split()) < 400


def make_model(folder: Path) -> None:
    """Make what `hf download` brings: a tiny model, with a tokenizer that has a chat template."""
    pytest.importorskip("transformers", reason="needs the extra hf: pip install 'decentral[hf]'")
    from tests.data.test_conversations import WORDS, tokenizer_in
    from tests.model.hf_folders import made

    tokenizer_in(folder)
    made(folder, vocab_size=len(WORDS))


@pytest.mark.swarm
@pytest.mark.night
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_peers_of_a_page_train_together(page: Path, tmp_path: Path) -> None:
    if "hf download" in blocks(page):
        make_model(tmp_path / "model")
    run(page, tmp_path)
    lines = {path: [*journal.read(path)] for path in tmp_path.rglob("journal.jsonl") if not path.is_symlink()}
    assert len(lines) >= 2
    for path, found in lines.items():
        events = [line["event"] for line in found]
        assert {"joined", "step", "stopped"} <= set(events), path
        assert not [line for line in found if line["event"] == "error"], path
    assert any(line["event"] == "exchange" and line["outcome"] == "done" for found in lines.values() for line in found)
