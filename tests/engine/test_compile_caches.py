"""Compilers keep their results in the state folder where the user has no home that can be written."""

import os
from pathlib import Path

import pytest

from decentral.engine import compile_caches


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in compile_caches.FOLDERS:
        monkeypatch.setenv(variable, "")  # so that what a test sets is taken back
        monkeypatch.delenv(variable)


def test_a_user_without_a_home_that_can_be_written_has_them_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    compile_caches.keep_in(tmp_path)
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "compiled" / "numba")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"


def test_a_user_id_that_the_system_does_not_know_has_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    compile_caches.keep_in(tmp_path)
    assert set(compile_caches.FOLDERS) <= set(os.environ)


def test_a_home_that_can_be_written_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    compile_caches.keep_in(tmp_path / "state")
    assert not set(compile_caches.FOLDERS) & set(os.environ)
