"""Tuning ends at a rate whose neighbours are both worse, wherever it is."""

from typing import Any

import pytest

from benchmarks.contest import tuning
from benchmarks.contest.contestants import RATES, Contestant


@pytest.mark.parametrize("best", [RATES[0] / 4, RATES[0], RATES[2], RATES[-1], RATES[-1] * 4])
def test_the_best_rate_is_found_inside_and_beyond_the_grid(best: float) -> None:
    tried = list[float]()

    def loss_of(rate: float) -> float:
        tried.append(rate)
        return abs(rate / best - 1) if rate > best else best / rate - 1

    assert tuning.best_rate(loss_of) == best
    assert {best / 2, best * 2} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_options_are_chosen_in_turn_before_the_rate() -> None:
    one = Contestant("one", "gloo", {}, {"inner_steps": (5, 10, 20), "momentum": (0.0, 0.9)})

    def loss_of(picked: dict[str, Any]) -> float:
        return float(
            abs(picked.get("inner_steps", 5) - 10) + picked.get("momentum", 0.9) + abs(picked["rate"] - RATES[1])
        )

    assert tuning.search(one, loss_of) == {"rate": RATES[1], "inner_steps": 10, "momentum": 0.0}
