"""Durations, bytes, counts and rates as people type them."""

import argparse
from collections.abc import Callable

import pytest

from decentral.core.quantities import (
    comma_hint,
    count,
    duration_s,
    memories_bytes,
    memory_bytes,
    rate_bytes,
    size_bytes,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("0.5w", 302_400), (" 1.5 h ", 5400)],
)
def test_a_duration_is_a_number_and_a_unit_of_time(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("800", 800), ("1.5e9", 1_500_000_000), ("800MB", 800_000_000), ("2g", 2_000_000_000), ("1kB", 1000)],
)
def test_a_size_is_in_powers_of_a_thousand(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "value"), [("5000", 5000), ("125M", 125e6), ("1.3B", 1.3e9), ("10T", 1e13), ("2e6", 2e6)]
)
def test_a_count_may_end_with_a_letter_for_its_thousands(text: str, value: float) -> None:
    assert count(text) == value


@pytest.mark.parametrize(("text", "rate"), [("50", 6.25e6), ("500Mb/s", 62.5e6), ("1Gb/s", 125e6), ("10Gbps", 1.25e9)])
def test_a_rate_without_a_unit_is_in_megabits(text: str, rate: float) -> None:
    assert rate_bytes(text) == pytest.approx(rate)


@pytest.mark.parametrize("read", [duration_s, size_bytes, count, rate_bytes])
@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "1e300", "3x", "٣", "1_000"])
def test_anything_else_is_refused_with_an_example(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a .* such as "):
        read(text)


def test_megabytes_are_no_rate_since_links_are_sold_in_megabits() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="500Mb/s"):
        rate_bytes("20MB/s")


@pytest.mark.parametrize("read", [duration_s, size_bytes, count, rate_bytes])
def test_the_longest_argument_is_refused_at_once(read: Callable[[str], float]) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read("1" * 131_000 + "!")  # the time of a search that goes back would grow with the square of the length


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0,30", "; write 0.30"),
        ("1,3B", "; write 1.3B"),
        ("0,300", "; write 0.300"),
        ("1,000", "; write 1000"),
        ("12,000,000B", "; write 12000000B"),
        ("4090=0,35,A100=1,2", "; write 4090=0.35,A100=1.2"),
        ("1.000,5", "; write 1000.5"),
        ("1.234.567,8B", "; write 1234567.8B"),
        ("1,000.5", "; write 1000.5"),
        ("1.000.000", "; write 1000000"),
        ("1.000", ""),
        ("1,5,3", ""),
        ("many", ""),
        ("a,b", ""),
    ],
)
def test_a_comma_in_a_number_is_explained(text: str, hint: str) -> None:
    assert comma_hint(text) == hint


@pytest.mark.parametrize(
    ("text", "hint"), [("4,5", ""), ("1.000,5", ""), ("4,000", "; write 4000"), ("4.000", "; write 4000")]
)
def test_no_fraction_is_proposed_where_a_whole_number_is_due(text: str, hint: str) -> None:
    assert comma_hint(text, whole=True) == hint


@pytest.mark.parametrize("read", [duration_s, size_bytes, count, rate_bytes])
def test_each_reader_explains_a_decimal_comma(read: Callable[[str], float]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"; write 0\.5$"):
        read("0,5")


def test_memory_without_a_unit_is_not_taken_for_a_few_bytes() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as 8GB; got '8'; did you mean 8GB\?"):
        memory_bytes("8")
    with pytest.raises(argparse.ArgumentTypeError, match=r"got '5e5'; in bytes it is 500000B$"):
        memory_bytes("5e5")
    assert (memory_bytes("1000B"), memory_bytes("8e9"), memory_bytes("8GB")) == (1000, 8_000_000_000, 8_000_000_000)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1,5GB", "; write 1.5GB for one size, or 1GB,5GB"),
        ("8,16", "; write 8GB,16GB"),
        ("1,000MB", "; write 1000MB"),
        ("1,500MB", "; write 1500MB for one size, or 1MB,500MB"),
        ("8, 16, 24GB", "; write 8GB,16GB,24GB"),
        ("1.000,5", ""),
    ],
)
def test_sizes_without_units_are_explained_as_a_whole(text: str, meant: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        memories_bytes(text)
    assert str(error.value) == f"expected sizes with units, such as 800MB,16GB; got {text!r}{meant}"
    assert memories_bytes("800MB, 1.5GB,2000000") == (800_000_000, 1_500_000_000, 2_000_000)
