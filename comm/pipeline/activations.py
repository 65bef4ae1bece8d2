"""What travels between two layers: hidden values or their gradient, and the targets that the loss at the end needs.

Shapes: B sequences, T positions, D width.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import FAST, THIN, ActivationForms, Layout, Section, fits_one
from decentral.core.jobs import UNLIKE, Likeness
from decentral.core.reasons import Reason
from decentral.model.decoder import MASKED

WIRES: Mapping[str, tuple[str, str]] = {
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int8-q4": ("int8", "q4"),
    "fp32": ("fp32", "fp32"),
}
"""The codecs of hidden values and of their gradients, by the config's `routes.wire`."""

AUTO = ("bf16", "int8-q4")  # over fast links, over thin ones

LARGEST_ACTIVATION = (
    1e6  # magnitude of a hidden value or its gradient that we believe: backward passes of larger ones overflow
)


class ActivationFormat:
    """Encodes and decodes the micro-batches of one run. `widths[x]`: numbers a token that enter layer x."""

    def __init__(self, run: config.Config, codecs: Codecs, widths: Sequence[int]) -> None:
        self.codecs, self.widths = codecs, widths
        self.context, self.vocabulary = run.model.context, run.model.vocabulary
        names = AUTO if run.routes.wire == "auto" else (run.routes.wire,)
        self.forward = [WIRES[name][0] for name in names]  # over fast links first, over thin ones last
        self.backward = [WIRES[name][1] for name in names]
        self.masks = run.data.format != "text"  # a target that is not trained travels as the first number of no token

    def forms(self, layer: int, sequences: int) -> ActivationForms:
        """Of a micro-batch that enters this layer."""
        tokens = sequences * self.context
        numbers = tokens * self.widths[layer]
        codec, size = ("u16", 2) if self.vocabulary + self.masks <= 1 << 16 else ("u32", 4)
        targets = Section("targets", codec, tokens, tokens * size)
        entering = tuple((self._hidden(wire, numbers), targets) for wire in self.forward)
        return ActivationForms(entering, tuple((self._hidden(wire, numbers),) for wire in self.backward))

    def _hidden(self, codec: str, numbers: int) -> Section:
        return Section("hidden", codec, numbers, self.codecs.size(codec, numbers))

    def encode_gradient(self, gradient_BTD: Tensor, thin: bool = False) -> tuple[Layout, bytes]:
        section, blob = self._encode(self.backward[THIN if thin else FAST], gradient_BTD)
        return (section,), blob

    def _encode(self, codec: str, hidden_BTD: Tensor) -> tuple[Section, bytes]:
        flat = hidden_BTD.float().flatten()
        return self._hidden(codec, flat.numel()), self.codecs.encode(codec, flat)

    def decode_gradient(self, layout: Layout, blob: bytes, shape: torch.Size) -> Tensor:
        """fp32 on the CPU. Raises ProtocolError for what is not one section of this shape, whole and believable."""
        if len(layout) != 1 or layout[0].codec not in self.backward or layout[0].elements != shape.numel():
            raise ProtocolError(Reason.SHAPE, "not the gradient of this micro-batch")
        return self._decode(layout[0].codec, blob, shape)

    def _decode(self, codec: str, blob: bytes, shape: torch.Size) -> Tensor:
        values = self.codecs.decode(codec, memoryview(blob), shape.numel()).view(shape)
        if values.numel() and float(values.abs().amax()) > LARGEST_ACTIVATION:
            raise ProtocolError(
                Reason.MAGNITUDE, f"a hidden value or its gradient is larger than {LARGEST_ACTIVATION:g}"
            )
        return values

    def pack(self, layer: int, hidden_BTD: Tensor, targets_BT: Tensor, thin: bool = False) -> tuple[Layout, bytes]:
        """A micro-batch that leaves for this layer."""
        section, hidden = self._encode(self.forward[THIN if thin else FAST], hidden_BTD)
        expected = self.forms(layer, len(targets_BT)).entering_over(thin)
        assert section == expected[0], f"what enters layer {layer} is {section}, not {expected[0]}"
        tokens_BT = targets_BT.cpu().where(targets_BT.cpu() != MASKED, self.vocabulary)
        integers = tokens_BT.to(_dtype(expected[1])).contiguous()
        return expected, hidden + integers.view(torch.uint8).numpy().tobytes()

    def unpack(self, job: jobs.Forward) -> tuple[Tensor, Tensor]:
        """hidden_BTD fp32 and targets_BT int64, on the CPU. Raises ProtocolError for what is not both, and whole."""
        B, T, D = job.sequences, self.context, self.widths[job.first]
        if not fits_one(self.forms(job.first, B).entering, job.layout, len(job.blob)):
            raise ProtocolError(Reason.SHAPE, "not what enters this layer")
        hidden, targets = job.layout
        hidden_BTD = self._decode(hidden.codec, job.blob[: hidden.size], torch.Size((B, T, D)))
        integers = torch.frombuffer(bytearray(job.blob[hidden.size :]), dtype=_dtype(targets))
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
