"""`CudaKernels` on a machine without a GPU: in host memory, with launches that the test does."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentral.comm.codecs.compiled_blocks import Bytes
from decentral.comm.gossip.kernels_cpu import CompiledKernels

KERNELS = "decentral.comm.gossip.kernels_cuda"
CHUNK = 256  # numbers; most vectors of a test have several chunks

Launch = Callable[[str, int, int, Sequence[Any]], None]  # kernel, blocks of threads, threads of each, arguments


class Slot:
    """A slot of `CudaKernels` in host memory."""

    def __init__(self) -> None:
        self.stream = SimpleNamespace(wait_stream=lambda stream: None, synchronize=lambda: None)
        self.staged = [torch.zeros(CHUNK) for _ in range(3)]

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, place: int, values: Tensor) -> Tensor:
        return self.staged[place][: len(values)].copy_(values)


@contextmanager
def cuda_kernels(launch: Launch) -> Iterator[Any]:
    """`CudaKernels` whose kernels `launch` runs."""

    def function_of(kernel: str) -> Callable[..., None]:
        return lambda grid, block, arguments: launch(kernel, grid[0], block[0], arguments)

    cupy, before = ModuleType("cupy"), sys.modules.get("cupy")
    cupy.cuda = SimpleNamespace(function=SimpleNamespace(Module=object))  # type: ignore[attr-defined]
    cupy.from_dlpack = lambda tensor: tensor  # type: ignore[attr-defined]
    sys.modules["cupy"] = cupy
    sys.modules.pop(KERNELS, None)
    module = importlib.import_module(KERNELS)

    class OnCpu(module.CudaKernels):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.device, self.chunk_elements = torch.device("cpu"), CHUNK
            CompiledKernels.__init__(self)
            self._slots, self._module = [Slot(), Slot()], SimpleNamespace(get_function=function_of)

        def _results(self, blocks: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(blocks, dtype=torch.float64), torch.zeros(blocks, dtype=torch.int32)

        def _sent(self, packed: Bytes) -> Tensor:
            return torch.from_numpy(packed.copy() if packed.size else np.zeros(1, np.uint8))

    try:
        yield OnCpu()
    finally:
        sys.modules.pop(KERNELS, None)
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before
