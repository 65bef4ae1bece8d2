"""A config from a stranger: bounded before it is parsed, and nothing that it names is run or read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core import config
from decentral.core.config import Config, load
from decentral.core.errors import UserError
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.received import received
from decentral.model import decoder


def refusal(text: str, own: OwnInputs = NOTHING_NAMED) -> str:
    """The one line with which a joiner refuses this config."""
    with pytest.raises(UserError) as caught:
        received(text).adopt(own)
    line = str(caught.value)
    assert line.isprintable()
    assert 0 < len(line) < 1000
    return line


def changed(section: str, **keys: Any) -> str:
    """A whole config as it travels, with some keys as a liar would write them."""
    tree = json.loads(Config().canonical())
    tree[section] |= keys
    return json.dumps(tree)


def test_canonical_text_round_trips() -> None:
    run = load(None, ["model.kv_heads=1", "train.total_steps=100", "train.learning_rate=8e-3", "seed=7"])
    again = received(run.canonical()).adopt(NOTHING_NAMED)
    assert again == run
    assert again.canonical() == run.canonical()


def test_the_longest_config_may_travel() -> None:
    longest = load(None, ["name=" + "a" * 41, "model.layers=" + "\\" * 256, "seed=-4611686018427387904"])
    assert len(longest.canonical()) < config.MAX_CONFIG_BYTES / 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{" + " " * config.MAX_CONFIG_BYTES + "}", id="too large"),
        pytest.param('{"a":' * 1000 + "1" + "}" * 1000, id="nested"),
        pytest.param("[" * 8000, id="lists that do not end"),
        pytest.param('{"seed": [' + "1," * 1000 + "1]}", id="many values"),
        pytest.param('{"seed": ' + "9" * 5000 + "}", id="a number of 5000 digits"),
        pytest.param('{"seed": NaN}', id="not a number"),
        pytest.param('{"train": {"learning_rate": 1e999}}', id="an infinite number"),
        pytest.param('{"seed": 1, "seed": 2}', id="a key twice"),
        pytest.param('{"two\\nlines": 1}', id="a key with a line break"),
        pytest.param('{"name": "\\u001b[2J\\u202e"}', id="escapes of a terminal"),
        pytest.param('{"name": "\\ud800"}', id="half a surrogate"),
        pytest.param("\ud800", id="no text"),
        pytest.param("[]", id="a list"),
        pytest.param("null", id="nothing"),
        pytest.param("", id="empty"),
        pytest.param("seed: 3\n", id="YAML"),
        pytest.param("a0: &a0 {x: 1}\nb: {<<: [*a0, *a0]}\n", id="merge keys"),
    ],
)
def test_a_hostile_config_is_one_short_line(text: str) -> None:
    refusal(text)


@given(st.text(max_size=60) | st.text(alphabet='{}[]":,0123456789eaNI \n', max_size=200))
def test_any_text_is_a_config_or_refused_in_one_line(text: str) -> None:
    try:
        received(text)
    except UserError as error:
        said = str(error)
    else:
        return
    assert said.isprintable()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("model", "depth", 3_000_000_000), ("swarm", "max_peers", 1 << 40), ("gossip", "window_s", 1e-9)],
)
def test_a_value_out_of_bounds_is_named(section: str, key: str, value: object) -> None:
    assert f"{section}.{key}" in refusal(changed(section, **{key: value}))


# Code


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that leaves a file where it is imported."""
    (tmp_path / "strangers.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "Path(__file__).with_name('ran').touch()\n"
        "def layers(model): return [nn.Embedding(8, 8), nn.Linear(8, 8)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers", raising=False)
    return changed("model", layers="strangers:layers")


def test_code_that_the_swarm_names_is_not_run_and_the_line_says_which_flag_would(code: str, tmp_path: Path) -> None:
    assert refusal(code).endswith("if you trust it, give --trust-model-code strangers:layers")
    assert not (tmp_path / "ran").exists()


def test_code_that_the_user_trusts_runs(code: str, tmp_path: Path) -> None:
    run = received(code).adopt(OwnInputs(model_code="strangers:layers"))
    assert decoder.parameters(run.model) == [64, 72]
    assert (tmp_path / "ran").exists()


