"""The outer step on a GPU, for vectors that live in host memory: cupy kernels on torch's streams.

Vectors go through the device in chunks. Each of two slots has a stream and staging buffers of its own and takes every
second chunk: it copies the chunk in, runs the kernel and copies the results out, while the other slot does the same
with the next one. The host vectors should be pinned: then copies in both directions overlap with kernels. Training's
stream is waited for only where the snapshot is on the device.

The formulas, and the order in which they round, are those of train/outer_kernels.py: `--fmad=false` keeps products and
sums apart, and division and rounding are those of IEEE 754. A warp of 32 threads works on one block of a codec.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

import cupy
import numpy as np
import torch
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.train import block_kernels, compress
from decentral.train.block_kernels import Bytes
from decentral.train.kernels_cpu import factors_of, stacked
from decentral.train.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterConstants,
    OuterVectors,
    Weighted,
)

CHUNK_ELEMENTS = 1 << 22  # 16 MiB in each staging buffer; a multiple of both codecs' blocks
THREADS = 256
WARP = 32
STAGED = 4  # vectors of a chunk at most: those of a merge with momentum

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

// The upper half of q4's scale for a block, bf16_up(peak / 7). `peak` is a bit pattern.
__device__ int q4_scale(int peak) { return (__float_as_int(__fdiv_rn(__int_as_float(peak), 7.0f)) + 0xffff) >> 16; }

// q1's, bf16_down(mean magnitude / 7), for a block of `numbers`: train/compress.py has the formula.
__device__ int q1_scale(const float* owed, int peak, int numbers) {
    const float unit = __fdiv_rn(__int_as_float(peak & INFINITE), 32768.0f), divisor = unit == 0 ? 1.0f : unit;
    int total = 0;
    for (int k = 0; k < 4; k++) total += (int)rintf(__fdiv_rn(fabsf(owed[k]), divisor));
    return __float_as_int(__fdiv_rn((float)sum_of(total), (float)(7 * numbers)) * unit) >> 16;
}

// `blob` is that of all blocks; the chunk of `count` elements begins with block `first`. A lane has four neighbours.
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
        const float apart = levels[i] * scale - phi[i];
        peak = max(peak, abs((int)levels[i]));
        square += (double)apart * apart;
    }
    peak = largest_of(peak);
    square = sum_of(square);
    if (threadIdx.x % 32 == 0) {
        squares[first + block] = square;
        faults[first + block] = fault_of(peak, 127, scale);
    }
}

// A thread has one element, number `first` + i of `n`. Factors: the weights of all blobs, alpha, beta, gamma, rho.
extern "C" __global__ void merge(float* phi, float* baseline, float* correction, float* momentum, int has_momentum,
                                 number count, number first, number n, const byte* steps, int step_count,
                                 const byte* towards, int towards_count, const float* factors) {
    const number i = blockIdx.x * (number)blockDim.x + threadIdx.x, at = first + i;
    if (i >= count) return;
    const number q4_scales = (n + 127) / 128 * 2, int8_scales = (n + 255) / 256 * 2;
    const float* constants = factors + step_count + towards_count;
    const float alpha = constants[0], beta = constants[1], gamma = constants[2], rho = constants[3];
    float step = 0, apart = 0;
    for (int j = 0; j < step_count; j++) {
        const byte* blob = steps + j * (q4_scales + (n + 1) / 2);
        step += factors[j] * (nibble_at(blob + q4_scales, at) * scale_at(blob, at / 128));
    }
    for (int k = 0; k < towards_count; k++) {
        const byte* blob = towards + k * (int8_scales + n);
        const int level = (signed char)blob[int8_scales + at];
        apart += factors[step_count + k] * (phi[i] - level * scale_at(blob, at / 256));
    }
    if (has_momentum) {
        momentum[i] = alpha * momentum[i] + step;
        step += alpha * momentum[i];
    }
    phi[i] = phi[i] - beta * step - gamma * apart;
    correction[i] = rho * (phi[i] - baseline[i]);
    baseline[i] += correction[i];
}
"""


class _Slot:
    """A stream, and staging buffers for one chunk."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.for_cupy = cupy.cuda.ExternalStream(self.stream.cuda_stream, device.index)
        self.staged = [torch.empty(elements, device=device) for _ in range(STAGED)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What torch and cupy do meanwhile, they do in this slot's stream."""
        with torch.cuda.stream(self.stream), self.for_cupy:
            yield

    def load(self, place: int, values: Tensor) -> Tensor:
        """A chunk of a vector on the device, copied there if it is in host memory."""
        return values if values.is_cuda else self.staged[place][: len(values)].copy_(values, non_blocking=True)


