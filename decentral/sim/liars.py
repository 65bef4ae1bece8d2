"""Falsify the gossip snapshots, and the gradients on routes, of a Byzantine peer, with a valid digest.

    zero       slow weights and pseudo-gradient are zero
    grown      the pseudo-gradient is multiplied by a hundred
    huge       every number is near the largest finite fp32 number
    flipped    the liar's own pseudo-gradient with the opposite sign (sign flip)
    opposed    the mean of the honest peers' pseudo-gradients with the opposite sign, scaled to the mean of their norms
               (inner-product manipulation: Xie et al., arXiv 1903.03936)
    little     the mean of the honest peers' pseudo-gradients, minus LITTLE standard deviations in each number (Baruch
               et al., "A Little Is Enough", arXiv 1902.06156)
    drift      a vector whose direction never changes, with the norm of the liar's own pseudo-gradient, is added to that
               pseudo-gradient and to the slow weights
    tokens     `flipped`, with a thousand times the true number of tokens
    random     noise with the norm of the liar's own pseudo-gradient
    copied     twice an honest peer's pseudo-gradient; the liar claims four times its true number of tokens
    belated    `copied`, but from the second to last pseudo-gradient of the honest peer
    blurred    `copied`, plus noise with twice the norm of the copy
    hidden     `copied`, with slow weights of zero
    astray     `copied`, with slow weights far from the optimum
    inflated   the honest window, with ten times its number of tokens

Start reading at `falsify`. A liar knows the latest pseudo-gradients of all honest peers. Two more lies change the bytes
of a snapshot without decoding it: `nan` sets all bits, and `scaled` makes the first block's values 64 times as large.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, Snapshot
from decentral.core import rng
from decentral.core.synthetic import SyntheticBlob

GROWN = 100.0  # the lie `grown` multiplies the pseudo-gradient by this factor
HUGE = 1e38  # the lie `huge` sets every number to this value
LITTLE = 1.0  # the lie `little` is the honest mean minus this many standard deviations
TOKENS = 1000  # the lie `tokens` multiplies the reported number of tokens by this factor
COPIED_LENGTH, COPIED_TOKENS = 2.0, 4  # the lie `copied` multiplies a copied pseudo-gradient by 2 and tokens by 4
INFLATED_TOKENS = 10  # the lie `inflated` multiplies the reported number of tokens by this factor
BLUR = 2.0  # the lie `blurred` adds noise whose norm is this many times the norm of the pseudo-gradient
ASTRAY = 1e9  # the lie `astray` sets all slow weights to this value
MOST_TOKENS = 1 << 60  # no liar reports more tokens than this

Vectors = dict[str, Tensor]
"""A snapshot's sections by name, each fp32 (n,)."""

Honest = Sequence[Tensor]
"""Pseudo-gradients of the honest peers' latest windows, each fp32 (n,)."""
HOP_GROWN = 10.0  # the lies `hop-grown` and `hop-opposed` multiply the gradient's norm by this factor
HOP_LOSS = 0.5  # the lie `hop-loss` multiplies the reported loss by this factor


def falsify(kind: str, liar: str, envelope: Envelope, codecs: Codecs, honest: Honest) -> Envelope:
    """Return the false snapshot of a liar, with a valid digest.

    Args:
        kind: Name of the lie, a key of FALSIFIED or TIMES_TOKENS.
        liar: The liar's id, which seeds its random directions.
        envelope: The liar's honest answer, a snapshot.
        codecs: Codecs of the snapshot's sections.
        honest: Pseudo-gradients of the honest peers, each fp32 (n,).
    """
    snapshot = envelope.message
    assert isinstance(snapshot, Snapshot)
    tokens = min(TIMES_TOKENS.get(kind, 1) * snapshot.tokens, MOST_TOKENS)
    if kind not in FALSIFIED:
        return Envelope(replace(snapshot, tokens=tokens), envelope.blob)
    packer = Packer(codecs)
    vectors = FALSIFIED[kind](unpack(codecs, snapshot.layout, envelope.blob), honest, liar)
    for section in snapshot.layout:
        packer.add(section.name, section.codec, vectors[section.name])
    layout, blob = packer.finish()
    return Envelope(replace(snapshot, layout=layout, tokens=tokens, digest=blobs.digest(blob)), blob)


def garble(kind: str, envelope: Envelope) -> Envelope:
    """Return the snapshot, its bytes changed by the lie `kind` (a key of GARBLED), with a valid digest."""
    assert isinstance(envelope.message, Snapshot)
    blob = changed(envelope.blob, GARBLED[kind])
    return Envelope(replace(envelope.message, digest=blobs.digest(blob)), blob)


