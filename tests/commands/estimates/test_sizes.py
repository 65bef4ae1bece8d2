"""The shape of a model that is named by its size."""

import pytest

from decentral.commands.estimates import sizes
from decentral.core.config import Config, validated
from decentral.core.errors import UserError


@pytest.mark.parametrize("vocabulary", [256, 32_768])
@pytest.mark.parametrize(("text", "parameters"), [("60M", 60e6), ("125M", 125e6), ("1.3B", 1.3e9), ("70B", 70e9)])
def test_a_size_becomes_a_valid_shape_with_about_as_many_parameters(
    text: str, parameters: float, vocabulary: int
) -> None:
    shape = sizes.shape_of(text, vocabulary)
    model = validated({"model": {**shape, "vocabulary": vocabulary}}).model
    assert sum(model.layer_parameters) == pytest.approx(parameters, rel=0.08)
    assert shape["width"] % 64 == 0


def test_only_a_number_of_parameters_is_a_size() -> None:
    assert sizes.is_size("125M")
    assert not sizes.is_size("small")


def test_the_rest_of_the_config_stays() -> None:
    run = validated({"train": {"optimizer": "adamw"}, "model": {"context": 512}})
    shaped = sizes.with_shape(run, "10M", frozenset({"context"}))
    assert (shaped.train.optimizer, shaped.model.context) == ("adamw", 512)
    assert sizes.with_shape(Config(), "10M", frozenset()).model.context == sizes.CONTEXT


def test_a_size_and_a_shape_contradict_each_other() -> None:
    with pytest.raises(UserError, match="leave one of both out"):
        sizes.with_shape(Config(), "10M", frozenset({"depth"}))


@pytest.mark.parametrize(("text", "line"), [("5k", "from 100k to 1T"), ("1M", "no shape has so few parameters")])
def test_a_size_that_no_shape_has_is_refused(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        sizes.shape_of(text, 65_536)
