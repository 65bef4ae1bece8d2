"""Try a file in a child process before a library loads the file in this process; start reading at `tried`.

The libraries `tokenizers` and `pyarrow` end the process on some malformed files, or ask for gigabytes. So a child with
limits of memory and time loads the file first, and this process loads it only if the child succeeds. The child runs
this same file, which therefore imports nothing of decentral:

    python library_trial.py MEMORY_BYTES SECONDS tokenizers TEXT...    stdin: a tokenizer.json
    python library_trial.py MEMORY_BYTES SECONDS pyarrow KIND          stdin: paths with zero bytes between

It prints {"found": ...} or {"error": text}.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

LEAST_MEMORY_BYTES = 2 << 30  # a child's memory limit for an empty file, enough for the libraries
MEMORY_OF_A_BYTE = 16  # the memory limit grows by this many bytes for each byte of the largest file
TRIAL_S = 120.0  # processor and wall time of a child; the largest usual tokenizers take a second
TRIED_BYTES = 256 << 20  # a child reads about this many bytes, which takes seconds; each file has an equal share
LEAST_SHARE = 1 << 20  # a file's share of TRIED_BYTES is at least this many bytes, however many files there are
# A row group of a Parquet file that is larger than the rest of the file's share is read later, until such groups of all
# files together have LARGE_GROUP_BYTES. If no row group fits into a file's share, the child reads the file's first
# FIRST_ROWS rows at once.
LARGE_GROUP_BYTES, FIRST_ROWS = 512 << 20, 256
CELL_BYTES = 8  # one value of a column takes at least this much memory after it has been read
QUIET = {  # environment of a child: one thread, and memory from the system's allocator, which the limit bounds
    **{"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    **{"ARROW_DEFAULT_MEMORY_POOL": "system"},
}


class TrialFailed(Exception):
    """Raised if a child could not load a file; the text says why."""


def tried(library: str, arguments: Sequence[str], data: bytes, size: int) -> object:
    """Load a file in a child process with limits of memory and time, and return what the child has found.

    Args:
        library: `tokenizers` or `pyarrow`.
        arguments: Texts to encode (`tokenizers`); the kind of files, `parquet` or `arrow` (`pyarrow`).
        data: What the child reads from stdin: the content of a tokenizer.json, or paths.
        size: Size of the largest file in bytes; the limit of memory grows with it.

    Returns:
        For `tokenizers`, the number of tokens in the vocabulary; for Parquet, the number of rows of each file, or None
        for a file that the library refuses; for Arrow, None for each file.

    Raises:
        TrialFailed: If the library refuses the tokenizer, ends the child, or needs more memory or time.
    """
    memory_bytes = LEAST_MEMORY_BYTES + MEMORY_OF_A_BYTE * size
    command = [sys.executable, "-P", __file__, str(memory_bytes), str(int(TRIAL_S)), library, *arguments]
    try:
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_S,
            env=os.environ | QUIET,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"{library} needs more than {TRIAL_S:.0f} s") from None
    except OSError as error:
        raise TrialFailed(f"{library} could not be tried: {error.strerror}") from None
    try:
        said = json.loads(done.stdout)
    except ValueError:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        raise TrialFailed(f"{library} ended a trial process: {how}") from None
    if "error" in said:
        raise TrialFailed(str(said["error"]))
    return said["found"]


def _try_tokenizer(texts: Sequence[str]) -> int:
    """Load the tokenizer, encode and decode these texts, and return the number of tokens in the vocabulary."""
    import tokenizers

    made = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    made.no_padding()
    made.no_truncation()
    known: int = len(made.get_vocab(with_added_tokens=True))
    for text in texts:
        with suppress(Exception):  # the vocabulary may lack the text; a panic is a BaseException, so it passes
            made.decode(made.encode(text, add_special_tokens=True).ids)
            made.encode_batch_fast([text], add_special_tokens=False)
    return known


def _try_tables(kind: str, memory_bytes: int) -> list[int | None]:
    """Read each file up to its share of TRIED_BYTES, then other row groups of Parquet files up to LARGE_GROUP_BYTES.

    Raises:
        MemoryError: If rows may take more than `memory_bytes`.
    """
    from pyarrow import ArrowException

    found: list[int | None] = []
    unread: list[tuple[str, Group]] = []
    paths = [os.fsdecode(one) for one in sys.stdin.buffer.read().split(b"\0") if one]
    share = max(LEAST_SHARE, TRIED_BYTES // max(1, len(paths)))
    for path in paths:
        with _blaming(path, memory_bytes):
            try:
                rows = None
                if kind == "parquet":
                    rows, others = _try_parquet(path, memory_bytes, share)
                    unread += [(path, group) for group in others]
                else:
                    _try_arrow(path, share)
                found.append(rows)
            except MemoryError:  # pyarrow's is an ArrowException, too
                raise
            except (ArrowException, OSError):
                found.append(None)
    left = LARGE_GROUP_BYTES
    for path, group in sorted(unread, key=lambda one: one[1].rows_per_byte, reverse=True):
        if group.size <= left:
            left -= group.size
            with _blaming(path, memory_bytes):
                _read_group(path, group.number)
    return found


@contextmanager
def _blaming(path: str, memory_bytes: int) -> Iterator[None]:
    """Replace a MemoryError in the `with` block by one whose text names the file."""
    try:
        yield
    except MemoryError:
        raise MemoryError(f"rows of {path} may take more than {memory_bytes} bytes of memory") from None


class Group(NamedTuple):
    """A row group of a Parquet file: its index, its stored size in bytes, and its number of rows per stored byte."""

    number: int
    size: int
    rows_per_byte: float


def _try_parquet(path: str, memory_bytes: int, share: int) -> tuple[int, list[Group]]:
    """Read whole row groups, as `datasets` does, and return the number of rows, and the groups that were not read.

    The groups with the most rows per byte come first, since a few bytes become gigabytes only in many rows. A group
    that is left out because of both limits, the share and LARGE_GROUP_BYTES, may still need any amount of memory later.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        known = file.metadata
        groups = [known.row_group(number) for number in range(known.num_row_groups)]
        cells = max((group.num_rows * group.num_columns for group in groups), default=0)
        if cells * CELL_BYTES > memory_bytes or any(group.total_byte_size > memory_bytes for group in groups):
            raise MemoryError
        stored = [sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups]
        sizes = [max(1, min(size, os.path.getsize(path))) for size in stored]  # the file may claim any size
        listed = [Group(at, sizes[at], group.num_rows / sizes[at]) for at, group in enumerate(groups)]
        left, unread = share, list[Group]()
        for group in sorted(listed, key=lambda one: one.rows_per_byte, reverse=True):
            if group.size > left:
                unread.append(group)
                continue
            left -= group.size
            _read_group(path, group.number)
        if groups and left == share:
            next(file.iter_batches(FIRST_ROWS, row_groups=[0], use_threads=False), None)
        return int(known.num_rows), unread


def _read_group(path: str, number: int) -> None:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            file.read_row_group(number, use_threads=False)
    except MemoryError:
        raise
    except (ArrowException, OSError):  # the group is damaged; `datasets` says so when it reads the group
        pass


def _try_arrow(path: str, share: int) -> None:
    from pyarrow import ArrowInvalid, ipc, memory_map

    left = share if os.path.getsize(path) > share else None  # None: all batches are read
    with memory_map(path) as source:
        try:
            batches = iter(ipc.open_stream(source))
        except ArrowInvalid:  # the Arrow file is not a stream, but has an index
            source.seek(0)
            file = ipc.open_file(source)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        for batch in batches:
            if left is not None and (left := left - batch.nbytes) <= 0:
                break


def _main(arguments: Sequence[str]) -> int:
    memory_bytes, seconds, library, texts = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: seconds, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        with suppress(ValueError, OSError):  # the system has a stricter limit, or no limit of this kind
            resource.setrlimit(kind, (most, most))
    try:
        found = _try_tokenizer(texts) if library == "tokenizers" else _try_tables(texts[0], memory_bytes)
        print(json.dumps({"found": found}))
    except BaseException as error:
        print(json.dumps({"error": str(error) or type(error).__name__}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
