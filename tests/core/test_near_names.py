"""Names near a mistyped one."""

import pytest

from decentral.core.near_names import did_you_mean, listed


@pytest.mark.parametrize(("typed", "near"), [("genetik", "genetic"), ("GENETIC", "genetic"), ("flo", "flow")])
def test_the_nearest_name_is_suggested_whatever_its_case(typed: str, near: str) -> None:
    assert did_you_mean(typed, ["annealing", "genetic", "flow"]) == f"; did you mean {near}?"


def test_a_name_that_resembles_none_gets_no_suggestion() -> None:
    assert did_you_mean("xyz", ["genetic", "flow"]) == ""


def test_a_list_of_names_ends_with_the_nearest() -> None:
    assert listed("flo", ["genetic", "flow"]) == "genetic, flow; did you mean flow?"
