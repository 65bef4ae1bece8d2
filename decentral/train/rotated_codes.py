"""The rotated codes h4 and h3, for what travels between two layers: pure functions from fp32 vectors to bytes and back.

    code   levels                  tile   bytes for n numbers      squared error over the squares, Gaussian numbers
    h4     -15, -13, ..., 15       128    66 ceil(n/128)           0.012
    h3     -7, -5, ..., 7          128    50 ceil(n/128)           0.038

Hidden values and their gradients have a few channels that are far larger than the others, which would take all levels
of a block for themselves. So each tile of 128 numbers is rotated first: fixed random signs, then the Hadamard
transform, after which its numbers are nearly Gaussian whatever they were (Suresh et al., arXiv 1611.00429; for
activations TAH-Quant, arXiv 2506.01352). Levels are those that suit Gaussian numbers (Max, 1960): numbers beyond the
outermost levels are clipped. Each tile has a bf16 scale, the one with the least squared error for its levels, and none
has more error than what a tile of zeros would have. The scales come first, then the levels, four or three bits each,
and the last tile is filled up with zeros.

The formulas here are in torch, for vectors on any device; train/rotation_kernels.py has them as machine code, with the
same bits. A level takes all values of its bits, so bytes that no encoder can have written are those with a negative
scale, or with numbers that are not finite.
"""

import math

import numpy as np
import torch
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.train.block_kernels import Bytes
from decentral.train.rotation_kernels import HALF_STEP, SIGNS, STAGES, TILE


def rotated_size(bits: int, elements: int) -> int:
    """The bytes of so many numbers."""
    return math.ceil(elements / TILE) * (2 + TILE * bits // 8)


def transform(tiles: Tensor) -> Tensor:
    """The Hadamard transform of fp32 [tiles, 128], not normalised: twice makes 128 times what it was."""
    for _ in range(STAGES):
        halves = tiles.view(-1, 2, TILE // 2)
        tiles = torch.stack((halves[:, 0] + halves[:, 1], halves[:, 0] - halves[:, 1]), dim=2).view(-1, TILE)
    return tiles


def tree_sum(terms: Tensor) -> Tensor:
    """fp32 [tiles]: the sum of each row of [tiles, 128], halves added until one number is left."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def pack(bits: int, values: Tensor) -> bytes:
    """The bytes of fp32 [n], on any device."""
    highest = 2**bits - 1
    signs = torch.from_numpy(SIGNS).to(values.device)
    tiles = torch.nn.functional.pad(values, (0, -values.numel() % TILE)).view(-1, TILE)
    rotated = transform(tiles * signs * (1 / TILE))
    half_step = tree_sum(rotated.abs()) * (1 / TILE) * torch.tensor(HALF_STEP[bits], device=values.device)
    divisor = half_step.masked_fill(half_step == 0, 1.0)
    places = torch.floor(rotated / divisor[:, None] * 0.5).clamp_(-(highest + 1) / 2, (highest - 1) / 2)
    levels = 2 * places.to(torch.int32) + 1
    scales = (tree_sum(levels.float() * rotated) / (levels * levels).sum(dim=1).float()).to(torch.bfloat16)
    folded = _folded(bits, (levels + highest) >> 1)
    return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in (scales, folded))


def unpack(bits: int, blob: bytes | Bytes, elements: int) -> Tensor:
    """fp32 [elements] on the CPU. Raises ProtocolError for a scale that is negative."""
    if not elements:
        return torch.empty(0)
    read, cut = torch.from_numpy(np.frombuffer(blob, np.uint8).copy()), 2 * math.ceil(elements / TILE)
    scales = read[:cut].view(torch.bfloat16)
    if bool((scales.isfinite() & (scales < 0)).any()):
        raise ProtocolError(Reason.LEVELS, f"an h{bits} section has a negative scale")
    levels = 2 * _unfolded(bits, read[cut:]) - (2**bits - 1)
    tiles = transform(levels.view(-1, TILE).float() * scales.float()[:, None]) * torch.from_numpy(SIGNS)
    return tiles.view(-1)[:elements]


def _folded(bits: int, codes: Tensor) -> Tensor:
    """uint8: two codes of 4 bits in a byte, or eight of 3 bits in three; the first code is in the lowest bits."""
    together = 8 // math.gcd(8, bits)
    groups = codes.view(-1, together) << (bits * torch.arange(together, device=codes.device, dtype=torch.int32))
    group, count = groups.sum(dim=1, dtype=torch.int32), together * bits // 8
    return torch.stack([group >> (8 * at) & 255 for at in range(count)], dim=1).to(torch.uint8).view(-1)


def _unfolded(bits: int, folded: Tensor) -> Tensor:
    """int32 codes, as many as are in the bytes."""
    together = 8 // math.gcd(8, bits)
    parts = folded.view(-1, together * bits // 8).to(torch.int32)
    group = sum(parts[:, at] << (8 * at) for at in range(parts.shape[1]))
    assert isinstance(group, Tensor)
    return torch.stack([group >> (bits * at) & (2**bits - 1) for at in range(together)], dim=1).view(-1)
