"""Array types of the planner, and the one way in which it compiles.

Letters used in shapes throughout: N peers, S stages, R replicas (devices in a stage), L layers.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

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
