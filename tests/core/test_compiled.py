"""Compiled functions work where nothing can be kept on disk: only the next process has to compile them again."""

import errno
import os

import pytest
from numba.core.caching import FunctionCache

from decentral.core.compiled import compiled


def test_where_no_folder_can_be_written_functions_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    assert compiled(lambda number: number + 1)(1) == 2


def test_a_disk_that_refuses_what_was_compiled_costs_this_process_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def save(self: FunctionCache, sig: object, data: object) -> None:
        refused.append(sig)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(FunctionCache, "save_overload", save)
    assert compiled(lambda number: number + 2)(1) == 3
    assert refused
