"""JSON that every reader understands, whatever the numbers are."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core import strict_json

Value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


def strict(text: str) -> Any:
    """The value, as a reader sees it that knows no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@given(Value, st.sampled_from([None, 1]))
def test_any_value_is_strict_json_in_one_line_or_indented(value: object, indent: int | None) -> None:
    text = strict_json.dumps(value, indent)
    strict(text)
    assert indent is not None or "\n" not in text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_the_others_stay(number: float) -> None:
    line = {"loss": number, "of": [1, (number, 2.5)], "by": {"a": {"b": number}}}
    assert strict(strict_json.dumps(line)) == {"loss": None, "of": [1, [None, 2.5]], "by": {"a": {"b": None}}}


def test_what_json_does_not_know_is_its_text() -> None:
    assert strict(strict_json.dumps({"path": ValueError("x"), "loss": math.nan})) == {"path": "x", "loss": None}


def test_lines_of_older_writers_are_read() -> None:
    assert strict_json.loads('{"loss":NaN,"most":-Infinity}') == {"loss": None, "most": None}


def test_what_is_nested_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested"):
        strict_json.loads("[" * 100_000)
