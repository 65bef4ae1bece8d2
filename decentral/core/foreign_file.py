"""Open and read files that somebody else may have written, such as a journal, an invitation or a tokenizer.

Only a regular file of at most N bytes is read: a pipe or a device could block the reader for ever, and an endless file
would fill the reader's memory. A link to a file or a folder is followed if the link is in a folder of this user, if
root made the link, or if the maker of the link owns the target. Any other link could lead this user to a file that the
maker of the link may not read.

A refused file raises OSError, so that callers treat it like a file that cannot be read.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NEVER_WAIT = os.O_NONBLOCK | os.O_NOCTTY  # with these flags, opening a pipe returns at once even if nobody writes to it
FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH also opens folders that the user may not list


def opened(path: str | Path, most_bytes: int | None = None) -> BinaryIO:
    """Return a regular file, open for reading.

    Args:
        path: The file.
        most_bytes: Largest size of the file; None: any size, for a caller that reads the file part by part.

    Raises:
        OSError: If the file cannot be opened, is no regular file, is larger than `most_bytes`, or is a link that is not
            followed.
    """
    return _checked(Path(path), os.O_RDONLY | NEVER_WAIT, most_bytes)


def read_bytes(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes.

    Raises:
        OSError: If the file cannot be read, is no regular file, is larger, or is a link that is not followed.
    """
    with opened(path, most_bytes) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # the file grew after it was opened
        raise _too_large(path, len(data), most_bytes)
    return data


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return the UTF-8 text in a regular file of at most `most_bytes` bytes.

    Raises:
        OSError: If the file cannot be read, is no regular file, is larger, or is a link that is not followed.
        UnicodeDecodeError: If the content is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode()


def opened_to_lock(path: str | Path) -> BinaryIO:
    """Return a file to lock, which is made if it is missing; an existing file keeps its content.

    Raises:
        OSError: If the file cannot be opened, is no regular file, or is a link that is not followed.
    """
    return _checked(Path(path), os.O_RDWR | os.O_CREAT | NEVER_WAIT, None)


def require_fit(path: str | Path) -> None:
    """Raise OSError if `opened` would refuse the file. Call this before a library opens the file by its path."""
    opened(path).close()


def _checked(path: Path, flags: int, most_bytes: int | None) -> BinaryIO:
    try:
        folder = _opened_folder(path.parent)
        try:
            descriptor = os.open(path.name or ".", flags, 0o666, dir_fd=folder)
            try:
                _require_fit(path, folder, os.fstat(descriptor), most_bytes)
                return os.fdopen(descriptor, "rb")
            except BaseException:
                os.close(descriptor)
                raise
        finally:
            os.close(folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _opened_folder(path: Path) -> int:
    """Return a descriptor of the folder. Open the parts of the path one by one, and check each part that is a link."""
    found = os.open(path.anchor or ".", FOLDER)
    for part in path.relative_to(path.anchor).parts:
        above = found
        try:
            found = _entered(above, part)
        finally:
            os.close(above)
    return found


def _entered(folder: int, name: str) -> int:
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    found = os.open(name, FOLDER, dir_fd=folder)  # the name is a link
    try:
        _require_own_link(folder, name, os.fstat(found), "folder")
    except BaseException:
        os.close(found)
        raise
    return found


def _require_fit(path: Path, folder: int, found: os.stat_result, most_bytes: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file; it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "expected a file; it is a pipe, a socket or a device")
    if most_bytes is not None and found.st_size > most_bytes:
        raise _too_large(path, found.st_size, most_bytes)
    _require_own_link(folder, path.name, found, "file")


def _require_own_link(folder: int, name: str, target: os.stat_result, kind: str) -> None:
    holder, link = os.fstat(folder), os.stat(name, dir_fd=folder, follow_symlinks=False)
    own = holder.st_uid == os.geteuid() and not holder.st_mode & stat.S_IWOTH
    if not own and link.st_uid not in (0, target.st_uid):
        what = "its folder" if kind == "folder" else "it"
        raise OSError(errno.ELOOP, f"expected a file; {what} is a link to another user's {kind}")


def _too_large(path: str | Path, size: int, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {most_bytes} bytes; it has {size}", str(path))
