"""Compute rotary positions (RoFormer, arXiv 2104.09864, equation 15), also scaled for longer texts than in training.

Pair f of a head's channels turns by theta^(-2 f / E) from one position to the next. This angle is the pair's rate.

    linear     all rates are divided by the factor (Chen et al., arXiv 2306.15595)
    dynamic    theta grows with the text's length, if that exceeds the training length (NTK-aware scaling,
               github.com/jquesnelle/yarn)
    llama3     slow rates are divided by the factor, fast rates stay, with a ramp between (Llama 3, arXiv 2407.21783)
    yarn       like llama3, with a ramp over the channels, and queries and keys scaled (Peng et al., arXiv 2309.00071)
    longrope   each rate has one divisor for short texts and one for long texts, and queries and keys are scaled (Ding
               et al., arXiv 2402.13753)

A rate is slow if its pair makes few turns within the longest text of the model's first training. Formulas and order of
operations are those of transformers' modeling_rope_utils, since one rounding error in a rate changes the angles of
large positions visibly.

Shapes: T positions, E channels of a head that are rotated, F = E / 2 pairs.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from decentral.model.shape import ModelConfig, RopeScaling


def tables(model: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Return cos_TE and sin_TE of the angles by which each position turns each pair of channels, in fp32.

    The two latest results are cached and shared by all blocks of a model: do not change them in place.

    Args:
        model: The model.
        positions: Number of positions T. With dynamic and longrope scaling the angles depend on T.
    """
    most = model.positions or model.context
    return _tables(model.rope_theta, model.d_rotary, positions, model.rope_scaling, most, torch.get_default_device())


def reach(model: ModelConfig, positions: int, most: int) -> int:
    """Return the length in tokens that a text can reach before its rotary angles must be computed again.

    Args:
        model: The model. With dynamic and longrope scaling the angles depend on the length of the text.
        positions: Present length of the text.
        most: Upper limit of the result, for example the size of a cache.
    """
    scaling = model.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return most
    first = scaling.positions or model.positions or model.context
    return most if positions > first else min(first, most)


@lru_cache(maxsize=2)
@torch.inference_mode(False)  # inference tensors could not be used in training
def _tables(
    theta: float, channels: int, positions: int, scaling: RopeScaling | None, most: int, _: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos_TE and sin_TE. `most`: the longest sequence in tokens that the config allows."""
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
    """Return how much yarn slows each pair, [F]: from 0 (the rate stays) to 1 (the rate is divided by the factor)."""
    low, high = (_channel(theta, channels, first, turns) for turns in (scaling.high, scaling.low))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    return ((torch.arange(channels // 2) - low) / (max(high - low, 1e-3))).clamp(0, 1)


def _channel(theta: float, channels: int, first: int, turns: float) -> float:
    """Return the index, possibly a fraction, of the pair of channels that makes `turns` turns in `first` positions."""
    return channels * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(theta))
