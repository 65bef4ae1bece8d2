"""Run tests with the lowest and the newest versions that pyproject.toml allows, on each Python that this machine has.

    python -m tests.matrix [--pythons python3.11,python3.12] [--versions lowest,newest] [--folder DIR] [TESTS...]

Each combination has a virtual environment of its own (some gigabytes, as torch from the index brings CUDA's libraries).
Exit code 1: tests failed, or an environment could not be made. A Python that does not run here is named, and left
out.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = ["tests/comm", "tests/core", "tests/engine", "tests/model", "tests/scheduler"]
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ".[dev,hf,lora,plot,upload,dashboard]"
STATED = "import torch, transformers, numpy; print(torch.__version__, transformers.__version__, numpy.__version__)"


def main() -> None:
    args = _arguments()
    outcomes = []
    for python in args.pythons.split(","):
        if not runs(python):
            outcomes.append((python, "", "does not run here"))
            continue
        for versions in args.versions.split(","):
            outcomes.append((python, versions, tried(python, versions, args.folder, args.tests)))
            print(*outcomes[-1], sep="\t", flush=True)
    print("\n".join("\t".join(one) for one in outcomes))
    sys.exit(any(outcome.startswith("failed") for _, _, outcome in outcomes))


def runs(python: str) -> bool:
    """Return whether this command runs. pyenv also installs commands for Pythons that it then refuses to run."""
    try:
        return subprocess.run([python, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def tried(python: str, versions: str, folder: Path, tests: Sequence[str]) -> str:
    """Make the environment, run the tests in it, and return the line that says how it ended."""
    environment = folder / f"{Path(python).name}-{versions}"
    own = environment / "bin" / "python"
    install = ["uv", "pip", "install", "--quiet", "--python", str(own), "--resolution", RESOLUTIONS[versions]]
    # torch requires exact versions of CUDA's libraries. If uv chose the newest of these first, only an old torch fits.
    first = [[*install, "torch"]] if versions == "newest" else []
    for command in [
        ["uv", "venv", "--quiet", "--clear", "--python", python, str(environment)],
        *first,
        [*install, "-e", EXTRAS],
    ]:
        made = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        if made.returncode:
            return f"failed to install: {made.stderr.strip().splitlines()[-1]}"
    stated = subprocess.run([own, "-c", STATED], capture_output=True, text=True)
    if stated.returncode:
        return f"failed to import: {stated.stderr.strip().splitlines()[-1]}"
    log = folder / f"{environment.name}.txt"
    with log.open("w") as output:
        ran = subprocess.run(
            [own, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", *tests], stdout=output, stderr=output
        )
    last = log.read_text().strip().splitlines()[-1]
    return f"{'failed' if ran.returncode else 'passed'}: torch, transformers, numpy {stated.stdout.strip()}: {last}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TESTS", help=f"default: {' '.join(TESTS)}")
    parser.add_argument("--pythons", default="python3.11,python3.12,python3.13", metavar="NAMES")
    parser.add_argument("--versions", default="lowest,newest", metavar="NAMES", help="lowest, newest or both")
    parser.add_argument("--folder", type=Path, default=Path("build/matrix"), metavar="DIR", help="for environments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
