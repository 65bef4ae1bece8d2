"""Send a peer's checkpoint, or the folder of a model, to a store as one upload. Start reading at `push`.

    opened_upload    opens the files and computes sizes and digests
    push             sends the parts that the store lacks, then the manifest; then removes older checkpoints

A peer may replace its checkpoint during the upload: the open file keeps the old content. A hard link keeps the old file
until it is uploaded completely, so that an interrupted upload resumes even if the peer has written newer checkpoints.
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

MOST_HEADER_BYTES = 64 * MiB  # a checkpoint with a larger header (of its safetensors format) is refused
MOST_RUN_BYTES = 64 * KiB
PACED_BYTES = 256 * KiB  # within the limit of bandwidth, a file is read in pieces of at most this size
PICKLED = (".bin", ".pt", ".pth")
LINK_DIGITS = 8


class SendPace:
    """A limit of bandwidth: `wait` sleeps until more bytes may be sent."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """Allow this rate on average; None: any rate."""
        self._rate = bytes_per_s
        self._free_at: Seconds = 0.0

    def wait(self, count: int) -> None:
        """Sleep until `count` more bytes may be sent."""
        if self._rate:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / self._rate
            time.sleep(self._free_at - now)


class PartReader(io.RawIOBase):
    """A reader of one part of an open file, at a limited pace, as if the part were a file. Implements UploadSource."""

    def __init__(self, file: IO[bytes], begin: int, size: int, pace: SendPace, sent: Callable[[int], None]) -> None:
        """Prepare to read `size` bytes from `begin` on.

        `sent` gets the number of bytes of each read at the pace, and 0 for each other read.
        """
        self._file, self._begin, self.size = file.fileno(), begin, size
        self._pace, self._sent, self._at = pace, sent, 0
        self._unpaced = 0  # the next calls of `readinto` read this many bytes at full speed

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
        """Read the next bytes of the part into the buffer, and return their number; 0 at the part's end."""
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
        """Yield the content at the limited pace, in pieces of SEND_BYTES."""
        for begin in range(0, self.size, SEND_BYTES):
            piece = b""
            while data := self._paced(begin + len(piece), SEND_BYTES - len(piece)):
                piece += data
            yield piece

    def reader(self) -> BinaryIO:
        """Return the content as a buffered file.

        A library reads it twice: the first pass, for a digest, is at full speed and is not reported to `sent`.
        """
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
    """An upload to be sent: its manifest, and the open files that the manifest describes."""

    manifest: UploadManifest
    files: Mapping[str, IO[bytes]]  # by name
    changed: Mapping[str, int]  # name of a file -> time of its last change when the digests were computed, ns

    @classmethod
    def of(cls, manifest: UploadManifest, files: Mapping[str, IO[bytes]]) -> "LocalUpload":
        """Return an upload of these open files, with the times of their last change so far."""
        return cls(manifest, files, _changed(files))

    def require_unchanged(self) -> None:
        """Raise UserError if an open file was changed in place. A new file that replaces its name does not matter."""
        for name, changed in _changed(self.files).items():
            if changed != self.changed[name]:
                raise UserError(f"{name} was changed while it was sent; push again when nothing writes to it")


@dataclass(frozen=True, slots=True)
class PushResult:
    """What `push` has done."""

    name: str  # name of the upload's folder in the store; "" if the place itself is the upload
    kind: UploadKind
    step: int
    size: int  # bytes of all files of the upload
    sent: int  # bytes of the parts that were sent, because the store did not have them
    removed: Sequence[str]  # names of the older checkpoints that were removed from the store


