"""Choice of the outer step's kernels: the fastest ones that agree with torch's formulas on this machine.

Kernels that are missing, fail, or differ from torch in one bit are not used; the returned text names them. All compiled
functions, including the codecs, run once here, so that none is compiled during training.

`prove` compares kernels with torch's formulas: vectors and bytes bit for bit, lengths within rounding. A peer runs it
at each start, so the cases are few and small: sizes around the blocks' edges, numbers from the smallest to the largest
of fp32, and blobs that must be refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import (
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterKernels,
    OuterVectors,
    TorchKernels,
    Weighted,
)
from decentral.core.errors import ProtocolError

PROVEN_SIZES = (0, 1, 127, 128, 129, 255, 256, 257, 1000, 10_001)
PROVEN_MAGNITUDES = (1e-42, 1e-30, 1.0, 1e36)
EXTREMES = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0, 7.0, 127.0])
HALVES = torch.tensor([7.0, *(sign * (level + 0.5) for level in range(7) for sign in (1, -1))])
# One test vector consists of HALVES times each number from 1 to PEAKS. In its blocks peak / 7 is exact, and the numbers
# lie halfway between two levels, so that a kernel that does not round half to even differs from torch.
PEAKS = 64
LENGTH_TOLERANCE = 1e-9  # largest relative difference of two L2 norms; kernels may add the squares in another order
PROVEN_WEIGHTS = (0.5, 0.3, 0.2)

T = TypeVar("T")


def best_kernels(device: torch.device, codecs: Codecs) -> tuple[OuterKernels, str]:
    """Return the kernels for a peer that trains on `device`, and the reason for the choice.

    The first call on a machine compiles, which takes seconds. Codecs other than comm/codecs/blockwise.py, such as the
    simulator's, get `TorchKernels`.
    """
    if codecs is not blockwise:
        return TorchKernels(codecs), "torch, since only a real peer's codecs are compiled"
    blockwise.warm_up()
    candidates: dict[str, Callable[[], OuterKernels]] = {"CUDA": lambda: _cuda(device)} if device.type == "cuda" else {}
    return first_proven({**candidates, "compiled for the CPU": CompiledKernels})


def first_proven(candidates: Mapping[str, Callable[[], OuterKernels]]) -> tuple[OuterKernels, str]:
    """Return the first kernels that pass `prove`, else `TorchKernels`, and a text that names them and earlier failures.

    Args:
        candidates: Functions that create kernels, by the kernels' name. They may raise any error, for example if a
            library or a device is missing.
    """
    against: list[str] = []
    for name, make in candidates.items():
        try:
            kernels = make()
            prove(kernels)
        except Exception as error:  # a driver, compiler or kernel can fail with any error, and training must go on
            against.append(f"not {name} ({type(error).__name__}: {error})")
        else:
            return kernels, "; ".join([f"{name}, proven against torch", *against])
    return TorchKernels(blockwise), "; ".join(["torch", *against])


def _cuda(device: torch.device) -> OuterKernels:
    """Return CUDA kernels for `device` after checking them with small chunks; raise ImportError without cupy."""
    from decentral.comm.gossip.kernels_cuda import CudaKernels

    prove(CudaKernels(device, chunk_elements=1024))  # with small chunks, a test vector spans several chunks
    return CudaKernels(device)


class Disagreement(Exception):
    """Raised by `prove` if a kernel's result differs from torch's."""


class Formulas:
    """The codecs of comm/codecs/blockwise.py in torch operations only, without compiled functions."""

    def encode(self, codec: str, values: Tensor) -> bytes:
        """Return the bytes of fp32 values [n]."""
        return blockwise.CODECS[codec].pack(values)

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """Return the numbers in a blob, fp32 [elements]; raise ProtocolError if the blob is invalid."""
        return blockwise.decode_by_formula(codec, blob, elements)

    def size(self, codec: str, elements: int) -> int:
        """Return the number of bytes that `elements` numbers take."""
        return blockwise.size(codec, elements)


def prove(kernels: OuterKernels) -> None:
    """Check on this machine that the kernels return what torch's formulas return.

    Raises:
        Disagreement: If a result differs. Errors that the kernels raise pass through.
    """
    both = (kernels, TorchKernels(Formulas()))
    for vectors in _cases():
        for code in (PSEUDO_GRADIENT_CODEC, *blockwise.SHORTER_CODECS):
            _prove_close(both, vectors, code)
        _prove_merge(both, [vector / 16 for vector in vectors])  # divided by 16, so that no decoded number overflows
    _prove_refusals(both)


def _cases() -> Iterator[list[Tensor]]:
    """Yield lists of six equally long vectors: random ones of several magnitudes, mixtures of EXTREMES, and ties."""
    generator = torch.Generator().manual_seed(0)
    for n in PROVEN_SIZES:
        for magnitude in PROVEN_MAGNITUDES:
            yield [magnitude * torch.randn(n, generator=generator) for _ in range(6)]
        yield [EXTREMES[torch.randint(len(EXTREMES), (n,), generator=generator)] for _ in range(6)]
    ties = torch.outer(torch.arange(1.0, PEAKS + 1), HALVES.repeat(9)[:128]).flatten()
    yield [torch.zeros_like(ties), torch.zeros_like(ties), *(ties for _ in range(4))]


def _prove_close(both: tuple[OuterKernels, OuterKernels], vectors: list[Tensor], code: str) -> None:
    snapshot, baseline, residual = vectors[:3]
    kept = [residual.clone(), residual.clone()]
    closed = [
        _outcome(partial(one.close, snapshot, baseline, mine, code)) for one, mine in zip(both, kept, strict=True)
    ]
    ours, theirs = closed
    if not isinstance(ours, tuple) or not isinstance(theirs, tuple):
        _same("close", closed)  # if the vectors are refused, both implementations must give the same reason
        return
    read = partial(Formulas().decode, PSEUDO_GRADIENT_CODEC, elements=residual.numel())
    _same_bits("the numbers of close", (read(ours[0]), read(theirs[0])))
    _near("the length of close", (ours[1], theirs[1]))
    _same_bits("the residual", kept)
    _near("length", (one.length(theirs[0], residual.numel()) for one in both))
    if code != PSEUDO_GRADIENT_CODEC:
        narrow = [one.narrow(code, blob, residual.numel()) for one, (blob, _) in zip(both, (ours, theirs), strict=True)]
        _same(f"narrow to {code}", narrow)
        _same_bits(f"widen from {code}", (read(one.widen(code, narrow[0], residual.numel())) for one in both))


def _prove_merge(both: tuple[OuterKernels, OuterKernels], vectors: list[Tensor]) -> None:
    phi, baseline, correction, *others = vectors
    encode = Formulas().encode
    steps = [Weighted(w, encode(PSEUDO_GRADIENT_CODEC, one)) for w, one in zip(PROVEN_WEIGHTS, others, strict=True)]
    towards = [Weighted(w, encode(SLOW_WEIGHTS_CODEC, one)) for w, one in zip(PROVEN_WEIGHTS, others, strict=True)][1:]
    for partner in towards:
        _near("distance", (one.distance(phi, partner.blob) for one in both))
    for taken, pulled, rho in ((steps, towards, 0.6), (steps, [], 0.6), ([], towards, 0.0)):
        merged = []
        for one in both:
            moved = OuterVectors(phi.clone(), baseline.clone(), correction.clone())
            one.merge(moved, taken, pulled, rho)
            merged.append(moved)
        for name in ("phi", "baseline", "correction"):
            _same_bits(f"{name} of merge", (getattr(moved, name) for moved in merged))


def _prove_refusals(both: tuple[OuterKernels, OuterKernels]) -> None:
    ones, n = torch.ones(300), 300
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = ones.clone()
        bad[200] = value
        _same(f"close of {value}", (_outcome(partial(one.close, bad, ones, ones.clone())) for one in both))
    for blob in _damaged(Formulas().encode(PSEUDO_GRADIENT_CODEC, ones)):
        _same("length of a damaged blob", (_reason(partial(one.length, blob, n)) for one in both))
    for code in blockwise.SHORTER_CODECS:
        for blob in _damaged(Formulas().encode(code, ones)):
            _same(f"a damaged blob of {code}", (_reason(partial(_length_of, one, code, blob, n)) for one in both))
    for blob in _damaged(Formulas().encode(SLOW_WEIGHTS_CODEC, ones)):
        _same("distance of a damaged blob", (_reason(partial(one.distance, ones, blob)) for one in both))


def _length_of(kernels: OuterKernels, code: str, blob: bytes, elements: int) -> float:
    return kernels.length(kernels.widen(code, blob, elements), elements)


def _damaged(blob: bytes) -> Iterator[bytes]:
    """Yield damaged copies of a blob: wrong sizes; infinite, NaN, negative, -0 and huge scales; levels out of range."""
    yield from (blob[:-1], blob + b"\0")
    for scale in (0x7F80, 0xFF80, 0x7FC0, 0xBF80, 0x8000, 0x7F7F):
        yield scale.to_bytes(2, "little") + blob[2:]
    yield from (blob[:-1] + b"\x80", blob[:-1] + b"\x00")


def _outcome(call: Callable[[], T]) -> T | str:
    """Return the result of the call, or the reason of the ProtocolError that it raises."""
    try:
        return call()
    except ProtocolError as error:
        return error.reason


def _reason(call: Callable[[], T]) -> str | None:
    outcome = _outcome(call)
    return outcome if isinstance(outcome, str) else None


def _same(what: str, both: Iterable[T]) -> None:
    """Raise Disagreement unless `both`, the kernel's result and torch's result, are equal. `what` names the result."""
    ours, theirs = both
    if ours != theirs:
        raise Disagreement(f"{what}: torch's formulas give {theirs!r:.60}, the kernel gives {ours!r:.60}")


def _same_bits(what: str, both: Iterable[Tensor]) -> None:
    """Raise Disagreement unless `both`, the kernel's and torch's tensors, are bit-identical; all NaN are equal."""
    ours, theirs = both
    equal = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    if not bool(equal.all()):
        at = int((~equal).nonzero()[0])
        both_give = f"torch's formulas give {float(theirs[at])!r}, the kernel gives {float(ours[at])!r}"
        raise Disagreement(f"{what}, at index {at} of {len(ours)}: {both_give}")


def _near(what: str, both: Iterable[float]) -> None:
    """Raise Disagreement unless `both`, the kernel's number and torch's number, are equal within LENGTH_TOLERANCE."""
    ours, theirs = both
    if ours != theirs and not abs(ours - theirs) <= LENGTH_TOLERANCE * abs(theirs):
        raise Disagreement(f"{what}: torch's formulas give {theirs!r}, the kernel gives {ours!r}")
