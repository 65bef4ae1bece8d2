"""Read quantities as people type them: durations (`15m`), bytes (`16GB`), counts (`10B`) and rates in Mb/s.

Each kind has one reader, which all commands use. A reader can be the `type` of a flag:
it raises ArgumentTypeError, whose text says what was expected and what came.
"""

import argparse
import math
import re

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}  # unit of a duration -> seconds
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}  # letter after a count -> factor
MOST_SECONDS = 10 * 365 * 86400.0  # no duration is longer than ten years
MOST_SIZE = 1 << 60
MOST_COUNT = 1e18
_NUMBER = r"(?P<value>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)"


def duration_s(text: str) -> float:
    """Return the seconds in a text such as 90s, 15m, 2h, 1d or 8w; a number without a unit is seconds.

    Raises:
        ArgumentTypeError: If the text has another form, or the duration is not above 0, or longer than MOST_SECONDS.
    """
    value = _read(text, r"(?P<unit>[smhdw]?)", SECONDS)
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected a duration such as 90s, 15m, 2h or 1d, at most ten years; got {text!r}"
        )
    return value


def size_bytes(text: str) -> int:
    """Return the bytes in a text such as 800000000, 800MB, 16GB or 1.5e9; a kB has 1,000 bytes.

    Raises:
        ArgumentTypeError: If the text has another form, or the size is below 1 or at least MOST_SIZE.
    """
    value = _read(text, r"(?P<unit>[kmgt]?)b?", THOUSANDS)
    if not 1 <= value < MOST_SIZE:
        raise argparse.ArgumentTypeError(f"expected a size such as 800MB or 16GB; got {text!r}")
    return int(value)


def count(text: str) -> float:
    """Return the number in a text such as 5000, 125M, 1.3B (or 1.3G), 10T or 2e6.

    Raises:
        ArgumentTypeError: If the text has another form, or the number is not above 0, or above MOST_COUNT.
    """
    value = _read(text, r"(?P<unit>[kmgbt]?)", THOUSANDS)
    if not 0 < value <= MOST_COUNT:
        raise argparse.ArgumentTypeError(f"expected a number such as 125M, 10B or 2e6; got {text!r}")
    return value


def rate_bytes(text: str) -> float:
    """Return the bytes/s in a text such as 50, 500Mb/s or 1Gb/s; a number without a unit is Mb/s.

    Raises:
        ArgumentTypeError: If the text has another form, or the rate is not above 0.
    """
    bare = text.strip().removesuffix("/s").removesuffix("ps")
    value = _read(bare if re.search("[A-Za-z]$", bare) else f"{bare}M", r"(?P<unit>[kmgt])(?-i:b|bit)?", THOUSANDS)
    if not 0 < value <= MOST_COUNT:
        raise argparse.ArgumentTypeError(f"expected a rate in Mb/s, such as 50, 500Mb/s or 1Gb/s; got {text!r}")
    return value / 8


def _read(text: str, unit: str, factors: dict[str, float]) -> float:
    """Return the number in a text times the factor of its unit; NaN if the text is no number with such a unit."""
    found = re.fullmatch(rf"{_NUMBER}\s*{unit}", text.strip(), re.IGNORECASE | re.ASCII)
    return float(found["value"]) * factors[found["unit"].lower()] if found else math.nan
