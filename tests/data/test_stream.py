"""Streamed text: every training piece once an epoch, nothing that is held out, no window twice after a restart."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="needs the extra hf: pip install 'decentral[hf]'")
import pyarrow as pa
import tokenizers
from pyarrow import parquet

from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.data import corpora, data_files, documents, run_inputs
from decentral.data import stream as text_stream
from decentral.data import tokenizer as ours
from decentral.data.corpora import Reading
from decentral.data.stream import StreamReader, TextStream

CONTEXT, WORDS_OF_A_DOCUMENT, DOCUMENTS = 16, 40, 80
END = "<end>"
MODEL = config.ModelConfig(depth=1, width=32, context=CONTEXT, vocabulary=8192)
TEXTS = [" ".join(f"w{number}x{word}" for word in range(WORDS_OF_A_DOCUMENT)) for number in range(DOCUMENTS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token for each word, so that a token tells which document it is of; 0 is the separator."""
    words = {END: 0} | {word: number for number, word in enumerate(" ".join(TEXTS).split(), 1)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def parquet_files(folder: Path) -> None:
    for part in range(2):
        rows = [{"n": 1, "text": text} for text in TEXTS[part::2]]
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet", row_group_size=10)


def json_lines(folder: Path) -> None:
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))


def arrow_file(folder: Path) -> None:
    table = pa.Table.from_pylist([{"text": text} for text in TEXTS])
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)


def text_files(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)


FORMATS = [parquet_files, json_lines, arrow_file, text_files]


@pytest.fixture
def stream(tmp_path: Path, tokenizer: Path) -> Callable[..., TextStream]:
    """`stream(write, **keys)`: the documents in a format."""

    def opened(
        write: Callable[[Path], None] = json_lines, model: config.ModelConfig = MODEL, **keys: object
    ) -> TextStream:
        folder = tmp_path / write.__name__
        if not folder.exists():
            folder.mkdir()
            write(folder)
        tree = {"kind": "huggingface", "path": str(folder), "tokenizer": str(tokenizer), "held_out": 0.2, **keys}
        found = corpora.load(config.DataConfig.model_validate(tree), model)
        assert isinstance(found, TextStream)
        return found

    return opened


def reader(
    stream: TextStream, peer: str = "A", folder: Path | None = None, rank: int = 0, ranks: int = 1
) -> StreamReader:
    return stream.micro_batches(Reading(0, PeerId(peer), folder, rank, ranks))


def drawn(source: StreamReader, batches: int) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for number in range(batches) for row in source(number, 4)[0]]


def words(windows: Sequence[Sequence[int]]) -> set[int]:
    return {token for window in windows for token in window} - {0}


def held_out(stream: TextStream) -> set[int]:
    pieces = [piece.text for piece in documents.Documents(stream.data).held_out()]
    return {int(token) for tokens in stream.tokenizer.tokens(pieces) for token in tokens}


def epoch(source: StreamReader) -> list[tuple[int, ...]]:
    """The windows of the reader's first epoch."""
    found = []
    while (windows := source._next.result()).begin.epoch == 0:
        source._turn()
        source._drawn = len(windows.tokens_NT)
        found += [tuple(row[:-1].tolist()) for row in windows.tokens_NT]
    return found


@pytest.mark.parametrize("write", FORMATS)
def test_an_epoch_has_every_document_that_is_not_held_out_and_no_other(
    stream: Callable[..., TextStream], write: Callable[[Path], None]
) -> None:
    found = stream(write)
    trained, kept = words(epoch(reader(found))), held_out(found)
    assert not trained & kept
    assert kept
    every = DOCUMENTS * WORDS_OF_A_DOCUMENT
    assert every - CONTEXT < len(trained) + len(kept) <= every  # what is left over behind the last window is not drawn


def test_all_formats_hold_the_same_text_out(stream: Callable[..., TextStream]) -> None:
    assert len({frozenset(held_out(stream(write))) for write in (parquet_files, json_lines, arrow_file)}) == 1


def test_evaluation_is_on_held_out_text_and_on_the_same_windows_each_time(stream: Callable[..., TextStream]) -> None:
    found = stream()
    batch, again = found.evaluation(64), found.evaluation(64)
    assert all(one.equal(other) for one, other in zip(batch, again, strict=True))
    assert words([row.tolist() for part in batch for row in part]) <= held_out(found)
    assert batch[0].shape == (64, CONTEXT)


