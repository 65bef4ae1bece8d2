"""Take pieces out of an encoded vector without decoding it."""

import math
from collections.abc import Sequence

import numpy as np

from decentral.comm.codecs import blockwise


def joined_pieces(codec: str, blob: bytes | memoryview, elements: int, begins: Sequence[int], numbers: int) -> bytes:
    """Return one blob that encodes several pieces of a vector, joined in the order of `begins`.

    The levels and scales are copied from the vector's blob, which is not decoded.

    Args:
        codec: A codec with blocks: a key of `blockwise.BLOCKS`.
        blob: The encoded vector.
        elements: The vector's length in numbers.
        begins: Index of each piece's first number; must be a multiple of `numbers`.
        numbers: Length of each piece; must be a multiple of the codec's block.

    Raises:
        ProtocolError: If the blob does not have the size of `elements` numbers.
    """
    read, block = blockwise.as_bytes(codec, blob, elements), blockwise.BLOCKS[codec]
    scales, levels = read[: 2 * math.ceil(elements / block)], read[2 * math.ceil(elements / block) :]
    each = blockwise.size(codec, numbers) - 2 * (numbers // block)  # bytes of one piece without its block scales
    places = [(begin // block * 2, begin // numbers * each) for begin in begins]
    parts = [scales[at : at + 2 * (numbers // block)] for at, _ in places]
    parts += [levels[at : at + each] for _, at in places]
    return np.concatenate(parts).tobytes()
