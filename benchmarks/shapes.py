"""The shapes of models that benchmarks train, and how much of a GPU's peak a training speed is."""

from decentral.core import config
from decentral.model import decoder

SIZES = {  # shapes of byte-level models, and the micro-batch
    "0.5M": ["model.depth=2"],
    "10M": ["model.depth=6", "model.width=384"],
    "85M": ["model.depth=12", "model.width=768", "train.micro_batch=1"],
    "125M": ["model.depth=18", "model.width=768", "model.context=1024", "train.micro_batch=32"],
    "350M": ["model.depth=28", "model.width=1024", "model.context=1024", "train.micro_batch=16"],
    "1B": ["model.depth=20", "model.width=2048", "model.context=1024", "train.micro_batch=8"],
}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}
"""Dense bf16 FLOP/s by the data sheet, by a part of the GPU's name."""


def utilisation(run: config.Config, tokens_per_s: float, device: str) -> float | None:
    """Return the FLOP/s of training over the dense bf16 peak of the GPU with this name; None if its peak is unknown.

    A token takes 6 FLOP for each parameter that multiplies it (all but the embedding's), and 6 T D for each block's
    causal attention (Chowdhery et al., arXiv 2204.02311, appendix B, halved for the mask).
    """
    peak = next((flops for name, flops in PEAKS.items() if name in device), None)
    attention = 6 * run.model.depth * run.model.context * run.model.d_model
    return tokens_per_s * (6 * sum(decoder.parameters(run.model)[1:]) + attention) / peak if peak else None
