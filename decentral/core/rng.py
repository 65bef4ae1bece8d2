"""Chance as an argument: independent, named streams from one seed.

The same names give the same stream on every machine and in every Python, so a run can be replayed and a peer
that restarts draws what it would have drawn.
"""

import hashlib
import random

import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """A 64-bit seed for the stream with these names."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def stream(seed: int, *names: str | int) -> random.Random:
    """A stream for decisions: which partner, when to jitter."""
    return random.Random(seed_of(seed, *names))


def arrays(seed: int, *names: str | int) -> np.random.Generator:
    """A stream for arrays of draws: which windows of the text make this micro-batch."""
    return np.random.default_rng(seed_of(seed, *names))
