"""Kernels do what torch does, bit for bit; and a machine whose kernels do not gets torch, and a line that says why."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import outer_step
from decentral.comm.codecs import blockwise, compiled_blocks, compiled_sparse
from decentral.comm.gossip.influence import token_weights
from decentral.comm.gossip.kernel_choice import Disagreement, Formulas, best_kernels, first_proven, prove
from decentral.comm.gossip.kernels_cpu import CompiledKernels
from decentral.comm.gossip.outer_kernels import OuterKernels, OuterVectors, TorchKernels, Weighted
from decentral.core.errors import ProtocolError
from decentral.sim.surrogate_model import SyntheticCodecs

CPU = torch.device("cpu")
REFERENCE = TorchKernels(Formulas())
KERNELS: list[OuterKernels] = [REFERENCE, CompiledKernels()]

Patterns = st.integers(0, 2**32 - 1)  # any fp32 there is, by its bits
Finite = Patterns.filter(lambda bits: bits & 0x7F800000 != 0x7F800000)
Exponents = st.sampled_from([-149, -140, -127, -126, -60, 0, 60, 127])


def of_bits(patterns: Sequence[int], n: int) -> Tensor:
    """fp32 [n] from these bit patterns, repeated."""
    row = [patterns[i % len(patterns)] for i in range(n)]
    return torch.tensor(row, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random(n: int, seed: int, exponent: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("codec", blockwise.COMPILED_PACK)
@given(patterns=st.lists(Patterns, min_size=1, max_size=40), n=st.integers(0, 700))
def test_any_numbers_have_the_bytes_of_the_formulas(codec: str, patterns: list[int], n: int) -> None:
    values = of_bits(patterns, n)
    assert blockwise.encode(codec, values) == Formulas().encode(codec, values)


@pytest.mark.parametrize("codec", blockwise.COMPILED_PACK)
@given(seed=st.integers(0, 10**6), exponent=Exponents, n=st.integers(0, 700))
def test_vectors_of_one_magnitude_have_the_bytes_and_numbers_of_the_formulas(
    codec: str, seed: int, exponent: int, n: int
) -> None:
    values = random(n, seed, exponent)
    blob = Formulas().encode(codec, values)
    assert blockwise.encode(codec, values) == blob
    assert read(blockwise, codec, blob, n) == read(Formulas(), codec, blob, n)


@pytest.mark.parametrize("codec", blockwise.COMPILED_PACK)
@given(data=st.data(), n=st.integers(0, 600))
def test_any_bytes_are_read_or_refused_as_by_the_formulas(codec: str, data: st.DataObject, n: int) -> None:
    size = blockwise.size(codec, n)
    blob = data.draw(st.binary(min_size=size, max_size=size))
    assert read(blockwise, codec, blob, n) == read(Formulas(), codec, blob, n)


@pytest.mark.parametrize("codec", blockwise.COMPILED_PACK)
@given(patterns=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=6), n=st.integers(1, 600))
def test_any_scale_is_read_or_refused_as_by_the_formulas(codec: str, patterns: list[int], n: int) -> None:
    blob = bytearray(Formulas().encode(codec, random(n, n)))
    for block in range(-(-n // blockwise.BLOCKS[codec])):
        blob[2 * block : 2 * block + 2] = patterns[block % len(patterns)].to_bytes(2, "little")
    assert read(blockwise, codec, bytes(blob), n) == read(Formulas(), codec, bytes(blob), n)


@given(patterns=st.lists(Finite, min_size=3, max_size=40), n=st.integers(0, 700))
def test_any_finite_window_closes_as_in_torch(patterns: list[int], n: int) -> None:
    snapshot, baseline, residual = (of_bits(patterns[k:] + patterns[:k], n) for k in range(3))
    assert closed(KERNELS[1], snapshot, baseline, residual) == closed(REFERENCE, snapshot, baseline, residual)


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@given(seed=st.integers(0, 10**6), exponent=Exponents, n=st.integers(0, 700) | st.just(9001))
def test_a_window_closes_to_a_shorter_code_as_in_torch(code: str, seed: int, exponent: int, n: int) -> None:
    vectors = [random(n, seed + k, exponent - 3) for k in range(3)]
    assert published(KERNELS[1], code, *vectors) == published(REFERENCE, code, *vectors)


@pytest.mark.parametrize("patterns", [[0], [1, 2, 3], [0x3F800000], [0x7F7FFFFF, 1], [0x80000000, 0x00800000, 0]])
@pytest.mark.parametrize("n", [1, 300, 4096, 9001])
def test_a_sparse_window_of_equal_or_extreme_numbers_closes_as_in_torch(patterns: list[int], n: int) -> None:
    vectors = of_bits(patterns, n), torch.zeros(n), torch.zeros(n)
    assert published(KERNELS[1], "sparse", *vectors) == published(REFERENCE, "sparse", *vectors)


def test_a_sparse_window_closes_as_in_torch_however_unlike_its_chunks_are() -> None:
    chunks = [random(4096, seed, exponent) for seed, exponent in enumerate((0, -40, 40, 0, -149, 3))]
    vectors = torch.cat(chunks), torch.zeros(6 * 4096), torch.zeros(6 * 4096)
    assert published(KERNELS[1], "sparse", *vectors) == published(REFERENCE, "sparse", *vectors)


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@given(seed=st.integers(0, 10**6), exponent=Exponents, n=st.integers(0, 700) | st.just(9001))
def test_a_shorter_code_becomes_q4_and_itself_again_and_says_the_same(
    code: str, seed: int, exponent: int, n: int
) -> None:
    blob = blockwise.encode(code, random(n, seed, exponent - 3))
    for kernels in KERNELS:
        wide = kernels.widen(code, blob, n)
        assert kernels.narrow(code, wide, n) == blob
        assert torch.equal(blockwise.decode("q4", wide, n), blockwise.decode(code, blob, n))


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@given(
    n=st.integers(1, 300) | st.just(4200),
    damage=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_a_damaged_blob_of_a_shorter_code_is_widened_or_refused_as_by_the_formulas(
    code: str, n: int, damage: list[tuple[int, int]]
) -> None:
    blob = bytearray(blockwise.encode(code, random(n, n)))
    for at, byte in damage:
        blob[at % len(blob)] = byte
    assert numbers(lambda: blockwise.decode("q4", blockwise.widened(code, bytes(blob), n), n)) == numbers(
        lambda: Formulas().decode(code, bytes(blob), n)
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_blob_of_another_size_is_not_widened(kernels: OuterKernels, code: str, change: int) -> None:
    blob = blockwise.encode(code, torch.ones(300))
    with pytest.raises(ProtocolError) as caught:
        kernels.widen(code, blob + b"x" if change > 0 else blob[:-1], 300)
    assert caught.value.reason == "shape"


@given(seed=st.integers(0, 10**6), n=st.integers(0, 1200), partners=st.integers(0, 3))
def test_a_merge_gives_the_same_bits_as_in_torch(seed: int, n: int, partners: int) -> None:
    steps = [Weighted(0.1 + k, blockwise.encode("q4", random(n, seed + k))) for k in range(1 + partners)]
    towards = [Weighted(0.1 * k, blockwise.encode("int8", random(n, seed - k))) for k in range(partners)]
    results = []
    for kernels in KERNELS:
        phi, baseline, correction = (random(n, seed + 10 + k) for k in range(3))
        kernels.merge(OuterVectors(phi, baseline, correction), steps, towards, rho=0.6)
        results.append((phi, baseline, correction))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
def test_close_and_merge_are_those_of_the_outer_step(kernels: OuterKernels) -> None:
    n = 1001
    slow = outer_step.Slow(random(n, 0), random(n, 1), random(n, 2), random(n, 3))
    theta, sent = random(n, 4), blockwise.encode("int8", random(n, 5))
    residual = slow.residual.clone()
    blob, _ = kernels.close(theta, slow.baseline, residual)
    after, published = outer_step.close(
        slow, theta, lambda owed: Formulas().decode("q4", Formulas().encode("q4", owed), n)
    )
    assert same_bits(residual, after.residual)

    own, other = (
        outer_step.WindowUpdate(published, 3, 1.0),
        outer_step.WindowUpdate(published, 5, 1.0, blockwise.decode("int8", sent, n)),
    )
    expected = outer_step.merge(after, own, [other], outer_step.Constants(), 0.3)
    moved = OuterVectors(slow.phi.clone(), theta.clone(), torch.empty(n))
    weights = token_weights([3, 5])
    kernels.merge(moved, [Weighted(weight, blob) for weight in weights], [Weighted(weights[1], sent)], rho=0.3)
    assert same_bits(moved.phi, expected.slow.phi)
    assert same_bits(moved.baseline, expected.slow.baseline)
    assert same_bits(moved.correction, expected.correction)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_length_of_a_close_is_that_of_its_bytes(kernels: OuterKernels) -> None:
    blob, length = kernels.close(random(999, 1), random(999, 2), random(999, 3))
    exact = float(torch.linalg.vector_norm(blockwise.decode("q4", blob, 999).double()))
    assert length == pytest.approx(exact, rel=1e-9)
    assert kernels.length(blob, 999) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_distance_is_that_from_what_the_bytes_say(kernels: OuterKernels) -> None:
    phi, blob = random(999, 1), blockwise.encode("int8", random(999, 2))
    apart = (blockwise.decode("int8", blob, 999) - phi).double()
    assert kernels.distance(phi, blob) == pytest.approx(float(torch.linalg.vector_norm(apart)), rel=1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_window_that_is_not_finite_does_not_close(kernels: OuterKernels, value: float) -> None:
    theta = torch.ones(300)
    theta[299] = value
    with pytest.raises(ProtocolError) as caught:
        kernels.close(theta, torch.ones(300), torch.zeros(300))
    assert caught.value.reason == "nan"


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_blob_of_another_size_changes_nothing(kernels: OuterKernels) -> None:
    vectors = OuterVectors(torch.ones(300), torch.ones(300), torch.ones(300))
    good = blockwise.encode("q4", torch.ones(300))
    for steps, towards in (([good, good[:-1]], []), ([good], [good])):
        with pytest.raises(ProtocolError) as caught:
            kernels.merge(
                vectors,
                [Weighted(1.0, blob) for blob in steps],
                [Weighted(1.0, blob) for blob in towards],
                rho=1.0,
            )
        assert caught.value.reason == "shape"
    assert torch.equal(vectors.phi, torch.ones(300))


def test_a_section_is_read_out_of_the_middle_of_a_blob() -> None:
    section = blockwise.encode("q4", random(500, 1))
    inside = memoryview(b"x" + section + b"yz")[1:-2]
    assert CompiledKernels().length(inside, 500) == CompiledKernels().length(section, 500)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *product([compiled_blocks], ["pack_q4", "pack_int8", "unpack_q4", "unpack_int8", "close", "narrow", "widen"]),
        *product([compiled_blocks], ["length", "distance", "merge"]),
        *product([compiled_sparse], ["close", "widen", "narrow"]),
    ],
)
def test_other_threads_may_run_while_a_kernel_does(module: ModuleType, name: str) -> None:
    assert getattr(module, name).targetoptions["nogil"]


def test_a_real_peer_on_the_cpu_gets_compiled_kernels() -> None:
    kernels, reason = best_kernels(CPU, blockwise)
    assert isinstance(kernels, CompiledKernels)
    assert reason == "compiled for the CPU, proven against torch"


def test_codecs_of_a_simulator_get_torch() -> None:
    kernels, reason = best_kernels(CPU, SyntheticCodecs(blockwise, 1000.0))
    blob, _ = kernels.close(torch.ones(10), torch.zeros(10), torch.zeros(10))
    assert isinstance(kernels, TorchKernels)
    assert len(blob) == blockwise.size("q4", 10_000)
    assert reason == "torch, since only a real peer's codecs are compiled"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and tests/gpu looks at it")
def test_without_a_gpu_the_cpu_takes_the_place_of_its_kernels() -> None:
    kernels, reason = best_kernels(torch.device("cuda"), blockwise)
    assert isinstance(kernels, CompiledKernels)
    assert reason.startswith("compiled for the CPU, proven against torch; not CUDA (")


class WrongResidual(CompiledKernels):
    """One bit of one number of one size is off."""

    def close(self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = "q4") -> tuple[bytes, float]:
        result = super().close(snapshot, baseline, residual, code)
        if len(residual) == 257:
            residual.view(torch.int32)[256] ^= 1
        return result


class WrongMerge(CompiledKernels):
    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        super().merge(vectors, pseudo_gradients[:1], slow_weights, rho)


class Credulous(CompiledKernels):
    """Refuses nothing."""

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        try:
            return super().length(blob, elements)
        except ProtocolError:
            return 0.0


class Inexact(CompiledKernels):
    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        return super().distance(phi, blob) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("lying", "about"),
    [
        (WrongResidual, "the residual, at index 256 of 257"),
        (WrongMerge, "phi of merge"),
        (Credulous, "length of a damaged blob"),
        (Inexact, "distance"),
    ],
)
def test_a_kernel_that_lies_is_refused_and_the_reason_says_where(lying: type[CompiledKernels], about: str) -> None:
    with pytest.raises(Disagreement, match=about):
        prove(lying())
    kernels, reason = first_proven({"fast": lying, "compiled": CompiledKernels})
    assert type(kernels) is CompiledKernels
    assert reason.startswith("compiled, proven against torch; not fast (Disagreement: " + about)


def test_where_nothing_proves_itself_torch_is_left() -> None:
    kernels, reason = first_proven({"fast": missing, "lying": WrongMerge})
    assert isinstance(kernels, TorchKernels)
    assert reason.startswith("torch; not fast (ImportError: no cupy here); not lying (Disagreement: ")


def missing() -> OuterKernels:
    raise ImportError("no cupy here")


def closed(kernels: OuterKernels, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = "q4") -> object:
    kept = residual.clone()
    try:
        blob, _ = kernels.close(snapshot, baseline, kept, code)
    except ProtocolError as error:
        return error.reason
    return blob, kept.view(torch.int32).tolist()


def published(kernels: OuterKernels, code: str, snapshot: Tensor, baseline: Tensor, residual: Tensor) -> object:
    """What a close sends and keeps back, with the bits of the numbers that partners read."""
    kept, n = residual.clone(), len(residual)
    blob, _ = kernels.close(snapshot, baseline, kept, code)
    return kernels.narrow(code, blob, n), read(Formulas(), "q4", blob, n), kept.view(torch.int32).tolist()


def numbers(decode: Callable[[], Tensor]) -> object:
    """What is decoded, or the reason of the refusal; a zero has no sign."""
    try:
        return decode().tolist()
    except ProtocolError as error:
        return error.reason


def read(codecs: object, codec: str, blob: bytes, n: int) -> object:
    """The bits of the numbers, or the reason of the refusal."""
    try:
        return codecs.decode(codec, blob, n).view(torch.int32).tolist()  # type: ignore[attr-defined]
    except ProtocolError as error:
        return error.reason
