"""The outer step on a GPU, for vectors in host memory: cupy kernels on torch's streams. Start at `CudaKernels`.

Vectors pass through the device in chunks. Two slots, each with its own stream and staging buffers, take turns: one
copies a chunk in, runs the kernel and copies the results out, while the other does the same with the next chunk. Copies
overlap with kernels if the host vectors are pinned. The kernels wait for training's stream only if the snapshot is on
the device.

Formulas and rounding order are those of comm/gossip/outer_kernels.py: `--fmad=false` keeps products and sums apart,
and division and rounding are those of IEEE 754. A warp of 32 threads works on one block of a codec.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

import cupy
import numpy as np
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise, compiled_blocks
from decentral.comm.codecs.compiled_blocks import Bytes
from decentral.comm.gossip.cuda_source import COMPILE_OPTIONS, SIGNS_ARGUMENT, SOURCE, check_arguments
from decentral.comm.gossip.kernels_cpu import CompiledKernels, factors_of, stacked
from decentral.comm.gossip.outer_kernels import PSEUDO_GRADIENT_CODEC, SLOW_WEIGHTS_CODEC, OuterVectors, Weighted
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason

CHUNK_ELEMENTS = 1 << 22  # numbers in a chunk: 16 MiB of fp32, and a multiple of every codec's block
THREADS = 256
WARP = 32
STAGED = 3  # staging buffers of a `_Slot`: a kernel reads or writes up to three vectors


class _Slot:
    """One of two CUDA streams that process a vector's chunks in turn, and its staging buffers for one chunk."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.for_cupy = cupy.cuda.ExternalStream(self.stream.cuda_stream, device.index)
        self.staged = [torch.empty(elements, device=device) for _ in range(STAGED)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run torch's and cupy's operations in this slot's stream inside the `with` block."""
        with torch.cuda.stream(self.stream), self.for_cupy:
            yield

    def load(self, place: int, values: Tensor) -> Tensor:
        """Return a chunk of a vector on the device; a chunk in host memory is copied to staging buffer `place`."""
        return values if values.is_cuda else self.staged[place][: len(values)].copy_(values, non_blocking=True)


class CudaKernels(CompiledKernels):
    """`OuterKernels` on a GPU. If the device fails, all methods raise the errors of cupy or CUDA."""

    def __init__(self, device: torch.device, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        """Compile the kernels for a device, and allocate staging buffers for chunks of `chunk_elements` numbers."""
        assert chunk_elements % 256 == 0, "a chunk has whole blocks"
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self.chunk_elements = torch.device("cuda", index), chunk_elements
        with torch.cuda.device(self.device):
            self._slots = [_Slot(self.device, chunk_elements) for _ in range(2)]
            self._module = _compiled()

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        """Return the pseudo-gradient in q4 and its L2 norm, and update `residual` in place (`OuterKernels.close`).

        The CPU computes codecs that are not in `SIGNS_ARGUMENT`.
        """
        if code not in SIGNS_ARGUMENT:
            return super().close(snapshot, baseline, residual, code)
        n, blocks, signs = len(residual), -(-len(residual) // 128), np.int32(SIGNS_ARGUMENT[code])
        if not n:
            return b"", 0.0
        with self._slots[0].entered():
            blob = torch.empty(blockwise.size(PSEUDO_GRADIENT_CODEC, n), dtype=torch.uint8, device=self.device)
            squares, peaks = self._results(blocks)
        for slot, start, end in self._chunks(n, wait=snapshot.is_cuda):
            with slot.entered():
                vectors = [slot.load(place, one[start:end]) for place, one in enumerate((snapshot, baseline, residual))]
                where = np.int64(end - start), np.int64(start // 128), np.int64(blocks), signs
                self._launch("close_q4", WARP * -(-(end - start) // 128), [*vectors, *where, blob, squares, peaks])
                residual[start:end].copy_(vectors[2], non_blocking=True)
        with self._slots[0].entered():
            if int(peaks.max()) >= compiled_blocks.INFINITE:
                raise ProtocolError(Reason.NAN, "expected a finite pseudo-gradient; some numbers are NaN or infinite")
            return blob.cpu().numpy().tobytes(), sqrt(float(squares.sum()))

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        """Return the L2 norm of a pseudo-gradient in q4; raise ProtocolError if the codec refuses the blob."""
        read, blocks = blockwise.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements), -(-elements // 128)
        if not elements:
            return 0.0
        with self._slots[0].entered():
            sent, (squares, faults) = self._sent(read), self._results(blocks)
            self._launch("length_q4", WARP * blocks, [sent, np.int64(elements), np.int64(blocks), squares, faults])
            return _root(PSEUDO_GRADIENT_CODEC, squares, faults)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        """Return the L2 distance of int8 slow weights from phi; raise ProtocolError if the codec refuses the blob."""
        read, blocks = blockwise.as_bytes(SLOW_WEIGHTS_CODEC, blob, len(phi)), -(-len(phi) // 256)
        if not len(phi):
            return 0.0
        with self._slots[0].entered():
            sent, (squares, faults) = self._sent(read), self._results(blocks)
        for slot, start, end in self._chunks(len(phi)):
            with slot.entered():
                where = np.int64(end - start), np.int64(start // 256), np.int64(blocks)
                mine = slot.load(0, phi[start:end])
                self._launch("distance_int8", WARP * -(-(end - start) // 256), [mine, *where, sent, squares, faults])
        with self._slots[0].entered():
            return _root(SLOW_WEIGHTS_CODEC, squares, faults)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        """Take the outer step on `vectors`, in place; raise ProtocolError if a blob has the wrong size."""
        n = len(vectors.phi)
        step_rows = stacked(PSEUDO_GRADIENT_CODEC, pseudo_gradients, n)
        towards_rows = stacked(SLOW_WEIGHTS_CODEC, slow_weights, n)
        if not n:
            return
        weights = [one.weight for one in (*pseudo_gradients, *slow_weights)]
        scalars = factors_of([*weights, rho])
        with self._slots[0].entered():
            steps, towards, factors = (
                self._sent(step_rows),
                self._sent(towards_rows),
                torch.from_numpy(scalars).to(self.device),
            )
        blobs = steps, np.int32(len(step_rows)), towards, np.int32(len(towards_rows)), factors
        for slot, start, end in self._chunks(n):
            with slot.entered():
                phi, baseline = slot.load(0, vectors.phi[start:end]), slot.load(1, vectors.baseline[start:end])
                correction = slot.staged[2][: end - start]
                where = np.int64(end - start), np.int64(start), np.int64(n)
                self._launch("merge", end - start, [phi, baseline, correction, *where, *blobs])
                vectors.phi[start:end].copy_(phi, non_blocking=True)
                vectors.baseline[start:end].copy_(baseline, non_blocking=True)
                vectors.correction[start:end].copy_(correction, non_blocking=True)

    def _chunks(self, n: int, wait: bool = False) -> Iterator[tuple[_Slot, int, int]]:
        """Yield the chunks of a vector of n numbers, [start, end), each with the slot (stream) that processes it.

        After the last chunk, the CPU waits until both slots' streams are done. Before the first chunk, the streams wait
        for earlier work in slot 0's stream and, if `wait`, for the current stream, on which training runs.
        """
        for slot in self._slots:
            slot.stream.wait_stream(self._slots[0].stream)
            if wait:
                slot.stream.wait_stream(torch.cuda.current_stream(self.device))
        for number, start in enumerate(range(0, n, self.chunk_elements)):
            yield self._slots[number % 2], start, min(start + self.chunk_elements, n)
        for slot in self._slots:
            slot.stream.synchronize()

    def _launch(self, kernel: str, threads: int, arguments: Sequence[Tensor | np.integer]) -> None:
        """Launch a kernel with `threads` threads in the current stream; tensors are passed by DLPack, not copied.

        Raises:
            TypeError: If the arguments are not those of the kernel's signature.
        """
        check_arguments(kernel, arguments)
        passed = [cupy.from_dlpack(one) if isinstance(one, Tensor) else one for one in arguments]
        self._module.get_function(kernel)((-(-threads // THREADS),), (THREADS,), tuple(passed))

    def _results(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Return two uninitialised tensors [blocks]: squared lengths in fp64, and peaks or fault codes in int32."""
        squares = torch.empty(blocks, dtype=torch.float64, device=self.device)
        return squares, torch.empty(blocks, dtype=torch.int32, device=self.device)

    def _sent(self, packed: Bytes) -> Tensor:
        """Return a copy of the bytes on the device, sent through pinned memory: six times as fast as pageable memory.

        For an empty array, return one byte: an empty tensor has no address that a kernel could get.
        """
        pinned = torch.empty(max(1, packed.size), dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[: packed.size] = packed.reshape(-1)
        return pinned.to(self.device, non_blocking=True).view(packed.shape if packed.size else (1,))


def _compiled() -> cupy.cuda.function.Module:
    """Return the kernels, compiled for the current device.

    `cupy.RawModule` is not used: it adds `-ftz=true`, which flushes denormals to zero, so that results differ from
    torch's.
    """
    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(SOURCE, COMPILE_OPTIONS, filename="outer_step.cu")
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module


def _root(codec: str, squares: Tensor, faults: Tensor) -> float:
    """Return the square root of the sum of `squares`; raise ProtocolError if a block has a fault."""
    blockwise.refuse(codec, int((faults & compiled_blocks.BAD_LEVEL).max()))
    blockwise.refuse(codec, int(faults.max()))
    return sqrt(float(squares.sum()))
