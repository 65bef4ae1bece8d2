"""The parts of a model (fragments), and the parts of a blob (sections)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

LARGE_ELEMENTS = 1 << 20  # a fragment with at least this many parameters is large: its gossip state is kept rounded
FAST, THIN = 0, -1  # indexes into a tuple of layouts: the first is for fast links, the last for thin (slow) links


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive layers [first, last) that are gossiped together. All peers of a run have the same fragments."""

    index: int
    first: int
    last: int
    parameters: int
    # FLOPs per token, both passes together, of the fragment's embedding, its blocks and its head; (): not known, as for
    # layers of user code.
    work: tuple[float, float, float] | tuple[()] = ()

    @property
    def work_of_kinds(self) -> tuple[float, float, float]:
        """Return `work`. If it is not known, count all layers as blocks, and use their number of parameters."""
        return self.work or (0.0, float(self.parameters), 0.0)


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
