"""Amounts of work as a user types them, and figures for people."""

import pytest

from decentral.core.errors import UserError
from decentral.core.units import Amount, plural, readable_bytes


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("90s", 90, "s"),
        ("0.5s", 0.5, "s"),
        ("15m", 900, "s"),
        ("1.5h", 5400, "s"),
        ("2d", 172_800, "s"),
        ("500steps", 500, "steps"),
        ("2e6tokens", 2e6, "tokens"),
        ("10Btokens", 1e10, "tokens"),
        (" 7 steps ", 7, "steps"),
    ],
)
def test_an_amount_is_a_number_and_its_unit(text: str, value: float, kind: str) -> None:
    assert (Amount.parse(text).value, Amount.parse(text).kind) == (value, kind)


@pytest.mark.parametrize("text", ["", "90", "s", "0s", "-3s", "1.2.3s", "90 minutes", "e6tokens", "nans"])
def test_anything_else_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(UserError, match="--stop-after expects 90s, 15m"):
        Amount.parse(text)


@pytest.mark.parametrize("text", ["90s", "0.5s", "500steps", "2e6tokens", "1234567steps", "2h", "90.5m", "3Mtokens"])
def test_what_an_amount_prints_is_read_back_as_the_same(text: str) -> None:
    assert Amount.parse(str(Amount.parse(text))) == Amount.parse(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("7200s", "2h"), ("120m", "2h"), ("48h", "2d"), ("14d", "2w"), ("90s", "90s"), ("0.5s", "0.5s")),
        *(("5400s", "90m"), ("2e6tokens", "2Mtokens"), ("1500Mtokens", "1500Mtokens"), ("2000steps", "2000steps")),
    ],
)
def test_an_amount_is_shown_in_the_largest_unit_that_leaves_a_whole_number(text: str, shown: str) -> None:
    assert str(Amount.parse(text)) == shown


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (1.5e6, "1.5 MB"), (2e9, "2.0 GB"), (3e12, "3.0 TB")],
)
def test_bytes_are_read_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "peer", "0 peers"), (1, "peer", "1 peer"), (1000, "line", "1,000 lines"), (2, "batch", "2 batches")],
)
def test_a_count_of_one_has_a_singular_noun(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text
