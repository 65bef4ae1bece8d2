"""CUDA kernels on a CPU: their unchanged source, compiled by g++ with CUDA's words in C++ (lockstep.h).

Each tensor argument is a copy between two pages that nobody may touch: a kernel that reads or writes outside of it ends
the process, as it may do on a GPU.
"""

import ctypes
import mmap
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from decentral.comm.gossip.cuda_source import SOURCE, signatures

HERE = Path(__file__).parent
# As COMPILE_OPTIONS: no product and sum become one operation.
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-shared", "-w")
FAULTS = {1: "a lane is missing at a shuffle", 2: "lanes shuffle at different places"}
C_TYPES = {"number": ctypes.c_int64, "int": ctypes.c_int32}
PAGE, NO_ACCESS = mmap.PAGESIZE, 0
_LIBC = ctypes.CDLL(None, use_errno=True)


class Emulated:
    """The kernels of a CUDA source, to launch on this machine's CPU."""

    def __init__(self, folder: Path, source: str = SOURCE) -> None:
        """Compile `source`, whose kernels have the signatures of the product's, in a folder for temporary files."""
        cpp, library = folder / "kernels.cpp", folder / "kernels.so"
        cpp.write_text("\n".join(['#include "lockstep.h"', source, *map(_entry, signatures())]))
        subprocess.run(["g++", *OPTIONS, f"-I{HERE}", "-o", library, cpp], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, kernel: str, grid: int, block: int, arguments: Sequence[Tensor | np.integer[Any]]) -> None:
        """Run a kernel; what it writes is in the tensors then. Raise RuntimeError if its lanes do not stay together."""
        parameters = signatures()[kernel]
        guarded = [Guarded(one) if isinstance(one, Tensor) else None for one in arguments]
        passed = [
            C_TYPES[kind](int(one)) if place is None else ctypes.c_void_p(place.address)
            for (kind, _), one, place in zip(parameters, arguments, guarded, strict=True)
        ]
        fault = self._library[f"run_{kernel}"](ctypes.c_uint(grid), ctypes.c_uint(block), *passed)
        if fault:
            raise RuntimeError(f"{kernel}: {FAULTS[fault]}")
        for place in guarded:
            if place is not None:
                place.back()


class Guarded:
    """A copy of a tensor in memory that ends where a page begins that nobody may touch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, size = tensor, tensor.numel() * tensor.element_size()
        pages = -(-size // PAGE) + 2
        self._memory = mmap.mmap(-1, pages * PAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address, self._size = begin + (pages - 1) * PAGE - size, size
        ctypes.memmove(self.address, tensor.data_ptr(), size)
        for page in (begin, begin + (pages - 1) * PAGE):
            _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS)

    def back(self) -> None:
        """Copy what a kernel wrote into the tensor."""
        ctypes.memmove(self.tensor.data_ptr(), self.address, self._size)


def _entry(kernel: str) -> str:
    """A C function that runs all threads of a kernel, and returns the fault that it finds."""
    parameters = signatures()[kernel]
    kept = " ".join(f"static {kind} {kernel}_{name};" for kind, name in parameters)
    taken = ", ".join(f"{kind} {name}" for kind, name in parameters)
    keep = " ".join(f"{kernel}_{name} = {name};" for _, name in parameters)
    given = ", ".join(f"{kernel}_{name}" for _, name in parameters)
    return (
        f'{kept}\nextern "C" int run_{kernel}(unsigned grid, unsigned block, {taken}) '
        f"{{ {keep} return lockstep::run(grid, block, [] {{ {kernel}({given}); }}); }}"
    )
