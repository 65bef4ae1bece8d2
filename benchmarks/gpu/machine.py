"""The machine: versions of what is installed, what the doctor says, and the memory that peers claim."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.training import whole_claim

PACKAGES = ("torch", "numpy", "numba", "triton", "cupy-cuda12x", "cupy-cuda13x", "hivemind", "pydantic", "protobuf")
CHECKS = ("python", "packages", "device")  # of the doctor; the others are about a network
CLAIMS = (("125M", 8), ("125M", 16), ("125M", 32), ("350M", 16), ("1B", 8))  # size and sequences in a micro-batch
DOCTOR_S = 60.0


def measure(scale: Scale, notes: Notes) -> None:
    """Note what this machine is. The GPU may be busy meanwhile."""
    notes.put("device", scale.name)
    notes.put("python", platform.python_version())
    notes.put("cores", os.cpu_count())
    notes.put("compiler", shutil.which("gcc") or shutil.which("cc"))
    notes.put("packages", {name: version(name) for name in PACKAGES})
    runs = {f"{size}, {count}": scale.run(size, f"train.micro_batch={count}") for size, count in CLAIMS}
    notes.attempt("claimed bytes", lambda: {name: whole_claim(run) for name, run in runs.items()})
    notes.attempt("doctor", doctor)


def version(package: str) -> str | None:
    """Return the installed version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def doctor() -> dict[str, str]:
    """Return what the doctor sees of this machine, by check."""
    command = [sys.executable, "-m", "decentral.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_S)
    findings = json.loads(done.stdout)["findings"]
    return {one["check"]: f"{one['state']}: {one['seen']}" for one in findings if one["check"] in CHECKS}
