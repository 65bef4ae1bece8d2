"""The rotated codes of train/rotated_codes.py: their error, their size, what they refuse, and the same bits twice."""

import numpy as np
import pytest
import torch

from decentral.core.errors import ProtocolError
from decentral.train import compress, rotated_codes
from decentral.train.rotation_kernels import TILE

CODES = ["h4", "h3"]
GAUSSIAN = {"h4": 0.0125, "h3": 0.0385}  # squared error over the squares


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def relative(code: str, values: torch.Tensor) -> float:
    read = compress.decode(code, compress.encode(code, values), values.numel())
    return float((read - values).square().sum() / values.square().sum())


def test_the_transform_is_its_own_inverse() -> None:
    tiles = random(4 * TILE, 0).view(4, TILE)
    assert torch.allclose(rotated_codes.transform(rotated_codes.transform(tiles)) / TILE, tiles, atol=1e-5)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-6, 1.0, 1e30])
def test_machine_code_and_formula_give_the_same_bits(code: str, n: int, scale: float) -> None:
    values = scale * random(n, n)
    blob = compress.encode(code, values)
    assert blob == compress.CODECS[code].pack(values)
    assert len(blob) == compress.size(code, n)
    assert torch.equal(compress.decode(code, blob, n), compress.decode_by_formula(code, blob, n))


@pytest.mark.parametrize("code", CODES)
def test_the_error_of_gaussian_numbers_is_the_documented_one(code: str) -> None:
    assert relative(code, random(1 << 16, 0)) < GAUSSIAN[code]


@pytest.mark.parametrize("code", CODES)
def test_a_channel_that_is_far_larger_than_the_others_costs_them_nothing_more(code: str) -> None:
    values = random(1 << 14, 0)
    values[::TILE] *= 100
    assert relative(code, values) < 2 * GAUSSIAN[code]


@pytest.mark.parametrize("code", CODES)
def test_a_tile_of_equal_numbers_has_no_more_error_than_others(code: str) -> None:
    assert relative(code, torch.full((TILE,), 3.7)) < 2 * GAUSSIAN[code]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", [0xBF80, 0x7F80, 0x7FC0, 0xFF80])  # scales of -1, infinity, no number, and -infinity
def test_a_scale_that_no_encoder_writes_is_refused(code: str, bits: int) -> None:
    blob = bytearray(compress.encode(code, random(300, 0)))
    blob[:2] = np.uint16(bits).tobytes()
    for read in (compress.decode, compress.decode_by_formula):
        with pytest.raises(ProtocolError):
            read(code, bytes(blob), 300)


@pytest.mark.parametrize("code", CODES)
def test_a_blob_of_another_size_is_refused(code: str) -> None:
    with pytest.raises(ProtocolError, match="shape"):
        compress.decode(code, bytes(compress.size(code, 300) - 1), 300)
