"""Decorators that compile functions to machine code with numba. Only modules that import this one load numba.

The machine code is cached on disk for later processes: beside the source, in the user's cache folder, or in
NUMBA_CACHE_DIR. If none of these folders can be written, each process compiles again.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

P = ParamSpec("P")
T = TypeVar("T")


class _Cache(FunctionCache):
    """The cache of numba on disk. A failed write is ignored; the next process then compiles the function again."""

    def save_overload(self, sig: object, data: object) -> None:
        """Write the machine code to the cache, ignoring errors of the disk."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _compiled(function: Callable[P, T], inner: bool = False, inlined: bool = False) -> Callable[P, T]:
    numba: Any = njit  # Any, because the type stubs of njit lack some of the options below
    how = {"no_cpython_wrapper": inner, "no_cfunc_wrapper": inner, "forceinline": inlined}
    fast = numba(nogil=True, error_model="numpy", **how)(function)
    cache: Any = _Cache
    with suppress(RuntimeError):  # raised if no cache folder can be written; then nothing is cached
        # `njit(cache=True)` would raise this RuntimeError too, but from the import of the compiled module.
        fast._cache = cache(function)
    return cast(Callable[P, T], fast)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that numba compiles at its first call; later processes read the result from disk."""
    return _compiled(function)


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Return a compiled function that only compiled functions can call.

    The function gets no wrapper for calls from Python, which makes its compilation faster.
    """
    return _compiled(function, inner=True)


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """Return a compiled function that only compiled functions can call, and that is inlined into each of them.

    If a caller passes constants, the compiler can then vectorise the inlined code for these constants.
    """
    return _compiled(function, inner=True, inlined=True)
