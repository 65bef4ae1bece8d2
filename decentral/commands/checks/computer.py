"""Check this computer: Python, packages, the device, open files.

This file imports neither torch nor hivemind at its top, so that a missing package is a finding instead of a traceback.
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

FILES_NEEDED = 128  # a process must be allowed this many open files; a peer needs up to 45, its libp2p daemon up to 70
FILES_GOOD = 1024  # this many open files suffice for a stream to each of several hundred peers


def python() -> Finding:
    """Return the finding on whether decentral supports this Python version."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = (_installed("decentral") or {}).get("Requires-Python") or ""
    if version not in SpecifierSet(wanted):
        return wrong("python", f"{version}; decentral needs {wanted}", "make a virtual environment with a newer Python")
    return ok("python", f"{version}, decentral {__version__}")


def packages() -> Finding:
    """Return the finding on whether supported versions of all needed packages are installed and can be imported."""
    requirements = [Requirement(one) for one in metadata.requires("decentral") or ()] if _installed("decentral") else []
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    bad = {one.name: complaint for one in needed if (complaint := _complaint(one))}
    if bad:
        names = " ".join(f"'{one.name}{one.specifier}'" for one in needed if one.name in bad)
        seen = "; ".join(f"{name} {complaint}" for name, complaint in bad.items())
        return wrong("packages", seen, f"{sys.executable} -m pip install {names}")
    from decentral.comm.wire.network import NETWORK_PACKAGE

    loaded = ("torch", NETWORK_PACKAGE)  # their compiled code may fail to load
    for name in loaded:
        try:
            importlib.import_module(name)
        except Exception as error:  # a compiled package may raise anything while it loads
            seen = f"{name} is installed but does not load: {type(error).__name__}: {error}"
            return wrong("packages", seen, f"{sys.executable} -m pip install --force-reinstall {name}")
    versions = ", ".join(f"{name} {(_installed(name) or {}).get('Version')}" for name in loaded)
    return ok("packages", f"{versions}; {len(needed)} requirements met")


def open_files() -> Finding:
    """Return the finding on whether a peer may open enough files; each stream to another peer counts as a file.

    Only the hard limit is checked, since a peer raises its soft limit to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard in (resource.RLIM_INFINITY, -1)
    seen = f"limit {'none' if unlimited else hard} (now {soft}; a peer raises it)"
    remedy = f"raise the limit: ulimit -Hn {FILES_GOOD} as root, LimitNOFILE={FILES_GOOD} in a systemd unit, "
    remedy += f"or --ulimit nofile={FILES_GOOD} of a container"
    if not unlimited and hard < FILES_NEEDED:
        return wrong("open files", f"{seen}: requests to other peers will fail", remedy)
    if not unlimited and hard < FILES_GOOD:
        return warn("open files", f"{seen}: enough for a small swarm only", remedy)
    return ok("open files", seen)


def compute_device(wanted: str) -> Finding:
    """Return the finding on whether the device that --device names exists and can compute."""
    from decentral.engine import device_check

    try:
        seen = device_check.described(wanted)
    except UserError as error:
        return wrong("device", str(error), device_check.remedy())
    missing = device_check.unused_gpu() if wanted == "auto" else ""
    return warn("device", f"{seen}; {missing}", device_check.remedy()) if missing else ok("device", seen)


def _complaint(requirement: Requirement) -> str:
    """Return why the installed package does not meet the requirement; "" if it does."""
    found = _installed(requirement.name)
    if found is None:
        return "is not installed"
    version = str(found["Version"])
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is needed"
    return ""


def _installed(name: str) -> dict[str, str] | None:
    """Return Version and Requires-Python of an installed package; None if it is not installed."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    return {key: found[key] for key in ("Version", "Requires-Python") if key in found}
