"""Generation: tokens/s of one sequence, with keys and values kept."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import nn

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.scale import Scale
from decentral.core.sampling import Sampling
from decentral.engine.measure import choose
from decentral.engine.step import Device
from decentral.model import decoder
from decentral.serving import decoding

PROMPT = range(32)
WARM_TOKENS = 4
DTYPES = ("float32", "bfloat16")


def measure(scale: Scale, notes: Notes, size: str) -> None:
    """Note tokens/s in each dtype; the prompt's reading is counted."""
    run = scale.run(size)
    layers = decoder.build(run.model, run.seed)
    for dtype in DTYPES:
        device = replace(choose(scale.device), dtype=getattr(torch, dtype))
        notes.attempt(f"{dtype}, tokens/s", partial(rate, layers, device, scale.generated))


def rate(layers: Sequence[nn.Module], device: Device, tokens: int) -> float:
    """Return tokens/s of so many tokens, after a few that are not counted."""
    for count in (WARM_TOKENS, tokens):
        began = perf_counter()
        for _ in decoding.generate(layers, PROMPT, Sampling(tokens=count, seed=0), device):
            pass
    return tokens / (perf_counter() - began)
