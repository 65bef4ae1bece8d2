"""A machine without a network gets what it lacks, and nothing that it has."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu import wheels

THERE = {"python_version": "3.12", "platform_machine": "x86_64"}
SCRIPT = Path(wheels.__file__).parent / "offline.sh"


def test_a_machine_that_has_nothing_lacks_all_that_is_required_in_turn() -> None:
    lacking = wheels.lacking(set(), THERE)
    assert lacking.keys() >= {"torch", "sympy", "hivemind", "base58", "pydantic-core", "pytest"}
    assert "decentral" not in lacking
    assert lacking["hivemind"] == metadata.version("hivemind")


def test_what_is_there_is_left_out_with_what_only_it_requires() -> None:
    lacking = wheels.lacking({"torch", "pytest"}, THERE)
    assert not lacking.keys() & {"torch", "sympy", "mpmath", "pytest", "pluggy"}
    assert "hivemind" in lacking


def test_the_markers_are_those_of_the_other_machine() -> None:
    old, new = ({**THERE, "python_version": version} for version in ("3.10", "3.12"))
    assert "tomli" in set(wheels.required("pytest", old))
    assert "tomli" not in set(wheels.required("pytest", new))


def test_a_listing_of_packages_is_read_by_canonical_name() -> None:
    assert wheels.names_in("PyYAML==6.0\nprefetch_generator==1.0\n\n") == {"pyyaml", "prefetch-generator"}


def test_a_listing_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main([str(tmp_path), "--has", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: --has expects a file")


def test_the_script_for_a_machine_without_a_network_says_what_it_wants() -> None:
    done = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sh benchmarks/gpu/offline.sh WHEELS")
