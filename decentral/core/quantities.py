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
LEAST_BARE_MEMORY = 1_000_000  # bytes; a smaller number without a unit is taken for a forgotten unit
_NUMBER = r"(?P<value>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)"


def unreadable(expected: str, text: str, whole: bool = False) -> argparse.ArgumentTypeError:
    """Return the error for a text that is not what was expected, with the number that a comma in it may mean."""
    return argparse.ArgumentTypeError(f"expected {expected}; got {text!r}{comma_hint(text, whole)}")


def comma_hint(text: str, whole: bool = False) -> str:
    """Return `; write 0.30` for a text with a decimal comma, `; write 1000` for commas between thousands, else "".

    Args:
        text: What somebody typed. Points between thousands are explained, too: 1.000,5 is 1000.5.
        whole: Whether a whole number is due, so that no other number is suggested, and 1.000 is 1000.
    """
    pointed = re.sub(r"\d[\d.,]*(?<=\d)", lambda found: _pointed(found[0], whole), text.strip())
    return f"; write {pointed}" if pointed != text.strip() else ""


def _pointed(number: str, whole: bool) -> str:
    """Return a number with a point before its fraction and nothing between thousands, if it can be read only so."""
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?", number):
        found = number.replace(",", "")
    elif re.fullmatch(r"[1-9]\d{0,2}((\.\d{3})+,\d+|(\.\d{3}){2,})", number):
        found = number.replace(".", "").replace(",", ".")
    elif whole and re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", number):
        found = number.replace(".", "")
    else:
        found = re.sub(r"^(\d+),(\d+)$", r"\1.\2", number)
    return number if whole and "." in found else found


def duration_s(text: str) -> float:
    """Return the seconds in a text such as 90s, 15m, 2h, 1d or 8w; a number without a unit is seconds.

    Raises:
        ArgumentTypeError: If the text has another form, or the duration is not above 0, or longer than MOST_SECONDS.
    """
    value = _read(text, r"(?P<unit>[smhdw]?)", SECONDS)
    if not 0 < value <= MOST_SECONDS:
        raise unreadable("a duration such as 90s, 15m, 2h or 1d, at most ten years", text)
    return value


def size_bytes(text: str) -> int:
    """Return the bytes in a text such as 800000000, 800MB, 16GB or 1.5e9; a kB has 1,000 bytes.

    Raises:
        ArgumentTypeError: If the text has another form, or the size is below 1 or at least MOST_SIZE.
    """
    value = _read(text, r"(?P<unit>[kmgt]?)b?", THOUSANDS)
    if not 1 <= value < MOST_SIZE:
        raise unreadable("a size such as 800MB or 16GB", text)
    return int(value)


def memory_bytes(text: str) -> int:
    """Return the bytes in a text such as 800MB or 16GB; a number without a unit has at least LEAST_BARE_MEMORY.

    Raises:
        ArgumentTypeError: As `size_bytes`, and for a text such as 8, which somebody means as 8 GB.
    """
    size, bare = size_bytes(text), text.strip()
    if size < LEAST_BARE_MEMORY and not bare[-1].isalpha():
        meant = f"did you mean {bare}GB?" if size < 1000 else f"in bytes it is {size}B"
        raise argparse.ArgumentTypeError(f"expected a size with a unit, such as 8GB; got {text!r}; {meant}")
    return size


def memories_bytes(text: str) -> tuple[int, ...]:
    """Return the bytes in each part of a comma-separated text such as 800MB,16GB; each part is read by `memory_bytes`.

    Raises:
        ArgumentTypeError: As `memory_bytes`; if at most the last part has a unit, with what the text may mean.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(map(memory_bytes, parts))
    except argparse.ArgumentTypeError:
        numbers = re.fullmatch(r"[\d.,\s]*\d,[\d.,\s]*\d\s*(?P<unit>[kmgt]?b?)", text, re.IGNORECASE | re.ASCII)
        if numbers is None:
            raise
    unit = numbers["unit"]
    several = ",".join(f"{part.removesuffix(unit)}{unit or 'GB'}" for part in parts)
    one = f"{comma_hint(text)} for one size, or" if unit and comma_hint(text) else "; write"
    plain = unit or all(re.fullmatch(r"[1-9]\d{0,3}", part) for part in parts)
    meant = f"{one} {several}" if plain else ""
    if unit and any(re.fullmatch(r"0\d+", part.removesuffix(unit)) for part in parts[1:]):
        meant = comma_hint(text)  # commas between thousands, as in 1,000MB: no size begins with 0
    raise argparse.ArgumentTypeError(f"expected sizes with units, such as 800MB,16GB; got {text!r}{meant}")


def count(text: str) -> float:
    """Return the number in a text such as 5000, 125M, 1.3B (or 1.3G), 10T or 2e6.

    Raises:
        ArgumentTypeError: If the text has another form, or the number is not above 0, or above MOST_COUNT.
    """
    value = _read(text, r"(?P<unit>[kmgbt]?)", THOUSANDS)
    if not 0 < value <= MOST_COUNT:
        raise unreadable("a number such as 125M, 10B or 2e6", text)
    return value


def rate_bytes(text: str) -> float:
    """Return the bytes/s in a text such as 50, 500Mb/s or 1Gb/s; a number without a unit is Mb/s.

    Raises:
        ArgumentTypeError: If the text has another form, or the rate is not above 0.
    """
    bare = text.strip().removesuffix("/s").removesuffix("ps")
    value = _read(bare if re.search("[A-Za-z]$", bare) else f"{bare}M", r"(?P<unit>[kmgt])(?-i:b|bit)?", THOUSANDS)
    if not 0 < value <= MOST_COUNT:
        raise unreadable("a rate in Mb/s, such as 50, 500Mb/s or 1Gb/s", text)
    return value / 8


def _read(text: str, unit: str, factors: dict[str, float]) -> float:
    """Return the number in a text times the factor of its unit; NaN if the text is no number with such a unit."""
    found = re.fullmatch(rf"{_NUMBER}\s*{unit}", text.strip(), re.IGNORECASE | re.ASCII)
    return float(found["value"]) * factors[found["unit"].lower()] if found else math.nan
