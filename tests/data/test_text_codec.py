"""Tokens are text: bytes, or those of a tokenizer; a character that is not whole yet waits."""

import json
from pathlib import Path

import pytest

from decentral.core import config
from decentral.core.errors import UserError
from decentral.data import stream, text_codec, tokenizer
from decentral.data.documents import TextPiece
from decentral.data.text_codec import ByteCodec, TextCodec, TokenizerCodec
from decentral.model import huggingface
from tests.data.few_words import few_words

TEXT = "naïve ☃ text\n"


def round_trip(codec: TextCodec, text: str) -> list[str]:
    decode = codec.decoder()
    return [decode(token) for token in codec.encode(text)]


def test_a_character_of_several_bytes_comes_when_it_is_whole() -> None:
    assert round_trip(ByteCodec(), "ï☃") == ["", "ï", "", "", "☃"]
    assert "".join(round_trip(ByteCodec(), TEXT)) == TEXT


def test_bytes_that_are_no_character_do_not_stop_the_text() -> None:
    decode = ByteCodec().decoder()
    assert [decode(token) for token in (0xFF, ord("a"))] == ["�", "a"]


def test_a_folder_of_bytes_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(huggingface.tokenizer()))
    monkeypatch.setattr(text_codec, "tokenizer", None)
    assert isinstance(text_codec.of_folder(tmp_path, None), ByteCodec)


def test_a_run_of_bytes_takes_no_tokenizer_and_another_one_needs_it(tmp_path: Path) -> None:
    assert isinstance(text_codec.of_run(config.Config(), None), ByteCodec)
    with pytest.raises(UserError, match="leave the flag out"):
        text_codec.of_run(config.Config(), str(tmp_path))
    with pytest.raises(UserError, match="--tokenizer PATH"):
        text_codec.of_run(config.Config(data=config.DataConfig(kind="tokens", path="x")), None)


