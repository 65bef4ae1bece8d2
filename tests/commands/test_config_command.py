"""decentral config: what it prints is a config, and `--explain` finds a key or names the nearest."""

from pathlib import Path

import pytest

from decentral.commands import config
from decentral.core import own_yaml
from decentral.core.config import Config, load


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert config.main(flags) == 0
    return capsys.readouterr().out


def test_what_it_prints_is_the_config_of_all_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys)
    (tmp_path / "all.yaml").write_text(text)
    assert load(tmp_path / "all.yaml") == Config()
    every = Config().model_dump(mode="json", by_alias=True)
    del every["model"]["weights"], every["data"]["tokenizer_digest"]  # the run's first peer fills these in
    assert own_yaml.mapping(text, "all") == every


def test_a_key_is_explained_with_its_meaning_unit_range_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--explain", "gossip.window_s") == (
        "# Time between two exchanges; peers lengthen it to stay within `link_share` and `core_share`.\n"
        "# Unit: seconds. Range: number, at least 0.01, at most 1e+07\n"
        "window_s: 0.5\n"
    )


def test_a_section_is_explained_with_all_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert own_yaml.mapping(printed(capsys, "--explain", "routes"), "routes") == {
        "routes": Config().routes.model_dump(mode="json")
    }


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("gossip.windw_s", "gossip.window_s"), ("learning_rate", "train.learning_rate"), ("rope_scaling.factr", "factor")],
)
def test_an_unknown_key_is_refused_and_the_nearest_is_named(
    key: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.main(["--explain", key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --explain: unknown key {key}; did you mean ")
    assert line.endswith(f"{nearest}?")
