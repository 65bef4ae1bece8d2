"""A safetensors file that is written tensor by tensor, while the tensors that are still to come go on changing.

    8 bytes: length of the header | header: JSON, padded with spaces | the tensors, one after another

What the header says of the tensors is known before the first one is written; what it says of the run (`facts`) may only
be known after the last, so room for it is kept. The data go past the page cache where the system allows it: a
checkpoint is read once a restart, and copying it through the cache costs ten times the processor time. The file
replaces the old one when it is whole and on the disk, so `kill -9` at any moment leaves the old file or the new one.
"""

import errno
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentral.core.atomic_file import sync_folder
from decentral.core.strict_json import JsonFields

ALIGNED = 4096  # bytes: what a disk takes at once
BUFFER_BYTES = 4 << 20
FACTS_BYTES = 16 * 1024  # room for the facts, and so many bytes more for each tensor: about two hundred for a fragment
FACTS_PER_TENSOR = 192
SUMS = "crc32"  # in the facts: the checksum of each tensor by its name
DIRECT = getattr(os, "O_DIRECT", 0)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


class TensorFile:
    """Writes the tensors in the order of `shapes`; then `finish`, or else `abandon`."""

    def __init__(self, path: Path, shapes: Mapping[str, Tensor]) -> None:
        """`shapes`: tensors of the right shape and type, with any content. Raises OSError if the disk refuses."""
        self.path, self.new = path, path.with_name(path.name + ".new")
        self._sums: dict[str, int] = {}
        self._entries, self._left, end = {}, list(shapes), 0
        for name, tensor in shapes.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            kind = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
            self._entries[name] = {**kind, "data_offsets": [begin, end]}
        header = len(json.dumps(self._entries)) + FACTS_BYTES + FACTS_PER_TENSOR * len(shapes)
        self._data_at = -(-header // ALIGNED) * ALIGNED
        self.size = self._data_at + end
        self._buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)  # aligned, as O_DIRECT asks for
        self._written, self._filled = self._data_at, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(self.new, flags | DIRECT, 0o644)
        except OSError:  # a filesystem in memory, for one
            self._file = os.open(self.new, flags, 0o644)
        self._closed = False
        with suppress(OSError):  # where there is no such call, a full disk is found later
            os.posix_fallocate(self._file, 0, self.size)

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor. Raises OSError if the disk refuses."""
        expected = self._left.pop(0)
        assert name == expected, f"the next tensor is {expected}, not {name}"
        source = _bytes_of(tensor)
        self._sums[name] = zlib.crc32(source)
        while len(source):
            part = source[: BUFFER_BYTES - self._filled]
            np.copyto(self._buffer[self._filled : self._filled + len(part)], part)
            self._filled, source = self._filled + len(part), source[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def finish(self, facts: JsonFields) -> int:
        """Writes the header, and replaces the old file. Gives the size in bytes. Raises OSError and leaves the old."""
        assert not self._left, f"{self._left} are missing"
        self._flush()
        described = json.dumps({**facts, SUMS: self._sums})
        header = json.dumps({"__metadata__": {"facts": described}, **self._entries}).encode()
        room = self._data_at - 8
        if len(header) > room:
            raise OSError(f"the header of {self.path} takes {len(header)} bytes; there is room for {room}")
        block = room.to_bytes(8, "little") + header.ljust(room)
        for at in range(0, len(block), BUFFER_BYTES):
            part = np.frombuffer(block[at : at + BUFFER_BYTES], dtype=np.uint8)
            np.copyto(self._buffer[: len(part)], part)
            self._write(len(part), at)
        os.ftruncate(self._file, self.size)
        os.fsync(self._file)
        self._close()
        self.new.replace(self.path)
        sync_folder(self.path.parent)
        return self.size

    def abandon(self) -> None:
        """Gives the file up and leaves the old one."""
        with suppress(OSError):
            self._close()
        self.new.unlink(missing_ok=True)

    def _close(self) -> None:
        """At most once: another thread may have been given the same number for a file or a socket since."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _flush(self) -> None:
        """Writes what the buffer has. Only the last piece may be padded: the file is cut to its size in the end."""
        self._write(-(-self._filled // ALIGNED) * ALIGNED, self._written)
        self._written, self._filled = self._written + self._filled, 0

    def _write(self, count: int, at: int) -> None:
        """Some filesystems open a file with O_DIRECT and refuse to write it; then it is written through the cache."""
        done = 0
        while done < count:
            try:
                done += os.pwrite(self._file, self._buffer[done:count].data, at + done)
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & DIRECT:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~DIRECT)


def checksum(tensor: Tensor) -> int:
    """What the facts of a file say of this tensor: damage that no header shows."""
    return zlib.crc32(_bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> Any:
    """The tensor's content, uint8 [bytes], without a copy where it lies in host memory in one piece."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
