"""Checks of this machine: Python, packages, the device, open files.

This file loads neither torch nor hivemind, so that their absence is a finding and no traceback.
"""

import importlib
import resource
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from decentral import __version__
from decentral.commands.checks.finding import Finding, ok, warn, wrong
from decentral.core.errors import UserError

FILES_NEEDED = 128  # in the soaks a peer had at most 45 open, its libp2p daemon 70 (`make soak`)
FILES_GOOD = 1024  # a stream to each of several hundred peers
LOADED = ("torch", "hivemind")  # packages that are compiled, and so may be there and not load


def python_and_packages() -> list[Finding]:
    """What everything else needs."""
    return [python(), packages()]


def python() -> Finding:
    """Whether the installed project takes this Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = (_installed("decentral") or {}).get("Requires-Python") or ""
    if version not in SpecifierSet(wanted):
        return wrong("python", f"{version}; decentral needs {wanted}", "make a virtual environment with a newer Python")
    return ok("python", f"{version}, decentral {__version__}")


def packages() -> Finding:
    """Whether the packages that the project needs are there, in versions that it takes, and load."""
    requirements = [Requirement(one) for one in metadata.requires("decentral") or ()] if _installed("decentral") else []
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    bad = {one.name: complaint for one in needed if (complaint := _complaint(one))}
    if bad:
        names = " ".join(f"'{one.name}{one.specifier}'" for one in needed if one.name in bad)
        seen = "; ".join(f"{name} {complaint}" for name, complaint in bad.items())
        return wrong("packages", seen, f"{sys.executable} -m pip install {names}")
    for name in LOADED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a compiled package may raise anything while it loads
            seen = f"{name} is installed and does not load: {type(error).__name__}: {error}"
            return wrong("packages", seen, f"{sys.executable} -m pip install --force-reinstall {name}")
    versions = ", ".join(f"{name} {(_installed(name) or {}).get('Version')}" for name in LOADED)
    return ok("packages", f"{versions}; {len(needed)} requirements met")


def open_files() -> Finding:
    """Whether a peer may open enough files: each stream to another peer is one. It raises its limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard in (resource.RLIM_INFINITY, -1)
    seen = f"limit {'none' if unlimited else hard} (now {soft}; a peer raises it)"
    remedy = f"raise the limit: ulimit -Hn {FILES_GOOD} as root, LimitNOFILE={FILES_GOOD} in a systemd unit, "
    remedy += f"or --ulimit nofile={FILES_GOOD} of a container"
    if not unlimited and hard < FILES_NEEDED:
        return wrong("open files", f"{seen}: questions to other peers will fail", remedy)
    if not unlimited and hard < FILES_GOOD:
        return warn("open files", f"{seen}: enough for a small swarm only", remedy)
    return ok("open files", seen)


def compute_device(wanted: str) -> Finding:
    """Whether the device that --device names is there and computes."""
    from decentral.engine import device_check

    try:
        seen = device_check.described(wanted)
    except UserError as error:
        return wrong("device", str(error), device_check.remedy())
    missing = device_check.unused_gpu() if wanted == "auto" else ""
    return warn("device", f"{seen}; {missing}", device_check.remedy()) if missing else ok("device", seen)


def _complaint(requirement: Requirement) -> str:
    """What is wrong with the installed package; "": nothing."""
    found = _installed(requirement.name)
    if found is None:
        return "is not installed"
    version = str(found["Version"])
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is needed"
    return ""


def _installed(name: str) -> dict[str, str] | None:
    """Version and Requires-Python of an installed package; None where it is not installed."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    return {key: found[key] for key in ("Version", "Requires-Python") if key in found}
