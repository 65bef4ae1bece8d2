"""Several named vectors in one blob, each written with its own codec.

The codecs come in as an argument: a simulator has others than training.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from decentral.core.fragments import Layout, Section
from decentral.core.synthetic import Blob, SyntheticBlob, joined


class Codecs(Protocol):
    """What comm/codecs/blockwise.py does for each codec by its name."""

    def encode(self, codec: str, values: Tensor) -> bytes:
        """The bytes of fp32 values [n]."""

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """fp32 [elements] on the CPU. Raises ProtocolError for bytes that `encode` cannot have written.

        It may be the blob's own memory, where that can be written: whoever holds such a blob has given it away.
        """

    def size(self, codec: str, elements: int) -> int:
        """How many bytes `encode` makes of so many values."""


@dataclass(slots=True)
class Packer:
    codecs: Codecs
    sections: list[Section] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def add(self, name: str, codec: str, values: Tensor) -> None:
        """Appends a section of fp32 values [n]."""
        self.add_encoded(name, codec, values.numel(), self.codecs.encode(codec, values))

    def add_encoded(self, name: str, codec: str, elements: int, part: bytes) -> None:
        """Appends a section that is encoded already."""
        self.sections.append(Section(name, codec, elements, len(part)))
        self.parts.append(part)

    def finish(self) -> tuple[Layout, bytes]:
        return tuple(self.sections), joined(self.parts)


def unpack(codecs: Codecs, layout: Layout, blob: Blob) -> dict[str, Tensor]:
    """fp32 vectors on the CPU, by name. Raises ProtocolError for what the codecs refuse."""
    parts = split(layout, blob)
    return {one.name: codecs.decode(one.codec, parts[one.name], one.elements) for one in layout}


def split(layout: Layout, blob: Blob) -> dict[str, bytes | memoryview]:
    """The encoded sections by name, as memoryviews of the blob: nothing is copied."""
    view, start, parts = blob if isinstance(blob, SyntheticBlob) else memoryview(blob), 0, {}
    for section in layout:
        parts[section.name] = view[start : start + section.size]
        start += section.size
    return parts
