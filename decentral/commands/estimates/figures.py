"""A predicted number with its range: `Figure`."""

from dataclasses import dataclass

from decentral.core.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class Figure:
    """A predicted number above 0 (`mid`), and the range in which it is expected to be, from `low` to `high`."""

    mid: float
    low: float
    high: float

    def times(self, factor: float) -> "Figure":
        """Return the estimate times a positive factor."""
        return Figure(self.mid * factor, self.low * factor, self.high * factor)

    def duration(self, amount: float) -> "Figure":
        """Return the time that an amount takes if this estimate is a rate; `low` follows from the highest rate."""
        return Figure(amount / self.mid, amount / self.high, amount / self.low)

    def to_json(self) -> JsonObject:
        """Return the three numbers by name, with four digits."""
        numbers = {"mid": self.mid, "low": self.low, "high": self.high}
        return {name: float(f"{value:.4g}") for name, value in numbers.items()}
