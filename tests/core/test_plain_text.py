"""Text of strangers does nothing to a terminal, and means itself in rich's markup."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from decentral.core.plain_text import SHOWN_CHARS, plain_text, printable

HOSTILE = [
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;a title\x07",  # names the window
    "\x9b31m",  # the same in one byte
    "back\rstart",
    "two\nlines",
    "\u202egnp.exe",  # shown from right to left
    "no\u200bwidth",
    "\ud800",
    "\u2028",
    "[red]a[/red]",
    "[link=https://example.org]a[/link]",
    "[/]",
    "\\[bold]",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_is_told_nothing(text: str) -> None:
    assert plain_text(text).isprintable()


@given(st.text(alphabet=st.characters()) | st.sampled_from(HOSTILE))
def test_rich_shows_it_as_it_is_whatever_it_is(text: str) -> None:
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system="truecolor", width=1000, highlight=False, emoji=False).print(
        plain_text(text), end="", soft_wrap=True
    )
    assert shown.getvalue() == plain_text(text)


def test_names_that_people_use_stay_what_they_are() -> None:
    for name in ("NVIDIA H100 80GB HBM3, 1 threads", "São Paulo", "北京", "eu-west-1"):
        assert plain_text(name) == name


def test_a_long_name_is_cut() -> None:
    assert len(plain_text("x" * 10_000)) == SHOWN_CHARS
    assert len(printable("x" * 10_000, 7)) == 7
