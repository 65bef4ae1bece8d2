"""What travels between two layers: hidden values or their gradient, and the targets that the loss at the end needs.

Shapes: B sequences, T positions, D width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.jobs import Layout, Section
from decentral.core.outcomes import UNLIKE, Likeness
from decentral.core.reasons import Reason
from decentral.train.gpt import MASKED
from decentral.train.sections import Codecs

LARGEST_ACTIVATION = (
    1e6  # magnitude of a hidden value or its gradient that we believe: backward passes of larger ones overflow
)


class ActivationFormat:
    """Encodes and decodes the micro-batches of one run. `widths[x]`: numbers a token that enter layer x."""

    def __init__(self, run: config.Config, codecs: Codecs, widths: Sequence[int]) -> None:
        self.codecs, self.widths = codecs, widths
        self.wire, self.context, self.vocabulary = run.routes.wire, run.model.context, run.model.vocabulary
        self.masks = run.data.format != "text"  # a target that is not trained travels as the first number of no token

    def layout(self, layer: int, sequences: int) -> Layout:
        """The sections of a micro-batch that enters this layer."""
        tokens = sequences * self.context
        numbers = tokens * self.widths[layer]
        codec, size = ("u16", 2) if self.vocabulary + self.masks <= 1 << 16 else ("u32", 4)
        return (
            Section("hidden", self.wire, numbers, self.codecs.size(self.wire, numbers)),
            Section("targets", codec, tokens, tokens * size),
        )

    def encode(self, hidden_BTD: Tensor) -> tuple[Section, bytes]:
        """Hidden values, or a gradient of them. Raises ProtocolError for numbers that are not finite."""
        flat = hidden_BTD.float().flatten()
        blob = self.codecs.encode(self.wire, flat)
        return Section("hidden", self.wire, flat.numel(), len(blob)), blob

    def decode(self, sections: Layout, blob: bytes, shape: torch.Size) -> Tensor:
        """fp32 on the CPU. Raises ProtocolError for what is not one section of this shape, whole and believable."""
        if len(sections) != 1 or sections[0].codec != self.wire or sections[0].elements != shape.numel():
            raise ProtocolError(Reason.SHAPE, "not the hidden values of this micro-batch")
        values = self.codecs.decode(self.wire, memoryview(blob), shape.numel()).view(shape)
        if values.numel() and float(values.abs().amax()) > LARGEST_ACTIVATION:
            raise ProtocolError(
                Reason.MAGNITUDE, f"a hidden value or its gradient is larger than {LARGEST_ACTIVATION:g}"
            )
        return values

    def pack(self, layer: int, hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Layout, bytes]:
        """A micro-batch that leaves for this layer."""
        section, hidden = self.encode(hidden_BTD)
        expected = self.layout(layer, len(targets_BT))
        assert section == expected[0], f"what enters layer {layer} is {section}, not {expected[0]}"
        tokens_BT = targets_BT.cpu().where(targets_BT.cpu() != MASKED, self.vocabulary)
        integers = tokens_BT.to(_dtype(expected[1])).contiguous()
        return expected, hidden + integers.view(torch.uint8).numpy().tobytes()

    def unpack(self, job: jobs.Forward) -> tuple[Tensor, Tensor]:
        """hidden_BTD fp32 and targets_BT int64, on the CPU. Raises ProtocolError for what is not both, and whole."""
        B, T, D = job.sequences, self.context, self.widths[job.first]
        expected = self.layout(job.first, B)
        if job.layout != expected or len(job.blob) != sum(section.size for section in expected):
            raise ProtocolError(Reason.SHAPE, "not what enters this layer")
        hidden_BTD = self.decode(expected[:1], job.blob[: expected[0].size], torch.Size((B, T, D)))
        integers = torch.frombuffer(bytearray(job.blob[expected[0].size :]), dtype=_dtype(expected[1]))
        targets_BT = integers.to(torch.int64).view(B, T)
        masked_BT = (targets_BT == self.vocabulary) & self.masks
        targets_BT = targets_BT.masked_fill(masked_BT, MASKED)
        if int(targets_BT.max()) >= self.vocabulary or bool(masked_BT.all()):
            raise ProtocolError(Reason.VOCABULARY, "a target that is no token, or none that is trained")
        return hidden_BTD, targets_BT


def likeness(one: Tensor | None, other: Tensor | None) -> Likeness:
    """Of two gradients fp32 [n]; UNLIKE where one is none, or nothing but zeros."""
    if one is None or other is None:
        return UNLIKE
    lengths = float(one.norm()), float(other.norm())
    if not all(0 < length < math.inf for length in lengths):
        return UNLIKE
    cosine = float(torch.dot(one.flatten() / lengths[0], other.flatten() / lengths[1]))
    return Likeness(cosine, lengths[0] / lengths[1])


def _dtype(targets: Section) -> torch.dtype:
    return torch.uint16 if targets.codec == "u16" else torch.uint32
