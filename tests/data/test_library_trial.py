"""What would end this process, or fill its memory, does so in a child, and is told in one line."""

import json
import os
import secrets
import struct
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

from decentral.core.errors import UserError
from decentral.data import conversations, library_trial, tokenizer
from decentral.data.data_files import files_of
from decentral.data.library_trial import TrialFailed


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, loading: str) -> None:
    """Make the child import a library `tokenizers` that does this when it loads a tokenizer."""
    code = f"class Tokenizer:\n    def from_str(text):\n        import os, signal, sys\n        {loading}\n"
    (folder / "tokenizers.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("loading", "said"),
    [
        ("os.abort()", "tokenizers ended a trial process: SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "tokenizers ended a trial process: SIGSEGV"),
        ("os._exit(3)", "tokenizers ended a trial process: exit code 3"),
        ("raise BaseException('called `Option::unwrap()`')", "called `Option::unwrap()`"),
        ("bytearray(1 << 32)", "MemoryError"),
        ("raise ValueError('no model')", "no model"),
    ],
)
def test_a_library_that_ends_its_process_ends_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: str, said: str
) -> None:
    stand_in(tmp_path, monkeypatch, loading)
    with pytest.raises(TrialFailed) as caught:
        library_trial.tried("tokenizers", ("a text",), b"{}", 2)
    assert str(caught.value) == said


def test_a_tokenizer_that_ends_the_library_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "os.abort()")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot be loaded \(tokenizers ended a trial process: SIGABRT"):
        tokenizer.load(str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be loaded \(tokenizers ended a trial process: SIGABRT"):
        conversations.template(str(tmp_path))  # `transformers` loads the file with the same library


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "ended a trial process: SIGABRT"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, "index out of bounds"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                                "pair": [], "special_tokens": {}}},
            "no entry found",
        ),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"],
                       "continuing_subword_prefix": "longer"}},
            "out of range",
        ),
    ],
)  # fmt: skip
def test_a_crafted_tokenizer_is_refused_in_one_line(tmp_path: Path, part: dict[str, object], said: str) -> None:
    """Each of these aborts this process, or raises a panic, which no `except Exception` catches."""
    model = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"}
    whole = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | part))
    with pytest.raises(UserError, match=said):
        tokenizer.load(str(tmp_path))


def test_a_tokenizer_is_tried_once_with_all_texts_that_are_encoded_to_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[tuple[str, ...]]()
    monkeypatch.setattr(library_trial, "tried", lambda _, texts, *__: tries.append(texts))
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "once": 1, "stop": 2}, "unk_token": "</s>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer.tried_text(tmp_path / "tokenizer.json")  # as before `transformers` loads it
    assert tokenizer.load(str(tmp_path)).digest == tokenizer.load(str(tmp_path)).digest
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "stop"}')
    tokenizer.load(str(tmp_path))
    usual = tokenizer.USUAL_TEXT
    assert tries == [(usual,), (usual, *tokenizer.USUAL_SEPARATORS), (usual, "stop")]


def test_rows_of_parquet_files_are_counted(tmp_path: Path) -> None:
    for name, count in (("none", 0), ("some", 3)):
        parquet.write_table(pyarrow.table({"text": ["a"] * count}), tmp_path / f"{name}.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no table")
    _, files = files_of(str(tmp_path), None)
    assert [one.name for one in files] == ["damaged.parquet", "some.parquet"]


