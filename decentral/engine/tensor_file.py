"""Write a safetensors file one tensor at a time (`TensorFile`). Tensors that are not written yet may still change.

    8 bytes: length of the header | header: JSON, padded with spaces | the tensors, one after another

The header describes the tensors and the run (`facts`). The facts are known only at the end, so the file begins with
reserved room for the header. The data bypass the page cache if the system allows it: a checkpoint is read only at a
restart, and copying it through the cache takes ten times the processor time. The new file replaces the old file only
when it is complete and on the disk, so `kill -9` at any moment leaves either the old or the new file whole.
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

ALIGNED = 4096  # O_DIRECT writes whole disk blocks; this is a multiple of their size
BUFFER_BYTES = 4 << 20
FACTS_BYTES = 16 * 1024  # bytes reserved in the file's header for facts of the run, such as counters of steps
FACTS_PER_TENSOR = 192  # additional bytes for facts per tensor, since each fragment adds about 200 bytes of facts
SUMS = "crc32"  # the header's field that maps a tensor's name to its checksum
DIRECT = getattr(os, "O_DIRECT", 0)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


class TensorFile:
    """A writer of one file: `add` each tensor in order, then `finish` to keep the file, or `abandon` to delete it."""

    def __init__(self, path: Path, shapes: Mapping[str, Tensor]) -> None:
        """Create the new file beside the old one, and reserve its space on the disk.

        Args:
            path: The file to replace.
            shapes: For each tensor that `add` will get, in that order: its name, and a tensor of its shape and dtype.
                Values do not matter.

        Raises:
            OSError: If the file cannot be created.
        """
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
        self._buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)  # page-aligned, for O_DIRECT
        self._written, self._filled = self._data_at, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(self.new, flags | DIRECT, 0o644)
        except OSError:  # some filesystems, such as those in memory, do not support O_DIRECT
            self._file = os.open(self.new, flags, 0o644)
        self._closed = False
        with suppress(OSError):  # without reserved space, a full disk fails a later write
            os.posix_fallocate(self._file, 0, self.size)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor, which must follow the order of `shapes`. Raises OSError if a write fails."""
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
        """Write the header, replace the old file, and return the new file's size in bytes.

        Args:
            facts: JSON fields to store beside the tensors.

        Raises:
            OSError: If the disk fails, or the facts need more bytes than are reserved. The old file stays.
        """
        assert not self._left, f"{self._left} are missing"
        self._flush()
        described = json.dumps({**facts, SUMS: self._sums})
        header = json.dumps({"__metadata__": {"facts": described}, **self._entries}).encode()
        room = self._data_at - 8
        if len(header) > room:
            raise OSError(f"the header of {self.path} takes {len(header)} bytes; {room} bytes are reserved for it")
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
        """Delete the new file, and leave the old file as it is."""
        with suppress(OSError):
            self._close()
        self.new.unlink(missing_ok=True)

    def _close(self) -> None:
        """Close the file once only, because another thread's file may get the same descriptor afterwards."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _flush(self) -> None:
        """Write the buffer's content, padded to a multiple of ALIGNED. `finish` cuts off the last write's padding."""
        self._write(-(-self._filled // ALIGNED) * ALIGNED, self._written)
        self._written, self._filled = self._written + self._filled, 0

    def _write(self, count: int, at: int) -> None:
        """Write `count` bytes of the buffer at file position `at`; if O_DIRECT is not supported, write without it."""
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
    """Return the CRC-32 of a tensor's bytes, with which a reader detects damage."""
    return zlib.crc32(_bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> Any:
    """Return the tensor's content as uint8 [bytes], without a copy if it is contiguous in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
