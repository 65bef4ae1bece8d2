"""Several named vectors in one blob, each written with its own codec.

The codecs come in as an argument: a simulator has others than training.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from decentral.core.jobs import Layout, Section
from decentral.core.synthetic import SyntheticBlob, joined


class Codecs(Protocol):
    """What train/compress.py does for each codec by its name."""

    def encode(self, codec: str, values: Tensor) -> bytes:
        """The bytes of fp32 values [n]."""

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """fp32 [elements] on the CPU. Raises ProtocolError for bytes that `encode` cannot have written."""

    def size(self, codec: str, elements: int) -> int:
        """How many bytes `encode` makes of so many values."""


@dataclass(slots=True)
class Packer:
    codecs: Codecs
    sections: list[Section] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)  # each section's values as those who read the blob see them

    def add(self, name: str, codec: str, values: Tensor) -> Tensor:
        """Appends a section of fp32 values [n]; gives the values as they will be read."""
        part = self.codecs.encode(codec, values)
        self.sections.append(Section(name, codec, values.numel(), len(part)))
        self.parts.append(part)
        self.read[name] = self.codecs.decode(codec, part, values.numel()).to(values.device)
        return self.read[name]

    def finish(self) -> tuple[Layout, bytes]:
        return tuple(self.sections), joined(self.parts)


def unpack(codecs: Codecs, layout: Layout, blob: bytes) -> dict[str, Tensor]:
    """fp32 vectors on the CPU, by name. Raises ProtocolError for what the codecs refuse."""
    view, start, values = blob if isinstance(blob, SyntheticBlob) else memoryview(blob), 0, {}
    for section in layout:
        values[section.name] = codecs.decode(section.codec, view[start : start + section.size], section.elements)
        start += section.size
    return values
