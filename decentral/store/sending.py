"""Send a peer's checkpoint, or the folder of a model, to a store as one upload. Start reading at `push`.

    opened_upload    opens the files and computes sizes and digests
    push             sends the parts that are missing, then the manifest; then removes older checkpoints

A peer may replace its checkpoint during the upload: the open file keeps the old content. A hard link keeps that file
until its upload is whole, so that an interrupted upload resumes even if the peer has written newer checkpoints.
"""

import hashlib
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO

from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.peer_folders import CHECKPOINT
from decentral.core.strict_json import JsonObject
from decentral.core.units import KiB, MiB, Seconds
from decentral.store.manifest import (
    DIGEST_BYTES,
    MANIFEST,
    MODEL_FILE,
    MOST_MANIFEST_BYTES,
    MOST_UPLOAD_PARTS,
    RUN_FILE,
    RUN_NAME,
    STATE_FILE,
    UploadKind,
    UploadManifest,
    UploadPart,
    parsed,
    series,
    step_of,
)
from decentral.store.places import SEND_BYTES, UploadStore

MOST_HEADER_BYTES = 64 * MiB  # of a safetensors file
MOST_RUN_BYTES = 64 * KiB
PACED_BYTES = 256 * KiB  # with a limit of bandwidth, a file is read in pieces of this size
PICKLED = (".bin", ".pt", ".pth")
LINK_DIGITS = 8


