"""The tests of tests/gpu, which need a GPU."""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale

COUNTS = ("tests", "failures", "errors", "skipped")


def measure(scale: Scale, notes: Notes) -> None:
    """Note how many tests passed, and the names of those that did not. On a CPU all are skipped."""
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        report = Path(folder) / "tests.xml"
        options = ["-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", "tests/gpu", *options], check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in COUNTS}
    notes.put("counts", counts | {"passed": counts["tests"] - sum(counts[name] for name in COUNTS[1:])})
    cases = [
        case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None
    ]
    notes.put("failed tests", [f"{case.get('classname')}.{case.get('name')}" for case in cases])
