"""Find the files of a data set, open them with Hugging Face's `datasets`, and fingerprint their content.

    a file, a folder, or a name on the hub -> files of one kind -> shards (row groups, files)

Start reading at `opened`. JSON files are opened as lines of text, because the JSON reader of `datasets` converts each
column to one type, and serialises a column with values of several types as JSON text.
"""

import glob as patterns
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from decentral.core import config, foreign_file
from decentral.core.choices import READERS
from decentral.core.errors import UserError
from decentral.core.plain_text import printable
from decentral.data import library_trial

if TYPE_CHECKING:
    import datasets

PACKED = (".gz", ".zst", ".bz2", ".xz")
HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")  # owner/name, or owner/name:subset, on the Hugging Face hub
LEAST_PARTS = 32  # a data set with fewer parts is split further, so that readers get about equal amounts of data
TRAIN = {"train", "training"}  # if a file's path has one of these words, files with a word of OTHER_SPLITS are not read
OTHER_SPLITS = {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
BETWEEN_WORDS = re.compile(r"[\W\d_]+")
HIDDEN_FOLDERS = {"__pycache__", "__MACOSX"}  # files in these folders are ignored, like files in hidden folders
ABOUT_DATA = re.compile(r"(readme|licen[cs]e)([_.-]\w+)*\.(md|txt|text)|(dataset_infos?|state)\.json", re.IGNORECASE)
NAMED, LINE_CHARS = 5, 1000  # a warning about ignored files has at most LINE_CHARS characters and names NAMED files
SAMPLED, SAMPLE_BYTES = 16, 4096  # a fingerprint hashes SAMPLED pieces of SAMPLE_BYTES bytes of each file


@dataclass(frozen=True, slots=True)
class OpenedData:
    """A data set that is open for reading."""

    kind: str
    set: "datasets.IterableDataset"
    files: tuple[Path, ...]
    fingerprint: str  # hash of samples of all files; for a data set on the hub: its name and data.glob, as JSON
    left_out: str | None = None


def opened(data: config.DataConfig) -> OpenedData:
    """Open the data set that `data.path` names, a local path or a name on the hub, and return it.

    Raises:
        UserError: If the data set does not exist or cannot be read.
    """
    path = data.given_path()
    load = _library().load_dataset
    if Path(path).exists():
        kind, files = files_of(path, data.glob)
        where: dict[str, object] = {"data_files": [patterns.escape(str(one)) for one in files]}
        if kind in ("text", "json"):
            where |= {"keep_linebreaks": kind == "text", "encoding": "utf-8-sig"}
        name, fingerprint = "text" if kind == "json" else kind, _fingerprint(files)
    elif HUB_NAME.match(path):
        kind, files = "hub", []
        name, _, subset = path.partition(":")
        where, fingerprint = {"name": subset or None, "data_files": data.glob}, json.dumps([path, data.glob])
    else:
        raise UserError(
            f"data: {path} is neither a file or folder here nor a hub name such as owner/name; give --data PATH"
        )
    try:
        found = load(name, split="train", streaming=True, **where)
        found = found.reshard() if found.num_shards < LEAST_PARTS else found
    except Exception as error:
        raise unreadable(path, error) from None
    said = left_out(Path(path), data.glob, files) if files else None
    return OpenedData(kind, found, tuple(files), fingerprint, said)


def unreadable(path: str | Path | None, error: Exception) -> UserError:
    """Return an error that says that `path` cannot be read, with the first 200 characters of `error` as the reason."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"data: {path} cannot be read ({said[:200]})")


def files_of(path: str, glob: str | None) -> tuple[str, list[Path]]:
    """Return the kind and the sorted paths of the files to read. Empty files are left out.

    A Parquet file without rows counts as empty. If `glob` is None, these files of a folder are left out as well:
    files that describe the data (README.md), if the folder has other files, and files of test and validation splits,
    if the path of another file names the training split.

    Args:
        path: A file or a folder.
        glob: Pattern of the files in the folder. If None, all files that are not hidden match.

    Raises:
        UserError: If no file has a suffix of READERS, all files with such a suffix are empty, the files are of several
            kinds, or `glob` is not a valid pattern.
    """
    root = Path(path)
    try:
        found = visible(root, glob or "**/*") if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {glob!r} is not a valid pattern in {root} ({error})") from None
    kinds = {one: kind for one in found if (kind := _kind(one))}
    if root.is_dir() and not glob:
        data = {one: kind for one, kind in kinds.items() if not ABOUT_DATA.fullmatch(one.name)}
        kinds = data or kinds
    if not kinds:
        matching = f" and matches {glob}" if glob else ""
        raise UserError(f"data: no file at {root} ends in {', '.join(READERS)}{matching}; check data.path")
    if len(set(kinds.values())) > 1:
        there = ", ".join(sorted(set(kinds.values())))
        raise UserError(f"data: {root} has files of several kinds ({there}); select files of one kind with data.glob")
    kind, files = next(iter(kinds.values())), [one for one in kinds if one.stat().st_size]
    if kind in ("parquet", "arrow"):
        rows = _rows_of(kind, tuple((one, *_state(one.stat())) for one in files))
        files = [one for one, count in zip(files, rows, strict=True) if count != 0]
    if not files:
        raise UserError(f"data: {root} is empty; check data.path")
    return kind, files if glob else _for_training(root, files)


def left_out(root: Path, glob: str | None, files: Collection[Path]) -> str | None:
    """Return a warning with the number of files of a folder that are not read, and the names of the first NAMED files.

    Args:
        root: The folder, or a file.
        glob: The pattern with which the user chose the files. If it is set, the result is None.
        files: The files that are read.

    Returns:
        The warning, at most LINE_CHARS characters; None if all files are read. The warning ignores empty files, and
        hidden files without a suffix of READERS.
    """
    if glob or not root.is_dir():
        return None
    read, shown = set(files), set(visible(root, "**/*"))
    others = (one for one in root.glob("**/*") if one not in read and (one in shown or (_kind(one) and one.is_file())))
    names = sorted(str(one.relative_to(root)) for one in others if one.stat().st_size)
    some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    count = f"{len(names)} files are" if len(names) > 1 else "1 file is"
    said = f"data: of {root} {count} left out ({some}); data.glob (--data-glob) says which files to read"
    return printable(said, LINE_CHARS) if names else None


def visible(root: Path, glob: str) -> list[Path]:
    """Return the sorted files below a folder that match a pattern, without hidden files and files in hidden folders.

    Hidden files are included if a part of the pattern's path begins with a dot.
    """

    def hidden(path: Path) -> bool:
        return any(part.startswith(".") or part in HIDDEN_FOLDERS for part in path.relative_to(root).parts)

    asked = any(part.startswith(".") for part in Path(glob).parts)
    return sorted(one for one in root.glob(glob) if one.is_file() and (asked or not hidden(one)))


def _for_training(root: Path, files: list[Path]) -> list[Path]:
    """Return the files that are not of a test or validation split; all files if no path contains a word of TRAIN."""
    words = {one: set(BETWEEN_WORDS.split(str(one.relative_to(root)).lower())) for one in files if one != root}
    if not any(TRAIN & found for found in words.values()):
        return files
    return [one for one in files if TRAIN & words[one] or not OTHER_SPLITS & words[one]]


@lru_cache(maxsize=8)
def _rows_of(kind: str, files: tuple[tuple[Path, int, int, int, int], ...]) -> list[int | None]:
    """Return the number of rows of each Parquet file; None for damaged files and other kinds of files.

    A child process opens the files. Raises UserError if a file crashes the child process or needs too much memory.

    Args:
        kind: `parquet` or `arrow`.
        files: For each file, its path and the four numbers that `_state` returns.
    """
    paths = b"\0".join(os.fsencode(path) for path, *_ in files)
    largest = max((size for _, size, *_ in files), default=0)
    try:
        found = library_trial.tried("pyarrow", (kind,), paths, largest)
    except library_trial.TrialFailed as error:
        raise UserError(f"data: the files cannot be read ({printable(str(error), LINE_CHARS)})") from None
    assert isinstance(found, list), "a trial of Parquet files returns a list"
    return found


def _state(found: os.stat_result) -> tuple[int, int, int, int]:
    """Return four numbers that change with a file's content: size in bytes, inode, st_mtime_ns and st_ctime_ns.

    No program can set st_ctime_ns back.
    """
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return READERS.get(suffixes[-1]) if suffixes else None


def _fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of the size and of SAMPLED samples of each file. Raises UserError if a file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            with foreign_file.opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8))
                for place in range(SAMPLED):
                    file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLED - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def _library() -> ModuleType:
    """Return the module `datasets`, after setting it to print nothing, send no telemetry and read Zstandard files.

    Raises:
        UserError: If the package `datasets` is not installed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
        import fsspec.compression
        import pyarrow
    except ImportError:
        raise UserError("data.kind huggingface needs the package datasets: pip install 'decentral[hf]'") from None
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if "zstd" not in fsspec.compression.available_compressions():
        unpack = lambda file, mode: pyarrow.CompressedInputStream(file, "zstd")  # noqa: E731
        fsspec.compression.register_compression("zstd", unpack, "zst")
    found: ModuleType = datasets
    return found
