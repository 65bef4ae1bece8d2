"""Blockwise quantisation: pure functions from fp32 vectors to bytes and back.

    codec   levels      block   bytes for n numbers          error within a block of largest magnitude a
    q4      -7..7       128     ceil(n/2) + 2 ceil(n/128)    at most s/2, s = bf16_up(a/7)
    int8    -127..127   256     n + 2 ceil(n/256)            at most s/2, s = bf16_up(a/127)
    bf16                        2 n                          a relative 2^-9
    fp32                        4 n                          none

Scales are bf16 rounded up: bf16 has fp32's range, so the small deltas of a late training stage do not underflow
as they do in fp16; rounding up keeps the largest number of a block within the levels. The scales come first,
then the levels. `unpack` raises ProtocolError for bytes that no `pack` can have written or that are not finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class Codec:
    """`pack` takes fp32 [n] on any device and gives bytes; `unpack` takes those bytes and n, and gives fp32 [n]."""

    name: str
    size: Callable[[int], int]
    pack: Callable[[Tensor], bytes]
    unpack: Callable[[bytes, int], Tensor]


def encode(codec: str, values: Tensor) -> bytes:
    """The bytes of fp32 [n], on any device. Raises KeyError for an unknown codec."""
    return CODECS[codec].pack(values)


def size(codec: str, elements: int) -> int:
    """The bytes that `elements` numbers take on the wire."""
    return CODECS[codec].size(elements)


def decode(codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
    """fp32 [elements] on the CPU. Raises ProtocolError for an unknown codec, a wrong size, or numbers not finite."""
    if codec not in CODECS:
        raise ProtocolError(Reason.CODEC, f"{codec!r} is none of {', '.join(CODECS)}")
    expected = CODECS[codec].size(elements)
    if len(blob) != expected:
        raise ProtocolError(Reason.SHAPE, f"{elements} numbers in {codec} take {expected} bytes; got {len(blob)}")
    values = CODECS[codec].unpack(bytes(blob), elements)
    if not bool(torch.isfinite(values).all()):
        raise ProtocolError(Reason.NAN, f"a {codec} section holds numbers that are not finite")
    return values


def _pack_blocks(values: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    """int8 levels [n] and bf16 scales [blocks], both on the CPU."""
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % block)).view(-1, block)
    scales = _bf16_up(padded.abs().amax(dim=1) / levels)
    divisor = scales.float().masked_fill(scales == 0, 1.0)
    whole = (padded / divisor[:, None]).round_().clamp_(-levels, levels).to(torch.int8)
    return whole.view(-1)[:n].cpu(), scales.cpu()


def _bf16_up(values: Tensor) -> Tensor:
    """The smallest bf16 that is not below each (non-negative) value."""
    rounded = values.to(torch.bfloat16)
    low = rounded.float() < values
    return torch.where(low, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)


def _unpack_blocks(levels: Tensor, scales: Tensor, block: int, highest: int) -> Tensor:
    n = levels.numel()
    if n and (int(levels.min()) < -highest or bool((scales.isfinite() & (scales < 0)).any())):
        raise ProtocolError(Reason.LEVELS, f"outside -{highest}..{highest}, or a negative scale")
    padded = torch.nn.functional.pad(levels.float(), (0, -n % block)).view(-1, block)
    return (padded * scales.float()[:, None]).view(-1)[:n]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(blob: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=dtype) if blob else torch.empty(0, dtype=dtype)


def _blocks(n: int, block: int) -> int:
    return math.ceil(n / block)


def _pack_q4(values: Tensor) -> bytes:
    levels, scales = _pack_blocks(values, 128, 7)
    nibbles = torch.nn.functional.pad(levels + 8, (0, levels.numel() % 2), value=8).view(-1, 2).to(torch.uint8)
    return _bytes(scales) + _bytes(nibbles[:, 0] | (nibbles[:, 1] << 4))


def _unpack_q4(blob: bytes, n: int) -> Tensor:
    cut = 2 * _blocks(n, 128)
    pairs = _tensor(blob[cut:], torch.uint8)
    levels = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1)[:n].to(torch.int8) - 8
    return _unpack_blocks(levels, _tensor(blob[:cut], torch.bfloat16), 128, 7)


def _pack_int8(values: Tensor) -> bytes:
    levels, scales = _pack_blocks(values, 256, 127)
    return _bytes(scales) + _bytes(levels)


def _unpack_int8(blob: bytes, n: int) -> Tensor:
    cut = 2 * _blocks(n, 256)
    return _unpack_blocks(_tensor(blob[cut:], torch.int8), _tensor(blob[:cut], torch.bfloat16), 256, 127)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("q4", lambda n: math.ceil(n / 2) + 2 * _blocks(n, 128), _pack_q4, _unpack_q4),
        Codec("int8", lambda n: n + 2 * _blocks(n, 256), _pack_int8, _unpack_int8),
        Codec(
            "bf16",
            lambda n: 2 * n,
            lambda values: _bytes(values.cpu().to(torch.bfloat16)),
            lambda blob, n: _tensor(blob, torch.bfloat16).float(),
        ),
        Codec(
            "fp32",
            lambda n: 4 * n,
            lambda values: _bytes(values.cpu().float()),
            lambda blob, n: _tensor(blob, torch.float32).clone(),
        ),
    )
}
