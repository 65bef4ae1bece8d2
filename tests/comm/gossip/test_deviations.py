"""Who differs from us in the same direction window after window counts for less, and for nothing in the end."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.gossip import influence
from decentral.comm.gossip.influence import Deviations
from decentral.core import rng
from decentral.core.ids import PeerId

SIZE = 4096
SIGNAL = 0.12  # the common part of a window, where its noise has length one
CARRIED = 0.65  # of a window's noise, to the next one: what Muon's momentum of 0.95 does over windows of 5 steps
WINDOWS = 40

Lie = Callable[[list[Tensor], int], Tensor]


def unit(*seed: object) -> Tensor:
    chance = torch.Generator().manual_seed(rng.seed_of(0, *map(str, seed)) % 2**63)
    return torch.nn.functional.normalize(torch.randn(SIZE, generator=chance), dim=0)


class Swarm:
    """Four peers' windows, with noise that momentum carries on; ours are the first ones."""

    def __init__(self, lie: Lie | None = None, lives: int = 3, code: str = "") -> None:
        self.noise, self.lie, self.known = [unit("begin", peer) for peer in range(1 + lives)], lie, Deviations()
        self.number, self.code, self.kept = 0, code, [torch.zeros(SIZE) for _ in self.noise]

    def window(self) -> list[float]:
        """How much of each partner's counts in the next window; the liar is the last of them."""
        self.number += 1
        rest = (1 - CARRIED**2) ** 0.5
        self.noise = [CARRIED * one + rest * unit(self.number, peer) for peer, one in enumerate(self.noise)]
        ours, *theirs = [self.sent(peer, SIGNAL * unit("signal") + one) for peer, one in enumerate(self.noise)]
        if self.lie is not None:
            theirs.append(self.coded(self.lie([ours, *theirs], self.number)))
        named = [(PeerId(str(place)), one) for place, one in enumerate(theirs)]
        return self.known.unbiased(ours, named)

    def coded(self, window: Tensor) -> Tensor:
        """What partners read of it."""
        return blockwise.decode(self.code, blockwise.encode(self.code, window), SIZE) if self.code else window

    def sent(self, peer: int, window: Tensor) -> Tensor:
        """What partners read of an honest peer's window, and of what the code has kept back before."""
        owed = self.kept[peer] + window
        read = self.coded(owed)
        self.kept[peer] = owed - read
        return read

    def after(self, windows: int) -> list[list[float]]:
        return [self.window() for _ in range(windows)]


def little(honest: list[Tensor], number: int) -> Tensor:
    stacked = torch.stack(honest)
    return stacked.mean(dim=0) - stacked.std(dim=0)


@pytest.mark.parametrize("code", ["", *blockwise.SHORTER_CODECS])
def test_a_little_is_not_enough(code: str) -> None:
    counted = [one[-1] for one in Swarm(little, code=code).after(WINDOWS)[3 * influence.PERIOD_WINDOWS :]]
    assert max(counted) < (0.6 if code == "sparse" else 0.1)
    assert sum(counted) / len(counted) < 0.2


@pytest.mark.parametrize("code", ["", *blockwise.SHORTER_CODECS])
def test_honest_peers_count_whole_beside_a_liar_and_without_one(code: str) -> None:
    for lie in (None, little):
        honest = [part for one in Swarm(lie, code=code).after(WINDOWS) for part in one[:3]]
        assert min(honest) == 1.0


def test_a_direction_that_changes_is_noise() -> None:
    counted = Swarm(lambda honest, number: honest[-1] + unit("changing", number)).after(WINDOWS)
    assert min(one[-1] for one in counted) == 1.0


@pytest.mark.parametrize(("bias", "counts"), [(0.2, 1.0), (1.0, 0.0)])
def test_a_bias_for_good_counts_whole_only_while_it_is_small(bias: float, counts: float) -> None:
    counted = Swarm(lambda honest, number: honest[-1] + bias * unit("bias")).after(WINDOWS)
    assert counted[-1][-1] == counts


def test_who_stops_to_deviate_counts_again() -> None:
    swarm = Swarm(lambda honest, number: little(honest, number) if number < WINDOWS else honest[-1] + unit(number, 99))
    assert swarm.after(WINDOWS - 1)[-1][-1] < 0.1
    assert swarm.after(WINDOWS * 2)[-1][-1] == 1.0


def test_where_all_have_data_of_their_own_all_count_whole() -> None:
    """Each partner's windows have a direction of their own, as long as the noise: then that is usual."""
    known = Deviations()
    for number in range(WINDOWS):
        theirs = [(PeerId(str(peer)), unit("own", peer) + unit(number, peer)) for peer in range(3)]
        counted = known.unbiased(unit("own", 9) + unit(number, 9), theirs)
    assert counted == [1.0] * 3


def test_before_anything_is_old_all_count_whole() -> None:
    assert Swarm(little).after(2 * influence.PERIOD_WINDOWS - 1) == [[1.0] * 4] * (2 * influence.PERIOD_WINDOWS - 1)


def test_what_is_known_of_partners_who_left_is_forgotten() -> None:
    known = Deviations()
    for number in range(50):
        known.unbiased(unit("ours"), [(PeerId(str(number)), unit(number))])
    assert len(known.known) == influence.MOST_KNOWN
