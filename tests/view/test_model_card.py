"""The model card of an export: metadata that programs read, and nothing in it that another peer could make markup."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from decentral.core.config import Config, load
from decentral.view.loss_curve import LossCurve, common, sparkline
from decentral.view.model_card import MARK, CardFacts, card_of
from decentral.view.run_history import RunHistory, history_of
from tests.commands.test_compare_command import run_in

EVIL = "<script>alert(1)</script>|[x](http://evil.example)"


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    folder = run_in(tmp_path / "run", "one-aaaaaa", 1000, 2.0, peers=2)
    return history_of((path.parent.name, path) for path in sorted(folder.glob("*/journal.jsonl")))


def test_the_metadata_are_yaml_and_the_sections_tell_who_and_how_well(history: RunHistory) -> None:
    text = card_of(CardFacts("one-aaaaaa", load(None, ["train.optimizer=adamw"]), history, 100, ("books",)))
    _, metadata, body = text.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["library_name"] == "transformers"
    assert found["pipeline_tag"] == "text-generation"
    assert "trained with decentral" in body
    assert "by 2 peers on 200 k tokens; last held-out loss 2.000 nats per token" in body
    assert 'AutoModelForCausalLM.from_pretrained("THIS_FOLDER")' in body
    assert 'train.optimizer: "adamw"' in body
    assert "| 50.0% |" in body
    assert "| 200,000 | 100 s | 2.0000 |" in body
    assert "books" in body
    assert text.endswith(f"{MARK}\n")


def test_shares_are_said_to_be_by_the_peers_own_journals(history: RunHistory) -> None:
    text = card_of(CardFacts("a-1", Config(), history, 12))
    assert "own journal; `decentral ledger` has what other peers measured" in text


def test_names_of_others_are_no_markup(history: RunHistory) -> None:
    text = card_of(CardFacts(EVIL, Config(), history, 1, (EVIL,)))
    assert "<script>" not in text
    assert "](http" not in text
    assert "ann&#124;0" in text


def test_without_journals_the_card_says_so() -> None:
    text = card_of(CardFacts("one-aaaaaa", Config(), None, 12))
    assert "No journals were at hand" in text
    assert "at learning-rate step 12, which counts the steps of the swarm" in text


def test_a_data_set_of_the_hub_is_in_the_metadata() -> None:
    run = load(None, ["data.kind=huggingface", "data.path=ann/books", "data.tokenizer=/t"])
    text = card_of(CardFacts("a-1", run, None, 1, ("ann/books", "local")))
    assert yaml.safe_load(text.split("---\n")[1])["datasets"] == ["ann/books"]


def test_a_curve_is_the_mean_of_the_peers_that_run(history: RunHistory) -> None:
    curve = LossCurve.of(history)
    assert curve.kind == "held-out"
    assert curve.at("seconds", np.array([50.0, 1000.0]))[0] == pytest.approx(3.5)
    assert np.isnan(curve.at("seconds", np.array([1000.0]))[0])
    assert common([curve, curve], "tokens", 3).tolist() == pytest.approx([20_000, 63_245.6, 200_000], rel=1e-3)


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([1.0], "▁"), ([3, 2, 1], "█▅▁"), ([float("nan"), 1, 2], "▁█")])
def test_a_sparkline_falls_as_the_values_do(values: list[float], bars: str) -> None:
    assert sparkline(values, 10) == bars


def test_a_sparkline_has_no_more_bars_than_its_width() -> None:
    assert len(sparkline(list(range(1000)), 10)) == 10
