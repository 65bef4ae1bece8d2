"""The rotated codes h4 and h3 of the experiments on thin wires: what the other side reads of fp32 vectors.

Hidden values and their gradients have a few channels that are far larger than the others, which would take all levels
of a block for themselves. So each tile of 128 numbers is rotated first: fixed random signs, then the Hadamard
transform, after which its numbers are nearly Gaussian whatever they were (Suresh et al., arXiv 1611.00429; for
activations TAH-Quant, arXiv 2506.01352). Levels are those that suit Gaussian numbers (Max, 1960): -15, -13, ..., 15 in
four bits, or -7, -5, ..., 7 in three; numbers beyond them are clipped. Each tile has a bf16 scale, the one with the
least squared error for its levels. On a wire a tile would take 66 or 50 bytes.
"""

import numpy as np
import torch
from torch import Tensor

TILE = 128
STAGES = 7  # additions and subtractions of pairs in a Hadamard transform of 128 numbers: log2(128)
# The signs of the rotation: one bit for each number of a tile, 1 for minus. They are the first bits of pi's fraction.
SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
SIGNS = torch.tensor([-1.0 if SIGN_BITS >> (TILE - 1 - at) & 1 else 1.0 for at in range(TILE)])
# Half the distance between two levels, over the mean magnitude of a tile's rotated numbers: of Gaussian numbers, as
# rotated ones nearly are, these leave the least squared error (Max, 1960: steps of 0.3352 and 0.5860 deviations).
HALF_STEP = {4: np.float32(0.3352 / 2 / 0.79788456), 3: np.float32(0.5860 / 2 / 0.79788456)}


def transform(tiles: Tensor) -> Tensor:
    """Return the Hadamard transform of fp32 [tiles, 128], not normalised: twice makes 128 times what it was."""
    for _ in range(STAGES):
        halves = tiles.view(-1, 2, TILE // 2)
        tiles = torch.stack((halves[:, 0] + halves[:, 1], halves[:, 0] - halves[:, 1]), dim=2).view(-1, TILE)
    return tiles


def read(bits: int, values: Tensor) -> Tensor:
    """Return fp32 [n] as the other side reads it, in levels of so many bits."""
    highest = 2**bits - 1
    tiles = torch.nn.functional.pad(values, (0, -values.numel() % TILE)).view(-1, TILE)
    rotated = transform(tiles * SIGNS * (1 / TILE))
    half_step = rotated.abs().mean(dim=1) * torch.tensor(HALF_STEP[bits])
    divisor = half_step.masked_fill(half_step == 0, 1.0)
    places = torch.floor(rotated / divisor[:, None] * 0.5).clamp_(-(highest + 1) / 2, (highest - 1) / 2)
    levels = 2 * places + 1
    scales = ((levels * rotated).sum(dim=1) / (levels * levels).sum(dim=1)).to(torch.bfloat16).float()
    return (transform(levels * scales[:, None]) * SIGNS).view(-1)[: values.numel()]