def test_other_code_than_the_swarm_s_is_refused_and_both_are_named(code: str, tmp_path: Path) -> None:
    said = refusal(code, OwnInputs(model_code="mine:layers"))
    assert "mine:layers" in said
    assert "strangers:layers" in said
    assert not (tmp_path / "ran").exists()


def test_trusted_code_that_the_run_does_not_use_is_refused() -> None:
    assert "is built in" in refusal(Config().canonical(), OwnInputs(model_code="mine:layers"))


def test_a_command_that_looks_runs_no_code(code: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model is Python code \\(strangers:layers\\)"):
        received(code).built_in()
    assert not (tmp_path / "ran").exists()


# Data


def test_a_config_on_its_way_names_no_file() -> None:
    run = load(None, ["data.kind=text", "data.path=/home/me/secret", "data.glob=secret*"])
    assert "secret" not in run.canonical()


OWN = [{"path": "/etc/passwd"}, {"glob": "../../.ssh/*"}, {"path": None}, {"column": "password"}, {"tokenizer": "/x"}]


@pytest.mark.parametrize("keys", OWN)
def test_a_swarm_that_names_files_is_refused(keys: dict[str, str | None]) -> None:
    said = refusal(changed("data", kind="text", **keys), OwnInputs(data="/my/text"))
    assert f"data.{next(iter(keys))}" in said


@pytest.mark.parametrize("key", ["from", "start_from"])
def test_a_swarm_that_names_a_folder_to_start_from_is_refused(key: str) -> None:
    assert f"model.{key}" in refusal(changed("model", **{key: "/home/me/model"}))


def test_a_tokenizer_comes_from_the_user_s_own_flag() -> None:
    text = changed("data", kind="huggingface", tokenizer_digest="0" * 32)
    assert refusal(text, OwnInputs(data="/my/rows")).endswith("give --tokenizer PATH, its file or folder")
    own = OwnInputs(data="/my/rows", tokenizer="/my/tokenizer", data_part="1/2")
    data = received(text).adopt(own).data
    assert (data.tokenizer, data.part, data.tokenizer_digest) == ("/my/tokenizer", "1/2", "0" * 32)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_data_come_from_the_user_s_own_flag(kind: str) -> None:
    text = changed("data", kind=kind)
    assert refusal(text) == f"each peer of this swarm trains on its own data of kind {kind}: give --data PATH"
    data = received(text).adopt(OwnInputs(data="/my/text", data_glob="*.md")).data
    assert (data.kind, data.path, data.glob) == (kind, "/my/text", "*.md")


def test_peers_with_their_data_in_other_places_are_in_one_run() -> None:
    one, other = (load(None, ["data.kind=text", f"data.path=/{place}"]) for place in ("here", "there"))
    assert one.digest() == other.digest()


def test_data_that_the_swarm_does_not_read_is_refused() -> None:
    assert "--data" in refusal(Config().canonical(), OwnInputs(data="/my/text"))


# A folder to start from


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    fields = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_a_member_may_have_the_folder_in_another_place_or_not_at_all(model_folder: Path) -> None:
    run = load(None, [f"model.from={model_folder}"])
    text = run.model_copy(update={"model": run.model.model_copy(update={"weights": "0" * 32})}).canonical()
    assert str(model_folder) not in text
    without, with_folder = (
        received(text).adopt(own) for own in (NOTHING_NAMED, OwnInputs(model_folder=str(model_folder)))
    )
    assert (without.model.start_from, with_folder.model.start_from) == (None, str(model_folder))
    assert without.digest() == with_folder.digest()


def test_a_folder_of_another_model_is_refused_and_the_key_is_named(model_folder: Path) -> None:
    own = OwnInputs(model_folder=str(model_folder))
    drawn = Config().canonical()
    assert refusal(drawn, own) == "--model-from: this swarm's model does not start from a folder; leave the flag out"
    other = changed("model", weights="0" * 32, width=32, vocabulary=256, depth=2, heads=2, hidden=64)
    assert "model.depth is 1; in this swarm it is 2" in refusal(other, own)
    windowed = changed("model", weights="0" * 32, family="mistral", window=8, depth=1, width=32, heads=2, hidden=64)
    assert "--model-from" in refusal(windowed, own)


def test_a_command_that_looks_needs_no_data() -> None:
    assert received(changed("data", kind="text")).built_in().data.path is None
