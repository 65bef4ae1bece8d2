"""Low-rank adapters beside frozen weights (LoRA, equation 3 of arXiv 2106.09685).

    y = W x + alpha / rank * B (A x)        W frozen, A [rank, inputs] sampled, B [outputs, rank] zero at first

Start reading at `adapt`. With `model.lora` only the adapters are trained. All other weights are frozen: `freeze` turns
them from parameters into buffers. Fragments, optimizer, gossip and checkpoints use only parameters, so they contain
only the factors A and B. Each peer reads the frozen weights from its own folder (`start_weights`). The names inside a
layer are those of peft.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decentral.core import rng
from decentral.model.shape import LoraConfig


class AdaptedLinear(nn.Linear):
    """A linear layer that has frozen weights and an adapter."""

    def __init__(self, frozen: nn.Linear, lora: LoraConfig, chance: torch.Generator) -> None:
        """Share the weights of the layer `frozen`, and add a new adapter. `chance`: generator for the factor A."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.register_buffer("weight", frozen.weight)
        self.register_buffer("bias", frozen.bias)
        self.scale = lora.alpha / lora.rank
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False)
        with torch.no_grad():  # peft samples A in the same way: kaiming_uniform_ with a = sqrt(5)
            self.lora_A.weight.uniform_(-1, 1, generator=chance).div_(math.sqrt(self.in_features))
            self.lora_B.weight.zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + alpha / rank * B (A x), plus the bias if there is one."""
        adapted: Tensor = self.lora_B(self.lora_A(input))
        return F.linear(input, self.weight, self.bias) + self.scale * adapted

    def merged(self) -> Tensor:
        """Return W + alpha / rank * B A, [outputs, inputs]."""
        return self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)


def freeze(layers: Sequence[nn.Module]) -> None:
    """Turn all parameters of the layers into buffers, in place."""
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


def adapt(layer: nn.Module, lora: LoraConfig, seed: int, number: int) -> None:
    """Add adapters to the matrices of a frozen block, in place.

    Args:
        layer: The block.
        lora: Rank of the adapters, and the matrices that get adapters.
        seed: The run's seed.
        number: Index of the block among the model's layers. All peers get the same adapters from `seed` and `number`.
    """
    for path, parent, name in list(_matrices(layer, lora)):
        chance = torch.Generator().manual_seed(rng.seed_of(seed, "adapter", number, path) % 2**63)
        setattr(parent, name, AdaptedLinear(getattr(parent, name), lora, chance))


def merge(layers: Sequence[nn.Module]) -> None:
    """Replace each adapted linear layer, in place, by a plain layer with the weights W + alpha / rank * B A."""
    for module in [module for layer in layers for module in layer.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, AdaptedLinear):
                plain = nn.Linear(child.in_features, child.out_features, device="meta")
                plain.weight = nn.Parameter(child.merged().detach())
                plain.bias = None if child.bias is None else nn.Parameter(child.bias)
                setattr(module, name, plain)


def convert(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Convert frozen weights to a dtype, in place. The tables of rotary positions keep their dtype."""
    for module in (module for layer in layers for module in layer.modules()):
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))


def _matrices(layer: nn.Module, lora: LoraConfig) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each matrix that gets an adapter: its path, the module that contains it, and its name in that module."""
    for prefix, parent in layer.named_modules():
        for name, child in parent.named_children():
            if name in lora.targets and isinstance(child, nn.Linear):
                yield f"{prefix}.{name}", parent, name
