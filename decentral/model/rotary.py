"""Rotary positions (RoFormer, arXiv 2104.09864), as they are or stretched beyond the positions of a first training.

Pair f of a head's channels turns by theta^(-2 f / E) from one position to the next.

    linear     all rates are divided by the factor (Chen et al., arXiv 2306.15595)
    dynamic    theta grows with a text beyond the first positions (NTK-aware scaling, github.com/jquesnelle/yarn)
    llama3     slow rates are divided, fast ones stay, those between go over smoothly (Llama 3, arXiv 2407.21783)
    yarn       the same with a ramp over the channels, and queries and keys grow (Peng et al., arXiv 2309.00071)
    longrope   each rate has a divisor, one in short and one in long texts; both grow (Ding et al., arXiv 2402.13753)

"Slow" counts turns within the first training's positions. The formulas, and their order of operations, are those of
transformers' modeling_rope_utils: at large positions one rounding error in a rate changes the angle visibly.

Shapes: T positions, E channels of a head that are rotated, F = E / 2 pairs.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from decentral.model.shape import ModelConfig, RopeScaling


def tables(model: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Return cos_TE and sin_TE of the angles by which each of so many positions turns each pair of channels.

    The last two results are cached and shared by all blocks of a model; do not change them in place.
    """
    most = model.positions or model.context
    return _tables(model.rope_theta, model.d_rotary, positions, model.rope_scaling, most, torch.get_default_device())


def reach(model: ModelConfig, positions: int, most: int) -> int:
    """Return the longest length, at most `most`, that a text of `positions` tokens reaches with unchanged angles."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return most
    first = scaling.positions or model.positions or model.context
    return most if positions > first else min(first, most)


@lru_cache(maxsize=2)
@torch.inference_mode(False)  # training may use them after a text was generated
def _tables(
    theta: float, channels: int, positions: int, scaling: RopeScaling | None, most: int, _: torch.device
) -> tuple[Tensor, Tensor]:
    """`most`: the positions that the model is made for."""
    first = most if scaling is None or scaling.positions is None else scaling.positions
    grown = 1.0
    if scaling is not None and scaling.kind == "dynamic" and positions > first:
        theta *= (scaling.factor * positions / first - scaling.factor + 1) ** (channels / (channels - 2))
    rates_F = 1.0 / theta ** (torch.arange(0, channels, 2).float() / channels)
    if scaling is not None and scaling.kind == "linear":
        rates_F = rates_F / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        turns_F = first * rates_F / (2 * math.pi)
        kept_F = ((turns_F - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        rates_F = (1 - kept_F) * rates_F / scaling.factor + kept_F * rates_F
    elif scaling is not None and scaling.kind == "yarn":
        kept_F = 1 - _slowed(theta, channels, scaling, first)
        rates_F = rates_F / scaling.factor * (1 - kept_F) + rates_F * kept_F
        grown = scaling.attention or 0.1 * math.log(scaling.factor) + 1.0
    elif scaling is not None and scaling.kind == "longrope":
        rates_F = rates_F / torch.tensor(scaling.long if positions > first else scaling.short)
        grown = scaling.attention or math.sqrt(1 + math.log(scaling.factor) / math.log(first))
    angles_TE = torch.outer(torch.arange(positions).float(), rates_F).repeat(1, 2)
    return grown * angles_TE.cos(), grown * angles_TE.sin()


def _slowed(theta: float, channels: int, scaling: RopeScaling, first: int) -> Tensor:
    """Return by how much of yarn's factor each pair is slowed down, from 0 to 1."""
    low, high = (_channel(theta, channels, first, turns) for turns in (scaling.high, scaling.low))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    return ((torch.arange(channels // 2) - low) / (max(high - low, 1e-3))).clamp(0, 1)


def _channel(theta: float, channels: int, first: int, turns: float) -> float:
    """Return the pair of channels, as a number between two perhaps, that turns so often within the first positions."""
    return channels * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(theta))
