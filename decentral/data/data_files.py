"""Which files a data set is, opened with Hugging Face's `datasets`, and what tells one data set from another.

    a file, a folder, or a name on the hub -> files of one kind -> shards (row groups, files)

JSON is opened as lines of text: `datasets` would give each column one type, and where rows differ turn their text into
JSON once more.
"""

import glob as patterns
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.plain_text import printable

if TYPE_CHECKING:
    import datasets

READERS = {  # of files, by the ends of their names; the packed modules of datasets that read them
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
PACKED = (".gz", ".zst", ".bz2", ".xz")
HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")  # owner/name, or owner/name:subset
LEAST_PARTS = 32  # of a data set
TRAIN = {"train", "training"}  # words in a path that name a split, as the hub has them
OTHER_SPLITS = {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
BETWEEN_WORDS = re.compile(r"[\W\d_]+")
HIDDEN_FOLDERS = {"__pycache__", "__MACOSX"}  # and what begins with a dot
ABOUT_DATA = re.compile(  # names of files about the data, in a clone of a data set
    r"(readme|licen[cs]e)([_.-]\w+)*\.(md|txt|text)|(dataset_infos?|state)\.json", re.IGNORECASE
)
NAMED, LINE_CHARS = 5, 1000  # files that are named as left out, and the length of that line
SAMPLED, SAMPLE_BYTES = 16, 4096  # places in a file that tell it from others, and how much is read at each


@dataclass(frozen=True, slots=True)
class OpenedData:
    """A data set that is open for reading."""

    kind: str  # of READERS, or hub
    set: "datasets.IterableDataset"
    files: tuple[Path, ...]  # none of a set on the hub
    fingerprint: str  # of its content: the same wherever the files are
    left_out: str | None = None  # which files of the folder are not read, for the user


def opened(data: config.DataConfig) -> OpenedData:
    """Return the data set that `data.path` names. Raises UserError if there is none, or it cannot be read."""
    assert data.path is not None
    load = _library().load_dataset
    if Path(data.path).exists():
        kind, files = files_of(data.path, data.glob)
        where: dict[str, object] = {"data_files": [patterns.escape(str(one)) for one in files]}
        if kind in ("text", "json"):
            where |= {"keep_linebreaks": kind == "text", "encoding": "utf-8-sig"}
        name, fingerprint = "text" if kind == "json" else kind, _fingerprint(files)
    elif HUB_NAME.match(data.path):
        kind, files = "hub", []
        name, _, subset = data.path.partition(":")
        where, fingerprint = {"name": subset or None, "data_files": data.glob}, json.dumps([data.path, data.glob])
    else:
        raise UserError(f"data: {data.path} is not here, nor is it a name of the hub, such as owner/name")
    try:
        found = load(name, split="train", streaming=True, **where)
        found = found.reshard() if found.num_shards < LEAST_PARTS else found
    except Exception as error:  # of the network, of the hub, of the formats
        raise unreadable(data.path, error) from None
    said = left_out(Path(data.path), data.glob, files) if files else None
    return OpenedData(kind, found, tuple(files), fingerprint, said)


def unreadable(path: str | Path | None, error: Exception) -> UserError:
    """Return what the user is told of an error that a reader has raised."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"data: {path} cannot be read ({said[:200]})")


def files_of(path: str, glob: str | None) -> tuple[str, list[Path]]:
    """Return the kind of a file, or of all files of a folder (that match `glob`), and their sorted paths.

    Without `glob` a folder's files for tests are left out where others are named for training, and files about the data
    (README.md) where there are others. A Parquet file without rows counts as empty. Raises UserError.
    """
    root = Path(path)
    try:
        found = visible(root, glob or "**/*") if root.is_dir() else [root]
    except (ValueError, NotImplementedError, OSError) as error:
        raise UserError(f"data.glob: {glob!r} is no pattern below {root} ({error})") from None
    kinds = {one: kind for one in found if (kind := _kind(one))}
    if root.is_dir() and not glob:
        data = {one: kind for one, kind in kinds.items() if not ABOUT_DATA.fullmatch(one.name)}
        kinds = data or kinds
    if not kinds:
        matching = f" and matches {glob}" if glob else ""
        raise UserError(f"data: no file at {root} is one of {', '.join(READERS)}{matching}")
    if len(set(kinds.values())) > 1:
        there = ", ".join(sorted(set(kinds.values())))
        raise UserError(f"data: {root} has files of several kinds ({there}); choose with data.glob")
    files = [one for one, kind in kinds.items() if one.stat().st_size and not (kind == "parquet" and _has_no_rows(one))]
    if not files:
        raise UserError(f"data: {root} is empty")
    return next(iter(kinds.values())), files if glob else _for_training(root, files)


def left_out(root: Path, glob: str | None, files: Collection[Path]) -> str | None:
    """Return a line that says how many files of a folder are not read, names some, and says how to read them.

    Args:
        root: The folder, or a file.
        glob: The user's pattern; with one the user has chosen, and nothing is said.
        files: Those that are read.

    Returns:
        The line; None if there is nothing to say. It names no hidden files but those of READERS, and no empty ones.
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
    """Return the sorted files below a folder that match, without those that programs hide (.ipynb_checkpoints).

    A pattern that names a hidden folder finds what is in it.
    """

    def hidden(path: Path) -> bool:
        return any(part.startswith(".") or part in HIDDEN_FOLDERS for part in path.relative_to(root).parts)

    asked = any(part.startswith(".") for part in Path(glob).parts)
    return sorted(one for one in root.glob(glob) if one.is_file() and (asked or not hidden(one)))


def _for_training(root: Path, files: list[Path]) -> list[Path]:
    """Drop files of test and validation splits if any file is named for training."""
    words = {one: set(BETWEEN_WORDS.split(str(one.relative_to(root)).lower())) for one in files if one != root}
    if not any(TRAIN & found for found in words.values()):
        return files
    return [one for one in files if TRAIN & words[one] or not OTHER_SPLITS & words[one]]


def _has_no_rows(path: Path) -> bool:
    """Return whether a Parquet file has no row; False if it cannot be read, of which its reader tells the user."""
    from pyarrow import ArrowException, parquet

    try:
        return not parquet.read_metadata(path).num_rows
    except (ArrowException, OSError):
        return False


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return READERS.get(suffixes[-1]) if suffixes else None


def _fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of the files' sizes and of SAMPLED samples from each. Raises UserError."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8))
                for place in range(SAMPLED):
                    file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLED - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def _library() -> ModuleType:
    """Return the module `datasets`, set up: silent, no telemetry, Zstandard readable. Raises UserError."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
        import fsspec.compression
        import pyarrow
    except ImportError:
        raise UserError("data.kind huggingface needs the package datasets: pip install 'decentral[hf]'") from None
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if "zstd" not in fsspec.compression.available_compressions():  # else it would need one more package
        unpack = lambda file, mode: pyarrow.CompressedInputStream(file, "zstd")  # noqa: E731
        fsspec.compression.register_compression("zstd", unpack, "zst")
    found: ModuleType = datasets
    return found
