"""CUDA source of the outer step's kernels, and the compiler options that keep its rounding equal to torch's.

comm/gossip/kernels_cuda.py compiles and launches the source. This file does not import cupy, so that a machine without
a GPU can compile and check the source, and the arguments of its kernels (`check_arguments`).
"""

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from decentral.comm.gossip.outer_kernels import ONE_BIT_CODEC, PSEUDO_GRADIENT_CODEC

COMPILE_OPTIONS = ("--fmad=false",)  # without fused multiply-add, and with denormals, CUDA rounds as the CPU does

# By codec that the kernel close_q4 computes: its argument `signs`, whether to send one bit of each number.
SIGNS_ARGUMENT = {PSEUDO_GRADIENT_CODEC: False, ONE_BIT_CODEC: True}

SOURCE = r"""
typedef unsigned char byte;
typedef long long number;
const int BAD_LEVEL = 1, NOT_FINITE = 2, INFINITE = 0x7f800000;

__device__ number warp() { return (blockIdx.x * (number)blockDim.x + threadIdx.x) / 32; }

__device__ float scale_at(const byte* blob, number block) {
    return __int_as_float((blob[2 * block] | blob[2 * block + 1] << 8) << 16);
}

__device__ int nibble_at(const byte* levels, number i) { return ((levels[i / 2] >> (i % 2 * 4)) & 15) - 8; }

__device__ int largest_of(int value) {
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}

__device__ int sum_of(int value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

__device__ double sum_of(double value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

__device__ int fault_of(int peak, int highest, float scale) {
    const bool bad = peak > highest || (scale < 0 && isfinite(scale));
    return (bad ? BAD_LEVEL : 0) | (isfinite(peak * scale) ? 0 : NOT_FINITE);
}

// Returns the upper 16 bits of a block's q4 scale, bf16_up(peak / 7). `peak` is a bit pattern.
__device__ int q4_scale(int peak) { return (__float_as_int(__fdiv_rn(__int_as_float(peak), 7.0f)) + 0xffff) >> 16; }

// Returns the upper 16 bits of a block's q1 scale, bf16_down(mean magnitude / 7): formula in comm/codecs/blockwise.py.
__device__ int q1_scale(const float* owed, int peak, int numbers) {
    const float unit = __fdiv_rn(__int_as_float(peak & INFINITE), 32768.0f), divisor = unit == 0 ? 1.0f : unit;
    int total = 0;
    for (int k = 0; k < 4; k++) total += (int)rintf(__fdiv_rn(fabsf(owed[k]), divisor));
    return __float_as_int(__fdiv_rn((float)sum_of(total), (float)(7 * numbers)) * unit) >> 16;
}

// `blob` holds all blocks; the chunk has `count` numbers from block `first` on. A thread takes four adjacent numbers.
extern "C" __global__ void close_q4(const float* snapshot, const float* baseline, float* residual, number count,
                                    number first, number blocks, int signs, byte* blob, double* squares, int* peaks) {
    const number block = warp(), start = block * 128 + threadIdx.x % 32 * 4;
    if (block * 128 >= count) return;
    float owed[4];
    int peak = 0, level[4], square = 0;
    for (int k = 0; k < 4; k++) {
        const number i = start + k;
        owed[k] = i < count ? residual[i] + (baseline[i] - snapshot[i]) : 0.0f;
        peak = max(peak, __float_as_int(owed[k]) & 0x7fffffff);
    }
    peak = largest_of(peak);
    const int upper = signs ? q1_scale(owed, peak, (int)min(count - block * 128, (number)128)) : q4_scale(peak);
    const float scale = __int_as_float(upper << 16), divisor = scale == 0 ? 1.0f : scale;
    const int one = scale == 0 ? 0 : 7;
    for (int k = 0; k < 4; k++) {
        if (signs) level[k] = start + k >= count ? 0 : owed[k] >= 0 ? one : -one;
        else level[k] = (int)rintf(__fdiv_rn(owed[k], divisor));
        square += level[k] * level[k];
        if (start + k < count) residual[start + k] = owed[k] - level[k] * scale;
    }
    byte* out = blob + 2 * blocks + first * 64 + start / 2;
    for (int k = 0; k < 4; k += 2)
        if (start + k < count) out[k / 2] = (byte)(((level[k] + 8) & 15) | ((level[k + 1] + 8) & 15) << 4);
    square = sum_of(square);
    if (threadIdx.x % 32 == 0) {
        blob[2 * (first + block)] = upper & 255;
        blob[2 * (first + block) + 1] = upper >> 8;
        squares[first + block] = square * ((double)scale * scale);
        peaks[first + block] = peak;
    }
}

extern "C" __global__ void length_q4(const byte* blob, number count, number blocks, double* squares, int* faults) {
    const number block = warp(), start = block * 128 + threadIdx.x % 32 * 4;
    if (block * 128 >= count) return;
    const float scale = scale_at(blob, block);
    int peak = 0, square = 0;
    for (number i = start; i < min(start + 4, count); i++) {
        const int level = nibble_at(blob + 2 * blocks, i);
        peak = max(peak, abs(level));
        square += level * level;
    }
    peak = largest_of(peak);
    square = sum_of(square);
    if (threadIdx.x % 32 == 0) {
        squares[block] = square * ((double)scale * scale);
        faults[block] = fault_of(peak, 7, scale);
    }
}

extern "C" __global__ void distance_int8(const float* phi, number count, number first, number blocks, const byte* blob,
                                         double* squares, int* faults) {
    const number block = warp(), start = block * 256;
    if (start >= count) return;
    const float scale = scale_at(blob, first + block);
    const signed char* levels = (const signed char*)blob + 2 * blocks + first * 256;
    int peak = 0;
    double square = 0;
    for (number i = start + threadIdx.x % 32; i < min(start + 256, count); i += 32) {
        const float difference = levels[i] * scale - phi[i];
        peak = max(peak, abs((int)levels[i]));
        square += (double)difference * difference;
    }
    peak = largest_of(peak);
    square = sum_of(square);
    if (threadIdx.x % 32 == 0) {
        squares[first + block] = square;
        faults[first + block] = fault_of(peak, 127, scale);
    }
}

// A thread takes one number, index `first` + i of `n`. `factors` holds the weights of all blobs, then rho.
extern "C" __global__ void merge(float* phi, float* baseline, float* correction, number count, number first, number n,
                                 const byte* steps, int step_count, const byte* towards, int towards_count,
                                 const float* factors) {
    const number i = blockIdx.x * (number)blockDim.x + threadIdx.x, at = first + i;
    if (i >= count) return;
    const number q4_scales = (n + 127) / 128 * 2, int8_scales = (n + 255) / 256 * 2;
    float step = 0, consensus = 0;
    for (int j = 0; j < step_count; j++) {
        const byte* blob = steps + j * (q4_scales + (n + 1) / 2);
        step += factors[j] * (nibble_at(blob + q4_scales, at) * scale_at(blob, at / 128));
    }
    for (int k = 0; k < towards_count; k++) {
        const byte* blob = towards + k * (int8_scales + n);
        const int level = (signed char)blob[int8_scales + at];
        consensus += factors[step_count + k] * (phi[i] - level * scale_at(blob, at / 256));
    }
    phi[i] = phi[i] - step - consensus;
    correction[i] = factors[step_count + towards_count] * (phi[i] - baseline[i]);
    baseline[i] += correction[i];
}
"""

