"""Channels of the hidden values that no block changes, so that routes need not send them (`model.bottleneck`).

A token's hidden values have D channels. Each block reads all of them, but changes only the first K. The other D - K are
the token's features: fixed signs, which follow from the size of the model alone. A peer that receives the first K
channels and the token therefore restores all D channels exactly. The gradient that goes back has K channels too, since
fixed features need none. An embedding that all stages know, beside a small subspace to which all blocks write, is an
idea of Ramasinghe et al. (arXiv 2506.01260).
"""

import torch
from torch import Tensor, nn

from decentral.core.config import ModelConfig

FEATURE_SEED = 0  # all runs use the same signs, so that the config alone determines them
FEATURE_SIZE = 0.5  # magnitude of a feature; other magnitudes were not measured


class TokenFeatures(nn.Module):
    """The channels of hidden values that are a fixed function of the token."""

    signs_VF: Tensor

    def __init__(self, model: ModelConfig) -> None:
        """Compute the signs of all V tokens in F = D - K channels: +1 or -1, as int8."""
        super().__init__()
        chance = torch.Generator().manual_seed(FEATURE_SEED)
        shape = (model.vocabulary, model.d_model - model.d_written)
        signs_VF = torch.randint(2, shape, generator=chance, dtype=torch.int8).mul_(2).sub_(1)
        self.register_buffer("signs_VF", signs_VF, persistent=False)

    def forward(self, written_BTK: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return hidden_BTD: the channels that blocks write, followed by the features of the tokens."""
        features_BTF = self.signs_VF[tokens_BT].to(written_BTK.dtype) * FEATURE_SIZE
        return torch.cat((written_BTK, features_BTF), dim=-1)

    def table(self) -> Tensor:
        """Return the features of all tokens, fp32 [V, F]."""
        return self.signs_VF.float() * FEATURE_SIZE


def fold(model: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Give the weights, by their names in Hugging Face's models, the shapes of a model without a bottleneck.

    The folded model computes the same: its embedding has the features as further channels, and the matrices that add to
    the hidden values have rows of zeros for them.
    """
    if model.bottleneck is None:
        return
    features = model.d_model - model.d_written
    for name, tensor in weights.items():
        if name.endswith("embed_tokens.weight"):
            weights[name] = torch.cat((tensor, TokenFeatures(model).table()), dim=1)
        elif ".o_proj." in name or ".down_proj." in name:
            weights[name] = torch.cat((tensor, tensor.new_zeros((features, *tensor.shape[1:]))))
