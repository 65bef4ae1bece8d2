"""How functions are compiled to machine code. It is a file of its own, so that others load without numba."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles to machine code (numba) at the first call, and keeps the result on disk for later processes."""
    fast: Callable[P, T] = njit(cache=True, nogil=True, error_model="numpy")(function)
    return fast


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """As `compiled`, for a function that only compiled ones call: without an entry from Python it compiles faster."""
    numba: Any = njit  # its type stubs lack these two options
    fast: Callable[P, T] = numba(
        cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return fast


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """As `inner`, and copied into its callers before loops are vectorised: arguments that are constants there count."""
    numba: Any = njit  # its type stubs lack these options
    fast: Callable[P, T] = numba(
        cache=True,
        nogil=True,
        error_model="numpy",
        forceinline=True,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)
    return fast