_KINDS: dict[str, type[np.integer] | torch.dtype] = {
    "float*": torch.float32,
    "byte*": torch.uint8,
    "double*": torch.float64,
    "int*": torch.int32,
    "number": np.int64,
    "int": np.int32,
}
"""What must be passed for each type in the kernels' signatures: a tensor of a dtype, or a numpy integer."""


@cache
def signatures() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return each kernel's parameters by the kernel's name, as pairs of type (a key of `_KINDS`) and name."""
    found = re.findall(r"__global__ void (\w+)\((.*?)\)", SOURCE, flags=re.DOTALL)
    return {
        kernel: tuple(
            (kind, name) for kind, name in re.findall(r"(?:const )?(\w+\*?) (\w+)(?:,|$)", " ".join(text.split()))
        )
        for kernel, text in found
    }


def check_arguments(kernel: str, arguments: Sequence[Tensor | np.integer]) -> None:
    """Raise TypeError unless the arguments have the number and the types of the kernel's signature in `SOURCE`.

    A kernel that is launched with wrong arguments reads and writes memory outside its tensors. Tensors must be
    contiguous.
    """
    parameters = signatures()[kernel]
    if len(arguments) != len(parameters):
        raise TypeError(f"{kernel} takes {len(parameters)} arguments; got {len(arguments)}")
    for (kind, name), given in zip(parameters, arguments, strict=True):
        found = given.dtype if isinstance(given, Tensor) else type(given)
        if found != _KINDS[kind]:
            raise TypeError(f"{kernel}: {name} is {kind} and takes {_KINDS[kind]}; got {found}")
        if isinstance(given, Tensor) and not given.is_contiguous():
            raise TypeError(f"{kernel}: {name} takes a contiguous tensor; its strides are {given.stride()}")
