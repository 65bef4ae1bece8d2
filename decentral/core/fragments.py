"""The parts of a model (fragments), the parts of a blob (sections), and a stage's share of the model's work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

FAST, THIN = 0, -1  # indexes into a tuple of layouts: the first is for fast links, the last for thin (slow) links
FORWARD_PART = 1 / 3  # the forward pass takes this share of a micro-batch's compute time, the backward pass the rest


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive layers [first, last) that are gossiped together. All peers of a run have the same fragments."""

    index: int
    first: int
    last: int
    parameters: int


def share(cuts: Sequence[Fragment], first: int, last: int) -> float:
    """Return the share, 0 to 1, of the model's parameters in the fragments that lie completely in layers [first, last).

    Args:
        cuts: All fragments of the model.
        first: First layer.
        last: Layer after the last one.
    """
    inside = sum(cut.parameters for cut in cuts if first <= cut.first and cut.last <= last)
    return inside / sum(cut.parameters for cut in cuts)


def forward_part(last: int, layers: int) -> float:
    """Return the forward job's share, 0 to 1, of the time that a stage computes for one micro-batch.

    The share is FORWARD_PART. If the stage includes the model's last layer (`last` equals `layers`), the share is 1,
    because the forward job of that stage also runs the backward pass.
    """
    return 1.0 if last == layers else FORWARD_PART


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor inside a blob: `elements` numbers written with `codec` into `size` bytes.

    Peers send each other sections in messages, so the fields have bounds, which comm/wire/codec.py checks.
    """

    name: Annotated[str, Strict(), Field(max_length=32)]
    codec: Annotated[str, Strict(), Field(max_length=16)]
    elements: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]
    size: Annotated[int, Strict(), Field(ge=0, lt=1 << 40)]


Layout = tuple[Section, ...]
"""The sections of a blob, in the order of its bytes."""


@dataclass(frozen=True, slots=True)
class ActivationForms:
    """The valid layouts of the activations that enter one layer, and of the gradients sent back for them.

    Each tuple begins with the layout for fast links and ends with the layout for thin (slow) links. If a tuple has only
    one layout, it serves both kinds of links.
    """

    entering: tuple[Layout, ...]  # layouts of hidden values and targets
    gradients: tuple[Layout, ...]

    def entering_over(self, thin: bool) -> Layout:
        """Return the layout of activations for thin links if `thin`, else for fast links."""
        return self.entering[THIN if thin else FAST]

    def gradient_over(self, thin: bool) -> Layout:
        """Return the layout of gradients for thin links if `thin`, else for fast links."""
        return self.gradients[THIN if thin else FAST]


def layout_bytes(layout: Layout) -> int:
    """Return the size of a blob with this layout, in bytes."""
    return sum(section.size for section in layout)


def fits_one(forms: Sequence[Layout], layout: Layout, blob_bytes: int) -> bool:
    """Return whether a layout is one of `forms` and the blob has exactly that layout's size."""
    return layout in forms and blob_bytes == layout_bytes(layout)
