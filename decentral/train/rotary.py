"""Rotary positions (RoFormer, arXiv 2104.09864), as they are or stretched beyond the positions of a first training.

Pair f of a head's channels turns by theta^(-2 f / E) from one position to the next.

    linear   all rates are divided by the factor (Chen et al., arXiv 2306.15595)
    llama3   slow rates are, fast ones stay, those between go over smoothly (Llama 3, arXiv 2407.21783)
    yarn     likewise, with a ramp over the channels, and queries and keys grow a little (Peng et al., arXiv 2309.00071)

"Slow" counts turns within the first training's positions. The formulas are those of transformers' modeling_rope_utils.

Shapes: T positions, E channels of a head, F = E / 2 pairs.
"""

import math

import torch
from torch import Tensor

from decentral.core.model_config import ModelConfig, RopeScaling


def tables(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos_TE and sin_TE of the angles by which each position of the context turns each pair of channels."""
    rates_F = model.rope_theta ** (-torch.arange(0, model.d_head, 2).float() / model.d_head)
    scale = 1.0
    if model.rope_scaling is not None:
        rates_F, scale = _stretched(rates_F, model.rope_scaling, model)
    angles_TE = torch.outer(torch.arange(model.context).float(), rates_F).repeat(1, 2)
    return scale * angles_TE.cos(), scale * angles_TE.sin()


def _stretched(rates_F: Tensor, scaling: RopeScaling, model: ModelConfig) -> tuple[Tensor, float]:
    """The rates, and what the tables are multiplied by."""
    slowed_F = rates_F / scaling.factor
    if scaling.kind == "linear":
        return slowed_F, 1.0
    if scaling.kind == "llama3":
        turns_F = scaling.positions * rates_F / (2 * math.pi)
        kept_F = ((turns_F - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return torch.lerp(slowed_F, rates_F, kept_F), 1.0
    first, last = (_channel(scaling, model, turns) for turns in (scaling.high, scaling.low))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.d_head - 1)
    slowed_part_F = ((torch.arange(model.d_head // 2) - first) / (max(last - first, 1e-3))).clamp(0, 1)
    grown = 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention is None else scaling.attention
    return torch.lerp(rates_F, slowed_F, slowed_part_F), grown


def _channel(scaling: RopeScaling, model: ModelConfig, turns: float) -> float:
    """The pair of channels, as a number between two perhaps, that turns so often within the first positions."""
    return model.d_head * math.log(scaling.positions / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))
