"""python -m decentral.new: a valid config with only what differs from the defaults, and why."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from decentral.commands import new
from decentral.core import config, own_yaml
from decentral.core.choices import DATA_KINDS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", StringIO())


def written(*flags: str) -> str:
    assert new.main(["mine", *flags]) == 0
    return Path("mine.yaml").read_text()


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert new.main(flags) == 2
    return capsys.readouterr().err


def test_the_file_is_a_config_of_the_size_and_data_that_were_asked_for() -> None:
    Path("books").mkdir()
    written("--model", "125M", "--data", "books", "--peers", "4x4090 home", "--tokens", "10B")
    run = config.load("mine.yaml")
    assert (run.name, run.data.kind, run.data.path) == ("mine", "text", "books")
    assert sum(run.model.layer_parameters) == pytest.approx(125e6, rel=0.08)
    assert (run.train.micro_batch, run.train.accumulate) == (16, 1)
    assert run.train.total_steps == round(1e10 / (16 * 1024 * 4))


@pytest.mark.parametrize(
    ("settings", "step"), [((), (4, 4)), (("train.micro_batch=2",), (2, 1)), (("train.accumulate=2",), (4, 2))]
)
def test_the_schedule_counts_the_steps_that_the_config_sets(settings: tuple[str, ...], step: tuple[int, int]) -> None:
    """Of a 1 B model, total_steps assumed 16 sequences a step, but the file let each peer take 4."""
    flags = [part for one in settings for part in ("--set", one)]
    written("--model", "1B", "--peers", "4x4090 homes:50/500", "--tokens", "10B", *flags)
    run = config.load("mine.yaml")
    assert (run.train.micro_batch, run.train.accumulate) == step
    assert run.train.total_steps == round(1e10 / (step[0] * step[1] * 1024 * 4))


GUESSED = {"text": ["--data", "books"], "tokens": ["--data", "tokens.npy"]}
GUESSED["huggingface"] = ["--data", "rows.jsonl", "--tokenizer", "tok"]


def test_each_kind_of_data_that_has_a_path_is_guessed_from_its_name() -> None:
    assert {*GUESSED} == {kind for kind, one in DATA_KINDS.items() if one.needs_path}
    for kind, flags in GUESSED.items():
        assert own_yaml.mapping(written("--model", "10M", *flags), "mine")["data"]["kind"] == kind  # type: ignore[index]
        Path("mine.yaml").unlink()


def test_it_has_only_keys_that_differ_from_their_defaults() -> None:
    tree = own_yaml.mapping(written("--model", "10M", "--set", "gossip.partners=3"), "mine")
    usual = config.Config().model_dump(by_alias=True)
    for section, keys in tree.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            assert usual[section][key] != value, key
    assert "gossip" not in tree


def test_each_key_has_its_meaning_and_its_reason_above_it() -> None:
    text = written("--model", "10M")
    above = text[: text.index("  depth:")].splitlines()[-2:]
    assert above[0].startswith("  # Blocks between embedding and head. Unit: blocks.")
    assert "parameters" in above[1]


def test_rows_of_text_need_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("{}\n")
    assert "need --tokenizer" in refusal(capsys, "--model", "10M", "--data", "rows.jsonl")
    run = own_yaml.mapping(written("--model", "10M", "--data", "rows.jsonl", "--tokenizer", "tok"), "mine")
    assert run["data"] == {"kind": "huggingface", "path": "rows.jsonl", "tokenizer": "tok"}


def test_a_further_key_is_set_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean gossip.window_s?" in refusal(capsys, "--model", "10M", "--set", "gossip.windw_s=2")
    written("--model", "10M", "--set", "gossip.window_s=2")
    assert config.load("mine.yaml").gossip.window_s == 2


@pytest.mark.parametrize("name", ["my/run", "Mine", "-x", "x" * 42])
def test_a_name_that_is_refused_is_said_which_characters_it_may_have(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    said = refusal(capsys, "--model", "1B", "--", name)
    allowed = "name must be 1 to 41 of the characters a-z, 0-9 and -, of which the first is not -"
    assert said.startswith(f"error: config: {allowed}; it is {name[:5]!r}"[:-1])


@pytest.mark.parametrize("peers", ["2xcpu", "4x4090 homes"])
@pytest.mark.parametrize("key", ["train.micro_batch", "train.accumulate", "model.context"])
def test_a_value_that_is_no_number_of_a_step_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], peers: str, key: str
) -> None:
    flags = ["--model", "10M", "--peers", peers, "--tokens", "1B", "--set", f"{key}=fast"]
    assert f"{key} must be an integer" in refusal(capsys, *flags)


def test_an_existing_file_stays(capsys: pytest.CaptureFixture[str]) -> None:
    text = written("--model", "10M")
    assert "exists already" in refusal(capsys, "mine", "--model", "20M")
    assert Path("mine.yaml").read_text() == text


def test_on_a_terminal_it_asks_and_an_empty_answer_takes_the_default() -> None:
    asked, answers = [], iter(["ours", "20M", "", "", ""])

    def ask(question: str) -> str:
        asked.append(question)
        return next(answers)

    flags = new.parse([])
    new._ask_for(flags, ask)
    assert (flags.name, flags.model, flags.data, flags.peers, flags.tokens) == ("ours", "20M", None, "2xcpu here", 1e8)
    assert len(asked) == 5
    assert asked[-1] == "Tokens to train, of one byte each without a tokenizer [100M]: "


@pytest.mark.parametrize("size", ["lama", "-1", "1e999", "nan"])
def test_a_size_that_is_no_number(capsys: pytest.CaptureFixture[str], size: str) -> None:
    said = refusal(capsys, f"--model={size}")
    assert said == f"error: --model {size}: expected a number of parameters, such as 125M or 1.3B\n"


def test_without_a_terminal_the_size_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --model SIZE" in refusal(capsys)


def test_a_path_of_any_characters_is_the_path_that_a_peer_reads() -> None:
    for number, path in enumerate(("books \U0001f600", 'a "b": #c', "one\u2028gossip:\u2028  window_s: 9")):
        assert new.main([f"mine{number}", "--model", "10M", "--data", path]) == 0
        run = config.load(f"mine{number}.yaml")
        assert (run.data.path, run.gossip.window_s) == (path, config.Config().gossip.window_s)


def test_no_other_file_is_replaced_or_removed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml.new").write_text("notes")
    written("--model", "10M")
    assert Path("mine.yaml.new").read_text() == "notes"
    Path("link.yaml").symlink_to("elsewhere")
    assert "File exists" in refusal(capsys, "link", "--model", "10M")
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("wrong", ["abc", ".inf", ".nan", "2.5"])
def test_a_vocabulary_that_is_no_number_of_tokens_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    said = refusal(capsys, "--model", "10M", "--set", f"model.vocabulary={wrong}")
    assert said == f"error: --set model.vocabulary: expected a whole number; got {wrong!r}\n"


@pytest.mark.parametrize(
    ("data", "flags", "noted"),
    [("books", [], True), ("here", [], False), ("nobody/texts", ["--tokenizer", "mine"], False)],
)
def test_data_that_is_not_here_is_pointed_out(
    capsys: pytest.CaptureFixture[str], data: str, flags: list[str], noted: bool
) -> None:
    Path("here").mkdir()
    written("--model", "10M", "--data", data, *flags)
    note = f"note: {data} is not here yet; a peer needs it when it starts\n"
    assert (note in capsys.readouterr().out) == noted
