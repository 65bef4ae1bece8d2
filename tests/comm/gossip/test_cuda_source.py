"""The outer step's CUDA source, compiled where there is no GPU: its rounding has to be torch's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from decentral.comm.gossip.cuda_source import COMPILE_OPTIONS, SOURCE

ARCHITECTURES = ("75", "80", "90", "120")  # Turing, Ampere, Hopper, Blackwell


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_denormals_and_round_each_product(tmp_path: Path, architecture: str) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not installed")
    source, ptx = tmp_path / "outer_step.cu", tmp_path / "outer_step.ptx"
    source.write_text(SOURCE)
    target = f"--gpu-architecture=compute_{architecture}"
    subprocess.run([compiler, "--ptx", target, *COMPILE_OPTIONS, source, "--output-file", ptx], check=True)
    instructions = ptx.read_text()
    assert set(re.findall(r"\.entry (\w+)", instructions)) == {"close_q4", "length_q4", "distance_int8", "merge"}
    assert "div.rn.f32" in instructions
    assert not re.search(r"\.ftz|fma\.rn\.f(32|64)|div\.(approx|full)", instructions)
