"""The same progress counts once, however many partners send it, and ours is none of theirs."""

from math import sqrt

import pytest
import torch
from torch import Tensor

from decentral.comm.gossip.influence import token_shares
from decentral.comm.gossip.trust import MERGES_KEPT, CopiedParts, CountedWindows, PartnerHistory, copied_parts
from decentral.comm.gossip.update_rules import PulledWindow, Window
from decentral.core.ids import PeerId

SIZE = 4000
USUAL = 1000.0
KNOWN = 0.1  # mean cosine of honest windows


def window(seed: int, common: float = 0.3) -> Tensor:
    """An honest one: it has a direction in common with all others, and its own noise."""
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) / sqrt(SIZE)
    return noise + common * torch.nn.functional.normalize(torch.ones(SIZE), dim=0)


def found_in(ours: Tensor, partners: list[Tensor], known: float | None = KNOWN) -> CopiedParts:
    return copied_parts(ours, partners, known)


OURS, A, B, C = (window(seed) for seed in range(4))


@pytest.mark.parametrize("common", [0.0, 0.1, 0.3, 1.0, 3.0, 30.0])
def test_honest_windows_are_no_copies_however_alike_they_are(common: float) -> None:
    ours, *partners = (window(seed, common) for seed in range(4))
    found = found_in(ours, partners)
    assert found.new() == [1.0] * 3
    assert found.claims([1.0, 500.0, 1e6], USUAL) == [1.0, 500.0, 1e6]


@pytest.mark.parametrize("times", [0.01, 1.0, 2.0, 1e6])
def test_a_copy_and_what_it_is_a_copy_of_count_half_each(times: float) -> None:
    assert found_in(OURS, [A, B, times * A]).new() == pytest.approx([0.5, 1.0, 0.5])


def test_many_copies_count_as_one_window_together() -> None:
    assert found_in(OURS, [A, A, A, B, C, window(5), window(6)]).new() == pytest.approx([1 / 3] * 3 + [1.0] * 4)


def test_our_own_window_is_nothing_new() -> None:
    assert found_in(OURS, [A, OURS, B]).new() == pytest.approx([1.0, 0.0, 1.0])


@pytest.mark.parametrize(("noise", "counts"), [(0.3, 0.5), (4.0, 1.0)])
def test_the_more_noise_covers_a_copy_the_less_it_is_one(noise: float, counts: float) -> None:
    assert found_in(OURS, [A, B, A + noise * window(9, 0.0)]).new()[2] == pytest.approx(counts)


def test_a_copy_claims_no_more_tokens_than_its_like_or_than_is_usual() -> None:
    found = found_in(OURS, [A, B, A])
    assert found.claims([USUAL, USUAL, 4 * USUAL], USUAL) == pytest.approx([USUAL, USUAL, USUAL])
    assert found.claims([2 * USUAL, USUAL, 4 * USUAL], USUAL) == pytest.approx([2 * USUAL, USUAL, 2 * USUAL])


def test_a_copy_that_claims_next_to_nothing_leaves_the_other_what_is_usual() -> None:
    assert found_in(OURS, [A, B, A]).claims([3 * USUAL, 4 * USUAL, 1.0], USUAL) == pytest.approx(
        [USUAL, 4 * USUAL, 1.0]
    )


@pytest.mark.parametrize("partners", [[], [OURS], [A]])
def test_with_one_partner_nobody_can_tell(partners: list[Tensor]) -> None:
    assert found_in(OURS, partners).new() == [1.0] * len(partners)


def test_where_all_windows_are_the_same_there_are_no_copies() -> None:
    assert found_in(OURS, [OURS, OURS]).new() == [1.0, 1.0]


def test_one_partner_that_sends_noise_makes_no_copies_of_the_others() -> None:
    """Low noise: honest windows have a cosine of 0.9, and most pairs of three have a liar in them."""
    ours, one, other = (window(seed, 3.0) for seed in range(3))
    for useless in (window(9, 0.0), torch.zeros(SIZE)):
        assert found_in(ours, [one, useless], known=0.9).new() == [1.0, 1.0]
        assert found_in(ours, [one, useless, other], known=0.9).new() == [1.0] * 3
    assert found_in(ours, [one, window(9, 0.0)], known=KNOWN).new() == [0.0, 1.0], (
        "or else it is not the mean that tells"
    )


def test_of_few_numbers_chance_alone_makes_windows_alike() -> None:
    assert found_in(OURS[:8], [A[:8], 0.5 * A[:8] + 0.5 * B[:8], B[:8]]).new() == [1.0] * 3


def test_while_no_partner_is_known_there_are_no_copies() -> None:
    assert found_in(OURS, [A, B, A], known=None).new() == [1.0] * 3


@pytest.mark.parametrize("value", [0.0, 3e38])
def test_numbers_that_have_no_direction_are_no_copies(value: float) -> None:
    assert found_in(OURS, [A, torch.full((SIZE,), value), torch.full((SIZE,), value)]).new() == [1.0] * 3


