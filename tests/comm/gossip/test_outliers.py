"""Whose weights are not among the others' move us nowhere, wherever we are ourselves."""

import pytest
import torch
from torch import Tensor

from decentral.comm.gossip.influence import EARLY_MERGES, MOST_KNOWN, Outliers
from decentral.core.ids import PeerId

SIZE = 400
SPREAD = 1.0  # about how far an honest peer is from the others' median
STEP = 1.0  # the length of anybody's window
LIAR = PeerId("L")


def place(seed: int, length: float = SPREAD) -> Tensor:
    return length * torch.nn.functional.normalize(
        torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)), dim=0
    )


def merge(outliers: Outliers, places: dict[str, Tensor], ours: Tensor) -> dict[str, float]:
    """One merge with partners that are at these places, where we are at ours."""
    trust = outliers.trust([(PeerId(peer), where - ours) for peer, where in places.items()], [STEP] * len(places))
    return dict(zip(places, trust, strict=True))


def honest(count: int = 4) -> dict[str, Tensor]:
    return {chr(ord("A") + n): place(n) for n in range(count)}


def known(partners: dict[str, Tensor], ours: Tensor | None = None) -> Outliers:
    """What a peer knows after its first merges with these."""
    outliers = Outliers()
    for _ in range(EARLY_MERGES):
        merge(outliers, partners, torch.zeros(SIZE) if ours is None else ours)
    return outliers


@pytest.mark.parametrize("times", [8.0, 1e9])
@pytest.mark.parametrize("moved", [0.0, 20.0])
def test_who_is_nowhere_near_the_others_counts_for_nothing_wherever_we_are(times: float, moved: float) -> None:
    """By its distance from us a liar that had moved us was as near as anybody."""
    away = place(99, moved)
    ours, liar = away, place(99, moved + times * SPREAD)
    outliers = known(honest(), ours)
    trust = merge(outliers, {**honest(), LIAR: liar}, ours)
    assert trust.pop(LIAR) == 0.0
    assert set(trust.values()) == {1.0}
    assert outliers.is_far(LIAR)


@pytest.mark.parametrize(("times", "trusted"), [(1.5, 1.0), (3.0, 0.5), (5.0, 0.0)])
def test_a_device_that_is_ahead_counts_the_less_the_further(times: float, trusted: float) -> None:
    outliers = known(honest())
    trust = merge(outliers, {**honest(), LIAR: place(9, times * SPREAD)}, torch.zeros(SIZE))
    assert trust[LIAR] == pytest.approx(trusted, abs=0.15)
    assert not outliers.is_far(LIAR), "its windows count"


def test_in_the_first_merges_a_device_may_be_further_ahead() -> None:
    """Then a fast one is ahead of all others, as these have hardly moved."""
    partners = {**{peer: 0.01 * where for peer, where in honest().items()}, "F": place(9, 3 * STEP)}
    assert merge(Outliers(), partners, torch.zeros(SIZE))["F"] > 0.99
    assert merge(known(partners), partners, torch.zeros(SIZE))["F"] == 0.0


def test_of_two_peers_nobody_can_tell_which_one_is_elsewhere() -> None:
    outliers = known({"A": place(1)})
    assert merge(outliers, {"A": place(1, 40.0)}, torch.zeros(SIZE)) == {"A": 1.0}


def test_what_moves_us_moves_all_that_we_have_seen() -> None:
    """Partners that were near when they were seen last are not taken to be where we have been moved to."""
    outliers = known(honest())
    outliers.moved(place(99, 20.0))
    ours = place(99, 20.0)
    assert merge(outliers, {LIAR: place(99, 28.0)}, ours) == {LIAR: 0.0}
    assert merge(outliers, {"A": place(0)}, ours) == {"A": 1.0}


def test_a_number_that_is_as_large_as_floats_go_leaves_the_others_as_they_are() -> None:
    outliers = known(honest())
    trust = merge(outliers, {**honest(), LIAR: torch.full((SIZE,), 3e38)}, torch.zeros(SIZE))
    assert trust == {**dict.fromkeys(honest(), 1.0), LIAR: 0.0}


def test_partners_that_come_and_go_do_not_fill_the_memory() -> None:
    outliers = Outliers()
    for number in range(3 * MOST_KNOWN):
        outliers.trust([(PeerId(f"p{number}"), place(number))], [STEP])
    assert len(outliers.differences) == len(outliers.found) == MOST_KNOWN
