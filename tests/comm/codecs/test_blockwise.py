"""The codecs of comm/codecs/blockwise.py hold what its table says: error, size, and what they refuse."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import outer_step
from decentral.comm.codecs import blockwise
from decentral.core.errors import ProtocolError

BLOCKWISE = {"q4": (128, 7), "int8": (256, 127)}
CODECS = [*blockwise.CODECS]

Number = st.floats(min_value=2**-100, max_value=2**100, width=32) | st.sampled_from([0.0, 1.0, 7.0, 127.0])
Vectors = st.lists(st.tuples(Number, st.sampled_from([1.0, -1.0])), min_size=1, max_size=40).flatmap(
    lambda pairs: st.integers(1, 600).map(
        lambda n: torch.tensor([pairs[i % len(pairs)][0] * pairs[i % len(pairs)][1] for i in range(n)])
    )
)


def sent(codec: str, values: Tensor) -> Tensor:
    """What the other side reads."""
    return blockwise.decode(codec, blockwise.encode(codec, values), values.numel())


def half_step(values: Tensor, block: int, levels: int) -> npt.NDArray[np.float64]:
    """The documented bound for each number: half of bf16_up(a / levels), a the largest magnitude of its block."""
    padded = np.pad(values.numpy(), (0, -len(values) % block)).reshape(-1, block)
    exact = np.abs(padded).max(axis=1) / np.float32(levels)
    up = ((exact.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32)  # bf16 is the upper half of fp32
    return np.repeat(up.astype(np.float64) / 2, block)[: len(values)]


@pytest.mark.parametrize("codec", BLOCKWISE)
@given(values=Vectors)
def test_the_error_is_at_most_half_a_step_of_the_block(codec: str, values: Tensor) -> None:
    error = (sent(codec, values).double() - values.double()).abs().numpy()
    assert (error <= half_step(values, *BLOCKWISE[codec]) * (1 + 1e-5)).all()


@pytest.mark.parametrize("n", [1, 5, 128, 300])
def test_one_bit_keeps_the_sign_of_a_number_and_the_mean_magnitude_of_its_block(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    read = sent("q1", values)
    assert torch.equal(read >= 0, values >= 0)
    for mine, theirs in zip(torch.split(values, 128), torch.split(read, 128), strict=True):
        assert theirs.abs().tolist() == pytest.approx([float(mine.abs().mean())] * len(mine), rel=2**-7)


@pytest.mark.parametrize("n", [1, 15, 17, 4096, 5000, 8193])
def test_sparse_keeps_the_largest_of_each_group_in_two_magnitudes(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for mine, theirs in zip(torch.split(values, 4096), torch.split(sent("sparse", values), 4096), strict=True):
        largest, at = mine.abs().topk(math.ceil(len(mine) / 16))
        assert set(theirs.nonzero()[:, 0].tolist()) == set(at.tolist())
        assert torch.equal(theirs[at] > 0, mine[at] > 0)
        large = largest >= largest.mean()
        high, low = largest[large].mean(), largest[~large].mean()
        assert bool(((theirs[at].abs() - high)[large].abs() <= high / 16).all())
        assert bool(((theirs[at].abs() - low)[~large].abs() <= high / 7).all())


def test_of_equal_numbers_sparse_keeps_the_first() -> None:
    assert sent("sparse", -torch.ones(32)).nonzero()[:, 0].tolist() == [0, 1]


def test_numbers_that_are_zero_stay_zero_among_the_largest() -> None:
    values = torch.zeros(4096)
    values[5], values[4000] = 1.0, -2.0
    assert sent("sparse", values).nonzero()[:, 0].tolist() == [5, 4000]


def test_places_take_at_most_1_15_times_their_entropy() -> None:
    part, n = 1 / 16, 1 << 20
    entropy = part * math.log2(1 / part) + (1 - part) * math.log2(1 / (1 - part))
    headers, levels = 2 * n // 4096, 2 * n // 16 // 8
    assert 8 * (blockwise.size("sparse", n) - headers - levels) <= 1.15 * entropy * n


@given(seed=st.integers(0, 10**6))
def test_the_scale_of_signs_is_the_same_in_any_order_of_the_numbers(seed: int) -> None:
    values = torch.randn(128, generator=torch.Generator().manual_seed(seed))
    shuffled = values[torch.randperm(128, generator=torch.Generator().manual_seed(seed + 1))]
    assert blockwise.encode("q1", values)[:2] == blockwise.encode("q1", shuffled)[:2]


@given(values=Vectors)
def test_bf16_keeps_eight_bits(values: Tensor) -> None:
    error = (sent("bf16", values).double() - values.double()).abs()
    assert bool((error <= values.double().abs() * 2**-8 + 1e-38).all())


@given(values=Vectors)
def test_fp32_keeps_every_bit(values: Tensor) -> None:
    assert torch.equal(sent("fp32", values), values)


@pytest.mark.parametrize("codec", BLOCKWISE)
@given(rounds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6), scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e30]))
def test_what_is_sent_plus_what_remains_is_what_came_in(codec: str, rounds: list[int], scale: float) -> None:
    theta = torch.zeros(300)
    slow = outer_step.start(theta)
    for seed in rounds:
        came = slow.residual + scale * torch.randn(300, generator=torch.Generator().manual_seed(seed))
        theta = slow.baseline - (came - slow.residual)
        owed = slow.residual + (slow.baseline - theta)
        slow, read = outer_step.close(slow, theta, lambda owed: sent(codec, owed))
        rounding = 2**-23 * torch.maximum(owed.abs(), read.abs())
        assert bool((read + slow.residual - owed).abs().le(rounding).all())


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 255, 256, 257, 1000, 4097])
def test_the_size_on_the_wire_is_the_documented_one(n: int) -> None:
    sizes = {
        "q1": math.ceil(n / 8) + 2 * math.ceil(n / 128),
        "sparse": 2 * math.ceil(n / 4096) + sum(math.ceil(bits * math.ceil(n / 16) / 8) for bits in (2, 4, 2)),
        "q4": math.ceil(n / 2) + 2 * math.ceil(n / 128),
        "int8": n + 2 * math.ceil(n / 256),
        "bf16": 2 * n,
        "fp32": 4 * n,
    }
    values = torch.ones(n)
    assert {codec: len(blockwise.encode(codec, values)) for codec in CODECS} == sizes
    assert {codec: blockwise.CODECS[codec].size(n) for codec in CODECS} == sizes


@pytest.mark.parametrize("codec", CODECS)
def test_an_empty_vector_takes_no_bytes(codec: str) -> None:
    assert blockwise.encode(codec, torch.zeros(0)) == b""
    assert sent(codec, torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_come_back_as_zeros(codec: str) -> None:
    assert torch.equal(sent(codec, torch.zeros(300)), torch.zeros(300))


@pytest.mark.parametrize("codec", [one for one in CODECS if one != "sparse"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_tiny_and_huge_blocks_keep_their_magnitude(codec: str, size: float) -> None:
    assert torch.allclose(sent(codec, torch.full((300,), size)), torch.full((300,), size), rtol=1 / 64, atol=0)


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_a_huge_block_does_not_drown_its_neighbour(codec: str) -> None:
    block, _ = BLOCKWISE[codec]
    values = torch.cat((torch.full((block,), 1e30), torch.full((block,), 1e-30)))
    assert torch.allclose(sent(codec, values), values, rtol=1 / 64, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_numbers_give_the_same_bytes(codec: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert blockwise.encode(codec, values) == blockwise.encode(codec, values.clone())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=["inf", "-inf", "nan"])
def test_a_scale_or_number_that_is_not_finite_is_refused(codec: str, bits: int) -> None:
    blob = bytearray(blockwise.encode(codec, torch.ones(300)))
    at = 2 if codec == "fp32" else 0
    blob[at : at + 2] = bits.to_bytes(2, "little")
    assert refusal(codec, bytes(blob), 300) == "nan"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_does_not_come_out_at_the_other_side(codec: str, value: float) -> None:
    values = torch.ones(300)
    values[17] = value
    assert refusal(codec, blockwise.encode(codec, values), 300) == "nan"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", [-1, 1, 7])
def test_another_size_is_refused(codec: str, change: int) -> None:
    blob = blockwise.encode(codec, torch.ones(300))
    blob = blob + bytes(change) if change > 0 else blob[:change]
    assert refusal(codec, blob, 300) == "shape"


@pytest.mark.parametrize("codec", ["", "q3", "Q4", "pickle"])
def test_an_unknown_codec_is_refused(codec: str) -> None:
    assert refusal(codec, b"", 0) == "codec"


@pytest.mark.parametrize(
    ("codec", "at", "byte"),
    [
        pytest.param("q4", 10, 0x00, id="level -8 in 4 bits"),
        pytest.param("int8", 10, 0x80, id="level -128"),
        pytest.param("q1", 1, 0xBF, id="negative scale of signs"),
        pytest.param("sparse", 1, 0xBF, id="negative scale of a sparse group"),
        pytest.param("sparse", 0, 0x07, id="level 7 of small numbers"),
        pytest.param("sparse", 2, 0x00, id="too few numbers in the buckets"),
        pytest.param("sparse", 3, 0xFF, id="too many numbers in the buckets"),
        pytest.param("sparse", 4, 0x10, id="a place that is not above the one before"),
        pytest.param("q4", 1, 0xBF, id="negative scale in 4 bits"),
        pytest.param("int8", 1, 0xBF, id="negative scale"),
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(codec: str, at: int, byte: int) -> None:
    blob = bytearray(blockwise.encode(codec, torch.ones(128)))
    blob[at] = byte
    with pytest.raises(ProtocolError):
        blockwise.decode(codec, bytes(blob), 128)


@given(codec=st.sampled_from(CODECS) | st.text(max_size=5), blob=st.binary(max_size=400), n=st.integers(-5, 800))
def test_random_bytes_are_finite_numbers_or_refused(codec: str, blob: bytes, n: int) -> None:
    try:
        values = blockwise.decode(codec, blob, n)
    except ProtocolError:
        return
    assert values.numel() == n
    assert bool(torch.isfinite(values).all())


@given(codec=st.sampled_from(CODECS), n=st.integers(0, 600), data=st.data())
def test_random_bytes_of_the_right_size_are_finite_numbers_or_refused(codec: str, n: int, data: st.DataObject) -> None:
    size = blockwise.CODECS[codec].size(n)
    seed = data.draw(st.integers(0, 10**6))
    blob = np.random.default_rng(seed).bytes(size)
    try:
        values = blockwise.decode(codec, blob, n)
    except ProtocolError:
        return
    assert values.numel() == n
    assert bool(torch.isfinite(values).all())


def refusal(codec: str, blob: bytes, n: int) -> str:
    with pytest.raises(ProtocolError) as caught:
        blockwise.decode(codec, blob, n)
    return caught.value.reason


def test_fp32_in_memory_that_can_be_written_is_not_copied_and_in_any_other_it_is() -> None:
    blob = blockwise.encode("fp32", torch.tensor([1.0, 2.0]))
    own = memoryview(bytearray(blob))
    blockwise.decode("fp32", own, 2).fill_(7.0)
    blockwise.decode("fp32", blob, 2).fill_(7.0)
    assert blockwise.decode("fp32", own, 2).tolist() == [7.0, 7.0]
    assert blockwise.decode("fp32", blob, 2).tolist() == [1.0, 2.0]


def test_what_is_not_finite_is_refused_in_memory_of_its_own_too() -> None:
    bad = blockwise.encode("fp32", torch.tensor([1.0, float("inf")]))
    with pytest.raises(ProtocolError, match="got NaN or infinity"):
        blockwise.decode("fp32", memoryview(bytearray(bad)), 2)
