"""Destinations of uploads outside of a swarm: a folder, a bucket of any fsspec provider, or a Hugging Face repository.

`checked_place` reads the name that a user gives, such as `backup/`, `s3://BUCKET/PATH` or `hf://USER/NAME`, and
`store_of` opens it. Credentials come from the provider's own environment and files; a name that holds some is refused.
Errors of providers become UserErrors of one line.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from decentral.core import foreign_file
from decentral.core.atomic_file import replacing, write_atomically
from decentral.core.errors import UserError
from decentral.core.near_names import did_you_mean
from decentral.core.plain_text import error_text, printable
from decentral.core.units import MiB

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SEND_BYTES = 5 * MiB  # content is sent in pieces of at most this size, the minimum in multipart uploads of S3
PLACES = "a folder, s3://BUCKET/PATH or hf://USER/NAME"  # forms of a destination, as help texts and errors name them
HUB_PROTOCOL = "hf"  # fsspec's name of the Hugging Face Hub
WITH_FOLDERS = ("file", "sftp", "ssh", "ftp", "smb", "webdav", "hdfs", "webhdfs", "memory")
"""Providers on which a folder must be created before a file is written in it. With other providers, creating a folder
could create a bucket, whose name the user may have mistyped."""
EXTRA_OF = {
    "s3": "upload",
    HUB_PROTOCOL: "hf",
}  # fsspec's name of a provider -> the extra of decentral that installs it
MD5 = re.compile("[0-9a-f]{32}")
PLACE_ERROR_CHARS = 300


class UploadSource(Protocol):
    """Interface of the content that a store sends as one file; implemented by sending.PartReader."""

    size: int

    def pieces(self) -> Iterator[bytes]:
        """Yield the content from its beginning, in pieces of at most SEND_BYTES, within the limit of bandwidth."""

    def reader(self) -> BinaryIO:
        """Return the content as a file, for libraries that read it by themselves."""

    def hexdigest(self, method: str) -> str:
        """Return the content's hexadecimal digest by the hashlib method `method`; the content is read at full speed."""

    def equals(self, pieces: Iterable[bytes]) -> bool:
        """Return whether the content is that of these pieces; reading it is not slowed down."""


class UploadStore(Protocol):
    """Interface of a destination of uploads. Names are relative to it, with `/` after a folder's name."""

    at_once: bool  # True: all files of an upload appear together in `finish`, so a model needs no folder of its own

    def folders(self) -> list[str]:
        """Return the names of the folders at the destination; [] if the destination does not exist."""

    def files(self, folder: str) -> dict[str, int]:
        """Return the names and sizes (bytes) of the files in a folder at the destination; {} without this folder."""

    def has(self, name: str, source: UploadSource) -> bool:
        """Return whether a file of this name has this content, by its size and by the provider's digest, if any."""

    def send(self, name: str, source: UploadSource) -> None:
        """Write a file, which replaces a file of the same name. After a failure the file may be incomplete."""

    def finish(self, name: str, content: bytes, old: Sequence[str] = ()) -> None:
        """Write the manifest, which makes the upload whole, and remove the files `old` of the previous upload."""

    def read(self, name: str, most_bytes: int) -> Iterator[bytes]:
        """Yield a file's content in pieces: at most `most_bytes` bytes, and one more byte if the file is longer."""

    def remove(self, folder: str, first: str, removed: Callable[[], None]) -> None:
        """Remove a folder with its files, beginning with the file `first`; call `removed` after each file."""


