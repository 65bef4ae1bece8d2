"""What a played swarm did, counted from samples of it."""

from collections import Counter

import pytest

from decentral.commands.estimates.playing import WARM_UP_S, PlayedSwarm
from decentral.core.ids import PeerId

ANN, BOB = PeerId("QmAnn"), PeerId("QmBob")


def played(window_s: float, end: float, every_s: float = 5.0, phase_s: float = 0.0) -> PlayedSwarm:
    """A swarm of two, in which Ann sends Bob 1000 bytes at each end of a window, and both train 10 tokens/s."""
    watch = PlayedSwarm(number={ANN: 0, BOB: 1}, windows={ANN: (window_s, "link"), BOB: (window_s, "link")})
    for count in range(int(end / every_s) + 1):
        t = count * every_s
        sent = Counter({(ANN, BOB): 1000 * int((t + phase_s) / window_s)})
        watch.at.append((t, 10 * t, sent))
    return watch


@pytest.mark.parametrize("phase_s", [0.0, 60.0, 127.0])
def test_bytes_that_come_once_a_window_have_the_rate_of_whole_windows(phase_s: float) -> None:
    rates = played(128.0, 1400.0, phase_s=phase_s).rates()
    assert rates.sent_NN[0, 1] == pytest.approx(1000 / 128, rel=0.04)
    assert rates.sent_NN[1, 0] == 0
    assert rates.tokens == pytest.approx(10)


def test_what_comes_before_the_warm_up_does_not_count() -> None:
    watch = played(8.0, WARM_UP_S)
    later = played(64.0, 2000.0)
    watch.at += [(WARM_UP_S + t, tokens, watch.at[-1][2] + sent) for t, tokens, sent in later.at[1:]]
    assert watch.rates().sent_NN[0, 1] == pytest.approx(1000 / 64, rel=0.02)
