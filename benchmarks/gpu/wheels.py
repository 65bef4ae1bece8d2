"""Gather the wheels that a machine with a GPU and without a network lacks for the check.

    python -m benchmarks.gpu.wheels DIR [--has FILE] [--python 3.12] [--machine x86_64] [--glibc 2.34]

What is needed, and in which version, is read from what is installed here: the requirements in pyproject.toml, under
constraints.txt, and what they require in turn. What the other machine has, in any version, is left out, with whatever
only that requires. FILE is what `python3 -m pip list --format=freeze` prints there; without it, that is what images for
torch usually have (HAS). The checkout itself needs no wheel. A wheel that is not on the index is built here, which is
right for pure Python.
"""

import argparse
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from decentral.commands import shared
from decentral.core.errors import UserError

CHECKOUT = "decentral"
ROOTS = (CHECKOUT, "pytest", "hypothesis")  # tests/gpu need the others
HAS = (
    *("torch", "numpy", "scipy", "numba", "msgpack", "pyyaml", "safetensors", "rich", "packaging", "protobuf"),
    *("grpcio", "grpcio-tools", "sortedcontainers", "uvloop", "idna", "pytest", "hypothesis"),
)
OLDEST_GLIBC = 5  # manylinux_2_5, which was called manylinux1


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    has = names_in(flags.has.read_text()) if flags.has else set(HAS)
    wanted = lacking(has, {"python_version": flags.python, "platform_machine": flags.machine})
    flags.folder.mkdir(parents=True, exist_ok=True)
    for name, version in sorted(wanted.items()):
        gather(f"{name}=={version}", flags)
    print(f"{len(wanted)} wheels in {flags.folder}: {', '.join(sorted(wanted))}")


def names_in(listing: str) -> set[str]:
    """Return the packages that lines such as `numpy==2.4.6` name."""
    return {canonicalize_name(line.partition("==")[0].strip()) for line in listing.splitlines() if line.strip()}


def lacking(has: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return name and version of each package that the check needs, directly or not, and that is not in `has`.

    Args:
        has: What is there already, by canonical name; what only these require is not needed either.
        environment: Markers of the machine in question, which differ from this one's.
    """
    found: dict[str, str] = {}
    left = [*ROOTS]
    while left:
        name = left.pop()
        if name not in has and name not in found:
            found[name] = metadata.version(name)
            left += required(name, environment)
    del found[CHECKOUT]
    return found


def required(name: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the canonical names of what an installed package requires there, without its extras."""
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""}):
            yield canonicalize_name(requirement.name)


def gather(package: str, flags: argparse.Namespace) -> None:
    """Put the package's wheel into the folder. Raises UserError where the index has none and none can be built."""
    minor = int(flags.glibc.partition(".")[2])
    platforms = [f"manylinux_2_{number}_{flags.machine}" for number in range(minor, OLDEST_GLIBC - 1, -1)]
    platforms += [f"{old}_{flags.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    there = ["--only-binary=:all:", "--python-version", flags.python, "--implementation", "cp"]
    there += [part for platform in platforms for part in ("--platform", platform)]
    found = subprocess.run(
        [*pip, "download", "--no-deps", *there, "--dest", str(flags.folder), package], stderr=subprocess.DEVNULL
    )
    if found.returncode == 0:
        return
    built = subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(flags.folder), package])
    if built.returncode != 0:
        raise UserError(f"{package}: the index has no wheel for Python {flags.python}, and none was built from source")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--has", type=Path, metavar="FILE", help="what is installed there: pip list --format=freeze")
    parser.add_argument("--python", default="3.12", metavar="VERSION")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--glibc", default="2.34", metavar="VERSION", help="of the other machine, or older")
    flags = parser.parse_args(argv)
    if flags.has and not flags.has.exists():
        raise UserError(f"--has expects a file, what `pip list --format=freeze` prints there; {flags.has} is none")
    return flags


if __name__ == "__main__":
    sys.exit(main())
