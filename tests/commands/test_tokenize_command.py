"""python -m decentral.tokenize: what it writes trains as `data.kind: tokens`, and errors take one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets", reason="needs the extra hf: pip install 'decentral[hf]'")

from decentral.commands import tokenize
from decentral.core import config
from decentral.data import corpora, tokenizer

TEXTS = [f"the {number} quick brown foxes jump over the lazy dog, again and again\n" * 20 for number in range(30)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    return path


def test_a_trained_tokenizer_s_tokens_are_the_text_again(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "words.bin"
    assert tokenize.main([str(rows), "--column", "body", "--train", "300", "--out", str(out)]) == 0
    found = tokenizer.load(str(tmp_path / "words.tokenizer"))
    written = np.fromfile(out, np.uint16)
    assert found.size <= 300
    assert found.tokenizer.decode(written.tolist(), skip_special_tokens=False) == "".join(
        text + tokenize.SEPARATOR for text in TEXTS
    )
    model = config.ModelConfig(depth=1, width=32, context=16, vocabulary=300)
    inputs_BT, _ = corpora.load(config.DataConfig(kind="tokens", path=str(out)), model).evaluation(4)
    assert inputs_BT.shape == (4, 16)


def word_level(folder: Path, tokens: int) -> str:
    """The folder of a tokenizer of so many tokens, and one for all that it does not know."""
    names = {f"t{number}": number for number in range(tokens)} | {"<unk>": tokens}
    model = {"type": "WordLevel", "vocab": names, "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return str(folder)


def test_a_vocabulary_of_more_than_two_bytes_is_written_in_four(rows: Path, tmp_path: Path) -> None:
    flags = ["--column", "body", "--tokenizer", word_level(tmp_path, 70_000), "--separator", "t1"]
    assert tokenize.main([str(rows), *flags, "--out", str(tmp_path / "out.bin")]) == 0
    assert np.fromfile(tmp_path / "out.bin", np.uint32).tolist() == [70_000, 1] * len(TEXTS)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "x"], "expected either --tokenizer PATH, or --train N to make one"),
        (["--out", "x", "--train", "9"], "--train expects at least 257"),
        (["--out", "x", "--train", "300"], "no column text; it has body"),
        (["--out", "{rows}/x", "--column", "body", "--train", "300"], "cannot be written"),
        (["--out", "x", "--tokenizer", "gone"], "--tokenizer gone: no such file or folder; name the folder"),
    ],
)
def test_errors_take_one_line(rows: Path, capfd: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert tokenize.main([str(rows), *(flag.format(rows=rows) for flag in flags)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_tokens_that_have_no_place_take_one_line(rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--column", "body", "--tokenizer", word_level(tmp_path, 2), "--separator", "t1"]
    assert tokenize.main([str(rows), *flags, "--out", str(rows / "x")]) == 2
    said = f"error: --out {rows}/x: Not a directory; choose a file that can be written\n"
    assert capfd.readouterr().err == said


def test_a_missing_package_is_named_with_how_to_get_it(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenize.main([str(rows), "--column", "body", "--train", "300", "--out", "x"]) == 2
    assert capfd.readouterr().err == "error: a tokenizer needs the package tokenizers: pip install 'decentral[hf]'\n"