def kind_of_folder(folder: Path) -> UploadKind:
    """Return whether a folder is a peer's state folder ("checkpoint") or a model's folder ("model").

    Raises:
        UserError: If the folder is neither of the two, or has pickled weights.
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
        link: Path of the hard link to the checkpoint that is being uploaded; created if it does not exist.
        stack: Closes the files when it is closed.
        hashed: Called while digests are computed, with the number of bytes of each read, at most 1 MiB.

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
            raise ValueError("the id of its run cannot be the name of a folder")
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
    """Send the parts of an upload that the store lacks, then its manifest; remove this peer's older checkpoints.

    Args:
        upload: The files to send.
        store: The store.
        keep: Number of this peer's newest checkpoints of the run that stay; None: all stay.
        pace: The limit of bandwidth.
        sent: Called with the number of bytes after each read of bytes to be sent. Called with 0 often during other
            work (digests of parts that the store has already, removing older files), so that no push seems to hang.

    Raises:
        Exception: The provider's own exception, if a request fails. The store then has no manifest of the upload, so
            that readers ignore it.
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
                sent(0)  # checking thousands of parts takes minutes, in which the push must not seem to hang
        upload.require_unchanged()
        store.finish(f"{folder}{MANIFEST}", manifest.packed(), _outdated(before, manifest, there) if alone else ())
    removed = _prune(store, manifest, keep, sent) if keep is not None and manifest.kind == "checkpoint" else []
    return PushResult(folder.rstrip("/"), manifest.kind, manifest.step, manifest.size, count, removed)


def link_of(folder: Path, place: str) -> Path:
    """Return the path of the hard link in `folder` that keeps a checkpoint while it is uploaded."""
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
    """Open the checkpoint of an interrupted upload (`link`) or, if there is none, the newest checkpoint.

    If the filesystem has hard links, `link` then keeps the opened checkpoint.
    """
    if not (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} has no checkpoint yet; a peer writes one when it stops")
    with suppress(OSError):  # the link exists already, or this filesystem has none
        os.link(folder / CHECKPOINT, link)
    return foreign_file.opened(link if link.exists() else folder / CHECKPOINT)


def _facts(state: IO[bytes]) -> JsonObject:
    """Return the facts in the header of a checkpoint, such as its learning-rate step.

    Raises:
        ValueError: If the header is too long or not JSON.
        LookupError: If the header has no facts.
    """
    length = int.from_bytes(os.pread(state.fileno(), 8, 0), "little")
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"its header is too long: {length} bytes")
    header = strict_json.loads(os.pread(state.fileno(), length, 8))
    facts: JsonObject = strict_json.loads(header["__metadata__"]["facts"])
    return facts


def _parts(name: str, file: IO[bytes], split: bool, hashed: Callable[[int], None]) -> list[UploadPart]:
    """Return the parts of an open file: if `split`, parts of SEND_BYTES, else the whole file."""
    size = os.fstat(file.fileno()).st_size
    step = SEND_BYTES if split else max(1, size)
    if -(-size // step) > MOST_UPLOAD_PARTS:
        raise ValueError(f"{name} is too large: {size} bytes")
    parts = []
    for number, begin in enumerate(range(0, max(1, size), step)):
        end = min(begin + step, size)
        digest = _digest(hashlib.blake2b(digest_size=DIGEST_BYTES), file.fileno(), begin, end, hashed)
        parts.append(UploadPart(f"{name}-{number:05d}" if split else name, name, end - begin, digest))
    return parts


def _digest(
    of: "hashlib._Hash | hashlib.blake2b", file: int, begin: int, end: int, hashed: Callable[[int], None]
) -> str:
    """Return the hexadecimal digest of bytes [begin, end) of an open file, computed with the new hash object `of`.

    `hashed` is called with the number of bytes of each read, at most 1 MiB.
    """
    for at in range(begin, end, MiB):
        of.update(data := os.pread(file, min(MiB, end - at), at))
        hashed(len(data))
    return of.hexdigest()


def _memory_file(content: JsonObject) -> IO[bytes]:
    """Return a nameless temporary file with this JSON content."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(strict_json.dumps(content, indent=1).encode())
    file.flush()
    return file
