"""Adapters of low rank (LoRA, Hu et al., arXiv 2106.09685): what a run with `model.lora` trains instead of weights.

    y = W x + alpha / rank * B (A x)        W frozen, A [rank, inputs] drawn, B [outputs, rank] zero at first

The weights of all layers are frozen, which means that they are buffers, no parameters: fragments, optimizer, gossip and
checkpoints are about parameters, so they are about the factors alone. Each peer reads the weights from its own folder
(model/start_weights.py). The names inside a layer are those that peft has for them.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decentral.core import rng
from decentral.model.shape import LoraConfig


class AdaptedLinear(nn.Linear):
    """A linear map with frozen weights, and its adapter."""

    def __init__(self, frozen: nn.Linear, lora: LoraConfig, chance: torch.Generator) -> None:
        """`frozen` has its weights as buffers, which both share from now on."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.register_buffer("weight", frozen.weight)
        self.register_buffer("bias", frozen.bias)
        self.scale = lora.alpha / lora.rank
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False)
        with torch.no_grad():  # peft draws A so, too: kaiming_uniform_ with a = sqrt(5)
            self.lora_A.weight.uniform_(-1, 1, generator=chance).div_(math.sqrt(self.in_features))
            self.lora_B.weight.zero_()

    def forward(self, input: Tensor) -> Tensor:
        adapted: Tensor = self.lora_B(self.lora_A(input))
        return F.linear(input, self.weight, self.bias) + self.scale * adapted

    def merged(self) -> Tensor:
        """W + alpha / rank * B A."""
        return self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)


def freeze(layers: Sequence[nn.Module]) -> None:
    """Makes all parameters of the layers buffers."""
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


def adapt(layer: nn.Module, lora: LoraConfig, seed: int, number: int) -> None:
    """Puts adapters beside the matrices of a frozen block, the model's layer `number`. A seed's are the same on every
    peer, whatever its span."""
    for path, parent, name in list(_matrices(layer, lora)):
        chance = torch.Generator().manual_seed(rng.seed_of(seed, "adapter", number, path) % 2**63)
        setattr(parent, name, AdaptedLinear(getattr(parent, name), lora, chance))


def merge(layers: Sequence[nn.Module]) -> None:
    """Puts plain matrices with the adapters' products in them in the place of adapted ones."""
    for module in [module for layer in layers for module in layer.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, AdaptedLinear):
                plain = nn.Linear(child.in_features, child.out_features, device="meta")
                plain.weight = nn.Parameter(child.merged().detach())
                plain.bias = None if child.bias is None else nn.Parameter(child.bias)
                setattr(module, name, plain)


def convert(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Gives frozen weights this dtype. Tables of positions are no weights, and stay as they are."""
    for module in (module for layer in layers for module in layer.modules()):
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))


def _matrices(layer: nn.Module, lora: LoraConfig) -> Iterator[tuple[str, nn.Module, str]]:
    """Of each matrix that gets an adapter its path, the module that it is in, and its name there."""
    for prefix, parent in layer.named_modules():
        for name, child in parent.named_children():
            if name in lora.targets and isinstance(child, nn.Linear):
                yield f"{prefix}.{name}", parent, name