class FilesystemStore:
    """A store in a folder or a bucket, which is accessed through fsspec."""

    at_once = False

    def __init__(self, files: "AbstractFileSystem", root: str) -> None:
        """Keep uploads in the folder `root` of an fsspec filesystem."""
        from fsspec.implementations.local import LocalFileSystem

        self._files, self._root = files, root.rstrip("/")
        self._is_folder = isinstance(files, LocalFileSystem)
        protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
        self._has_folders = any(one in WITH_FOLDERS for one in protocols)

    def folders(self) -> list[str]:
        """Return the names of the folders in the place."""
        return [_last(one["name"]) for one in self._listed("") if one["type"] == "directory"]

    def files(self, folder: str) -> dict[str, int]:
        """Return the names and sizes of the files in a folder."""
        return {_last(one["name"]): int(one["size"] or 0) for one in self._listed(folder) if one["type"] == "file"}

    def has(self, name: str, source: UploadSource) -> bool:
        """Return whether the stored file has the same content or the same MD5.

        If the provider has no MD5, the size decides; for example, S3 has none of a file that was sent in pieces.
        """
        try:
            known = self._files.info(self._path(name))
        except FileNotFoundError:
            return False
        if known["size"] != source.size:
            return False
        if self._is_folder:
            return source.equals(self.read(name, source.size))
        tag = str(known.get("ETag", "")).strip('"')
        return not MD5.fullmatch(tag) or tag == source.hexdigest("md5")

    def send(self, name: str, source: UploadSource) -> None:
        """Write a file: atomically in a folder, else in one request if it has at most SEND_BYTES."""
        path = self._path(name)
        if self._has_folders:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if self._is_folder:
            with replacing(Path(path)) as whole:
                for piece in source.pieces():
                    whole.write(piece)
            return
        if source.size <= SEND_BYTES:
            self._files.pipe_file(path, b"".join(source.pieces()))
            return
        file = self._files.open(path, "wb", block_size=SEND_BYTES)
        try:
            for piece in source.pieces():
                file.write(piece)
        except BaseException:
            with suppress(Exception):  # do not call `close`, which would store the incomplete file as if it were whole
                file.discard()
            raise
        file.close()

    def finish(self, name: str, content: bytes, old: Sequence[str] = ()) -> None:
        """Write the manifest, atomically (in a folder) or by one request (in a bucket), then remove the files `old`."""
        if self._is_folder:
            write_atomically(Path(self._path(name)), content)
        else:
            self._files.pipe_file(self._path(name), content)
        for one in old:
            self._files.rm_file(self._path(one))

    def read(self, name: str, most_bytes: int) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""
        path, most = self._path(name), most_bytes + 1
        if self._is_folder:  # use foreign_file, because a pipe in place of a file would block the reader for ever
            with foreign_file.opened(path) as file:
                while most > 0 and (piece := file.read(min(most, SEND_BYTES))):
                    most -= len(piece)
                    yield piece
            return
        size = min(most, int(self._files.info(path)["size"] or 0))
        for at in range(0, size, SEND_BYTES):
            yield self._files.cat_file(path, start=at, end=min(at + SEND_BYTES, size))

    def remove(self, folder: str, first: str, removed: Callable[[], None]) -> None:
        """Remove a folder, its manifest first, so that an interrupted removal leaves no upload that seems whole."""
        names = self.files(folder)
        for name in sorted(names, key=lambda name: name != first):
            self._files.rm_file(self._path(f"{folder}/{name}"))
            removed()
        if self._has_folders:
            self._files.rmdir(self._path(folder))

    def _listed(self, folder: str) -> "list[dict[str, str]]":
        try:
            found: list[dict[str, str]] = self._files.ls(self._path(folder), detail=True, refresh=True)
        except FileNotFoundError:
            return []
        return found

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


