"""The arguments of each launch of a CUDA kernel are those of its signature, which a machine without a GPU can check."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import kernels as benchmark
from decentral.comm.codecs import blockwise
from decentral.comm.gossip.cuda_source import SIGNS_ARGUMENT, check_arguments, signatures
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import OuterVectors, Weighted
from tests.gpu_source.on_cpu import cuda_kernels

ALL = {"close_q4", "length_q4", "distance_int8", "merge"}
NUMBERS = 1000  # the last chunk and the last block are not full
RHO = 0.5


@pytest.fixture
def recorded() -> Iterator[tuple[Any, list[str]]]:
    """`CudaKernels` whose launches are only checked and listed, and the list of the launched kernels."""
    launched: list[str] = []
    with cuda_kernels(lambda kernel, grid, block, arguments: launched.append(kernel)) as kernels:
        yield kernels, launched


def test_every_launch_of_the_product_has_the_arguments_of_its_signature(recorded: tuple[Any, list[str]]) -> None:
    kernels, launched = recorded
    phi, baseline, residual = (torch.randn(NUMBERS) for _ in range(3))
    step, near = blockwise.encode("q4", residual), blockwise.encode("int8", phi)
    for code in SIGNS_ARGUMENT:
        kernels.close(phi, baseline, residual, code)
    kernels.length(step, NUMBERS)
    kernels.distance(phi, near)
    vectors = OuterVectors(phi, baseline, residual)
    kernels.merge(vectors, [Weighted(0.5, step)] * 2, [Weighted(0.5, near)], RHO)
    kernels.merge(vectors, [Weighted(1.0, step)], [], RHO)
    assert set(launched) == ALL


@pytest.mark.parametrize("code", ["sparse", "new"])
def test_a_codec_that_no_cuda_kernel_computes_closes_on_the_cpu(
    recorded: tuple[Any, list[str]], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, launched = recorded
    monkeypatch.setattr(CompiledKernels, "close", lambda self, snapshot, baseline, residual, code: (b"", code))
    assert kernels.close(*(torch.zeros(NUMBERS) for _ in range(3)), code) == (b"", code)
    assert launched == []


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
