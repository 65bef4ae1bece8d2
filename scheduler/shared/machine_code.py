"""The one way in which the planner compiles. Apart from the array types: who only names those need not load numba."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Machine code by numba, kept on disk after the first call ever."""
    fast: Callable[P, T] = njit(cache=True, nogil=True, error_model="numpy")(function)
    return fast


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """The same, for what only compiled functions call: without the way in from Python it compiles faster."""
    numba: Any = njit  # its types leave these two options out
    fast: Callable[P, T] = numba(
        cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return fast
