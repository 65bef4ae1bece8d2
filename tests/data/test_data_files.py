"""Files as people have them: which of a folder's are read, and every row as its file has it, or named."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="needs the extra hf: pip install 'decentral[hf]'")
import datasets
import pyarrow as pa
from pyarrow import parquet

from decentral.core import config
from decentral.core.errors import UserError
from decentral.data import documents
from decentral.data.data_files import files_of, left_out
from decentral.data.documents import Documents

TEXTS = ["one", 'It is "4"\nindeed é', "three"]
LINES = "\n".join(json.dumps({"text": text}) for text in TEXTS)


def read(path: Path, **keys: object) -> list[str]:
    """All documents, in their order."""
    data = config.DataConfig.model_validate({"kind": "huggingface", "path": str(path), **keys})
    return [piece.text for piece in Documents(data).all_pieces()]


def refusal(path: Path, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **keys)
    assert str(caught.value).isprintable()
    return str(caught.value)


# Which files


def touched(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return [str(one.relative_to(folder)) for one in files_of(str(folder), None)[1]]


def test_files_for_tests_beside_those_for_training_are_left_out(tmp_path: Path) -> None:
    names = ["data/train-0-of-1.parquet", "data/test-0-of-1.parquet", "validation/a.parquet", "more.parquet"]
    assert touched(tmp_path, *names) == ["data/train-0-of-1.parquet", "more.parquet"]
    assert len(files_of(str(tmp_path), "**/test*.parquet")[1]) == 1


@pytest.mark.parametrize("about", ["README.md", "Readme.txt", "LICENSE.md", "dataset_infos.json", "state.json"])
def test_files_about_the_data_are_left_out_beside_data(tmp_path: Path, about: str) -> None:
    assert touched(tmp_path, "train.parquet", about) == ["train.parquet"]


def test_files_that_are_left_out_are_named_with_what_to_do(tmp_path: Path) -> None:
    names = ["train.jsonl", "test.jsonl", "README.md", "more.csv", ".ipynb_checkpoints/a.jsonl", ".git/HEAD"]
    files = [tmp_path / name for name in touched(tmp_path, *names)]
    named = ".ipynb_checkpoints/a.jsonl, README.md, more.csv, test.jsonl"
    said = str(left_out(tmp_path, None, files))
    assert said.startswith(f"data: of {tmp_path} 4 files are left out ({named}); data.glob")
    assert left_out(tmp_path, "*.jsonl", files) is None
    assert left_out(files[0], None, files) is None


def test_of_many_files_that_are_left_out_some_are_named(tmp_path: Path) -> None:
    touched(tmp_path, "a.txt", *(f"{number}.csv" for number in range(9)))
    assert "9 files" in (said := str(left_out(tmp_path, None, [tmp_path / "a.txt"])))
    assert "(0.csv, 1.csv, 2.csv, 3.csv, 4.csv, ...)" in said


def test_an_opened_set_says_what_it_leaves_out(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(LINES)
    data = config.DataConfig.model_validate({"kind": "huggingface", "path": str(tmp_path)})
    assert "1 file is left out (test.jsonl)" in str(Documents(data).opened.left_out)
    (tmp_path / "test.jsonl").unlink()
    assert Documents(data).opened.left_out is None


def test_a_file_whose_name_begins_as_one_about_the_data_is_data(tmp_path: Path) -> None:
    names = ["licensed.md", "readmes.txt", "state-laws.txt"]
    assert touched(tmp_path, *names) == names


def test_a_file_about_the_data_is_read_where_it_is_alone_or_asked_for(tmp_path: Path) -> None:
    assert touched(tmp_path, "README.md") == ["README.md"]
    assert touched(tmp_path, "a.jsonl") == ["a.jsonl"]
    assert [one.name for one in files_of(str(tmp_path), "*.md")[1]] == ["README.md"]


def test_files_of_other_splits_alone_are_read(tmp_path: Path) -> None:
    assert touched(tmp_path, "test.jsonl", "trains.jsonl") == ["test.jsonl", "trains.jsonl"]


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints/a.jsonl", "__pycache__/a.jsonl", ".a.jsonl"])
def test_hidden_files_are_left_out(tmp_path: Path, hidden: str) -> None:
    assert touched(tmp_path, "a.jsonl", hidden) == ["a.jsonl"]


def test_a_pattern_that_names_a_hidden_folder_finds_its_files(tmp_path: Path) -> None:
    touched(tmp_path, ".notes/a.md", "b.md")
    assert [one.name for one in files_of(str(tmp_path), ".notes/*.md")[1]] == ["a.md"]


def test_a_folder_below_a_hidden_one_is_read(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    assert touched(tmp_path / ".cache", "a.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "[x]/a.jsonl", "{a,b}.jsonl", "a b.jsonl"])
def test_a_name_with_a_pattern_s_characters_is_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(LINES)
    assert read(tmp_path / name) == TEXTS


def test_an_empty_file_is_left_out_and_named_if_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    empty = f"data: {tmp_path} is empty; check data.path"
    assert refusal(tmp_path) == refusal(tmp_path / "a.jsonl").replace("/a.jsonl", "") == empty
    (tmp_path / "b.jsonl").write_text(LINES)
    assert read(tmp_path) == TEXTS


def test_a_table_without_rows_is_left_out_and_named_if_there_is_no_other(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert refusal(tmp_path) == f"data: {tmp_path} is empty; check data.path"
    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "b.parquet")
    assert read(tmp_path) == TEXTS


def zstandard(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_are_read(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(PACKERS[suffix](LINES.encode()))
    assert read(tmp_path / f"a.jsonl.{suffix}") == TEXTS


# Rows of JSON


def test_a_text_stays_as_it_is_where_other_rows_or_columns_have_other_types(tmp_path: Path) -> None:
    rows = [{"text": text, "meta": meta} for text, meta in zip(TEXTS, [1, {"a": [2]}, [{"a": "x"}]], strict=True)]
    rows += [{"meta": None}, {"text": None}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [[{"text": text} for text in TEXTS], TEXTS])
def test_a_list_of_rows_is_read_as_lines_are(tmp_path: Path, value: list[object], indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value, indent=indent))
    assert read(tmp_path / "a.json") == TEXTS


def test_rows_over_several_lines_are_read_as_lines_are(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS))
    assert read(tmp_path / "a.json") == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_mark_of_utf_8_is_no_part_of_a_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "x"}', encoding="utf-8-sig")
    assert read(tmp_path / name) == (["x"] if name == "a.jsonl" else ['{"text": "x"}'])


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83db \\ud83d\\ude00"}')
    assert read(tmp_path / "a.jsonl") == ["a�b 😀"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 5}', "text is a number (5); expected text"),
        ('{"text": ["a"]}', "text is a list; expected text"),
        ('{"text": "a"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "expected a JSON object with the key text; got a number (7)"),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.jsonl").write_text(f"{LINES}\n{line}\n{LINES}")
    message = refusal(tmp_path)
    assert f"line 4 of {tmp_path / 'b.jsonl'}" in message
    assert said in message


def test_a_bad_row_of_a_table_is_named_too(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert f"row 1 of {tmp_path / 'a.parquet'}: text is a number (1); expected text" in refusal(tmp_path)


def test_rows_of_a_table_without_text_are_left_out(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [None, *TEXTS, None, ""]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == TEXTS


def test_text_of_a_table_that_is_packed_as_json_is_unpacked(tmp_path: Path) -> None:
    """As `datasets` saves columns whose rows differ."""
    if not hasattr(datasets, "Json"):
        pytest.skip("this release of datasets has no such columns")
    features = datasets.Features({"text": datasets.Json()})
    datasets.Dataset.from_dict({"text": TEXTS}, features=features).to_parquet(str(tmp_path / "a.parquet"))
    assert read(tmp_path / "a.parquet") == TEXTS


# Files of text


def test_a_long_file_s_pieces_are_the_same_from_any_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LINES_AT_ONCE", 7)
    monkeypatch.setattr(documents, "PIECE_CHARS", 64)
    monkeypatch.setattr(documents, "FINER", (64,))
    text = "".join(f"{number} {number * number}\n" for number in range(300)) + "x" * 700 + " y" * 300 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    assert "".join(read(tmp_path / "a.txt")) == text
    data = config.DataConfig.model_validate({"kind": "huggingface", "path": str(tmp_path / "a.txt"), "held_out": 1e-9})
    found = Documents(data, least_parts=1)
    batches = list(found.read(0))
    assert len(batches) > 10
    for at, batch in enumerate(batches, 1):
        again = [piece for one in found.read(0, batch.state, batch.read) for piece in one.pieces]
        assert again == [piece for one in batches[at:] for piece in one.pieces]
