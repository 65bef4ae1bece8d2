"""The parts of a model and of a blob: fragments, sections, and a span's share of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

FAST, THIN = 0, -1  # places of the forms for a link; the same one, where a run has one form
FORWARD_PART = 1 / 3  # of a micro-batch's computing; the rest is its backward pass


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive layers `[first, last)` that are gossiped together. All peers of a run cut the model alike."""

    index: int
    first: int
    last: int
    parameters: int


def share(cuts: Sequence[Fragment], first: int, last: int) -> float:
    """Which part of the model's parameters is in layers [first, last). `cuts` are all fragments of the model."""
    inside = sum(cut.parameters for cut in cuts if first <= cut.first and cut.last <= last)
    return inside / sum(cut.parameters for cut in cuts)


def forward_part(last: int, layers: int) -> float:
    """Which part of a micro-batch's computing in layers up to `last` is done in its forward pass.

    At the model's end it is all of it, since the backward pass follows at once.
    """
    return 1.0 if last == layers else FORWARD_PART


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor inside a blob: `elements` numbers written with `codec` into `size` bytes.

    It travels in messages, so its fields have bounds (comm/wire/codec.py checks them).
    """

    name: Annotated[str, Strict(), Field(max_length=32)]
    codec: Annotated[str, Strict(), Field(max_length=16)]
    elements: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    size: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]


Layout = tuple[Section, ...]
"""The sections of a blob, in its order."""


@dataclass(frozen=True, slots=True)
class ActivationForms:
    """What may enter a layer, and what may come back for it: each over a fast link first, then over a thin one."""

    entering: tuple[Layout, ...]  # hidden values, and the targets
    gradients: tuple[Layout, ...]

    def entering_over(self, thin: bool) -> Layout:
        return self.entering[THIN if thin else FAST]

    def gradient_over(self, thin: bool) -> Layout:
        return self.gradients[THIN if thin else FAST]


def layout_bytes(layout: Layout) -> int:
    """The bytes of the blob."""
    return sum(section.size for section in layout)


def fits_one(forms: Sequence[Layout], layout: Layout, blob_bytes: int) -> bool:
    """Whether a blob comes in one of these forms, and has as many bytes as that."""
    return layout in forms and blob_bytes == layout_bytes(layout)