def changed(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return `change(blob)`. Of a SyntheticBlob, which has only parts of its bytes in memory, change each part."""
    if isinstance(blob, SyntheticBlob):
        return SyntheticBlob((length, change(content)) for length, content in blob.segments)
    return change(blob)


def _scaled(content: bytes) -> bytes:
    """Multiply the bf16 scale of the first encoded block, which is in the first two bytes, by 64."""
    if len(content) < 2:
        return content
    larger = min(int.from_bytes(content[:2], "little") + (6 << 7), 0x7E80)
    return larger.to_bytes(2, "little") + content[2:]


def _flipped(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return _progress(own, lambda vector: -vector)


def _opposed(own: Vectors, honest: Honest, liar: str) -> Vectors:
    if not honest:
        return _flipped(own, honest, liar)
    mean = torch.stack(list(honest)).mean(dim=0)
    length = torch.stack([one.norm() for one in honest]).mean()
    return _progress(own, lambda vector: -mean * (length / mean.norm().clamp_min(1e-30)))


def _little(own: Vectors, honest: Honest, liar: str) -> Vectors:
    if len(honest) < 2:
        return _flipped(own, honest, liar)
    stacked = torch.stack(list(honest))
    return _progress(own, lambda vector: stacked.mean(dim=0) - LITTLE * stacked.std(dim=0))


def _drift(own: Vectors, honest: Honest, liar: str) -> Vectors:
    length = own[PSEUDO_GRADIENT].norm() if PSEUDO_GRADIENT in own else 0.0
    return {name: vector - length * _unit(vector, liar) for name, vector in own.items()}


def _random(own: Vectors, honest: Honest, liar: str) -> Vectors:
    seed = f"{liar} {float(own[PSEUDO_GRADIENT].norm()) if PSEUDO_GRADIENT in own else 0.0}"
    return _progress(own, lambda vector: vector.norm() * _unit(vector, seed))


def _copied(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return _progress(own, lambda vector: COPIED_LENGTH * (honest[0] if honest else vector))


def _blurred(own: Vectors, honest: Honest, liar: str) -> Vectors:
    def blur(vector: Tensor) -> Tensor:
        length = float(vector.norm())
        return vector + BLUR * length * _unit(vector, f"{liar} {length}")

    return _progress(_copied(own, honest, liar), blur)


def _hidden(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return _elsewhere(_copied(own, honest, liar), 0.0)


def _elsewhere(own: Vectors, value: float) -> Vectors:
    """Return the sections with each number set to `value`; only the pseudo-gradient stays unchanged."""
    return {name: vector if name == PSEUDO_GRADIENT else torch.full_like(vector, value) for name, vector in own.items()}


def _unit(like: Tensor, seed: str) -> Tensor:
    """Return a random vector with norm 1 and the shape of `like`; equal seeds give equal vectors."""
    chance = torch.Generator().manual_seed(rng.seed_of(0, "liar", seed) % 2**63)
    direction = torch.randn(like.shape, generator=chance)
    unit: Tensor = direction / direction.norm().clamp_min(1e-30)
    return unit


def _progress(own: Vectors, change: Callable[[Tensor], Tensor]) -> Vectors:
    """Return the sections with `change` applied to the pseudo-gradient; the other sections stay unchanged."""
    return {name: change(vector) if name == PSEUDO_GRADIENT else vector for name, vector in own.items()}


FALSIFIED: Mapping[str, Callable[[Vectors, Honest, str], Vectors]] = {
    "zero": lambda own, honest, liar: {name: torch.zeros_like(vector) for name, vector in own.items()},
    "grown": lambda own, honest, liar: _progress(own, lambda vector: GROWN * vector),
    "huge": lambda own, honest, liar: {name: torch.full_like(vector, HUGE) for name, vector in own.items()},
    "flipped": _flipped,
    "opposed": _opposed,
    "little": _little,
    "drift": _drift,
    "tokens": _flipped,
    "random": _random,
    "copied": _copied,
    "belated": _copied,
    "blurred": _blurred,
    "hidden": _hidden,
    "astray": lambda own, honest, liar: _elsewhere(_copied(own, honest, liar), ASTRAY),
}
TIMES_TOKENS: Mapping[str, int] = {
    "tokens": TOKENS,
    "inflated": INFLATED_TOKENS,
    **dict.fromkeys(("copied", "belated", "blurred", "hidden", "astray"), COPIED_TOKENS),
}

GARBLED: Mapping[str, Callable[[bytes], bytes]] = {"nan": lambda content: b"\xff" * len(content), "scaled": _scaled}


def falsify_gradient(kind: str, seed: str, envelope: Envelope, codecs: Codecs, before: Envelope) -> Envelope:
    """Return the false backward response of a Byzantine peer on a route.

        hop-flipped   the gradient with the opposite sign (sign flip)
        hop-zero      a zero gradient
        hop-opposed   the gradient times -10
        hop-grown     the gradient times 10
        hop-replayed  the gradient of the previous response to the same peer
        hop-random    noise with the norm of the gradient, as from a peer that computes nothing
        hop-loss      the right gradient, with half of the loss

    With a surrogate workload the responses contain no gradients. Each of these lies then halves the loss instead.

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
