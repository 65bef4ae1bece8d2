"""The hook for commit messages takes what CONTRIBUTING.md asks for, and what git writes itself; it refuses the rest."""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
TAKEN = (
    "gossip: serialise merges per fragment",
    "sim: " + 67 * "x",
    "docs: say the rule\n\nA body may have lines of any length. " + 100 * "x",
    "Merge branch 'topic' into main, whose name is so long that the line has more than 72 characters",
    'Revert "gossip: serialise merges per fragment, a subject that was almost as long as may be"',
    "fixup! gossip: serialise merges per fragment",
)
REFUSED = (
    "",
    "serialise merges per fragment",
    "Gossip: serialise merges per fragment",
    "gossip:",
    "gossip: \n\na body alone",
    "sim: " + 68 * "x",
    "a subject without its area\n\ngossip: serialise merges per fragment",
)


def test_a_message_begins_with_its_area_and_what_it_does_in_72_characters(tmp_path: Path) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook.get("stages") == ["commit-msg"]]
    files = {str(tmp_path / str(number)): message for number, message in enumerate(TAKEN + REFUSED)}
    for file, message in files.items():
        Path(file).write_text(message + "\n")
    pygrep = [sys.executable, "-m", "pre_commit.languages.pygrep", *hook["args"], hook["entry"], *files]

    found = subprocess.run(pygrep, capture_output=True, text=True, check=False)

    assert [files[file] for file in found.stdout.splitlines()] == list(REFUSED)
