"""Data: held-out text is never trained on, and a position in the data is one number."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.core import config, rng
from decentral.core.errors import UserError
from decentral.data import corpora
from decentral.data.corpora import Corpus, Runs
from decentral.data.corpora import corpus as load

CONTEXT = 16
ENOUGH = 20 * (CONTEXT + 2)
MODEL = config.ModelConfig(depth=1, width=32, context=CONTEXT)
NUMBERS = config.ModelConfig(depth=1, width=32, context=CONTEXT, vocabulary=1 << 20)  # any position may be a token


def positions(tmp_path: Path, count: int, held_out: float = 0.05) -> Corpus:
    """A corpus whose token at each position is that position."""
    path = tmp_path / "positions.bin"
    np.arange(count, dtype=np.uint32).tofile(path)
    return load(config.DataConfig(kind="tokens", path=str(path), held_out=held_out), NUMBERS)


def all_of(batch: tuple[torch.Tensor, torch.Tensor]) -> set[int]:
    return {token for part in batch for token in part.flatten().tolist()}


def places(runs: Runs) -> int:
    """How many tokens they have."""
    return int((runs.counts + CONTEXT).sum())


# Held out and trained on


@given(count=st.integers(ENOUGH, 100_000), held_out=st.floats(0.05, 0.9), seed=st.integers(0, 99))
def test_what_is_held_out_is_never_trained_on(
    tmp_path_factory: pytest.TempPathFactory, count: int, held_out: float, seed: int
) -> None:
    corpus = positions(tmp_path_factory.getbasetemp(), count, held_out)
    trained = all_of(corpus.micro_batch(rng.arrays(seed), 100))
    assert not trained & all_of(corpus.evaluation(100))
    assert max(trained) < count


@pytest.mark.parametrize("held_out", [0.05, 0.1, 0.25, 0.3, 0.45, 0.5, 0.7, 0.9])
def test_about_the_share_that_was_asked_for_is_held_out(tmp_path: Path, held_out: float) -> None:
    corpus = positions(tmp_path, 200_000, held_out)
    assert places(corpus.held_out) / 200_000 == pytest.approx(held_out, abs=0.03)
    assert places(corpus.train) + places(corpus.held_out) == 200_000


@pytest.mark.parametrize("held_out", [0.001, 0.04, 0.999])
def test_a_small_text_has_something_to_train_on_and_something_that_is_held_out(tmp_path: Path, held_out: float) -> None:
    corpus = positions(tmp_path, 400, held_out)
    assert places(corpus.held_out) > CONTEXT
    assert places(corpus.train) > CONTEXT


def test_every_peer_evaluates_on_the_same_windows(tmp_path: Path) -> None:
    one, other = positions(tmp_path, 10_000).evaluation(8), positions(tmp_path, 10_000).evaluation(8)
    assert torch.equal(one[0], other[0])


# Micro-batches


def test_targets_are_the_inputs_one_token_on(tmp_path: Path) -> None:
    inputs_BT, targets_BT = positions(tmp_path, 10_000).micro_batch(rng.arrays(0), 5)
    assert inputs_BT.shape == targets_BT.shape == (5, CONTEXT)
    assert torch.equal(inputs_BT + 1, targets_BT)
    assert inputs_BT.dtype == torch.int64


def test_the_same_number_gives_the_same_micro_batch(tmp_path: Path) -> None:
    corpus = positions(tmp_path, 10_000)
    batches = [corpus.micro_batch(rng.arrays(7, "data", "A", 3), 4)[0] for _ in range(2)]
    assert torch.equal(*batches)


def test_another_number_or_peer_gives_another_micro_batch(tmp_path: Path) -> None:
    corpus = positions(tmp_path, 100_000)
    names = [("A", 3), ("A", 4), ("B", 3)]
    seen = {tuple(corpus.micro_batch(rng.arrays(7, "data", *name), 4)[0].flatten().tolist()) for name in names}
    assert len(seen) == 3


def test_every_part_of_the_training_text_is_drawn(tmp_path: Path) -> None:
    corpus = positions(tmp_path, 1000)
    drawn = all_of(corpus.micro_batch(rng.arrays(0), 3000))
    assert len(drawn) >= 0.95 * places(corpus.train)


# Kinds


def test_text_is_read_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 123)) * 40)
    corpus = load(config.DataConfig(kind="text", path=str(tmp_path / "a.txt")), MODEL)
    assert bytes(corpus.tokens[:5].astype(np.uint8)) == b"abcde"


def test_a_folder_of_text_is_read_in_order_through_its_glob(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b" * 300)
    (tmp_path / "a.txt").write_text("a" * 300)
    (tmp_path / "sub" / "c.txt").write_text("c" * 300)
    (tmp_path / "d.md").write_text("d" * 300)
    corpus = load(config.DataConfig(kind="text", path=str(tmp_path)), MODEL)
    assert bytes(corpus.tokens.astype(np.uint8)) == b"a" * 300 + b"\n" + b"b" * 300 + b"\n" + b"c" * 300


def test_hidden_files_are_no_text_and_modules_with_underscores_are(tmp_path: Path) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.py").write_text("a" * 1000)
    (tmp_path / "__init__.py").write_text("b" * 1000)
    corpus = load(config.DataConfig(kind="text", path=str(tmp_path), glob="**/*.py"), MODEL)
    assert bytes(corpus.tokens.astype(np.uint8)) == b"b" * 1000


def test_a_file_of_the_folder_that_is_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("all work and no play " * 40)
    (tmp_path / "b.md").write_text("x")
    tree = {"kind": "text", "path": str(tmp_path)}
    (said,) = load(config.DataConfig.model_validate(tree), MODEL).warnings
    assert "1 file is left out (b.md)" in said
    assert load(config.DataConfig.model_validate({**tree, "glob": "*.txt"}), MODEL).warnings == []


def test_the_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a" * 500, encoding="utf-8-sig")
    corpus = load(config.DataConfig(kind="text", path=str(tmp_path)), MODEL)
    assert bytes(corpus.tokens.astype(np.uint8)) == b"a" * 500 + b"\n" + b"a" * 500


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_tokens_are_mapped_and_not_read(tmp_path: Path, dtype: type[np.generic]) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000).astype(dtype).tofile(path)
    tokens = config.DataConfig.model_validate({"kind": "tokens", "path": str(path)})
    corpus = load(tokens, NUMBERS)
    assert isinstance(corpus.tokens, np.memmap)
    inputs_BT, _ = corpus.micro_batch(rng.arrays(0), 4)
    assert torch.equal(inputs_BT[:, 1:], inputs_BT[:, :-1] + 1)


def test_the_standard_library_is_there_without_a_download() -> None:
    corpus = load(config.DataConfig(), MODEL)
    assert len(corpus.tokens) > 1_000_000
    assert b"import" in bytes(corpus.tokens[:100_000].astype(np.uint8))


# Errors


def refusal(model: config.ModelConfig = MODEL, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        load(config.DataConfig.model_validate(keys), model)
    line = str(caught.value)
    assert line.splitlines() == [line]
    return line


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "gone.txt" in refusal(kind="text", path=str(tmp_path / "gone.txt"))
    assert "gone.bin" in refusal(kind="tokens", path=str(tmp_path / "gone.bin"))


def test_a_folder_without_a_matching_file_is_named_with_its_glob(tmp_path: Path) -> None:
    line = refusal(kind="text", path=str(tmp_path), glob="*.rst")
    assert str(tmp_path) in line
    assert "*.rst" in line


@pytest.mark.parametrize("glob", ["", "/etc/*", "**x/["])
def test_a_glob_that_is_none_is_refused(tmp_path: Path, glob: str) -> None:
    refusal(kind="text", path=str(tmp_path), glob=glob)


def test_utf_16_is_refused_as_it_is_twice_as_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000, encoding="utf-16")
    assert refusal(kind="text", path=str(tmp_path)).endswith("a.txt is UTF-16; save it as UTF-8")


@pytest.mark.parametrize("others", [b"caf\xe9 " * 200, bytes(range(256)) * 4, "caf\u00e9 ".encode() * 200 + b"\xc3"])
def test_text_that_is_not_utf_8_is_learned_as_it_is_and_a_warning_says_so(tmp_path: Path, others: bytes) -> None:
    """Latin-1, any bytes, and text whose last character is cut."""
    data = config.DataConfig(kind="text", path=str(tmp_path))
    (tmp_path / "a.txt").write_text("caf\u00e9 " * 1000, encoding="utf-8-sig")
    assert load(data, MODEL).warnings == []
    (tmp_path / "b.txt").write_bytes(others)
    corpus = load(data, MODEL)
    (said,) = corpus.warnings
    assert said.startswith(f"data: {tmp_path / 'b.txt'} is not UTF-8; the model learns the bytes as they are; save")
    assert bytes(np.asarray(corpus.tokens)).endswith(others)
    (tmp_path / "c.txt").write_bytes(others)
    (said,) = load(data, MODEL).warnings
    assert said.startswith(f"data: 2 files, such as {tmp_path / 'b.txt'}, are not UTF-8; the model learns")


def test_a_character_across_two_parts_of_a_long_text_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "UTF8_BYTES", 5)
    (tmp_path / "a.txt").write_text("\u6771\u4eac" * 1000, encoding="utf-8")
    assert load(config.DataConfig(kind="text", path=str(tmp_path)), MODEL).warnings == []


def test_too_few_tokens_are_refused_with_how_many_are_needed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert str(ENOUGH) in refusal(kind="text", path=str(tmp_path / "short.txt"))


def test_as_many_tokens_as_the_message_asks_for_are_enough(tmp_path: Path) -> None:
    (tmp_path / "enough.txt").write_text("x" * ENOUGH)
    assert load(config.DataConfig(kind="text", path=str(tmp_path / "enough.txt")), MODEL).evaluation(2)[0].shape == (
        2,
        16,
    )


@pytest.mark.parametrize("token_bytes", [2, 4])
def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path, token_bytes: int) -> None:
    tokens = np.zeros(1000, dtype=np.uint16 if token_bytes == 2 else np.uint32)
    tokens[777] = 256
    tokens.tofile(tmp_path / "tokens.bin")
    line = refusal(kind="tokens", path=str(tmp_path / "tokens.bin"))
    assert "256" in line


def test_text_needs_a_vocabulary_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    small = config.ModelConfig(depth=1, width=32, context=CONTEXT, vocabulary=100)
    assert "vocabulary" in refusal(small, kind="text", path=str(tmp_path / "a.txt"))


@pytest.mark.parametrize("size", [0, 2001])
def test_a_tokens_file_of_an_odd_size_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(size))
    assert "tokens.bin" in refusal(kind="tokens", path=str(tmp_path / "tokens.bin"))


def test_a_folder_is_no_tokens_file(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(kind="tokens", path=str(tmp_path))


def test_a_text_that_is_not_there_is_told_from_a_folder_without_text(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "text", f"data: {tmp_path / 'text'} does not exist; give --data PATH"),
        (tmp_path, f"data: no text at {tmp_path} that matches"),
    ):
        with pytest.raises(UserError) as refused:
            load(config.DataConfig(kind="text", path=str(path)), MODEL)
        assert str(refused.value).startswith(said)