def merged(counted: CountedWindows, ours: Tensor, **partners: Tensor) -> list[float]:
    """How much of each partner's window counts in one merge more."""
    return counted.copied_parts(ours, [(PeerId(name), one) for name, one in partners.items()], KNOWN).new()


def test_a_window_that_has_counted_is_nothing_new_later() -> None:
    counted = CountedWindows()
    assert merged(counted, OURS, a=A, b=B) == [1.0, 1.0]
    assert merged(counted, window(4), a=B, b=2 * OURS, c=window(5)) == pytest.approx([0.0, 0.0, 1.0])


def test_who_sends_its_own_window_once_more_is_judged_by_others() -> None:
    """An honest peer's windows may be alike one after the other."""
    counted = CountedWindows()
    merged(counted, OURS, a=A, b=B)
    assert merged(counted, window(4), a=A, b=B) == [1.0, 1.0]


def test_a_copy_that_does_not_count_makes_no_copy_of_what_comes_later() -> None:
    """Else one in whom nobody believes could send what another is about to send, and have that left out."""
    counted = CountedWindows()
    assert merged(counted, OURS, a=A, liar=OURS)[1] == 0.0
    assert [whose for whose, _ in counted.merges] == [[None, "a"]]


def test_what_was_merged_long_ago_is_forgotten() -> None:
    counted = CountedWindows()
    merged(counted, OURS, a=A, c=C)
    for number in range(MERGES_KEPT):
        assert merged(counted, window(10 + number), b=A, d=window(30 + number))[0] == 0.0
    assert len(counted.merges) == MERGES_KEPT
    assert merged(counted, window(9), b=A, d=window(50))[0] == 1.0


@pytest.mark.parametrize("partners", [{}, {"a": A}])
def test_a_merge_of_few_is_remembered(partners: dict[str, Tensor]) -> None:
    counted = CountedWindows()
    assert merged(counted, OURS, **partners) == [1.0] * len(partners)
    assert merged(counted, window(4), b=OURS, c=C) == [0.0, 1.0]


def judged(noise: float, windows: int) -> list[tuple[float, float]]:
    """Return the credited tokens and the trust factor of three partners after so many windows.

    The first is honest, the second is honest and four times as fast. The third is a liar that claims as much as the
    second, and sends the first one's window under noise of this relative length. Each third merge lacks the original.
    """
    counted, peers = CountedWindows(), [PeerId("slow"), PeerId("fast"), PeerId("liar")]
    for number in range(windows):
        ours, slow, fast, blur, other = (window(5 * number + at, 0.3 * (at != 3)) for at in range(5))
        partners = [other if number % 3 == 0 else slow, 3 * fast, slow + noise * blur]
        counted.copied_parts(ours, [*zip(peers, partners, strict=True)], KNOWN)
    claims = [USUAL, 4 * USUAL, 4 * USUAL]
    return [counted.resemblance_limits(peer, claim, USUAL) for peer, claim in zip(peers, claims, strict=True)]


def test_who_often_sends_copies_under_much_noise_is_credited_with_the_usual_tokens() -> None:
    """Noise hid the copies in each merge, and was half of the weight for four times the usual tokens."""
    slow, fast, (tokens, trust) = judged(noise=2.0, windows=30)
    assert slow[0] == USUAL
    assert fast == (4 * USUAL, 1.0)
    assert tokens == pytest.approx(USUAL)
    assert 0.5 <= trust < 1.0


def test_less_noise_costs_the_liar_more_but_never_all_since_the_original_looks_alike() -> None:
    assert [trust for _, trust in judged(noise=0.5, windows=30)] == [pytest.approx(0.5), 1.0, pytest.approx(0.5)]


def test_a_few_windows_that_are_alike_cost_nothing() -> None:
    assert judged(noise=2.0, windows=4) == [(USUAL, 1.0), (4 * USUAL, 1.0), (4 * USUAL, 1.0)]


def read(blob: bytes | memoryview) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.float32)


def test_a_copy_under_noise_has_a_smaller_share_of_a_merge_than_an_honest_window() -> None:
    """It had half of each merge, as of a fast device."""
    history, shares = PartnerHistory(), [0.0]
    for number in range(30):
        ours, a, b, blur = (window(4 * number + at, 0.3 * (at < 3)) for at in range(4))
        partners = [("a", a, 1000), ("b", b, 1000), ("liar", 2 * a + 4 * blur, 4000)]
        pulled = [
            PulledWindow(PeerId(name), tokens, {}, one.numpy().tobytes(), float(one.norm()))
            for name, one, tokens in partners
        ]
        history.experience.closed(float(ours.norm()))
        own = Window(1000, 5 * number), ours.numpy().tobytes()
        claims, trust, _ = history.judged(own, pulled, 1.0, read)
        shares = token_shares(1000, claims, trust)
    assert shares[2] < 0.75 * shares[1]
