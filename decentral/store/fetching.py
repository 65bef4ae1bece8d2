"""Fetch an upload from a store: find the newest whole upload, and download it into this user's cache.

Anybody may have written a store's files, so they are checked: the manifest by manifest.py, each part by its size and
digest. The files of an interrupted download are never returned. Start reading at `fetched`.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decentral.core import foreign_file
from decentral.core.errors import UserError
from decentral.core.units import readable_bytes
from decentral.store.manifest import (
    DIGEST_BYTES,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    RUN_FILE,
    UploadKind,
    UploadManifest,
    UploadPart,
    parsed,
    step_of,
)
from decentral.store.places import UploadStore, asking, checked_place, is_address, store_of

MOST_LOOKED_AT = 1000  # the manifests of at most this many folders of a place are read, highest steps first
FLAG_OF: dict[UploadKind, str] = {"checkpoint": "--resume-from", "model": "--model-from"}
SPARE_SHARE = 0.1  # a download is refused if it would not leave this share of the free disk space free
CHECKPOINT_KEPT_S = 86400.0  # a download removes the cache's checkpoints that no process has fetched for this long


@dataclass(frozen=True, slots=True)
class FoundUpload:
    """A whole upload in a store: its folder and its manifest."""

    folder: str  # name of the folder in the place; "" if the place itself is the upload
    manifest: UploadManifest


def fetched(text: str, kind: UploadKind, flag: str, say: Callable[[str], None]) -> Path:
    """Return a folder in the cache with the newest whole upload at a place. Download the upload if the cache lacks it.

    The folder of a checkpoint stays for CHECKPOINT_KEPT_S, that of a model until the user removes it.

    Args:
        text: The place, or one upload in it, as the user gives it.
        kind: The kind of upload to look for: a checkpoint or a model.
        flag: The user's flag, for error messages.
        say: Tells the user what happens.

    Raises:
        UserError: If the place cannot be read, has no such upload, or has files that differ from the manifest; or if
            the disk has no room.
    """
    place = checked_place(text, flag)
    store = store_of(place)
    with asking(f"{flag} {place}"):
        found = newest(store, kind)
        if found is None:
            raise UserError(f"{flag} {place} has no whole upload of a {kind}; {_remedy(store, kind, place)}")
        name, size = found.folder or place.rpartition("/")[2], readable_bytes(found.manifest.size)
        target = cache_folder() / found.manifest.digest
        if not target.exists():
            say(f"downloading {name} ({size}) from {place}")
            _download(store, found, target)
    os.utime(target)
    return target


def holds_uploads(text: str) -> bool:
    """Return whether a text is an address, or the path of a folder with uploads that is not itself a model's folder."""
    folder = Path(text)
    is_model = (folder / "config.json").exists()
    return is_address(text) or (not is_model and any((*folder.glob(MANIFEST), *folder.glob(f"*/{MANIFEST}"))))


def _remedy(store: UploadStore, kind: UploadKind, place: str) -> str:
    """Return what to do at a place without an upload of this kind: another flag, if it has the other kind."""
    other: UploadKind = "model" if kind == "checkpoint" else "checkpoint"
    try:
        has_other = newest(store, other) is not None
    except UserError:  # several models, or uploads that cannot be read
        has_other = True
    if not has_other:
        return f"decentral push DIR {place} makes one"
    return f"it has a {other}: decentral peer {FLAG_OF[other]} {place} begins from it"


def newest(store: UploadStore, kind: UploadKind) -> FoundUpload | None:
    """Return the checkpoint of the highest step, or the only model, at a place; None if there is no whole one.

    If the place itself has a manifest, the place is the upload. Folders whose manifest is not valid, such as those of
    interrupted uploads, are skipped if another folder has a whole upload.

    Raises:
        UserError: If all manifests are invalid, or the place has several models, of which none is the newest.
    """
    if MANIFEST in store.files(""):
        found = _read(store, "")
        return found if found.manifest.kind == kind else None
    named = [name for name in store.folders() if (step_of(name) >= 0) == (kind == "checkpoint")]
    whole, refused = list[FoundUpload](), list[UserError]()
    for name in sorted(named, key=lambda name: (-step_of(name), name))[:MOST_LOOKED_AT]:
        if MANIFEST not in store.files(name):
            continue
        try:
            found = _read(store, name)
        except UserError as error:
            refused.append(error)
            continue
        if found.manifest.kind == kind:
            whole.append(found)
            if kind == "checkpoint":
                break
    if len(whole) > 1:
        raise UserError(f"the place has {len(whole)} models; name one, such as .../{whole[0].folder}")
    if refused and not whole:
        raise refused[0]
    return whole[0] if whole else None


def cache_folder() -> Path:
    """Return the folder of this user's downloads: decentral/uploads in $XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decentral" / "uploads"


def _read(store: UploadStore, folder: str) -> FoundUpload:
    name = f"{folder}/{MANIFEST}" if folder else MANIFEST
    data = b"".join(store.read(name, MOST_MANIFEST_BYTES))
    if len(data) > MOST_MANIFEST_BYTES:
        raise UserError(f"{name} has more than {MOST_MANIFEST_BYTES} bytes, so it is no manifest; name another upload")
    return FoundUpload(folder, parsed(data, name))


def _download(store: UploadStore, found: FoundUpload, target: Path) -> None:
    """Download an upload's files into the folder `target`, which appears once all files are checked.

    If several processes download the same upload, a lock makes them take turns.

    Raises:
        UserError: If the disk has no room, or a file differs from the manifest.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    with foreign_file.opened_to_lock(target.with_name(f"{target.name}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # another process has downloaded it
            return
        shutil.rmtree(partial, ignore_errors=True)
        _remove_old(target.parent)
        free = shutil.disk_usage(target.parent).free
        if found.manifest.size > (1 - SPARE_SHARE) * free:
            sizes = f"{readable_bytes(found.manifest.size)}; {readable_bytes(free)} are free in {target.parent}"
            raise UserError(f"the upload needs {sizes}; make room, or set XDG_CACHE_HOME")
        partial.mkdir()
        for part in found.manifest.parts:
            _write_part(store, f"{found.folder}/{part.name}".lstrip("/"), part, partial)
        partial.rename(target)


def _remove_old(folder: Path) -> None:
    """Remove checkpoints and unfinished downloads that nobody has used for CHECKPOINT_KEPT_S, unless they are locked.

    No peer needs them: a peer links or copies the checkpoint with which it begins. Models stay, because runs name the
    folders of their models.
    """
    for one in folder.iterdir():
        with suppress(OSError):  # locked, or another process removes it
            is_old = time.time() - one.stat().st_mtime > CHECKPOINT_KEPT_S
            if is_old and one.is_dir() and (one.suffix == ".part" or (one / RUN_FILE).exists()):
                with foreign_file.opened_to_lock(folder / f"{one.stem}.lock") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(one)


def _write_part(store: UploadStore, name: str, part: UploadPart, folder: Path) -> None:
    """Append a part to its file in the folder; raise UserError if its size or digest differs from the manifest."""
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with (folder / part.of).open("ab") as file:
        for piece in store.read(name, part.bytes):
            digest.update(piece)
            file.write(piece)
            size += len(piece)
    if (size, digest.hexdigest()) != (part.bytes, part.digest):
        raise UserError(f"{name} differs from its manifest (size or digest); push it again, or name another upload")
