"""python -m decentral.generate: text on standard output, its source on standard error, and errors of one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentral.commands import export, generate
from decentral.core import jobs
from decentral.core.ids import RunId
from decentral.core.plain_text import printable_lines
from decentral.data.text_codec import ByteCodec
from decentral.engine.compute import Compute, ComputeSetup
from decentral.model import huggingface
from decentral.peers.startup.state import StateFolder
from decentral.serving import decoding, gather_weights
from decentral.serving.gather_weights import HolderWeights
from tests.commands.refusals import JOIN
from tests.data.few_words import few_words


@pytest.fixture
def folder(setup_of: Callable[..., ComputeSetup]) -> Path:
    """The state folder of a peer."""
    setup = setup_of("A")
    Compute(setup).do(jobs.Save())
    StateFolder(setup.folder).write_run(RunId("words-3fa2c1"), setup.config)
    return setup.folder


def text(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert generate.main([*flags, "--max-tokens", "30", "--seed", "5"]) == 0
    return capfd.readouterr().out


def test_the_text_is_the_prompt_and_what_follows_and_the_source_is_apart(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--state-dir", str(folder), "--max-tokens", "30", "--seed", "5", "the swarm"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("the swarm")
    assert len(said.out) > len("the swarm") + 8
    assert said.err.splitlines()[0] == f"run words-3fa2c1: weights of {folder} at learning-rate step 0; seed 5"


def test_an_exported_folder_says_the_same(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--state-dir", str(folder), "--out", str(tmp_path / "model")]) == 0
    capfd.readouterr()
    ours = text(capfd, "--state-dir", str(folder), "nobody")
    assert text(capfd, "--model", str(tmp_path / "model"), "nobody") == ours


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (8, "the prompt has 200 tokens and the model reads at most 16; only the last 8 of the prompt are used\n"),
        (9, "the model reads at most 16 tokens; beyond them, generation continues from the last 8 tokens only\n"),
    ],
)
def test_what_is_forgotten_is_said(folder: Path, capfd: pytest.CaptureFixture[str], tokens: int, said: str) -> None:
    prompt = "x" * (200 if tokens == 8 else 8)
    flags = ["--state-dir", str(folder), "--seed", "5", "--max-tokens"]
    assert generate.main([*flags, str(tokens), prompt]) == 0
    assert capfd.readouterr().err.endswith(said)
    assert generate.main([*flags, "8", "x" * 8]) == 0
    assert capfd.readouterr().err.endswith("seed 5\n")


def test_a_folder_s_model_reads_all_its_positions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hf_folders = pytest.importorskip("tests.model.hf_folders")
    hf_folders.made(tmp_path / "in", max_position_embeddings=8192)
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(huggingface.tokenizer()))
    theirs, prompt = hf_folders.loaded(tmp_path / "in"), "x" * 2400 + "the swarm"
    assert generate.main(["--model", str(tmp_path / "in"), "--temperature", "0", "--max-tokens", "6", prompt]) == 0
    tokens = torch.tensor([list(prompt.encode())])
    found = theirs.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    decode = ByteCodec().decoder()
    expected = "".join(decode(int(token)) for token in found[0, tokens.shape[1] :])
    assert printable_lines(capfd.readouterr().out.removeprefix(prompt)) == printable_lines(expected) + "\n"


def test_an_empty_text_begins_one(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert text(capfd, "--state-dir", str(folder), "")


def test_nothing_that_the_model_says_is_obeyed_by_a_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "generate", lambda *_: iter(b"a\x1b[2J\r\tb\n\xe2\x80\xaec"))
    assert text(capfd, "--state-dir", str(folder), "x") == "xa?[2J?\tb\n?c\n"


def test_the_holders_are_named_with_their_steps() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    whole = [HolderWeights("A", {0: one, 1: one}, {0: 4, 1: 4})]
    parts = [HolderWeights("A", {0: one}, {0: 4}), HolderWeights("B", {1: other, 2: other}, {1: 5, 2: 6})]
    some_twice = [*parts, HolderWeights("C", {2: one}, {2: 5})]
    mean = [HolderWeights(name, {0: one}, {0: 9}) for name in "ABCDE"]
    assert gather_weights.whose(whole) == "weights of A at learning-rate step 4"
    assert gather_weights.whose(parts) == "weights of A at learning-rate step 4, B at learning-rate steps 5 to 6"
    assert gather_weights.whose(some_twice).endswith("C at learning-rate step 5, each layer the mean of up to 2")
    assert gather_weights.whose(mean).endswith("D at learning-rate step 9 and 1 more, each layer the mean of up to 5")


# Errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["x"], "expected exactly one of --join ADDR of a running peer, --state-dir DIR, or --model FOLDER"),
        (["x", "--join", JOIN, "--model", "b"], "expected exactly one of"),
        (["x", "--model", "gone"], "--model gone: there is no such folder"),
        (["x", "--state-dir", "gone"], "--state-dir gone has no peer's state"),
        (["x", "--model", "b", "--max-tokens", "0"], "--max-tokens must be between 1 and"),
        (["x", "--model", "b", "--temperature", "nan"], "--temperature must be between 0 and"),
        (["x", "--model", "b", "--top-p", "1.5"], "--top-p must be between 0 and 1; it is 1.5"),
        (["x", "--model", "b", "--device", "abacus"], "--device expects"),
        (["--model", "b"], "required: text"),
    ],
)
def test_a_mistake_takes_one_line(flags: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate.main(flags) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_tokenizer_for_a_run_of_bytes_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["x", "--state-dir", str(folder), "--tokenizer", "somewhere"]) == 2
    assert "--tokenizer: this run's tokens are bytes" in capfd.readouterr().err


def test_a_prompt_that_the_tokenizer_cannot_encode_takes_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hf_folders = pytest.importorskip("tests.model.hf_folders")
    hf_folders.made(tmp_path)
    capfd.readouterr()  # how far the library is with writing the model
    assert generate.main(["the hive", "--model", str(few_words(tmp_path))]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: the tokenizer cannot encode this text (WordLevel error")


def test_an_adapter_s_folder_is_no_model_and_the_user_is_told_what_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert generate.main(["--model", str(tmp_path), "text"]) == 2
    assert "this folder is a peft adapter: export with --format huggingface" in capfd.readouterr().err
