"""The keys of a config as data: each has a meaning, a number has a unit, and the range is what the validator checks."""

import re
from typing import Annotated, Literal

import pytest
from pydantic import Field

from decentral.core.choices import ALGORITHMS, DATA_KINDS, OPTIMIZERS, WIRES
from decentral.core.config import Config
from decentral.core.config_keys import Key, keys_of
from decentral.core.config_values import Strict

KEYS = keys_of(Config)


class Inner(Strict):
    """A section."""

    least: Annotated[float, Field(gt=0, le=0.5)]
    """How little. Unit: seconds."""


class Outer(Strict):
    """A config."""

    always: Annotated[int, Field(ge=2, lt=4096)] = 7
    """How
    many. Unit: steps."""
    names: Annotated[tuple[Annotated[str, Field(max_length=8)], ...], Field(max_length=3, strict=False)] = ("a",)
    """Names."""
    choice: Literal["one", "two"] | None = None
    """Which."""
    inner: Inner | None = None


def test_a_key_has_what_its_field_says() -> None:
    assert keys_of(Outer) == (
        Key("always", "How many.", "steps", "integer, at least 2, below 4,096", "7", False),
        Key("names", "Names.", "", "list, at most 3 entries, each text, at most 8 characters", '["a"]', False),
        Key("choice", "Which.", "", "one | two | null", "null", False),
        Key("inner", "A section.", "", "a section with the keys below | null", "null", False),
        Key("inner.least", "How little.", "seconds", "number, above 0, at most 0.5", "", True),
    )


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_key_of_the_config_has_a_meaning_and_where_it_is_a_number_a_unit(key: Key) -> None:
    assert key.meaning.endswith(".")
    assert bool(key.unit) == key.allowed.startswith(("integer", "number", "2 | 4"))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("gossip.algorithm", ALGORITHMS),
        ("train.optimizer", OPTIMIZERS),
        ("routes.wire", WIRES),
        ("data.kind", DATA_KINDS),
    ],
)
def test_the_meaning_of_a_key_names_all_its_choices(path: str, names: dict[str, object]) -> None:
    (meaning,) = [key.meaning for key in KEYS if key.path == path]
    lacking = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", meaning)]
    assert not lacking, f"add each to the docstring of {path} in core/config.py"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_time_is_in_seconds(key: Key) -> None:
    assert key.path.endswith("_s") == (key.unit == "seconds")
