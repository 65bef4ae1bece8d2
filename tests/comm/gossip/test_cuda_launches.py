"""The arguments of each launch of a CUDA kernel are those of its signature, which a machine without a GPU can check."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import kernels as benchmark
from decentral.comm.codecs import blockwise
from decentral.comm.codecs.compiled_blocks import Bytes
from decentral.comm.gossip.cuda_source import check_arguments, signatures
from decentral.comm.gossip.outer_kernels import OuterVectors, Weighted

ALL = {"close_q4", "length_q4", "distance_int8", "merge"}
KERNELS = "decentral.comm.gossip.kernels_cuda"
NUMBERS = 1000  # the last chunk and the last block are not full
RHO = 0.5


class Slot:
    """A slot of `CudaKernels` in host memory."""

    def __init__(self) -> None:
        self.stream = SimpleNamespace(wait_stream=lambda stream: None, synchronize=lambda: None)
        self.staged = [torch.zeros(256) for _ in range(3)]

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, place: int, values: Tensor) -> Tensor:
        return self.staged[place][: len(values)].copy_(values)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """`CudaKernels` whose launches are only checked and listed, and the list of the launched kernels."""
    launched: list[str] = []

    def function_of(kernel: str) -> Callable[..., None]:
        return lambda grid, block, arguments: launched.append(kernel)

    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(function=SimpleNamespace(Module=object))  # type: ignore[attr-defined]
    cupy.from_dlpack = lambda tensor: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    sys.modules.pop(KERNELS, None)
    module = importlib.import_module(KERNELS)

    class OnCpu(module.CudaKernels):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.device, self.chunk_elements = torch.device("cpu"), 256
            self._slots, self._module = [Slot(), Slot()], SimpleNamespace(get_function=function_of)

        def _results(self, blocks: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(blocks, dtype=torch.float64), torch.zeros(blocks, dtype=torch.int32)

        def _sent(self, packed: Bytes) -> Tensor:
            return torch.from_numpy(packed.copy() if packed.size else np.zeros(1, np.uint8))

    yield OnCpu(), launched
    sys.modules.pop(KERNELS, None)


def test_every_launch_of_the_product_has_the_arguments_of_its_signature(recorded: tuple[Any, list[str]]) -> None:
    kernels, launched = recorded
    phi, baseline, residual = (torch.randn(NUMBERS) for _ in range(3))
    step, near = blockwise.encode("q4", residual), blockwise.encode("int8", phi)
    for code in ("q4", "q1"):
        kernels.close(phi, baseline, residual, code)
    kernels.length(step, NUMBERS)
    kernels.distance(phi, near)
    vectors = OuterVectors(phi, baseline, residual)
    kernels.merge(vectors, [Weighted(0.5, step)] * 2, [Weighted(0.5, near)], RHO)
    kernels.merge(vectors, [Weighted(1.0, step)], [], RHO)
    assert set(launched) == ALL


def test_every_launch_of_the_gpu_check_has_the_arguments_of_its_signature(recorded: tuple[Any, list[str]]) -> None:
    kernels, launched = recorded
    for _, _, call in benchmark.launches(NUMBERS, kernels):
        call()
    assert set(launched) == ALL


def test_the_signatures_are_read_from_the_source() -> None:
    assert signatures().keys() == ALL
    assert [" ".join(one) for one in signatures()["distance_int8"]] == [
        "float* phi",
        "number count",
        "number first",
        "number blocks",
        "byte* blob",
        "double* squares",
        "int* faults",
    ]


@pytest.mark.parametrize(
    ("at", "given", "expected"),
    [
        (None, None, "length_q4 takes 5 arguments; got 4"),
        (0, torch.zeros(1), "blob is byte\\* and takes torch.uint8; got torch.float32"),
        (1, np.int32(1), "count is number and takes .*int64.*; got .*int32"),
        (1, 1, "count is number and takes .*int64.*; got .*int"),
        (3, torch.zeros(2, 2, dtype=torch.float64).T, "squares takes a contiguous tensor"),
    ],
)
def test_wrong_arguments_are_refused_before_the_launch(at: int | None, given: Any, expected: str) -> None:
    blob, squares, faults = (torch.zeros(1, dtype=dtype) for dtype in (torch.uint8, torch.float64, torch.int32))
    arguments: list[Any] = [blob, np.int64(1), np.int64(1), squares, faults]
    check_arguments("length_q4", arguments)
    if at is None:
        arguments.pop()
    else:
        arguments[at] = given
    with pytest.raises(TypeError, match=expected):
        check_arguments("length_q4", arguments)