def test_a_small_parquet_file_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """A column of zeros, whose runs take a few bytes, becomes eight bytes a row."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [0] * 3}), path, use_dictionary=False, compression="none")
    claim(path, 3, 1 << 29)
    assert path.stat().st_size < 1000
    with pytest.raises(UserError, match=r"rows of .*a\.parquet may take more than"):
        files_of(str(tmp_path), None)


def test_a_small_arrow_file_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """Eight bytes before each compressed buffer say how long it is when it is unpacked."""
    table, path = pyarrow.table({"text": [0] * 4096}), tmp_path / "a.arrow"
    with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_table(table)
    length = struct.pack("<q", 8 * 4096)
    assert path.read_bytes().count(length) > 0
    path.write_bytes(path.read_bytes().replace(length, struct.pack("<q", 1 << 32)))
    with pytest.raises(UserError, match=r"rows of .*a\.arrow may take more than"):
        files_of(str(tmp_path), None)


def test_a_later_row_group_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """`datasets` reads whole row groups; here the last one has a text of 32 MiB, stored once, in 100 rows."""
    path, groups = tmp_path / "a.parquet", [repeated(9, secrets.token_hex(1 << 20)), repeated(100, "y" * (1 << 25))]
    with parquet.ParquetWriter(path, groups[0].schema, store_schema=False, compression="zstd") as file:
        for group in groups:
            file.write_table(group)
    with pytest.raises(UserError, match=r"rows of .*a\.parquet may take more than"):
        files_of(str(tmp_path), None)


def test_a_row_group_larger_than_its_file_s_share_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """So many files have a share of 1 MiB; the last row group of one has 2 MiB, and a text of 32 MiB in 100 rows."""
    for number in range(library_trial.TRIED_BYTES // library_trial.LEAST_SHARE):
        parquet.write_table(repeated(3, "a"), tmp_path / f"{number:03}.parquet", store_schema=False)
    bomb = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 100 + [1], "int32"), ["y" * (1 << 25), secrets.token_hex(1 << 21)]
    )
    groups = [repeated(9, "a"), pyarrow.table({"text": bomb})]
    with parquet.ParquetWriter(
        tmp_path / "999.parquet", groups[0].schema, store_schema=False, compression="zstd"
    ) as file:
        for group in groups:
            file.write_table(group)
    with pytest.raises(UserError, match=r"rows of .*999\.parquet may take more than"):
        files_of(str(tmp_path), None)


def test_a_file_is_tried_again_if_another_of_equal_size_and_time_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[str]()

    def noted(library: str, *_: object) -> list[int]:
        tries.append(library)
        return [3]

    monkeypatch.setattr(library_trial, "tried", noted)
    path, other = tmp_path / "a.parquet", tmp_path / "other"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    files_of(str(tmp_path), None)
    files_of(str(tmp_path), None)
    other.replace(path)
    files_of(str(tmp_path), None)
    assert tries == ["pyarrow"] * 2


def repeated(rows: int, text: str) -> pyarrow.Table:
    """Return a table with the same text in all rows, which is stored once."""
    return pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), [text])})


def test_a_later_batch_of_an_arrow_file_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    tables, path = [pyarrow.table({"text": [0] * rows}) for rows in (100, 4096)], tmp_path / "a.arrow"
    with ipc.new_stream(path, tables[0].schema, options=ipc.IpcWriteOptions(compression="lz4")) as stream:
        for table in tables:
            stream.write_table(table)
    path.write_bytes(path.read_bytes().replace(struct.pack("<q", 8 * 4096), struct.pack("<q", 1 << 32)))
    with pytest.raises(UserError, match=r"rows of .*a\.arrow may take more than"):
        files_of(str(tmp_path), None)


def claim(path: Path, rows: int, claimed: int) -> None:
    """Change the number of rows in a file's footer, where thrift writes it as a zigzag varint."""
    data = path.read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    body, footer = data[: -8 - size], data[-8 - size : -8]
    footer = footer.replace(b"\x16" + varint(rows), b"\x16" + varint(claimed))  # 0x16: a field of 64 bits, one further
    path.write_bytes(body + footer + struct.pack("<I", len(footer)) + b"PAR1")


def varint(number: int) -> bytes:
    number, made = 2 * number, bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def test_a_child_takes_only_modules_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `tokenizers.py` in the present folder is not run."""
    (tmp_path / "tokenizers.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrialFailed) as caught:
        library_trial.tried("tokenizers", (), b"{}", 2)
    assert "exit code 9" not in str(caught.value)
