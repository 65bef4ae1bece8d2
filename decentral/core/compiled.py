"""How functions are compiled to machine code. It is a file of its own, so that others load without numba.

The result is kept on disk for later processes where a folder can be written: beside the source, in the user's cache, or
where NUMBA_CACHE_DIR says. Where none can, each process compiles anew.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

P = ParamSpec("P")
T = TypeVar("T")


class _Cache(FunctionCache):
    """numba's cache on disk; a disk that refuses a file costs the next process time, and this one nothing."""

    def save_overload(self, sig: object, data: object) -> None:
        """Write the machine code to the cache, unless the disk refuses it."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def _compiled(function: Callable[P, T], inner: bool = False, inlined: bool = False) -> Callable[P, T]:
    numba: Any = njit  # its type stubs lack some options
    how = {"no_cpython_wrapper": inner, "no_cfunc_wrapper": inner, "forceinline": inlined}
    fast = numba(nogil=True, error_model="numpy", **how)(function)
    cache: Any = _Cache
    with suppress(RuntimeError):  # no folder can be written
        fast._cache = cache(function)  # as cache=True does, which raises instead
    return cast(Callable[P, T], fast)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles to machine code (numba) at the first call, and keeps the result on disk for later processes."""
    return _compiled(function)


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """As `compiled`, for a function that only compiled ones call: without an entry from Python it compiles faster."""
    return _compiled(function, inner=True)


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """As `inner`, and copied into its callers before loops are vectorised: arguments that are constants there count."""
    return _compiled(function, inner=True, inlined=True)
