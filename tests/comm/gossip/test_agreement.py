"""Whose progress counts: what points against ours does not, nor what pulls one way for long; noise is no lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.gossip import influence, trust
from decentral.comm.gossip.trust import Agreement, WindowSample
from decentral.core import rng
from decentral.core.ids import PeerId

SIZE = 16_384
SIGNAL = 0.4  # the common part of a window's progress, where its noise has length one: a cosine of 0.14
WINDOWS = 25

Lie = Callable[[list[Tensor], int], Tensor]
"""From the honest peers' windows, ours first, and the window's number."""


def unit(*seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(rng.seed_of(0, *seed) % 2**63)
    return torch.nn.functional.normalize(torch.randn(SIZE, generator=chance), dim=0)


def honest_windows(number: int, peers: int = 4) -> list[Tensor]:
    return [SIGNAL * unit(0) + unit(number, 1 + peer) for peer in range(peers)]


def as_read(window: Tensor, code: str) -> Tensor:
    return blockwise.decode(code, blockwise.encode(code, window), len(window)) if code else window


def trust_of(lie: Lie | None, windows: int = WINDOWS, code: str = "") -> list[float]:
    """How much we trust three partners in the last window, one of which may be a liar."""
    known, trusted = Agreement(), [0.0]
    for number in range(1, windows + 1):
        ours, *theirs = honest_windows(number)
        theirs = [*theirs[:2], lie([ours, *theirs], number)] if lie else theirs
        read = [as_read(one, code) for one in (ours, *theirs)]
        trusted = known.trust(read[0], [(PeerId(str(place)), one) for place, one in enumerate(read[1:])])
    return trusted


LIES: dict[str, Lie] = {
    "flipped": lambda honest, number: -honest[-1],
    "opposed": lambda honest, number: -torch.stack(honest).mean(dim=0),
    "huge": lambda honest, number: torch.full((SIZE,), 1e38),
    "replayed": lambda honest, number: unit(1, 99) + SIGNAL * unit(0),
    "little": lambda honest, number: torch.stack(honest).mean(dim=0) - torch.stack(honest).std(dim=0),
    "drift": lambda honest, number: honest[-1] - unit(99),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_counts_for_little_and_the_others_for_all(lie: str) -> None:
    *honest, liar = trust_of(LIES[lie])
    assert honest == [1.0, 1.0]
    assert liar < 0.1


@pytest.mark.parametrize("windows", [1, 2, 5, 30])
def test_honest_peers_count_whole_however_little_a_window_agrees(windows: int) -> None:
    assert trust_of(None, windows) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@pytest.mark.parametrize("windows", [1, 2, 5, 30])
def test_honest_peers_count_whole_where_few_bits_are_sent(windows: int, code: str) -> None:
    assert trust_of(None, windows, code) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("code", blockwise.SHORTER_CODECS)
@pytest.mark.parametrize("lie", ["flipped", "opposed", "little", "drift"])
def test_a_liar_counts_for_little_where_few_bits_are_sent(lie: str, code: str) -> None:
    *honest, liar = trust_of(LIES[lie], code=code)
    assert honest == [1.0, 1.0]
    assert liar < 0.2


def test_a_fast_peer_whose_progress_the_others_correct_counts_whole() -> None:
    """What it has contributed by chance, the others take back in the windows after: its sums and theirs are at odds."""
    known, theirs = Agreement(), [0.0]
    chance = [unit(number, 7) for number in range(WINDOWS + 1)]
    for number in range(1, WINDOWS + 1):
        fast = SIGNAL * unit(0) + 2 * chance[number]
        ours = SIGNAL * unit(0) + unit(number, 8) - chance[number - 1]
        theirs = known.trust(ours, [(PeerId("fast"), fast), (PeerId("C"), SIGNAL * unit(0) + unit(number, 9))])
        assert theirs == [1.0, 1.0]


def test_what_points_against_our_window_counts_for_nothing_at_once_whatever_it_did_before() -> None:
    known, peer = Agreement(), PeerId("B")
    for number in range(1, WINDOWS):
        ours, theirs, *_ = honest_windows(number)
        assert known.trust(ours, [(peer, theirs)]) == [1.0]
    ours, theirs, *_ = honest_windows(WINDOWS)
    assert known.trust(ours, [(peer, -theirs)]) == [0.0]


def test_a_slow_peer_counts_whole() -> None:
    """Its windows have one step where ours have five: a fifth of the signal, and less than half of the noise."""
    known, trusted = Agreement(), [0.0]
    for number in range(1, 41):
        ours, *theirs = honest_windows(number)
        slow = SIGNAL / 5 * unit(0) + 5**-0.5 * unit(number, 9)
        trusted = known.trust(ours, [(PeerId(name), one) for name, one in zip("BCD", [*theirs[:2], slow], strict=True)])
    assert trusted[2] > 0.5


def test_a_window_without_a_step_of_ours_says_nothing() -> None:
    assert Agreement().trust(torch.zeros(8), [(PeerId("B"), torch.ones(8))]) == [1.0]


# The sample


@pytest.mark.parametrize("elements", [100_001, 20_001])
def test_a_sample_has_the_numbers_at_its_places(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    sample = WindowSample.drawn(len(values), values)
    places = torch.cat([torch.arange(begin, begin + trust.STRETCH_NUMBERS) for begin in sample.begins])
    for codec in ("q4", "int8"):
        packed = blockwise.encode(codec, values)
        read = blockwise.decode(codec, packed, len(values))
        assert torch.equal(sample.read(codec, blockwise, packed), read[places])
    assert torch.equal(sample.take(values), values[places])


@pytest.mark.parametrize("elements", [10_000, 30_000, 1_000_000])
def test_the_first_part_of_a_sample_is_from_the_whole_vector(elements: int) -> None:
    """It was the embedding's part of a small model, and the first quarter of any: a liar had the rest for itself."""
    places = torch.arange(elements, dtype=torch.float32)
    found = WindowSample.drawn(elements, unit(1)[:64]).take(places)[: influence.COMPARED_NUMBERS] / elements
    quarters = torch.histc(found, bins=4, min=0.0, max=1.0) / len(found)
    assert quarters.min() > 0.1


def test_all_whole_stretches_of_a_vector_that_is_hardly_longer_are_in_its_sample() -> None:
    found = WindowSample.drawn(20_001, unit(1)[:64]).take(torch.arange(20_001))
    assert torch.equal(found.sort().values, torch.arange(20_001 - 20_001 % trust.STRETCH_NUMBERS))


def test_where_a_sample_lies_follows_from_a_secret() -> None:
    one, other = (WindowSample.drawn(1_000_000, unit(seed)[:64]) for seed in (1, 2))
    assert one == WindowSample.drawn(1_000_000, unit(1)[:64])
    assert one.begins != other.begins


def test_a_short_vector_is_its_own_sample() -> None:
    values = torch.randn(1000)
    assert len(WindowSample.drawn(1000, values).read("q4", blockwise, blockwise.encode("q4", values))) == 1000


def test_more_partners_than_are_usually_known_are_all_judged() -> None:
    partners = [(PeerId(str(number)), unit(number)) for number in range(influence.MOST_KNOWN + 8)]
    known = Agreement()
    assert len(known.trust(unit(0), partners)) == len(partners)
    known.trust(unit(1), partners[:3])
    assert len(known.deviations.known) <= influence.MOST_KNOWN
