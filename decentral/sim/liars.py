"""What a hostile peer sends instead of its snapshots: decoded, falsified, and encoded with the digest that fits.

    zero       slow weights and pseudo-gradient are zero
    grown      the pseudo-gradient is a hundred times as long
    huge       every number is near the largest that is finite
    flipped    its own pseudo-gradient, backwards (sign flip)
    opposed    the honest peers' mean of this window, backwards, as long as one of theirs (inner-product manipulation:
               Xie et al., arXiv 1903.03936)
    little     that mean, less LITTLE standard deviations in each number (a little is enough: Baruch et al.,
               arXiv 1902.06156)
    drift      its own, and as much again in one direction that stays the same; its slow weights go that way, too
    tokens     flipped, with a thousand times the tokens
    random     noise, as long as its own
    copied     an honest peer's window, twice as long and with four times the tokens, as of a device four times as fast
    belated    copied, once the peer it is from has its next window
    blurred    copied, under noise that is twice as long
    hidden     copied, with slow weights of zero
    astray     copied, with slow weights far away

Such a liar knows all: it reads what the honest peers have published in the same window before it answers. Two more lies
are changes of the bytes that it sends: `nan`, and `scaled`, in which the first block's values are 64 times as large.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, unpack
from decentral.comm.gossip.pull_rule import PSEUDO_GRADIENT
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Snapshot
from decentral.core import rng
from decentral.core.synthetic import SyntheticBlob

GROWN = 100.0
HUGE = 1e38
LITTLE = 1.0  # standard deviations
TOKENS = 1000
COPIED_LENGTH, COPIED_TOKENS = 2.0, 4
BLUR = 2.0  # times the window's length
ASTRAY = 1e9
MOST_TOKENS = 1 << 60

Vectors = dict[str, Tensor]
"""A snapshot's sections by name, fp32 [n]."""

Honest = Sequence[Tensor]
"""The pseudo-gradients of the honest peers' last windows."""


def falsify(kind: str, liar: str, envelope: Envelope, codecs: Codecs, honest: Honest) -> Envelope:
    """The answer of a liar of this kind, in the place of its honest one. Only snapshots are falsified."""
    snapshot = envelope.message
    assert isinstance(snapshot, Snapshot)
    packer = Packer(codecs)
    vectors = FALSIFIED[kind](unpack(codecs, snapshot.layout, envelope.blob), honest, liar)
    for section in snapshot.layout:
        packer.add(section.name, section.codec, vectors[section.name])
    layout, blob = packer.finish()
    tokens = min(TIMES_TOKENS.get(kind, 1) * snapshot.tokens, MOST_TOKENS)
    return Envelope(replace(snapshot, layout=layout, tokens=tokens, digest=blobs.digest(blob)), blob)


def garble(kind: str, envelope: Envelope) -> Envelope:
    """A snapshot whose bytes are changed as GARBLED says, with the digest that fits."""
    assert isinstance(envelope.message, Snapshot)
    blob = changed(envelope.blob, GARBLED[kind])
    return Envelope(replace(envelope.message, digest=blobs.digest(blob)), blob)


def changed(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The bytes after the change, which a simulated blob makes in those of its parts that have any."""
    if isinstance(blob, SyntheticBlob):
        return SyntheticBlob((length, change(content)) for length, content in blob.segments)
    return change(blob)


def _nan(content: bytes) -> bytes:
    return b"\xff" * len(content)


def _scaled(content: bytes) -> bytes:
    """The first scale of a quantised block (bf16) with a larger exponent: its values become 64 times as large."""
    if len(content) < 2:
        return content
    larger = min(int.from_bytes(content[:2], "little") + (6 << 7), 0x7E80)
    return larger.to_bytes(2, "little") + content[2:]


def _zero(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return {name: torch.zeros_like(vector) for name, vector in own.items()}


def _grown(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return _progress(own, lambda vector: GROWN * vector)


def _huge(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return {name: torch.full_like(vector, HUGE) for name, vector in own.items()}


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


def _astray(own: Vectors, honest: Honest, liar: str) -> Vectors:
    return _elsewhere(_copied(own, honest, liar), ASTRAY)


def _elsewhere(own: Vectors, value: float) -> Vectors:
    """The sections, with all but the pseudo-gradient changed."""
    return {name: vector if name == PSEUDO_GRADIENT else torch.full_like(vector, value) for name, vector in own.items()}


def _unit(like: Tensor, seed: str) -> Tensor:
    chance = torch.Generator().manual_seed(rng.seed_of(0, "liar", seed) % 2**63)
    direction = torch.randn(like.shape, generator=chance)
    unit: Tensor = direction / direction.norm().clamp_min(1e-30)
    return unit


def _progress(own: Vectors, change: Callable[[Tensor], Tensor]) -> Vectors:
    """The sections, with the pseudo-gradient changed."""
    return {name: change(vector) if name == PSEUDO_GRADIENT else vector for name, vector in own.items()}


FALSIFIED: Mapping[str, Callable[[Vectors, Honest, str], Vectors]] = {
    "zero": _zero,
    "grown": _grown,
    "huge": _huge,
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
    "astray": _astray,
}
TIMES_TOKENS: Mapping[str, int] = {
    "tokens": TOKENS,
    **dict.fromkeys(("copied", "belated", "blurred", "hidden", "astray"), COPIED_TOKENS),
}

GARBLED: Mapping[str, Callable[[bytes], bytes]] = {"nan": _nan, "scaled": _scaled}
