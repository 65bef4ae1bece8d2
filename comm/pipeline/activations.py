"""The encoding of micro-batches between two stages: hidden values and targets forward, gradients of hidden values back.

Start with `ActivationFormat`. Shapes: B sequences, T positions, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.core import config, jobs
from decentral.core.choices import wires_of
from decentral.core.errors import ProtocolError
from decentral.core.fragments import FAST, THIN, ActivationForms, Layout, Section, fits_one
from decentral.core.jobs import UNLIKE, Likeness
from decentral.core.reasons import Reason
from decentral.model.decoder import MASKED

# A hidden value or gradient of larger magnitude is refused, because the backward pass could overflow.
LARGEST_ACTIVATION = 1e6


@dataclass(frozen=True, slots=True)
class Entering:
    """A micro-batch that enters a stage."""

    hidden_BTD: (
        Tensor  # hidden values, fp32 once decoded; of a model with a bottleneck, the channels that blocks change
    )
    targets_BT: Tensor  # token ids that the loss needs, int64; MASKED at positions without a loss
    inputs_BT: Tensor | None = None  # the micro-batch's tokens, int64; None unless the model has a bottleneck


class ActivationFormat:
    """Encodes and decodes the micro-batches of one run."""

    def __init__(self, run: config.Config, codecs: Codecs, widths: Sequence[int]) -> None:
        """Create the format for a run.

        Args:
            run: The run's config.
            codecs: Turn vectors of numbers into bytes and back.
            widths: For each layer, how many numbers per token enter that layer.
        """
        self.codecs, self.widths = codecs, widths
        self.context, self.vocabulary = run.model.context, run.model.vocabulary
        self.sends_inputs = run.model.bottleneck is not None  # True: each stage needs the micro-batch's tokens
        wires = wires_of(run.routes.wire)
        self.forward = [wire.forward for wire in wires]  # the first codec is for fast links, the last for slow ones
        self.backward = [wire.backward for wire in wires]
        self.masks = run.data.format != "text"  # True: a target equal to `vocabulary` is masked (has no loss)

    def forms(self, layer: int, sequences: int) -> ActivationForms:
        """Return the layouts in which a micro-batch may enter a layer, and in which its gradient may be sent back.

        Args:
            layer: The layer that the micro-batch enters.
            sequences: Number of sequences in the micro-batch.

        Returns:
            The layouts of hidden values, targets and, for a model with a bottleneck, tokens; and the layouts of the
            gradient that is sent back.
        """
        tokens = sequences * self.context
        numbers = tokens * self.widths[layer]
        codec, size = ("u16", 2) if self.vocabulary + self.masks <= 1 << 16 else ("u32", 4)
        names = ("targets", "inputs") if self.sends_inputs else ("targets",)
        integers = tuple(Section(name, codec, tokens, tokens * size) for name in names)
        entering = tuple((self._hidden(wire, numbers), *integers) for wire in self.forward)
        return ActivationForms(entering, tuple((self._hidden(wire, numbers),) for wire in self.backward))

    def _hidden(self, codec: str, numbers: int) -> Section:
        return Section("hidden", codec, numbers, self.codecs.size(codec, numbers))

    def encode_gradient(self, gradient_BTD: Tensor, thin: bool = False) -> tuple[Layout, bytes]:
        """Return the layout and the bytes of a gradient of hidden values; `thin` selects the encoding of slow links."""
        section, blob = self._encode(self.backward[THIN if thin else FAST], gradient_BTD)
        return (section,), blob

    def _encode(self, codec: str, hidden_BTD: Tensor) -> tuple[Section, bytes]:
        flat = hidden_BTD.float().flatten()
        return self._hidden(codec, flat.numel()), self.codecs.encode(codec, flat)

    def decode_gradient(self, layout: Layout, blob: bytes, shape: torch.Size) -> Tensor:
        """Return the gradient of hidden values that a next peer has sent back, as fp32 on the CPU.

        Args:
            layout: Sections of the blob; there must be exactly one.
            blob: The encoded gradient.
            shape: (B, T, D) of the hidden values that were sent.

        Raises:
            ProtocolError: If the layout does not fit `shape`, the blob cannot be decoded, or a value exceeds
                LARGEST_ACTIVATION.
        """
        if len(layout) != 1 or layout[0].codec not in self.backward or layout[0].elements != shape.numel():
            raise ProtocolError(Reason.SHAPE, "the gradient's section, codec or size does not fit this micro-batch")
        return self._decode(layout[0].codec, blob, shape)

    def _decode(self, codec: str, blob: bytes, shape: torch.Size) -> Tensor:
        values = self.codecs.decode(codec, memoryview(blob), shape.numel()).view(shape)
        if values.numel() and float(values.abs().amax()) > LARGEST_ACTIVATION:
            raise ProtocolError(
                Reason.MAGNITUDE, f"a hidden value or a gradient has a magnitude above {LARGEST_ACTIVATION:g}"
            )
        return values

    def pack(self, layer: int, entering: Entering, thin: bool = False) -> tuple[Layout, bytes]:
        """Return the layout and the bytes of a micro-batch that is sent to the next stage.

        Args:
            layer: The layer that the micro-batch enters next.
            entering: The micro-batch.
            thin: Whether to use the encoding for thin (slow) links.
        """
        section, hidden = self._encode(self.forward[THIN if thin else FAST], entering.hidden_BTD)
        expected = self.forms(layer, len(entering.targets_BT)).entering_over(thin)
        assert section == expected[0], f"layer {layer} takes {expected[0]}; the hidden values are {section}"
        targets_BT = entering.targets_BT.cpu()
        blob = hidden + _integers(targets_BT.where(targets_BT != MASKED, self.vocabulary), expected[1])
        if self.sends_inputs:
            assert entering.inputs_BT is not None, "a model with a bottleneck needs the tokens in each stage"
            blob += _integers(entering.inputs_BT.cpu(), expected[2])
        return expected, blob

    def unpack(self, job: jobs.Forward) -> Entering:
        """Return another peer's micro-batch, as `pack` has encoded it, on the CPU.

        Raises:
            ProtocolError: If the layout is not one that may enter the layer, a value cannot be decoded or exceeds
                LARGEST_ACTIVATION, a target is neither masked nor a token, all targets are masked, or an input is not
                a token.
        """
        B, T, D = job.sequences, self.context, self.widths[job.first]
        if not fits_one(self.forms(job.first, B).entering, job.layout, len(job.blob)):
            raise ProtocolError(Reason.SHAPE, f"the sections, codecs or sizes do not fit layer {job.first}")
        hidden, targets = job.layout[:2]
        hidden_BTD = self._decode(hidden.codec, job.blob[: hidden.size], torch.Size((B, T, D)))
        integers = torch.frombuffer(bytearray(job.blob[hidden.size :]), dtype=_dtype(targets)).to(torch.int64)
        targets_BT, *inputs_BT = integers.view(-1, B, T)
        masked_BT = (targets_BT == self.vocabulary) & self.masks
        targets_BT = targets_BT.masked_fill(masked_BT, MASKED)
        if int(targets_BT.max()) >= self.vocabulary or bool(masked_BT.all()):
            raise ProtocolError(Reason.VOCABULARY, "targets must be token ids or masked, and not all may be masked")
        if inputs_BT and int(inputs_BT[0].max()) >= self.vocabulary:
            raise ProtocolError(Reason.VOCABULARY, "inputs must be token ids")
        return Entering(hidden_BTD, targets_BT, inputs_BT[0] if inputs_BT else None)


def likeness(one: Tensor | None, other: Tensor | None) -> Likeness:
    """Return how similar two gradients are: their cosine, and the norm of `one` over the norm of `other`.

    Args:
        one: fp32, of any shape; None if it could not be decoded.
        other: fp32, as many values as in `one`; None if it could not be decoded.

    Returns:
        UNLIKE if either gradient is None, not finite, or all zeros.
    """
    if one is None or other is None:
        return UNLIKE
    lengths = float(one.norm()), float(other.norm())
    if not all(0 < length < math.inf for length in lengths):
        return UNLIKE
    cosine = float(torch.dot(one.flatten() / lengths[0], other.flatten() / lengths[1]))
    return Likeness(cosine, lengths[0] / lengths[1])


def _integers(tokens_BT: Tensor, section: Section) -> bytes:
    return tokens_BT.to(_dtype(section)).contiguous().view(torch.uint8).numpy().tobytes()


def _dtype(targets: Section) -> torch.dtype:
    return torch.uint16 if targets.codec == "u16" else torch.uint32
