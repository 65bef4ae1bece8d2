"""What a hostile hop of a route gives back: its answer decoded, falsified, and encoded as an honest one would be.

    hop-flipped   the gradient backwards (sign flip)
    hop-zero      no gradient
    hop-opposed   the gradient backwards, ten times as long
    hop-grown     the gradient, ten times as long
    hop-replayed  the gradient that it gave back the time before
    hop-random    noise, as long as the gradient: it has computed nothing
    hop-loss      the right gradient, and half of the loss

Surrogate answers hold no gradients: there, each of these halves the loss.
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

HOP_GROWN = 10.0
HOP_LOSS = 0.5  # of the true loss


def falsify_gradient(kind: str, seed: str, envelope: Envelope, codecs: Codecs, before: Envelope) -> Envelope:
    """The answer of a hop that lies in this way. `before`: its honest answer to that asker the time before."""
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