class CudaKernels:
    """outer_kernels.OuterKernels on a GPU. Raises whatever cupy or CUDA raise if the device cannot do it."""

    def __init__(self, device: torch.device, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        assert chunk_elements % 256 == 0, "a chunk has whole blocks"
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.chunk_elements = torch.device("cuda", index), chunk_elements
        with torch.cuda.device(self.device):
            self._slots = [_Slot(self.device, chunk_elements) for _ in range(2)]
            self._module = cupy.RawModule(code=SOURCE, options=("--fmad=false",))

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        n, blocks, signs = len(residual), -(-len(residual) // 128), np.int32(code == ONE_BIT_CODEC)
        if not n:
            return b"", 0.0
        with self._slots[0].entered():
            blob = torch.empty(compress.size(PSEUDO_GRADIENT_CODEC, n), dtype=torch.uint8, device=self.device)
            squares, peaks = self._results(blocks)
        for slot, start, end in self._chunks(n, wait=snapshot.is_cuda):
            with slot.entered():
                vectors = [slot.load(place, one[start:end]) for place, one in enumerate((snapshot, baseline, residual))]
                where = np.int64(end - start), np.int64(start // 128), np.int64(blocks), signs
                self._launch("close_q4", WARP * -(-(end - start) // 128), *vectors, *where, blob, squares, peaks)
                residual[start:end].copy_(vectors[2], non_blocking=True)
        with self._slots[0].entered():
            if int(peaks.max()) >= block_kernels.INFINITE:
                raise ProtocolError(Reason.NAN, "the pseudo-gradient holds numbers that are not finite")
            return blob.cpu().numpy().tobytes(), sqrt(float(squares.sum()))

    def narrow(self, blob: bytes, elements: int) -> bytes:
        return compress.narrowed(blob, elements)

    def widen(self, blob: bytes | memoryview, elements: int) -> bytes:
        return compress.widened(blob, elements)

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        read, blocks = compress.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements), -(-elements // 128)
        if not elements:
            return 0.0
        with self._slots[0].entered():
            sent, (squares, faults) = self._sent(read), self._results(blocks)
            self._launch("length_q4", WARP * blocks, sent, np.int64(elements), np.int64(blocks), squares, faults)
            return _root(PSEUDO_GRADIENT_CODEC, squares, faults)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        read, blocks = compress.as_bytes(SLOW_WEIGHTS_CODEC, blob, len(phi)), -(-len(phi) // 256)
        if not len(phi):
            return 0.0
        with self._slots[0].entered():
            sent, (squares, faults) = self._sent(read), self._results(blocks)
        for slot, start, end in self._chunks(len(phi)):
            with slot.entered():
                where = np.int64(end - start), np.int64(start // 256), np.int64(blocks)
                mine = slot.load(0, phi[start:end])
                self._launch("distance_int8", WARP * -(-(end - start) // 256), mine, *where, sent, squares, faults)
        with self._slots[0].entered():
            return _root(SLOW_WEIGHTS_CODEC, squares, faults)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        constants: OuterConstants,
    ) -> None:
        n = len(vectors.phi)
        step_rows = stacked(PSEUDO_GRADIENT_CODEC, pseudo_gradients, n)
        towards_rows = stacked(SLOW_WEIGHTS_CODEC, slow_weights, n)
        if not n:
            return
        weights = [one.weight for one in (*pseudo_gradients, *slow_weights)]
        scalars = factors_of([*weights, constants.alpha, constants.beta, constants.gamma, constants.rho])
        with self._slots[0].entered():
            steps, towards, factors = (
                self._sent(step_rows),
                self._sent(towards_rows),
                torch.from_numpy(scalars).to(self.device),
            )
        blobs = steps, np.int32(len(step_rows)), towards, np.int32(len(towards_rows)), factors
        kept = [vectors.phi, vectors.baseline] + ([] if vectors.momentum is None else [vectors.momentum])
        for slot, start, end in self._chunks(n):
            with slot.entered():
                loaded = [slot.load(place, one[start:end]) for place, one in enumerate(kept)]
                correction, momentum = slot.staged[STAGED - 1][: end - start], loaded[-1]
                where = np.int32(len(kept) > 2), np.int64(end - start), np.int64(start), np.int64(n)
                self._launch("merge", end - start, *loaded[:2], correction, momentum, *where, *blobs)
                for host, changed in zip((*kept, vectors.correction), (*loaded, correction), strict=True):
                    host[start:end].copy_(changed, non_blocking=True)

    def _chunks(self, n: int, wait: bool = False) -> Iterator[tuple[_Slot, int, int]]:
        """The chunks of n elements with the slots that take them. All is done when it ends.

        The slots wait for what the first one has copied, and on request for training's stream.
        """
        for slot in self._slots:
            slot.stream.wait_stream(self._slots[0].stream)
            if wait:
                slot.stream.wait_stream(torch.cuda.current_stream(self.device))
        for number, start in enumerate(range(0, n, self.chunk_elements)):
            yield self._slots[number % 2], start, min(start + self.chunk_elements, n)
        for slot in self._slots:
            slot.stream.synchronize()

    def _launch(self, kernel: str, threads: int, *arguments: object) -> None:
        """A kernel with so many threads, in the stream that was entered. Tensors go to cupy by DLPack, uncopied."""
        passed = [cupy.from_dlpack(one) if isinstance(one, Tensor) else one for one in arguments]
        self._module.get_function(kernel)((-(-threads // THREADS),), (THREADS,), tuple(passed))

    def _results(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Of each block: a squared length, and a largest bit pattern or what is wrong with it. Not filled."""
        squares = torch.empty(blocks, dtype=torch.float64, device=self.device)
        return squares, torch.empty(blocks, dtype=torch.int32, device=self.device)

    def _sent(self, packed: Bytes) -> Tensor:
        """Packed bytes on the device; one byte for none, since an empty array has no address."""
        return torch.from_numpy(packed.copy() if packed.size else np.zeros(1, np.uint8)).to(self.device)


def _root(codec: str, squares: Tensor, faults: Tensor) -> float:
    """The length whose square the blocks add up to. Raises ProtocolError if something is wrong with one of them."""
    compress.refuse(codec, int((faults & block_kernels.BAD_LEVEL).max()))
    compress.refuse(codec, int(faults.max()))
    return sqrt(float(squares.sum()))
