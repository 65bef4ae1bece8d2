"""Pack several named vectors into one blob, each with its own codec. Start at `Packer` and `unpack`.

The codecs are an argument, because the simulator uses other codecs than real peers do.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from decentral.core.fragments import Layout, Section
from decentral.core.synthetic import Blob, SyntheticBlob, joined


class Codecs(Protocol):
    """Interface of codecs that are chosen by name; implemented by the module comm/codecs/blockwise.py."""

    def encode(self, codec: str, values: Tensor) -> bytes:
        """Encode fp32 values [n], and return the bytes."""

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """Decode a blob into fp32 [elements] on the CPU; the tensor may share the memory of a writable blob.

        Raises:
            ProtocolError: If the blob is not a valid encoding of `elements` finite numbers.
        """

    def size(self, codec: str, elements: int) -> int:
        """Return the number of bytes that `elements` numbers take when encoded with this codec."""


@dataclass(slots=True)
class Packer:
    """Builder of a blob from several vectors: call `add` for each vector, then `finish`."""

    codecs: Codecs
    sections: list[Section] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def add(self, name: str, codec: str, values: Tensor) -> None:
        """Encode fp32 values [n], and append the bytes as section `name`."""
        self.add_encoded(name, codec, values.numel(), self.codecs.encode(codec, values))

    def add_encoded(self, name: str, codec: str, elements: int, part: bytes) -> None:
        """Append `part`, the encoding of `elements` numbers with this codec, as section `name`."""
        self.sections.append(Section(name, codec, elements, len(part)))
        self.parts.append(part)

    def finish(self) -> tuple[Layout, bytes]:
        """Return the layout and the bytes of all sections added so far."""
        return tuple(self.sections), joined(self.parts)


def unpack(codecs: Codecs, layout: Layout, blob: Blob) -> dict[str, Tensor]:
    """Return the blob's vectors by section name, fp32 on the CPU.

    Raises:
        ProtocolError: If a section is not a valid encoding in its codec.
    """
    parts = split(layout, blob)
    return {one.name: codecs.decode(one.codec, parts[one.name], one.elements) for one in layout}


def split(layout: Layout, blob: Blob) -> dict[str, bytes | memoryview]:
    """Return the blob's sections by name, still encoded; each is a view of the blob, not a copy."""
    view, start, parts = blob if isinstance(blob, SyntheticBlob) else memoryview(blob), 0, {}
    for section in layout:
        parts[section.name] = view[start : start + section.size]
        start += section.size
    return parts
