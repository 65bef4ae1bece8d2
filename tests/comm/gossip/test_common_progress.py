"""Who sends noise, or nothing, takes a place and gives nothing: over many windows that shows."""

import pytest

from decentral.comm.gossip.influence import MOST_KNOWN
from decentral.comm.gossip.trust import CommonProgress
from decentral.core import rng
from decentral.core.ids import PeerId

CHANCE = 0.01  # standard deviation of a cosine is half of it


def judged(windows: int, **means: float) -> dict[str, float]:
    """How much counts of partners whose cosines are so much on average."""
    chance, known, counts = rng.stream(0, "cosines"), CommonProgress(), [0.0]
    for _ in range(windows):
        cosines = [(PeerId(name), chance.gauss(mean, CHANCE / 2)) for name, mean in means.items()]
        counts = known.useful(cosines, CHANCE)
    return dict(zip(means, counts, strict=True))


def test_who_has_nothing_in_common_with_us_counts_for_next_to_nothing() -> None:
    found = judged(20, A=0.1, B=0.15, liar=0.0)
    assert found["A"] == found["B"] == 1.0
    assert found["liar"] < 0.15


@pytest.mark.parametrize("windows", [1, 5, 20, 100])
def test_honest_partners_count_whole(windows: int) -> None:
    assert set(judged(windows, A=0.07, B=0.18, C=0.03).values()) == {1.0}


def test_a_few_windows_tell_nothing() -> None:
    assert judged(5, A=0.1, B=0.1, C=0.0)["C"] == 1.0


def test_where_nobody_has_much_in_common_with_us_nobody_is_judged() -> None:
    """A slow device among fast ones, or a fast one among slow ones."""
    assert set(judged(30, A=0.1, B=0.002, C=-0.002).values()) == {1.0}


def test_only_so_many_partners_are_remembered() -> None:
    known = CommonProgress()
    for number in range(3 * MOST_KNOWN):
        known.useful([(PeerId(str(number)), 0.1)], CHANCE)
    assert len(known.cosines.sums) == MOST_KNOWN


def test_of_two_partners_a_useless_one_does_not_say_what_is_usual_between_windows() -> None:
    known = CommonProgress()
    for _ in range(20):
        known.useful([(PeerId("A"), 0.5), (PeerId("liar"), 0.0)], CHANCE)
    assert known.usual() == 0.0
    assert known.usual_at_most() == pytest.approx(0.5)