def bytes_and(folder: Path, *special: str, begins: str | None = None, **settings: object) -> Path:
    """A folder with a tokenizer of bytes and these special tokens, from 256 on."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf: pip install 'decentral[hf]'")
    made = tokenizers.Tokenizer.from_str(json.dumps(huggingface.tokenizer()))
    made.add_special_tokens(list(special))
    if begins is not None:
        ids = [(begins, made.token_to_id(begins)), (special[0], 256)]
        around = tokenizers.processors.TemplateProcessing(f"{begins} $A {special[0]}", special_tokens=ids)
        made.post_processor = around
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_text_ends_with_each_token_that_the_model_s_files_name(tmp_path: Path) -> None:
    folder = bytes_and(tmp_path, "<end>", "<turn>", "<eot>", eos_token="<end>")
    (folder / "config.json").write_text('{"eos_token_id": 257}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert text_codec.of_folder(folder, None).ends == {256, 257, 258}
    run = config.Config(data=config.DataConfig(kind="huggingface", path="x"))
    assert text_codec.of_run(run, str(folder)).ends == {256, 257, 258}


def test_a_tokenizer_of_another_folder_leaves_the_ends_that_the_model_names(tmp_path: Path) -> None:
    other = bytes_and(tmp_path / "other", "<end>", "<turn>", eos_token="<end>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, true, "x"]}')
    assert text_codec.of_folder(tmp_path, str(other)).ends == {256, 257}


def test_settings_that_are_no_object_are_named(tmp_path: Path) -> None:
    folder = bytes_and(tmp_path, "<end>", eos_token="<end>")
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"generation_config\.json must be a JSON object; it is a list"):
        text_codec.of_folder(folder, None)


@pytest.mark.parametrize(("newer", "end"), [({}, 257), ({"added_tokens_decoder": {}}, 256)])
def test_the_older_file_of_special_tokens_counts_where_transformers_reads_it(
    tmp_path: Path, newer: dict[str, object], end: int
) -> None:
    folder = bytes_and(tmp_path, "<end>", "<turn>", "<begin>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", **newer}))
    older = {"eos_token": {"content": "<turn>", "lstrip": False}, "bos_token": "<begin>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    assert text_codec.of_folder(folder, None).start == end
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install 'decentral[hf]'")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    named = tokenizer.special_tokens(folder)
    assert (named.get("eos_token"), named.get("bos_token")) == (theirs.eos_token, theirs.bos_token)


def test_an_end_of_text_that_the_tokenizer_lacks_is_no_guess(tmp_path: Path) -> None:
    folder = bytes_and(tmp_path, "<|endoftext|>", eos_token="<gone>")
    with pytest.raises(UserError, match="has no token '<gone>'; set eos_token"):
        text_codec.of_folder(folder, None)


def test_a_text_begins_as_one_that_is_trained_on_and_ends_only_where_the_model_ends_it(tmp_path: Path) -> None:
    folder = bytes_and(tmp_path, "<end>", "<begin>", begins="<begin>", eos_token="<end>")
    codec, known = text_codec.of_folder(folder, None), tokenizer.load(str(folder))
    assert codec.encode("a") == [257, ord("a")]
    run = config.Config(data=config.DataConfig(kind="tokens", path="x"))
    assert text_codec.of_run(run, str(folder)).encode("a") == codec.encode("a")
    packer = stream.TokenPacker(known)
    packer.add(
        [TextPiece("a", 0, begins=True), TextPiece("b", 1, ends=True), TextPiece("c", 2, begins=True, ends=True)]
    )
    assert packer.take()[0].tolist() == [257, ord("a"), ord("b"), 256, 257, ord("c"), 256]


def test_a_completion_s_beginning_is_not_learned_and_is_in_its_window(tmp_path: Path) -> None:
    folder = bytes_and(tmp_path, "<end>", "<begin>", begins="<begin>", eos_token="<end>")
    packer = stream.TokenPacker(tokenizer.load(str(folder)), context=6)
    packer.add([TextPiece("ab", number, True, True, ((1, 3),)) for number in (0, 1)])
    tokens, learned = packer.take()
    assert tokens.tolist() == [257, ord("a"), ord("b"), 256, 256, 256, 257, ord("a"), ord("b"), 256, 256, 256, 256]
    assert learned.tolist() == [False, False, True, True, False, False] * 2 + [False]


def test_a_text_with_a_word_that_the_tokenizer_lacks_is_refused_in_one_line(tmp_path: Path) -> None:
    known = tokenizer.load(str(few_words(tmp_path)))
    codec = TokenizerCodec(known)
    assert codec.encode("the swarm") == [0, 1]
    said = r"^the tokenizer cannot encode .*\(WordLevel error.*\); use one that has an unknown token$"
    for read in (codec.encode, known.tokens_and_offsets, lambda text: known.tokens(["the", text])):
        with pytest.raises(UserError, match=said):
            read("the hive")


def test_a_token_that_the_library_cannot_decode_is_refused_in_one_line(tmp_path: Path) -> None:
    decode = TokenizerCodec(tokenizer.load(str(few_words(tmp_path)))).decoder()
    with pytest.raises(UserError, match="the tokenizer cannot decode token -1"):
        decode(-1)


def test_a_tokenizer_reads_and_ends_a_text_and_another_one_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf: pip install 'decentral[hf]'")
    made = tokenizers.Tokenizer.from_str(json.dumps(huggingface.tokenizer()))
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    data = config.DataConfig(kind="huggingface", path="x")
    codec = text_codec.of_run(config.Config(data=data), str(tmp_path))
    assert isinstance(codec, TokenizerCodec)
    assert (codec.start, set(codec.ends), codec.size) == (256, {256}, 257)
    assert round_trip(codec, "ï☃") == ["", "ï", "", "", "☃"]
    assert isinstance(text_codec.of_folder(tmp_path, None), TokenizerCodec)
    other = config.Config(data=data.model_copy(update={"tokenizer_digest": "0" * 32}))
    with pytest.raises(UserError, match="differs from this run"):
        text_codec.of_run(other, str(tmp_path))
