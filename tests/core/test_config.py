"""Configs: what is refused is refused with one line that helps; what is accepted has one canonical text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core import config
from decentral.core.choices import OPTIMIZERS
from decentral.core.config import Config, load, shipped_configs
from decentral.core.config_keys import keys_of
from decentral.core.errors import UserError
from decentral.core.own_inputs import OwnInputs
from tests.core.bounds import unbounded

Plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def refusal(*overrides: str, path: Path | str | None = None) -> str:
    """The line with which the config is refused."""
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return one_line(caught.value)


def one_line(error: UserError) -> str:
    line = str(error)
    assert line, "an empty complaint helps nobody"
    assert line.splitlines() == [line], "a complaint is one line"
    assert len(line) < 1000, "a complaint is short"
    return line


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_without_a_path_the_shipped_default_is_loaded() -> None:
    assert load(None).name == "stdlib-gpt"


def test_every_shipped_config_loads_by_its_name() -> None:
    names = [entry.name.removesuffix(".yaml") for entry in shipped_configs()]
    assert "default" in names
    for name in names:
        assert isinstance(load(name), Config)


def test_a_file_of_ones_own_is_loaded(tmp_path: Path) -> None:
    assert load(file(tmp_path, "name: mine\nmodel: {depth: 3}\n")).model.depth == 3


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(file(tmp_path, "# nothing\n")) == Config()


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("gossip.windw_s=2", "gossip.windw_s", "gossip.window_s"),
        ("train.learning_rat=1e-3", "train.learning_rat", "train.learning_rate"),
        ("modle.depth=2", "modle", "model"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override: str, unknown: str, nearest: str) -> None:
    line = refusal(override)
    assert unknown in line
    assert line.endswith(f"did you mean {nearest}?")


def test_an_unknown_key_like_no_other_is_refused_without_a_guess() -> None:
    assert "did you mean" not in refusal("zzzzzzzz=1")


@pytest.mark.parametrize(
    ("override", "key", "came"),
    [
        ("gossip.window_s=fast", "gossip.window_s", "'fast'"),
        ("model.depth=2.5", "model.depth", "2.5"),
        ("model.depth='2'", "model.depth", "'2'"),
        ("train.compile=1", "train.compile", "1"),
        ("train.micro_batch=many", "train.micro_batch", "'many'"),
        ("train.learning_rate=fast", "train.learning_rate must be", "'fast'"),
        ("gossip.algorithm=rumour", "gossip.algorithm", "'rumour'"),
        ("model.depth=0", "model.depth", "0"),
        ("gossip.window_s=-1", "gossip.window_s", "-1"),
        ("gossip=7", "gossip", "7"),
        ("name=Not A Name", "name", "'Not A Name'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_came(override: str, key: str, came: str) -> None:
    line = refusal(override)
    assert key in line
    assert came in line


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.width=33"], "model"),
        (["model.width=64", "model.heads=4", "model.kv_heads=3"], "model"),
        (["data.kind=text"], "data"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(overrides: list[str], key: str) -> None:
    assert refusal(*overrides).startswith(f"config: {key}")


def test_set_changes_one_value_and_leaves_the_others() -> None:
    changed = load(None, ["gossip.window_s=2", "model.depth=4"])
    assert (changed.gossip.window_s, changed.model.depth) == (2.0, 4)
    assert changed.train == load(None).train


def test_the_last_of_two_overrides_wins() -> None:
    assert load(None, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("other", ["train.accumulate=257", "routes.overlap=true"])
def test_what_a_synchronous_run_cannot_have_is_refused(other: str) -> None:
    key = other.partition("=")[0]
    assert key in refusal("gossip.algorithm=synchronous", other)
    assert load(None, ["gossip.algorithm=synchronous", "train.accumulate=256"]).synchronous


@pytest.mark.parametrize("override", ["gossip.window_s", "=3", "", "name.first=x", "model.depth=[1"])
def test_an_override_that_is_no_key_and_value_is_refused(override: str) -> None:
    assert "--set" in refusal(override)


@pytest.mark.parametrize(("text", "rate"), [("8e-3", 8e-3), ("1E-4", 1e-4), ("8.0e-3", 8e-3), ("2e+1", 20.0)])
def test_a_rate_may_be_written_as_people_write_it(text: str, rate: float) -> None:
    assert load(None, [f"train.learning_rate={text}"]).train.learning_rate == rate


def test_the_digest_does_not_depend_on_how_the_file_is_written(tmp_path: Path) -> None:
    one = load(file(tmp_path, "seed: 3\nmodel:\n  depth: 3\n  context: 64\n")).digest()
    other = load(file(tmp_path, "# mine\nmodel: {context: 64, depth: 3}\nseed: 3\n")).digest()
    assert one == other


def test_a_key_that_came_later_changes_the_digest_only_where_it_is_set() -> None:
    """Checkpoints name the digest of their run, and a run may be older than the key."""
    plain = load(None, ["model.family=granite"])
    assert "block" not in json.loads(plain.canonical())["model"]
    scaled = load(None, ["model.family=granite", "model.block={residual_multiplier: 0.5}"])
    assert json.loads(scaled.canonical())["model"]["block"]["residual_multiplier"] == 0.5
    assert config.validated(json.loads(plain.canonical())) == plain


def test_keys_that_are_retired_stay_in_the_digest() -> None:
    """These digests are of a version that had them: its checkpoints and state folders go on."""
    assert load(None).digest() == "b1e9990102601d567e7c4ac259ee5058"
    assert (
        load(None, ["gossip.algorithm=synchronous", "train.accumulate=4"]).digest()
        == "b0e831b3e299bbf73b5f5dec427b59ce"
    )


def test_a_later_key_of_a_section_within_a_section_leaves_digests_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    biased = load(None, ["model.block.attention_bias=true"])
    assert biased.digest() == "dc5b340d2bf318c58653b0e281c8e572", "of a release with all options that there are now"
    monkeypatch.setattr(config, "LATER_KEYS", (*config.LATER_KEYS, ("model", "block", "logits_scaling")))
    shown = json.loads(biased.canonical())["model"]["block"]
    assert shown["attention_bias"]
    assert "logits_scaling" not in shown
    scaled = load(None, ["model.family=granite", "model.block.logits_scaling=2"])
    assert json.loads(scaled.canonical())["model"]["block"]["logits_scaling"] == 2
    assert load(None).digest() == "b1e9990102601d567e7c4ac259ee5058"


RETIRED = [(section, key, value) for section, keys in config.RETIRED_KEYS.items() for key, value in keys.items()]


@pytest.mark.parametrize(("section", "key", "value"), RETIRED)
def test_a_retired_key_is_taken_with_its_old_default_alone(section: str, key: str, value: float) -> None:
    assert load(None, [f"{section}.{key}={value}"]) == load(None)
    assert refusal(f"{section}.{key}=0.25") == (
        f"config: {section}.{key} must be {value} in this release, but is 0.25; "
        "leave it out, or use the release that the run began with"
    )


def test_the_alpha_of_adapters_is_twice_their_rank() -> None:
    adapted = load(None, ["model.lora={rank: 16, alpha: 32.0}"])
    assert adapted == load(None, ["model.lora={rank: 16}"])
    assert json.loads(adapted.canonical())["model"]["lora"]["alpha"] == 32.0
    assert config.validated(json.loads(adapted.canonical())) == adapted
    assert "alpha must be 32 (twice the rank) in this release, but is 16" in refusal("model.lora={rank: 16, alpha: 16}")


@pytest.mark.parametrize(("context", "sequences"), [(16, 64), (128, 64), (256, 32), (4096, 8)])
def test_an_evaluation_has_about_as_many_tokens_for_any_context(context: int, sequences: int) -> None:
    assert load(None, [f"model.context={context}"]).eval_sequences == sequences


def test_what_the_run_s_first_peer_fills_in_is_no_key_of_users() -> None:
    assert not {"model.weights", "data.tokenizer_digest"} & {key.path for key in keys_of(config.Config)}


def test_the_digest_changes_with_any_value() -> None:
    assert load(None, ["seed=1"]).digest() != load(None).digest()


def test_what_is_not_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in refusal(path=file(tmp_path, "name: x\nmodel: ]\n"))


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just words", "7"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "mapping" in refusal(path=file(tmp_path, text))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    said = refusal(path=file(tmp_path, "#" * (config.MAX_YAML_BYTES + 1)))
    assert "expected at most 65536 bytes; it has 65537" in said


def test_a_folder_hides_no_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = load("small")
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("small") == shipped


def test_a_missing_file_is_refused_with_the_names_of_the_shipped_ones(tmp_path: Path) -> None:
    line = refusal(path=tmp_path / "gone.yaml")
    assert "gone.yaml" in line
    assert "default" in line


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00\x81" * 50)
    assert "weights.bin" in refusal(path=path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(path=tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("seed: " + "9" * 5000, id="a number of 5000 digits"),
        pytest.param("seed: " + ":".join(["1"] * 5000), id="a number to base 60"),
        pytest.param("seed: 0x" + "f" * 5000, id="a hexadecimal number"),
        pytest.param("seed: 0x_", id="a hexadecimal number without digits"),
        pytest.param("name: 2001-99-99", id="a date that is none"),
        pytest.param('"two\\nlines": 1', id="a key with a line break"),
        pytest.param("name: " + "a" * 60_000, id="a very long value"),
        pytest.param("1: 2", id="a key that is a number"),
        pytest.param("? [a]\n: 1", id="a key that is a list"),
        pytest.param("[" * 30_000, id="lists in lists"),
        pytest.param("!!python/object/apply:os.getcwd []", id="a call"),
    ],
)
def test_a_file_that_is_strange_is_one_short_line(tmp_path: Path, text: str) -> None:
    refusal(path=file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("model: &m {depth: 3}\n", "an anchor or an alias at line 1"),
        ("a: &a [*a]", "an anchor or an alias at line 1"),
        ("model:\n  <<: {depth: 3}\n", "a merge key at line 2"),
        ("name: *mine\n", "an anchor or an alias at line 1"),
    ],
)
def test_anchors_and_merge_keys_are_refused_with_their_line(tmp_path: Path, text: str, what: str) -> None:
    assert f"has {what}; write the values out" in refusal(path=file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("seed: 1\nname: x\nseed: 2\n", "the key seed twice, first at line 1, again at line 3"),
        ("model:\n  depth: 3\nmodel:\n  width: 64\n", "the key model twice, first at line 1, again at line 3"),
        ("model:\n  depth: 3\n  width: 64\n  depth: 4\n", "the key depth twice, first at line 2, again at line 4"),
        ("model: {depth: 3, 'depth': 4}\n", "the key depth twice, first at line 1, again at line 1"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path, text: str, what: str) -> None:
    """The last one won without a word."""
    assert f"has {what}; keep one of them" in refusal(path=file(tmp_path, text))


def test_merge_keys_that_double_thirty_times_expand_nothing(tmp_path: Path) -> None:
    """Without the refusal this file of 800 bytes would make a mapping of a billion entries."""
    doubled = "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    assert "anchor" in refusal(path=file(tmp_path, "a0: &a0 {x: 1}\n" + doubled))


@pytest.mark.parametrize("seed", ["1:1:1", "1:1:1.5", "0x_", "2001-01-01", "true", "1.5", ".nan"])
def test_a_seed_that_is_no_whole_number_is_refused(seed: str) -> None:
    assert "seed" in refusal(f"seed={seed}")


def test_an_alias_in_an_override_is_refused() -> None:
    assert "--set" in refusal("name=&a [*a]")


@given(st.dictionaries(st.sampled_from(sorted(Config.model_fields)) | st.text(max_size=6), Plain, max_size=3))
def test_any_tree_is_a_config_or_refused_in_one_line(tree: dict[str, object]) -> None:
    try:
        config.validated(tree)
    except UserError as error:
        one_line(error)


# Bounds


def test_every_number_and_text_of_a_config_has_bounds() -> None:
    assert unbounded(Config) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.depth=3e9", "model.depth"),
        ("model.depth=3000000000", "model.depth"),
        ("swarm.max_peers=1000000000", "swarm.max_peers"),
        ("train.micro_batch=1000000", "train.micro_batch times model.context"),
        ("model.context=1000000", "channels of a head is "),
        ("gossip.window_s=1e-9", "gossip.window_s"),
        ("swarm.checkpoint_every_s=1e-9", "swarm.checkpoint_every_s"),
        ("train.emulated_micro_batch_s=.inf", "train.emulated_micro_batch_s"),
        ("train.learning_rate=.nan", "train.learning_rate"),
    ],
)
def test_a_value_that_would_fill_a_memory_or_keep_a_core_busy_is_refused(override: str, key: str) -> None:
    assert key in refusal(override)


# What only the user names


def test_data_of_ones_own_may_be_named_by_a_flag() -> None:
    found = load(None, ["data.kind=text"], OwnInputs(data="/my/text", data_glob="*.md"))
    assert (found.data.path, found.data.glob) == ("/my/text", "*.md")


def test_a_flag_for_data_goes_before_the_file() -> None:
    found = load(None, ["data.kind=text", "data.path=/elsewhere"], OwnInputs(data="/my/text"))
    assert found.data.path == "/my/text"


def test_data_that_the_run_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"--data: data\.kind python-stdlib reads no file; add --set data\.kind=text"):
        load(None, [], OwnInputs(data="/my/text"))
    with pytest.raises(UserError, match=r"reads no file; add --set data\.kind=huggingface"):
        load(None, [], OwnInputs(data="/my/rows.jsonl"))


def test_what_is_expected_and_the_key_are_said_in_plain_english() -> None:
    with pytest.raises(UserError, match=r"train\.micro_batch must be .*an integer"):
        load(None, ["train.micro_batch=three"])
    with pytest.raises(UserError, match=r"^config: data\.kind huggingface needs data\.tokenizer"):
        load(None, ["data.kind=huggingface", "data.path=x"])
    with pytest.raises(UserError, match=r"; did you mean small\?$"):
        load("smal", [])


def test_code_may_be_named_by_a_flag_or_by_the_file_and_both_must_agree() -> None:
    trusted = OwnInputs(model_code="mine:layers")
    assert load(None, [], trusted).model.layers == "mine:layers"
    assert load(None, ["model.layers=mine:layers"], trusted).model.layers == "mine:layers"
    with pytest.raises(UserError, match=r"--trust-model-code mine:layers: the config's model is other:layers"):
        load(None, ["model.layers=other:layers"], trusted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_has_its_own_learning_rate_unless_one_is_given(optimizer: str) -> None:
    run = load(None, [f"train.optimizer={optimizer}"])
    assert run.train.peak_rate == OPTIMIZERS[optimizer].peak_rate
    assert load(None, [f"train.optimizer={optimizer}", "train.learning_rate=3e-3"]).train.peak_rate == 3e-3


@pytest.mark.parametrize("option", ["train.weights=bfloat16", "train.moments=int8"])
def test_what_holders_would_round_apart_is_not_for_exact_gradients(option: str) -> None:
    with pytest.raises(UserError, match="must be float32 where gossip"):
        load(None, [option, "gossip.algorithm=synchronous"])


# A model's families


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.window=8"], "family llama does not support window; omit window"),
        (["model.family=mistral", "model.window=8", "model.context=32768"], "context 32768 must be at most 16384"),
        (["model.heads=3"], "must be an even multiple of heads 3"),
        (["model.heads=1024", "model.kv_heads=1024", "model.head_channels=128"], "head_channels is 131072; expected"),
        (
            ["model.layers=mine:layers", "model.weights=" + 32 * "a"],
            "cannot start from a folder's weights; omit model.from",
        ),
        (["model.weights=short"], "model.weights must"),
        (["model.from=[1]"], "model.from must be"),
        (["model.rope_scaling={kind: yarn, factor: 0.5}"], "model.rope_scaling.factor must be"),
        (["data.part=3/2"], "data.part expects k/n with k from 1 to n; it is 3/2"),
        (["data.kind=huggingface"], "kind huggingface needs data.path, or the flag --data PATH"),
        (["data.kind=huggingface", "data.path=x"], "needs data.tokenizer, or the flag --tokenizer PATH"),
    ],
)
def test_what_a_family_or_data_have_not_is_refused(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_heads_may_have_more_channels_together_than_the_model_is_wide() -> None:
    model = load(None, ["model.width=96", "model.heads=5", "model.head_channels=32"]).model
    assert (model.d_queries, model.d_keys) == (160, 160)


@pytest.mark.parametrize(
    ("override", "meant"),
    [("gossip.window_s=0,5", "; write 0.5"), ("model.depth=1,000", "; write 1000"), ("train.micro_batch=4,5", "")],
)
def test_a_comma_in_a_number_of_the_config_is_explained(override: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"must be an? \w+.*; it is '[^;]*'{meant}$"):
        config.load(None, [override])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learning_rate=fast", "must be a number (number, above 0, at most 1e+12 | auto); it is 'fast'"),
        ("model.depth=0", "must be greater than 0 (integer, above 0, at most 1,024); it is 0"),
    ],
)
def test_a_number_that_is_refused_is_answered_with_its_whole_range(override: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        load(None, [override])
    assert str(refused.value) == f"config: {override.partition('=')[0]} {said}"


def test_the_key_of_the_learning_rate_names_what_auto_takes() -> None:
    (key,) = (one for one in keys_of(Config) if one.path == "train.learning_rate")
    assert all(f"{one.peak_rate:g} for {name}" in key.meaning for name, one in OPTIMIZERS.items())
