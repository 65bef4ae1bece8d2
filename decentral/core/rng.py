"""Make independent, named random streams from one seed.

The same seed and names give the same stream on every machine and Python version. So a run can be replayed, and a peer
that restarts gets the same samples as without the restart.
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """Return a 64-bit seed for the stream with these names."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def stream(seed: int, *names: str | int) -> random.Random:
    """Return a random stream for single decisions, such as the choice of a partner."""
    return random.Random(seed_of(seed, *names))


def arrays(seed: int, *names: str | int) -> "np.random.Generator":
    """Return a random stream for arrays of samples, such as the text positions of a micro-batch."""
    import numpy as np  # commands that only print their help need none

    return np.random.default_rng(seed_of(seed, *names))