class SendPace:
    """A limit of bandwidth: `wait` sleeps until more bytes may be sent."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """Allow this rate in the mean; None: any rate."""
        self._rate = bytes_per_s
        self._free_at: Seconds = 0.0

    def wait(self, count: int) -> None:
        """Sleep until `count` more bytes may be sent."""
        if self._rate:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / self._rate
            time.sleep(self._free_at - now)


class PartReader(io.RawIOBase):
    """Part of an open file as a file of its own, which is read at a limited pace. It implements UploadSource."""

    def __init__(self, file: IO[bytes], begin: int, size: int, pace: SendPace, sent: Callable[[int], None]) -> None:
        """Read `size` bytes from `begin` on; `sent` is told how many bytes were read at the pace, and 0 for others."""
        self._file, self._begin, self.size = file.fileno(), begin, size
        self._pace, self._sent, self._at = pace, sent, 0
        self._unpaced = 0  # this many bytes more are read at full speed

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the part, and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position in the part."""
        return self._at

    def readinto(self, buffer: "bytearray | memoryview[int]") -> int:  # type: ignore[override]
        """Fill the buffer as far as the part goes, at the pace, and return the number of bytes."""
        if self._unpaced > 0:
            data = self._read(self._at, min(len(buffer), self._unpaced))
            self._unpaced -= len(data)
            self._sent(0)
        else:
            data = self._paced(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def pieces(self) -> Iterator[bytes]:
        """Yield the content at the pace, in pieces of SEND_BYTES."""
        for begin in range(0, self.size, SEND_BYTES):
            piece = b""
            while data := self._paced(begin + len(piece), SEND_BYTES - len(piece)):
                piece += data
            yield piece

    def reader(self) -> BinaryIO:
        """Return the content as a buffered file; a first pass, for a digest, is at full speed and does not count."""
        self._unpaced = self.size
        return io.BufferedReader(self, PACED_BYTES)

    def hexdigest(self, method: str) -> str:
        """Return the content's digest by a method of hashlib, at full speed."""
        of, end = hashlib.new(method, usedforsecurity=False), self._begin + self.size
        return _digest(of, self._file, self._begin, end, lambda _: self._sent(0))

    def equals(self, pieces: Iterable[bytes]) -> bool:
        """Return whether the content is that of these pieces, reading it at full speed."""
        at = 0
        for piece in pieces:
            if self._read(at, len(piece)) != piece:
                return False
            at += len(piece)
            self._sent(0)
        return at == self.size

    def _paced(self, at: int, most: int) -> bytes:
        data = self._read(at, min(most, PACED_BYTES))
        self._pace.wait(len(data))
        self._sent(len(data))
        return data

    def _read(self, at: int, most: int) -> bytes:
        return os.pread(self._file, max(0, min(most, self.size - at)), self._begin + at)


@dataclass(frozen=True, slots=True)
class LocalUpload:
    """A manifest, and the open files that it describes, by name, with the times of their last change (ns)."""

    manifest: UploadManifest
    files: Mapping[str, IO[bytes]]
    changed: Mapping[str, int]

    @classmethod
    def of(cls, manifest: UploadManifest, files: Mapping[str, IO[bytes]]) -> "LocalUpload":
        """Return an upload of these open files, as they are now."""
        return cls(manifest, files, _changed(files))

    def require_unchanged(self) -> None:
        """Raise UserError if an open file was changed in place; a new file under its name does not matter."""
        for name, changed in _changed(self.files).items():
            if changed != self.changed[name]:
                raise UserError(f"{name} was changed while it was sent; push again when nothing writes to it")


@dataclass(frozen=True, slots=True)
class PushResult:
    """What `push` has done. Sizes in bytes."""

    name: str  # of the upload in the store; "" if the place itself is the upload
    kind: UploadKind
    step: int
    size: int
    sent: int  # the bytes that were not there before
    removed: Sequence[str]  # older checkpoints


def kind_of_folder(folder: Path) -> UploadKind:
    """Return what a folder holds.

    Raises:
        UserError: If it is neither a peer's state folder nor a model's folder, or it has pickled weights.
    """
    if (folder / RUN_FILE).exists():
        return "checkpoint"
    inside = sorted(run.parent.name for run in folder.glob(f"*/{RUN_FILE}"))
    if inside:
        raise UserError(f"{folder} holds folders of peers; name one: {', '.join(inside[:8])}")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{folder} is neither a peer's state folder nor a model that decentral export wrote")
    if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        raise UserError(f"{folder} has the pickle {pickles[0]}, which a reader would have to run; expected safetensors")
    return "model"


def opened_upload(
    folder: Path, peer: PeerId, link: Path, stack: ExitStack, hashed: Callable[[int], None]
) -> LocalUpload:
    """Open the files of a folder, and compute their digests.

    Args:
        folder: A peer's state folder, or a model's folder.
        peer: The peer's id, for a state folder; "" if it is not known.
        link: A hard link to the checkpoint whose upload goes on; made if it does not exist.
        stack: Closes the files.
        hashed: Is told how many more bytes were read to be hashed, at least once for each MiB.

    Raises:
        UserError: If the folder cannot be uploaded, or a file cannot be read.
    """
    try:
        if kind_of_folder(folder) == "model":
            names = sorted(path.name for path in folder.iterdir() if MODEL_FILE.fullmatch(path.name))
            files = {name: stack.enter_context(foreign_file.opened(folder / name)) for name in names}
            parts = [part for name, file in files.items() for part in _parts(name, file, False, hashed)]
            return LocalUpload.of(UploadManifest("model", tuple(parts)), files)
        state = stack.enter_context(_opened_state(folder, link))
        kept = strict_json.loads(foreign_file.read_text(folder / RUN_FILE, MOST_RUN_BYTES))
        shared = stack.enter_context(_memory_file({"run": kept["run"], "config": kept["config"]}))
        facts = _facts(state)
        fragments = facts["fragments"]
        parts = [*_parts(RUN_FILE, shared, False, hashed), *_parts(STATE_FILE, state, True, hashed)]
        if not re.fullmatch(RUN_NAME, kept["run"]):
            raise ValueError("its run has no name that a folder could have")
        described = UploadManifest("checkpoint", tuple(parts), kept["run"], peer, int(facts["lr_step"]))
        described = replace(described, first=int(fragments[0]["first"]), last=int(fragments[-1]["last"]))
        return LocalUpload.of(described, {RUN_FILE: shared, STATE_FILE: state})
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder} has a damaged {RUN_FILE} or {CHECKPOINT} ({error}); it is not uploaded") from None


def push(
    upload: LocalUpload, store: UploadStore, keep: int | None, pace: SendPace, sent: Callable[[int], None]
) -> PushResult:
    """Send an upload to a store: what is missing there, then the manifest; remove this peer's older checkpoints.

    Args:
        upload: The files to send.
        store: The store.
        keep: Number of this peer's newest checkpoints of the run that stay; None: all stay.
        pace: The limit of bandwidth.
        sent: Is told how many more bytes were read to be sent; and 0 often while there is other work, such as digests
            for parts that are there already, and older files to remove, so that no push seems to hang.

    Raises:
        Exception: The provider's own, if a request fails. Without the manifest, the upload does not count.
    """
    manifest = upload.manifest
    alone = store.at_once and manifest.kind == "model"
    folder = "" if alone else f"{manifest.name}/"
    there = store.files("" if alone else manifest.name)
    before = b"".join(store.read(f"{folder}{MANIFEST}", MOST_MANIFEST_BYTES)) if MANIFEST in there else b""
    count, begin_of = 0, dict.fromkeys(upload.files, 0)
    if before != manifest.packed():
        for part in manifest.parts:
            reader = PartReader(upload.files[part.of], begin_of[part.of], part.bytes, pace, sent)
            begin_of[part.of] += part.bytes
            if part.name not in there or not store.has(f"{folder}{part.name}", reader):
                store.send(f"{folder}{part.name}", reader)
                count += part.bytes
            else:
                sent(0)
        upload.require_unchanged()
        store.finish(f"{folder}{MANIFEST}", manifest.packed(), _outdated(before, manifest, there) if alone else ())
    removed = _prune(store, manifest, keep, sent) if keep is not None and manifest.kind == "checkpoint" else []
    return PushResult(folder.rstrip("/"), manifest.kind, manifest.step, manifest.size, count, removed)


