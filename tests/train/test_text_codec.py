"""Tokens are text: bytes, or those of a tokenizer; a character that is not whole yet waits."""

import json
from pathlib import Path

import pytest

from decentral.core import config
from decentral.core.errors import UserError
from decentral.train import huggingface, text_codec
from decentral.train.text_codec import ByteCodec, TextCodec, TokenizerCodec

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


def test_a_tokenizer_reads_and_ends_a_text_and_another_one_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf: pip install 'decentral[hf]'")
    made = tokenizers.Tokenizer.from_str(json.dumps(huggingface.tokenizer()))
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    data = config.DataConfig(kind="huggingface", path="x")
    codec = text_codec.of_run(config.Config(data=data), str(tmp_path))
    assert isinstance(codec, TokenizerCodec)
    assert (codec.start, codec.end, codec.size) == (256, 256, 257)
    assert round_trip(codec, "ï☃") == ["", "ï", "", "", "☃"]
    assert isinstance(text_codec.of_folder(tmp_path, None), TokenizerCodec)
    other = config.Config(data=data.model_copy(update={"tokenizer_digest": "0" * 32}))
    with pytest.raises(UserError, match="is another"):
        text_codec.of_run(other, str(tmp_path))
