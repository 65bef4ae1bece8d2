"""What stands in a line of a journal is of the right kind and size, or is read as if it were not there."""

import math

import pytest

from decentral.core import line_fields

NOT_NUMBERS: list[object] = [None, "7", True, [], {}, math.inf, -math.inf, math.nan, 10**400, 1e18]


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_what_is_no_number_that_a_peer_can_mean_is_none(value: object) -> None:
    line = {"t": value, "x": value, "all": [value, 2]}
    assert line_fields.finite(line, "x") is None
    assert line_fields.time_of(line) is None
    assert (line_fields.number(line, "x"), line_fields.count(line, "x")) == (0.0, 0)
    assert line_fields.numbers(line, "all") == [0.0, 2.0]


def test_numbers_are_read_as_they_are() -> None:
    line = {"t": 1.7e9, "x": -2.5, "n": 7}
    assert (line_fields.finite(line, "x"), line_fields.number(line, "x")) == (-2.5, -2.5)
    assert (line_fields.count(line, "n"), line_fields.time_of(line)) == (7, 1.7e9)


@pytest.mark.parametrize("t", [-1, 1e11])
def test_a_time_that_no_calendar_has_is_none(t: float) -> None:
    assert line_fields.time_of({"t": t}) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"first": 2, "last": 5}, (2, 5)),
        ({"first": -1e17, "last": 4}, (0, 4)),
        ({"first": 5, "last": 2}, (0, 0)),
        ({"first": 0, "last": 1 << 20}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_layers_are_those_that_a_model_can_have(line: line_fields.Line, expected: tuple[int, int]) -> None:
    assert line_fields.layers(line) == expected


def test_texts_are_plain_and_as_long_as_texts_are() -> None:
    assert line_fields.text({"x": "[red]\x1b" + "y" * 1000}, "x", 8) == "(red)?yy"
    assert line_fields.text({}, "x") == ""
    assert line_fields.listed({"x": "ab"}, "x") == ()