class HubStore(FilesystemStore):
    """A store in a Hugging Face repository. All files of an upload become one commit.

    The Hub keeps content that was sent before the commit, so that an interrupted upload need not send it again.
    """

    at_once = True

    def __init__(self, files: "AbstractFileSystem", root: str) -> None:
        """Keep uploads in the repository or folder `root`, which is USER/NAME or USER/NAME/FOLDER."""
        from huggingface_hub import CommitOperationAdd

        super().__init__(files, root)
        user, name, *inside = root.split("/")
        self._repository, self._inside = f"{user}/{name}", "/".join(inside)
        self._added: list[CommitOperationAdd] = []
        self._is_there = False

    def has(self, name: str, source: UploadSource) -> bool:
        """Return False, so that `send` is called: the Hub compares digests, and receives only content that it lacks."""
        return False

    def send(self, name: str, source: UploadSource) -> None:
        """Send a file's content, which is visible after `finish`. Create a private repository if there is none."""
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        if not self._is_there:
            api.create_repo(self._repository, private=True, exist_ok=True)
            self._is_there = True
        added = CommitOperationAdd(self._inner(name), source.reader())
        api.preupload_lfs_files(self._repository, [added], num_threads=1)
        self._added.append(added)

    def finish(self, name: str, content: bytes, old: Sequence[str] = ()) -> None:
        """Commit all files that were sent, and the manifest."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        removed = [CommitOperationDelete(self._inner(one)) for one in old]
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        operations += [CommitOperationAdd(self._inner(name), content), *self._added, *removed]
        HfApi().create_commit(self._repository, operations, commit_message=f"Upload by decentral: {name}")
        self._added.clear()

    def remove(self, folder: str, first: str, removed: Callable[[], None]) -> None:
        """Remove a folder by one commit."""
        from huggingface_hub import HfApi

        HfApi().delete_folder(self._inner(folder), self._repository, commit_message=f"Remove {folder}")

    def _inner(self, name: str) -> str:
        return f"{self._inside}/{name}" if self._inside else name


def checked_place(text: str, flag: str) -> str:
    """Return the name of a place, as `store_of` opens it: a folder's path is made absolute.

    Args:
        text: What the user gives.
        flag: The flag or key, for error messages.

    Raises:
        UserError: If the name holds credentials, no provider has it, or the provider's package is not installed.
    """
    import fsspec

    scheme, is_address, rest = text.partition("://")
    if not is_address:
        if not text:
            raise UserError(f"{flag} expects {PLACES}; got nothing")
        if re.match(r"[a-z0-9]{2,}:/?[^/]", text):
            raise UserError(f"{flag} expects s3://BUCKET/PATH, or ./{text} for a folder of that name; got {text!r}")
        return str(Path(text).absolute())
    if "::" in text or not rest.strip("/") or re.search(r"[?#\s]|^[^/]*@", rest):
        credentials = "credentials belong in the provider's environment or files, such as AWS_ACCESS_KEY_ID"
        raise UserError(f"{flag} expects a place such as s3://BUCKET/PATH, without user, key or options; {credentials}")
    known = fsspec.available_protocols()
    if scheme not in known:
        near = did_you_mean(scheme, known)
        raise UserError(
            f"{flag}: expected a provider that fsspec knows, such as s3, gs, az or hf; got {scheme!r}{near}"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRA_OF.get(scheme)
        remedy = f"pip install 'decentral[{extra}]'" if extra else printable(error_text(error, None))
        raise UserError(f"{flag} {scheme}://...: its package is not installed: {remedy}") from None
    if scheme == HUB_PROTOCOL and rest.strip("/").count("/") < 1:
        raise UserError(f"{flag} expects hf://USER/NAME, a model's repository; got {text!r}")
    return text.rstrip("/")


def store_of(place: str) -> UploadStore:
    """Return the store of a place that `checked_place` has returned. Most providers get no request yet."""
    # The library of Xet would read the files by itself, without the limit of bandwidth.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from fsspec.core import url_to_fs

    with asking(place):
        files, root = url_to_fs(place, skip_instance_cache=True, use_listings_cache=False)
        return HubStore(files, root) if place.startswith(f"{HUB_PROTOCOL}://") else FilesystemStore(files, root)


@contextmanager
def asking(place: str) -> Iterator[None]:
    """Turn any exception of a provider in the block into a UserError of one line that names the place.

    Raises:
        UserError: If the block raises any Exception, because each provider has its own exception classes.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join((str(error) or type(error).__name__).split())
        raise UserError(f"{place}: {printable(words, PLACE_ERROR_CHARS)}") from None


def is_address(text: str) -> bool:
    """Return whether a text names a place at a provider, such as `s3://BUCKET/PATH`, rather than a path."""
    return "://" in text


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
