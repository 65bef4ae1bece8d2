"""Files of tokens say which tokenizer made them, and none is read in another width than it was written in."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the extra hf: pip install 'decentral[hf]'")
import tokenizers

from decentral.core import config
from decentral.core.errors import UserError
from decentral.data import corpora, run_inputs, tokenizer
from decentral.data.token_file import Description, describe

MODEL = config.ModelConfig(depth=1, width=32, context=16, vocabulary=512)
NUMBERS = np.arange(4000) % 512


def word_tokenizer(folder: Path, words: list[str]) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(["<end>", *words])}))
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def run_on(path: Path, tokenizer: Path | None = None) -> config.Config:
    tree = {"kind": "tokens", "path": str(path), "tokenizer": tokenizer and str(tokenizer)}
    return config.Config(model=MODEL, data=config.DataConfig.model_validate(tree))


def of_run(run: config.Config, own: config.Config) -> config.Config:
    """What a member reads: the run's settings with its own files."""
    return run.with_own(own.own_inputs)


def tokens_in(path: Path, made_by: Path | None = None, dtype: type[np.generic] = np.uint16) -> Path:
    NUMBERS.astype(dtype).tofile(path)
    if made_by is not None:
        digest = tokenizer.load(str(made_by)).digest
        describe(path, Description(digest, np.dtype(dtype).itemsize, 512, len(NUMBERS)))
    return path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "ours", ["a", "b"])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "other", ["b", "a"])


# Tokenizers


def test_a_run_compares_the_tokenizers_that_made_its_peers_tokens(tmp_path: Path, ours: Path, other: Path) -> None:
    run = run_inputs.sealed(run_on(tokens_in(tmp_path / "a.bin", ours)))
    run_inputs.check(of_run(run, run_on(tokens_in(tmp_path / "b.bin", ours))), begun=True)
    with pytest.raises(UserError, match=r"c\.bin was made by another tokenizer than this run's"):
        run_inputs.check(of_run(run, run_on(tokens_in(tmp_path / "c.bin", other))), begun=True)


def test_a_file_of_another_program_is_compared_by_the_tokenizer_that_its_user_names(
    tmp_path: Path, ours: Path, other: Path
) -> None:
    run, theirs = run_inputs.sealed(run_on(tokens_in(tmp_path / "a.bin", ours))), tokens_in(tmp_path / "b.bin")
    with pytest.raises(
        UserError, match=r"b\.bin has no description .*b\.bin\.json\) .*; name that tokenizer with --tokenizer"
    ):
        run_inputs.check(of_run(run, run_on(theirs)), begun=True)
    run_inputs.check(of_run(run, run_on(theirs, ours)), begun=True)
    with pytest.raises(UserError, match="another tokenizer than this run's"):
        run_inputs.check(of_run(run, run_on(theirs, other)), begun=True)


def test_a_run_of_files_that_say_nothing_goes_on_as_before(tmp_path: Path, ours: Path) -> None:
    run = run_inputs.sealed(run_on(tokens_in(tmp_path / "a.bin")))
    assert run.data.tokenizer_digest is None
    run_inputs.check(of_run(run, run_on(tokens_in(tmp_path / "b.bin", ours))), begun=True)


def test_a_user_who_names_another_tokenizer_than_the_file_is_told(tmp_path: Path, ours: Path, other: Path) -> None:
    with pytest.raises(
        UserError, match=r"is not the tokenizer that made .*a\.bin \(their digests differ\); name the tokenizer"
    ):
        run_inputs.sealed(run_on(tokens_in(tmp_path / "a.bin", ours), other))


# Widths


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_described_file_is_read_in_its_own_width(tmp_path: Path, ours: Path, dtype: type[np.generic]) -> None:
    run = run_on(tokens_in(tmp_path / "a.bin", ours, dtype))
    assert corpora.corpus(run.data, MODEL).tokens.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_file_without_a_description_shows_its_width(tmp_path: Path, dtype: type[np.generic]) -> None:
    run = run_on(tokens_in(tmp_path / "a.bin", dtype=dtype))
    assert corpora.corpus(run.data, MODEL).tokens.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_an_array_of_numpy_is_mapped_in_its_own_width(tmp_path: Path, dtype: type[np.generic]) -> None:
    np.save(tmp_path / "a.npy", NUMBERS.astype(dtype))
    tokens = corpora.corpus(run_on(tmp_path / "a.npy").data, MODEL).tokens
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (NUMBERS.astype(np.float32), "has float32 of shape"),
        (NUMBERS.reshape(2, -1), "expected a one-dimensional array of integers"),
        (NUMBERS - 1, "has the token -1; a token is at least 0"),
        (np.array([object()]), "cannot map"),
    ],
)
def test_an_array_of_something_else_is_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=said):
        corpora.corpus(run_on(tmp_path / "a.npy").data, MODEL)


def test_an_array_under_another_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", NUMBERS.astype(np.uint16))
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"give it a name that ends in \.npy"):
        corpora.corpus(run_on(tmp_path / "a.bin").data, MODEL)


@pytest.mark.parametrize("content", ["{", "[]", '{"tokens": 1}', json.dumps(["x"] * 9999), "\xff"])
def test_a_damaged_description_is_named(tmp_path: Path, content: str) -> None:
    path = tokens_in(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"a\.bin\.json is not a description of a file of tokens"):
        corpora.corpus(run_on(path).data, MODEL)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("vocabulary", "q", "a whole number"),
        ("tokens", 4000.0, "a whole number"),
        ("token_bytes", True, "a whole number"),
        ("tokenizer", None, "text"),
    ],
)
def test_a_description_with_a_value_of_another_type_is_named(
    tmp_path: Path, ours: Path, key: str, value: object, expected: str
) -> None:
    path = tokens_in(tmp_path / "a.bin", ours)
    beside = tmp_path / "a.bin.json"
    beside.write_text(json.dumps({**json.loads(beside.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"a\.bin\.json is not a description .*\({key} is .*; expected {expected}\)"):
        corpora.corpus(run_on(path).data, MODEL)


def test_a_description_of_another_file_is_named(tmp_path: Path, ours: Path) -> None:
    path = tokens_in(tmp_path / "a.bin", ours)
    NUMBERS[1:].astype(np.uint16).tofile(path)
    with pytest.raises(
        UserError,
        match=r"expects 4000 tokens of 2 bytes, but .*a\.bin has 7998 bytes; run python -m decentral\.tokenize",
    ):
        corpora.corpus(run_on(path).data, MODEL)


# A run of another user's, which names no file


@pytest.mark.parametrize("kind", ["tokens", "text", "huggingface"])
def test_data_without_a_path_are_refused_in_a_line(kind: str, ours: Path) -> None:
    data = config.DataConfig.model_validate({"kind": kind, "tokenizer": str(ours)})
    with pytest.raises(UserError, match=f"data.kind {kind} needs data.path, or the flag --data PATH"):
        corpora.load(data, MODEL).evaluation(1)
    if kind == "tokens":
        with pytest.raises(UserError, match=r"needs data\.path"):
            run_inputs.sealed(config.Config(model=MODEL, data=data))