def link_of(folder: Path, place: str) -> Path:
    """Return the path of the hard link that keeps a checkpoint while it is uploaded to a place."""
    digest = hashlib.blake2b(place.encode(), digest_size=LINK_DIGITS // 2).hexdigest()
    return folder / f"uploading-{digest}.safetensors"


def _changed(files: Mapping[str, IO[bytes]]) -> dict[str, int]:
    return {name: os.fstat(file.fileno()).st_mtime_ns for name, file in files.items()}


def _outdated(before: bytes, manifest: UploadManifest, there: Mapping[str, int]) -> list[str]:
    """Return the files that the manifest `before` names and the place has, but the new manifest does not name."""
    with suppress(UserError):
        names = {part.name for part in parsed(before, MANIFEST).parts} - {part.name for part in manifest.parts}
        return sorted(names & set(there))
    return []


def _prune(store: UploadStore, manifest: UploadManifest, keep: int, sent: Callable[[int], None]) -> list[str]:
    """Remove this peer's checkpoints of the run, whole or not, except the newest `keep` whole ones; return their names.

    Checkpoints of later steps than `manifest` stay.
    """
    begin = series(RunId(manifest.run), PeerId(manifest.peer))
    own = sorted((name for name in store.folders() if name.startswith(begin) and step_of(name) >= 0), key=step_of)
    older = [name for name in own if step_of(name) < manifest.step]
    whole = [name for name in older if MANIFEST in store.files(name)]
    kept = {*whole[-(keep - 1) :]} if keep > 1 else set[str]()
    removed = [name for name in older if name not in kept]
    for name in removed:
        store.remove(name, MANIFEST, lambda: sent(0))
    return removed


def _opened_state(folder: Path, link: Path) -> IO[bytes]:
    """Open the checkpoint of an interrupted upload, else the newest one, and keep it by a hard link if possible."""
    if not (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} has no checkpoint yet; a peer writes one when it stops")
    with suppress(OSError):  # the link exists already, or this filesystem has none
        os.link(folder / CHECKPOINT, link)
    return foreign_file.opened(link if link.exists() else folder / CHECKPOINT)


def _facts(state: IO[bytes]) -> JsonObject:
    """Return the facts in the header of a checkpoint."""
    length = int.from_bytes(os.pread(state.fileno(), 8, 0), "little")
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    header = strict_json.loads(os.pread(state.fileno(), length, 8))
    facts: JsonObject = strict_json.loads(header["__metadata__"]["facts"])
    return facts


def _parts(name: str, file: IO[bytes], split: bool, hashed: Callable[[int], None]) -> list[UploadPart]:
    """Return the parts of an open file: if `split`, parts of SEND_BYTES, else the whole file."""
    size = os.fstat(file.fileno()).st_size
    step = SEND_BYTES if split else max(1, size)
    if -(-size // step) > MOST_UPLOAD_PARTS:
        raise ValueError(f"{name} has {size} bytes")
    parts = []
    for number, begin in enumerate(range(0, max(1, size), step)):
        end = min(begin + step, size)
        digest = _digest(hashlib.blake2b(digest_size=DIGEST_BYTES), file.fileno(), begin, end, hashed)
        parts.append(UploadPart(f"{name}-{number:05d}" if split else name, name, end - begin, digest))
    return parts


def _digest(
    of: "hashlib._Hash | hashlib.blake2b", file: int, begin: int, end: int, hashed: Callable[[int], None]
) -> str:
    """Return the hexadecimal digest, by a new hash object, of bytes [begin, end) of an open file.

    `hashed` is told how many more bytes were read, for each MiB.
    """
    for at in range(begin, end, MiB):
        of.update(data := os.pread(file, min(MiB, end - at), at))
        hashed(len(data))
    return of.hexdigest()


def _memory_file(content: JsonObject) -> IO[bytes]:
    """Return a file in memory with this JSON content."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(strict_json.dumps(content, indent=1).encode())
    file.flush()
    return file
