"""What stands in a line of a journal, for those who did not write it: a value of the right kind and size, or none.

Somebody else may have written the journal, or a disk may have spoilt it, and a number of JSON may have any size: one
that no peer can mean is read as if it were not there, so that whoever computes with the others needs no checks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from decentral.core.plain_text import SHOWN_CHARS, plain_text
from decentral.core.units import Seconds

MOST_NUMBER = 1e18  # bytes of an exabyte, tokens of all that was ever written
MOST_TIME_S = 1e11  # Unix time in the year 5138; as in messages
MOST_LAYERS = 4096  # more than a config allows

Line = Mapping[str, Any]  # as JSON gives it


def finite(line: Line, name: str) -> float | None:
    """The number of that name; None if there is none, or one that no peer can mean."""
    return finite_value(line.get(name))


def finite_value(value: object) -> float | None:
    """The value as a number; None if it is none, or one that no peer can mean."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST_NUMBER < value < MOST_NUMBER:
        return None
    return float(value)


def number(line: Line, name: str) -> float:
    """The number of that name; 0 if there is none."""
    return finite(line, name) or 0.0


def count(line: Line, name: str) -> int:
    """The same as a whole number, 0 or more."""
    return max(0, int(number(line, name)))


def time_of(line: Line) -> Seconds | None:
    """When the line was written, in Unix seconds; None if it does not say."""
    t = finite(line, "t")
    return t if t is not None and 0 <= t < MOST_TIME_S else None


def text(line: Line, name: str, most: int = SHOWN_CHARS) -> str:
    """The text of that name, made plain; "" if there is none."""
    value = line.get(name)
    return "" if value is None else plain_text(str(value), most)


def listed(line: Line, name: str) -> Sequence[Any]:
    """The list of that name; empty if there is none."""
    value = line.get(name)
    return value if isinstance(value, list | tuple) else ()


def numbers(line: Line, name: str) -> list[float]:
    """The list of that name as numbers; what is no number in it is 0."""
    return [finite_value(one) or 0.0 for one in listed(line, name)]


def layers(line: Line) -> tuple[int, int]:
    """The layers [first, last) that the line names; (0, 0) if it names none that a model can have."""
    first, last = count(line, "first"), count(line, "last")
    return (first, last) if first <= last <= MOST_LAYERS else (0, 0)
