"""Long documents are cut where their text says, and not within a word."""

import pytest

from decentral.data.pieces import UNCUT, cut

USUAL = 256
LINES = "".join(f"{number} {number * number} and so on\n" for number in range(2000))
INDENTED = "".join(f"def f{number}():\n    return {number}\n" for number in range(2000))
NUMBERS = " ".join(map(str, range(100_000, 110_000)))
LETTERS = "".join(map(str, range(10_000)))


@pytest.mark.parametrize("text", [LINES, INDENTED, NUMBERS, LETTERS, LETTERS + LINES, "x" * 30_000, " " * 30_000])
def test_the_pieces_are_all_of_the_text_and_none_is_much_longer_than_usual(text: str) -> None:
    pieces = cut(text, USUAL)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 4 * USUAL
    assert len(text) / USUAL / 4 <= len(pieces) <= 2 * len(text) / USUAL


def test_a_document_of_ordinary_length_is_not_cut() -> None:
    assert cut(LINES[: UNCUT * USUAL], USUAL) == [LINES[: UNCUT * USUAL]]
    assert len(cut(LINES[: UNCUT * USUAL + 1], USUAL)) > 1


def test_lines_and_words_stay_whole() -> None:
    assert all(piece.endswith("\n") for piece in cut(LINES, USUAL))
    assert {number for piece in cut(NUMBERS, USUAL) for number in piece.split()} == set(NUMBERS.split())


def test_a_piece_begins_with_no_indented_line() -> None:
    """A tokenizer takes an indentation and the line end before it as one."""
    assert not any(piece[0].isspace() for piece in cut(INDENTED, USUAL))


@pytest.mark.parametrize("text", [LINES, NUMBERS])
def test_a_text_with_something_before_it_is_cut_in_the_same_places(text: str) -> None:
    one, other = cut(text, USUAL), cut("a line before all others\n" + text, USUAL)
    assert len(set(one) & set(other)) >= len(one) - 3
