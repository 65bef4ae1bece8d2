"""The CUDA kernels do on a CPU, thread for thread, what torch's formulas do: bit for bit, whatever the numbers are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.cuda_source import SOURCE
from decentral.comm.gossip.kernel_choice import Disagreement, prove
from decentral.comm.gossip.outer_kernels import OuterVectors, TorchKernels, Weighted
from decentral.core.errors import ProtocolError
from tests.gpu_source.emulator import Emulated
from tests.gpu_source.on_cpu import cuda_kernels

SIZES = (1, 2, 3, 4, 5, 31, 33, 127, 128, 129, 255, 256, 257, 511, 513, 1000)
NUMBERS = {
    "denormals": torch.tensor([1e-45, -1e-45, 1e-40, -3e-39, 0.0]),
    "from the smallest to the largest": torch.tensor([1e-45, -1e-38, 1.0, -1e19, 3e38]),
    "ties of four bits": torch.tensor([7.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5]),
    "zeros of both signs": torch.tensor([0.0, -0.0]),
    "one number alone": torch.tensor([0.0] * 200 + [1.0] + [0.0] * 56),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with cuda_kernels(Emulated(tmp_path_factory.mktemp("kernels")).launch) as kernels:
        yield kernels


def of(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.repeat(-(-size // len(values)))[:size].clone()


def test_the_peers_own_proof_holds(emulated: Any) -> None:
    prove(emulated)


@pytest.mark.parametrize("code", ["q4", *blockwise.SHORTER_CODECS])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_window_closes_with_the_same_bytes_and_the_same_residual(emulated: Any, numbers: str, code: str) -> None:
    for size in SIZES:
        baseline, snapshot = of(NUMBERS[numbers], size), torch.zeros(size)
        residuals = [of(NUMBERS[numbers].flip(0), size) * 0.25 for _ in range(2)]
        ours, torchs = (
            one.close(snapshot, baseline, residual, code)
            for one, residual in zip((emulated, TorchKernels(blockwise)), residuals, strict=True)
        )
        assert torch.equal(*(blockwise.decode("q4", one[0], size) for one in (ours, torchs)))
        assert torch.equal(residuals[0].view(torch.int32), residuals[1].view(torch.int32))
        assert ours[1] == pytest.approx(torchs[1], rel=1e-9)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_merges_leave_the_same_bits(emulated: Any, numbers: str) -> None:
    for size in SIZES:
        values = of(NUMBERS[numbers], size)
        step, near = blockwise.encode("q4", values), blockwise.encode("int8", values.flip(0))
        given = [Weighted(0.5, step), Weighted(0.3, step)], [Weighted(0.2, near)]
        both = [OuterVectors(values.clone(), values.flip(0).clone(), torch.zeros(size)) for _ in range(2)]
        for kernels, vectors in zip((emulated, TorchKernels(blockwise)), both, strict=True):
            kernels.merge(vectors, *given, 0.7)
        for name in ("phi", "baseline", "correction"):
            ours, torchs = (getattr(vectors, name).view(torch.int32) for vectors in both)
            assert torch.equal(ours, torchs), (name, size)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_closes_no_window(emulated: Any, bad: float) -> None:
    for size in SIZES:
        snapshot = torch.zeros(size)
        snapshot[size // 2] = bad
        with pytest.raises(ProtocolError, match="finite"):
            emulated.close(snapshot, torch.zeros(size), torch.zeros(size))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(int)rintf(__fdiv_rn(owed[k], divisor))", "(int)roundf(__fdiv_rn(owed[k], divisor))"),
        ("__fdiv_rn(__int_as_float(peak), 7.0f)", "(__int_as_float(peak) * (1 / 7.0f))"),
        (
            "step += factors[j] * (nibble_at(blob + q4_scales, at) * scale_at(blob, at / 128))",
            "step = fmaf(factors[j], nibble_at(blob + q4_scales, at) * scale_at(blob, at / 128), step)",
        ),
        ("phi[i] - step - consensus", "phi[i] - (step + consensus)"),
    ],
)
def test_a_kernel_that_rounds_otherwise_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    assert right in SOURCE
    with cuda_kernels(Emulated(tmp_path, SOURCE.replace(right, wrong)).launch) as kernels, pytest.raises(Disagreement):
        prove(kernels)


def test_lanes_that_do_not_shuffle_together_are_found(tmp_path: Path) -> None:
    begin = "const number block = warp(), start = block * 128 + threadIdx.x % 32 * 4;\n"
    assert SOURCE.count(begin) == 2
    apart = SOURCE.replace(begin, begin + "    if (threadIdx.x % 32 == 31) return;\n")
    blob = torch.zeros(66, dtype=torch.uint8), np.int64(128), np.int64(1)
    results = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="length_q4: a lane is missing at a shuffle"):
        Emulated(tmp_path, apart).launch("length_q4", 1, 32, [*blob, *results])
