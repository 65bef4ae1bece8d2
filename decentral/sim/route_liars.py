"""Falsify the backward responses of a Byzantine peer on a route (a pipeline of peers).

    hop-flipped   the gradient with the opposite sign (sign flip)
    hop-zero      a zero gradient
    hop-opposed   the gradient times -10
    hop-grown     the gradient times 10
    hop-replayed  the gradient of the previous response to the same peer
    hop-random    noise with the norm of the gradient, as from a peer that computes nothing
    hop-loss      the right gradient, with half of the loss

With a surrogate workload the responses contain no gradients. Each of these lies then halves the loss instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse
from decentral.core import rng
from decentral.core.synthetic import SyntheticBlob

HOP_GROWN = 10.0  # the lies `hop-grown` and `hop-opposed` multiply the gradient's norm by this factor
HOP_LOSS = 0.5  # the lie `hop-loss` multiplies the reported loss by this factor


def falsify_gradient(kind: str, seed: str, envelope: Envelope, codecs: Codecs, before: Envelope) -> Envelope:
    """Return the false backward response of a Byzantine peer on a route.

    Args:
        kind: Name of the lie, one of HOP_LIES (sim/faults.py).
        seed: Seed of the noise of `hop-random`.
        envelope: The honest backward response.
        codecs: Codecs of the gradient.
        before: The previous honest response to the same peer, which `hop-replayed` sends again.
    """
    response = envelope.message
    assert isinstance(response, BackwardResponse)
    if kind == "hop-loss" or isinstance(envelope.blob, SyntheticBlob):
        return Envelope(replace(response, loss=HOP_LOSS * response.loss), envelope.blob)
    if kind == "hop-replayed":
        return Envelope(response, before.blob if len(before.blob) == len(envelope.blob) else envelope.blob)
    section = response.layout[0]
    gradient = codecs.decode(section.codec, memoryview(envelope.blob), section.elements)
    return Envelope(response, codecs.encode(section.codec, FALSE_GRADIENTS[kind](gradient, seed)))


def _noise(gradient: Tensor, seed: str) -> Tensor:
    """Return random noise with the shape and the norm of the gradient."""
    chance = torch.Generator().manual_seed(rng.seed_of(0, "hop", seed) % 2**63)
    noise = torch.randn(gradient.shape, generator=chance)
    found: Tensor = noise * (gradient.norm() / noise.norm().clamp_min(1e-30))
    return found


FALSE_GRADIENTS: Mapping[str, Callable[[Tensor, str], Tensor]] = {
    "hop-flipped": lambda gradient, seed: -gradient,
    "hop-opposed": lambda gradient, seed: -HOP_GROWN * gradient,
    "hop-zero": lambda gradient, seed: torch.zeros_like(gradient),
    "hop-grown": lambda gradient, seed: HOP_GROWN * gradient,
    "hop-random": _noise,
}
