"""The outer step as machine code for vectors in host memory: one pass to close, one to merge, the GIL free meanwhile.

The formulas, and the order in which they round, are those of train/outer_kernels.py; how a block is read and written,
and what makes the loops fast, is in train/block_codec.py. A block's scratch vectors stay in the nearest cache.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.machine_code import compiled
from decentral.core.reasons import Reason
from decentral.train import block_codec, compress
from decentral.train.block_codec import INFINITE, INT8_BLOCK, Q4_BLOCK, Bytes, Floats
from decentral.train.outer_kernels import (
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterConstants,
    OuterVectors,
    Weighted,
)

_2 = np.uint64(2)
_Q4_BLOCK, _INT8_BLOCK, _HALF_BLOCK = np.uint64(Q4_BLOCK), np.uint64(INT8_BLOCK), np.uint64(Q4_BLOCK // 2)


@compiled
def _close(snapshot: Floats, baseline: Floats, residual: Floats, blob: Bytes) -> tuple[float, int]:
    """The squared length of what the blob says, and the bit pattern of the largest magnitude of what was owed."""
    n, blocks = np.uint64(len(residual)), np.uint64((len(residual) + Q4_BLOCK - 1) // Q4_BLOCK)
    owed, levels, nibbles = np.zeros(Q4_BLOCK, np.float32), np.empty(Q4_BLOCK, np.float32), np.empty(Q4_BLOCK, np.uint8)
    squares, largest = 0.0, np.int32(0)
    for block in range(blocks):
        start = block * _Q4_BLOCK
        count = min(_Q4_BLOCK, n - start)
        if count < _Q4_BLOCK:
            owed[:] = np.float32(0.0)
        for i in range(count):
            owed[i] = residual[start + i] + (baseline[start + i] - snapshot[start + i])
        peak = block_codec.peak_of(owed)
        largest = max(largest, peak)
        scale = block_codec.put_scale(peak, np.float32(7.0), blob, block)
        block_codec.quantise(owed, scale, levels)
        for i in range(count):
            residual[start + i] = owed[i] - levels[i] * scale
        counted = block_codec.put_q4(levels, count, blob, _2 * blocks + block * _HALF_BLOCK, nibbles)
        squares += counted * (np.float64(scale) * np.float64(scale))
    return squares, largest


@compiled
def _length(blob: Bytes, elements: int) -> tuple[float, int]:
    """The squared length of what a q4 blob says, and what is wrong with the blob."""
    n, blocks = np.uint64(elements), np.uint64((elements + Q4_BLOCK - 1) // Q4_BLOCK)
    nibbles = np.empty(Q4_BLOCK, np.uint8)
    squares, fault = 0.0, np.int32(0)
    for block in range(blocks):
        count = min(_Q4_BLOCK, n - block * _Q4_BLOCK)
        scale = block_codec.scale_of(blob, block)
        block_codec.get_q4(blob, _2 * blocks + block * _HALF_BLOCK, count, nibbles)
        fault |= block_codec.fault_of(np.int32(7), block_codec.q4_peak(nibbles), scale)
        counted = np.int32(0)
        for i in range(_Q4_BLOCK):
            level = np.int32(nibbles[i]) - np.int32(8)
            counted += level * level
        squares += counted * (np.float64(scale) * np.float64(scale))
    return squares, fault


@compiled
def _distance(phi: Floats, blob: Bytes) -> tuple[float, int]:
    """The squared distance of what an int8 blob says from phi, and what is wrong with the blob."""
    n, blocks = np.uint64(len(phi)), np.uint64((len(phi) + INT8_BLOCK - 1) // INT8_BLOCK)
    squares = np.zeros(INT8_BLOCK, np.float64)  # one sum for each place in a block: a single one is not vectorised
    fault = np.int32(0)
    for block in range(blocks):
        start = block * _INT8_BLOCK
        at, count = _2 * blocks + start, min(_INT8_BLOCK, n - start)
        scale = block_codec.scale_of(blob, block)
        fault |= block_codec.fault_of(np.int32(127), block_codec.int8_peak(blob, at, count), scale)
        for i in range(count):
            apart = np.float32(np.float32(np.int8(blob[at + i])) * scale - phi[start + i])
            squares[i] += np.float64(apart) * np.float64(apart)
    return squares.sum(), fault


@compiled
def _merge(
    vectors: tuple[Floats, Floats, Floats, Floats],
    pseudo_gradients: npt.NDArray[np.uint8],
    slow_weights: npt.NDArray[np.uint8],
    weights: tuple[Floats, Floats],
    constants: Floats,
) -> None:
    """Blobs are [J, size] and [K, size], their weights [J] and [K]; a momentum of no elements is none."""
    phi, baseline, correction, momentum = vectors
    alpha, beta, gamma, rho = constants
    n, halves = np.uint64(len(phi)), np.uint64((len(phi) + Q4_BLOCK - 1) // Q4_BLOCK)
    wholes = np.uint64((len(phi) + INT8_BLOCK - 1) // INT8_BLOCK)
    step, apart = np.empty(INT8_BLOCK, np.float32), np.empty(INT8_BLOCK, np.float32)
    nibbles = np.empty(Q4_BLOCK, np.uint8)
    for whole in range(wholes):
        start = whole * _INT8_BLOCK
        count = min(_INT8_BLOCK, n - start)
        step[:] = np.float32(0.0)
        apart[:] = np.float32(0.0)
        for j in range(len(pseudo_gradients)):
            blob, weight = pseudo_gradients[j], weights[0][j]
            for half in range(_2 * whole, min(_2 * whole + _2, halves)):
                first = half * _Q4_BLOCK - start
                scale = block_codec.scale_of(blob, half)
                block_codec.get_q4(blob, _2 * halves + half * _HALF_BLOCK, min(_Q4_BLOCK, count - first), nibbles)
                for i in range(_Q4_BLOCK):
                    step[first + i] += weight * (np.float32(np.int32(nibbles[i]) - np.int32(8)) * scale)
        for k in range(len(slow_weights)):
            blob, weight = slow_weights[k], weights[1][k]
            scale = block_codec.scale_of(blob, whole)
            at = _2 * wholes + start
            for i in range(count):
                apart[i] += weight * (phi[start + i] - np.float32(np.int8(blob[at + i])) * scale)
        if len(momentum):
            for i in range(count):
                moved = alpha * momentum[start + i] + step[i]
                momentum[start + i] = moved
                step[i] += alpha * moved
        for i in range(count):
            slow = (phi[start + i] - beta * step[i]) - gamma * apart[i]
            phi[start + i] = slow
            taken = rho * (slow - baseline[start + i])
            correction[start + i] = taken
            baseline[start + i] += taken


class CompiledKernels:
    """outer_kernels.OuterKernels for vectors in host memory and the codecs of train/compress.py."""

    def close(self, snapshot: Tensor, baseline: Tensor, residual: Tensor) -> tuple[bytes, float]:
        blob = np.empty(compress.size(PSEUDO_GRADIENT_CODEC, residual.numel()), np.uint8)
        squares, largest = _close(snapshot.numpy(), baseline.numpy(), residual.numpy(), blob)
        if largest >= INFINITE:
            raise ProtocolError(Reason.NAN, "the pseudo-gradient holds numbers that are not finite")
        return blob.tobytes(), sqrt(squares)

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        squares, fault = _length(compress.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements), elements)
        compress.refuse(PSEUDO_GRADIENT_CODEC, fault)
        return sqrt(squares)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        squares, fault = _distance(phi.numpy(), compress.as_bytes(SLOW_WEIGHTS_CODEC, blob, phi.numel()))
        compress.refuse(SLOW_WEIGHTS_CODEC, fault)
        return sqrt(squares)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        constants: OuterConstants,
    ) -> None:
        n = vectors.phi.numel()
        none = np.empty(0, np.float32)
        momentum = none if vectors.momentum is None else vectors.momentum.numpy()
        steps, towards = (
            _stacked(PSEUDO_GRADIENT_CODEC, pseudo_gradients, n),
            _stacked(SLOW_WEIGHTS_CODEC, slow_weights, n),
        )
        _merge(
            (vectors.phi.numpy(), vectors.baseline.numpy(), vectors.correction.numpy(), momentum),
            steps,
            towards,
            (_weights(pseudo_gradients), _weights(slow_weights)),
            np.array([constants.alpha, constants.beta, constants.gamma, constants.rho], np.float32),
        )


def _weights(several: Sequence[Weighted]) -> Floats:
    return np.array([one.weight for one in several], np.float32)


def _stacked(codec: str, several: Sequence[Weighted], elements: int) -> Bytes:
    """The blobs as the rows of one array. Raises ProtocolError for one of the wrong size."""
    rows = np.empty((len(several), compress.size(codec, elements)), np.uint8)
    for row, one in zip(rows, several, strict=True):
        row[:] = compress.as_bytes(codec, one.blob, elements)
    return rows