def test_about_the_share_that_was_asked_for_is_held_out(stream: Callable[..., TextStream]) -> None:
    found = documents.Documents(stream(held_out=0.3).data)
    assert sum(1 for _ in found.held_out()) == pytest.approx(0.3 * DOCUMENTS, abs=12)  # three standard deviations


def test_no_window_comes_twice_within_an_epoch(stream: Callable[..., TextStream]) -> None:
    found = epoch(reader(stream()))
    assert len(set(found)) == len(found) > 80


def test_the_next_epoch_has_the_same_text_in_another_order(stream: Callable[..., TextStream]) -> None:
    source = reader(stream(parquet_files))
    first = epoch(source)
    again = drawn(source, len(first) // 4)
    assert len(words(again) - words(first)) < CONTEXT  # they were left over behind the first epoch's windows
    assert again != first[: len(again)]


def test_targets_are_the_inputs_one_token_on(stream: Callable[..., TextStream]) -> None:
    inputs_BT, targets_BT = reader(stream())(0, 5)
    assert inputs_BT.shape == targets_BT.shape == (5, CONTEXT)
    assert inputs_BT[:, 1:].equal(targets_BT[:, :-1])


def test_the_same_peer_reads_the_same_and_another_one_something_else(stream: Callable[..., TextStream]) -> None:
    found = stream()
    one, again, other = (drawn(reader(found, peer), 10) for peer in "AAB")
    assert one == again
    assert one != other


# Packing


def test_a_separator_stands_between_documents_and_nowhere_else(stream: Callable[..., TextStream]) -> None:
    for window in epoch(reader(stream())):
        for left, right in pairwise(window):
            goes_on = left and right and (left - 1) // WORDS_OF_A_DOCUMENT == (right - 1) // WORDS_OF_A_DOCUMENT
            assert right == left + 1 if goes_on else 0 in (left, right)


def test_a_document_goes_on_over_its_pieces_but_not_over_a_gap(stream: Callable[..., TextStream]) -> None:
    packer = text_stream.TokenPacker(stream().tokenizer)
    pieces = [
        ("w0x0 w0x1", 5, True, False),
        ("w0x2", 6, False, False),
        ("w0x3", 8, False, True),
        ("w1x0", 9, True, True),
    ]
    packer.add([documents.TextPiece(*piece) for piece in pieces])  # the seventh is held out
    assert packer.take()[0].tolist() == [1, 2, 3, 0, 4, 0, WORDS_OF_A_DOCUMENT + 1, 0]


def test_a_document_in_pieces_is_all_there_in_their_order(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    long = "".join(f"line {number} of many\n" for number in range(40_000))
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("short", long)))
    first, *pieces = documents.Documents(stream(path=str(tmp_path / "long.jsonl")).data).all_pieces()
    assert (first.text, first.begins, first.ends) == ("short", True, True)
    assert "".join(piece.text for piece in pieces) == long
    assert [piece.at - pieces[0].at for piece in pieces] == list(range(len(pieces)))
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("last", ["end\n", "a long last line " * 1000, "a long last line " * 1000 + "\nend"])
def test_only_the_last_piece_of_a_text_file_ends_its_document(
    last: str, stream: Callable[..., TextStream], tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("".join(f"line {number} of many\n" for number in range(40_000)) + last)
    pieces = list(documents.Documents(stream(path=str(tmp_path / "long.txt")).data).all_pieces())
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


# Peers, ranks and shares


def test_shares_of_the_data_are_disjoint_and_make_up_all_of_it(stream: Callable[..., TextStream]) -> None:
    shares = [
        words(epoch(reader(stream(parquet_files, part=f"{k}/3"), peer)))
        for k, peer in zip((1, 2, 3), "ABC", strict=True)
    ]
    assert not shares[0] & shares[1] | shares[0] & shares[2] | shares[1] & shares[2]
    assert len(set().union(*shares)) >= 0.95 * len(words(epoch(reader(stream(parquet_files)))))


@pytest.mark.parametrize(("shares", "ranks"), [(1, 1), (3, 1), (10, 1), (7, 5), (100, 2)])
def test_a_file_is_read_no_oftener_than_its_readers_need(
    stream: Callable[..., TextStream], shares: int, ranks: int
) -> None:
    made = reader(stream(json_lines, part=f"1/{shares}"), ranks=ranks)
    assert data_files.LEAST_PARTS <= made.documents.parts < data_files.LEAST_PARTS + shares * ranks


@pytest.mark.parametrize("shards", [1, 2, 5, 60, 1000])
@pytest.mark.parametrize("readers", [1, 3, 10, 100])
def test_each_reader_has_as_many_parts_as_the_others_or_nearly(shards: int, readers: int) -> None:
    parts = shards * documents.parts_of_a_shard(shards, data_files.LEAST_PARTS, readers)
    own = [len(range(reader, parts, readers)) for reader in range(readers)]
    assert max(own) == min(own) or max(own) <= min(own) * (1 + 1 / data_files.LEAST_PARTS)
    assert min(own) >= 1


def test_the_ranks_of_an_island_read_different_text(stream: Callable[..., TextStream]) -> None:
    one, other = (words(epoch(reader(stream(), rank=rank, ranks=2))) for rank in (0, 1))
    assert one
    assert other
    assert not one & other


# Restarts


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("batches", [1, 12])
def test_a_restart_goes_on_close_behind_and_trains_on_nothing_twice(
    stream: Callable[..., TextStream],
    write: Callable[[Path], None],
    batches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_stream, "TOKENS_AT_ONCE", 1024)
    found = stream(write)
    every = epoch(reader(found))
    before = drawn(reader(found, folder=tmp_path), batches)
    assert before == every[: len(before)]
    after = drawn(reader(found, folder=tmp_path), 5)
    assert not set(before) & set(after)
    assert every.index(after[0]) - len(before) <= 1024 * 2 // CONTEXT // text_stream.MARKS


def test_a_position_of_other_data_or_a_damaged_one_counts_as_none(
    stream: Callable[..., TextStream], tmp_path: Path
) -> None:
    first = drawn(reader(stream(), folder=tmp_path), 3)
    place = tmp_path / "data-position.json"
    assert drawn(reader(stream(held_out=0.1), folder=tmp_path), 3)
    place.write_text("{")
    assert drawn(reader(stream(), folder=tmp_path), 3) == first


def test_data_that_were_moved_or_are_named_otherwise_go_on_where_they_were(
    stream: Callable[..., TextStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = drawn(reader(stream()), 20)
    first = drawn(reader(stream(), folder=tmp_path), 5)
    monkeypatch.chdir(tmp_path)
    relative = stream(path="json_lines")
    second = drawn(reader(relative, folder=tmp_path), 5)
    (tmp_path / "json_lines").rename(tmp_path / "elsewhere")
    moved = stream(path=str(tmp_path / "elsewhere" / "a.jsonl"))
    third = drawn(reader(moved, folder=tmp_path), 5)
    assert first == every[:20]
    assert not set(first) & set(second)
    assert not {*first, *second} & set(third)
    assert relative.warnings == moved.warnings == []


def test_a_file_of_the_folder_that_is_not_read_is_said(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    found = stream()
    (tmp_path / "json_lines" / "notes.csv").write_text("x")
    drawn(reader(found, folder=tmp_path), 1)
    (said,) = found.warnings
    assert "1 file is left out (notes.csv)" in said


@pytest.mark.parametrize("change", ["the data", "an older release"])
def test_a_position_that_does_not_count_is_said(stream: Callable[..., TextStream], tmp_path: Path, change: str) -> None:
    drawn(reader(stream(), folder=tmp_path), 3)
    place, file = tmp_path / "data-position.json", tmp_path / "json_lines" / "a.jsonl"
    if change == "the data":
        file.write_text(file.read_text().replace("w3x0", "w3x1"))
    else:
        found = json.loads(place.read_text())
        place.write_text(json.dumps({**found, "key": json.dumps(["json_lines", None, "text", 0.2])}))
    found = stream()
    drawn(reader(found, folder=tmp_path), 3)
    (said,) = found.warnings
    assert said.startswith(f"{place} belongs to other contents or settings of ")
    assert said.endswith("reading starts over and repeats text that this peer has trained on")
    drawn(reader(again := stream(), folder=tmp_path), 3)
    assert again.warnings == []


def test_a_full_disk_does_not_stop_the_stream(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    (tmp_path / "data-position.json.new").mkdir()
    assert len(drawn(reader(stream(), folder=tmp_path), 3)) == 12


# Errors


def refusal(stream: Callable[[], TextStream]) -> str:
    with pytest.raises(UserError) as caught:
        reader(stream())(0, 1)
    line = str(caught.value)
    assert line.isprintable()
    return line


def test_a_column_that_is_not_there_is_named_with_those_that_are(stream: Callable[..., TextStream]) -> None:
    assert "no column body; it has n, text" in refusal(lambda: stream(parquet_files, column="body"))
    assert "expected text" in refusal(lambda: stream(parquet_files, column="n"))


def test_files_that_cannot_be_told_apart_or_read_are_refused(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    assert "no file at" in refusal(lambda: stream(path=str(tmp_path / "json_lines"), glob="*.parquet"))
    assert "neither a file or folder here" in refusal(lambda: stream(path="gone.parquet"))
    (tmp_path / "json_lines" / "b.parquet").write_bytes(b"no parquet")
    assert "several kinds (json, parquet)" in refusal(stream)
    assert "cannot be read" in refusal(lambda: stream(glob="*.parquet"))


def test_a_vocabulary_that_is_too_small_is_refused_with_one_that_fits(stream: Callable[..., TextStream]) -> None:
    small = MODEL.model_copy(update={"vocabulary": 100})
    size = DOCUMENTS * WORDS_OF_A_DOCUMENT + 1
    assert f"--set model.vocabulary={size} would fit" in refusal(lambda: stream(model=small))


def test_a_vocabulary_of_a_folder_is_not_the_user_s_to_enlarge(stream: Callable[..., TextStream]) -> None:
    small = MODEL.model_copy(update={"vocabulary": 100, "weights": "0" * 32})
    said = refusal(lambda: stream(model=small))
    assert "model.vocabulary is 100; use the model's own tokenizer, or enlarge the model with transformers'" in said
    assert "--set" not in said


def test_text_too_short_for_a_held_out_window_is_refused(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps({"text": f"w{number}x0"}) for number in range(9)))
    with pytest.raises(UserError, match=r"\d+ tokens of it are held out, and 18 are needed; lower model\.context"):
        stream(path=str(short)).evaluation(4)


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.9])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_of_few_documents_some_are_held_out_and_some_are_not(
    stream: Callable[..., TextStream], tmp_path: Path, count: int, share: float
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:count]))
    found = stream(path=str(few), held_out=share)
    assert found.evaluation(4)[0].shape == (4, CONTEXT)
    assert words(epoch(reader(found)))
    assert not words(epoch(reader(found))) & held_out(found)


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_short_file_of_text_is_cut_finely_enough_to_hold_some_out(
    stream: Callable[..., TextStream], tmp_path: Path, end: str
) -> None:
    (tmp_path / "one.txt").write_text(end.join(TEXTS))
    found = stream(path=str(tmp_path / "one.txt"), held_out=0.05)
    trained, kept = words(epoch(reader(found))), held_out(found)
    assert not trained & kept
    assert 0.01 < len(kept) / (len(kept) + len(trained)) < 0.2


def test_a_missing_package_is_named_with_how_to_get_it(
    stream: Callable[..., TextStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal(stream).endswith("needs the package datasets: pip install 'decentral[hf]'")


# The tokenizer that all peers share


def test_a_tokenizer_s_digest_is_of_its_tokens_and_its_separator(tokenizer: Path, tmp_path: Path) -> None:
    known = ours.load(str(tokenizer))
    assert (known.separator, known.size) == (0, DOCUMENTS * WORDS_OF_A_DOCUMENT + 1)
    padded = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    padded.enable_padding(length=9)
    padded.enable_truncation(4)
    padded.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="names no end-of-text token"):
        ours.load(str(tmp_path))
    assert ours.load(str(tmp_path), END).digest == known.digest
    assert [len(one) for one in ours.load(str(tmp_path), END).tokens([TEXTS[0], "w1x1"])] == [WORDS_OF_A_DOCUMENT, 1]
    assert ours.load(str(tmp_path), "w1x1").digest != known.digest
    with pytest.raises(UserError, match="has no token 'gone'"):
        ours.load(str(tmp_path), "gone")


def test_a_peer_with_another_tokenizer_is_refused(stream: Callable[..., TextStream], tmp_path: Path) -> None:
    run = run_inputs.sealed(config.Config(model=MODEL, data=stream().data))
    run_inputs.check(run, begun=True)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({END: 0, "a": 1}))
    other.save(str(tmp_path / "other.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    mine = run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": str(tmp_path / "other.json")})})
    with pytest.raises(UserError, match="the tokenizer, or its token between texts, differs from this run"):
        run_inputs.check(mine, begun=True)


@pytest.mark.parametrize("content", [None, "no json", '{"model": {}}'])
def test_a_tokenizer_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=f"--tokenizer {tmp_path}"):
        ours.load(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one strategy")
def test_opening_a_data_set_starts_no_process_that_shares_tensors() -> None:
    code = "import decentral.comm.net.libp2p, torch; print(torch.multiprocessing.get_sharing_strategy())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "file_descriptor"
