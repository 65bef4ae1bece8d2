"""The outer step's CUDA source, compiled by NVIDIA's compiler, which needs no GPU: its rounding has to be torch's."""

import ctypes
import re
from collections.abc import Sequence
from importlib.metadata import files

import pytest

from decentral.comm.gossip.cuda_source import COMPILE_OPTIONS, SOURCE

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")  # Turing, Ampere, Ada, Hopper, Blackwell


def ptx(architecture: str, options: Sequence[str]) -> str:
    """The instructions that NVRTC makes of the source."""
    (library,) = (one for one in files("nvidia-cuda-nvrtc") or [] if re.fullmatch(r"libnvrtc\.so\.\d+", one.name))
    nvrtc = ctypes.CDLL(str(library.locate()))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"outer_step.cu", 0, None, None)
    given = [one.encode() for one in (f"--gpu-architecture=compute_{architecture}", *options)]
    assert not nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    assert not nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    assert not nvrtc.nvrtcGetPTX(program, text)
    return text.value.decode()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_denormals_and_round_each_product(architecture: str) -> None:
    instructions = ptx(architecture, COMPILE_OPTIONS)
    assert set(re.findall(r"\.entry (\w+)", instructions)) == {"close_q4", "length_q4", "distance_int8", "merge"}
    assert "div.rn.f32" in instructions
    assert not re.search(r"\.ftz|fma\.rn\.f(32|64)|div\.(approx|full)", instructions)


def test_the_compilers_own_options_would_round_otherwise() -> None:
    assert "fma.rn.f32" in ptx("90", ())
    assert ".ftz" in ptx("90", ("-ftz=true",))
