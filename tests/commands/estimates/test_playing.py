"""What a played swarm did, counted from samples of it."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from decentral.commands.estimates import playing
from decentral.commands.estimates.estimating import swarm_of
from decentral.commands.estimates.peer_devices import devices_of
from decentral.commands.estimates.places import groups_of, topology_of
from decentral.commands.estimates.playing import (
    EVENT_S,
    RATE_S,
    ROUTES_SETTLED_S,
    WARM_UP_S,
    PlayedSwarm,
    play,
    play_routes,
)
from decentral.commands.estimates.sizes import with_shape
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology.search_budget import RESERVE, SearchBudget

LARGE = ["model.depth=12", "model.width=768", "model.vocabulary=50304", "model.context=1024", "train.micro_batch=8"]
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


def test_time_in_which_pipelines_fill_does_not_count() -> None:
    """The first tokens come after 30 s, and all peers train after 50 s."""
    watch = PlayedSwarm(number={ANN: 0})
    watch.at = [(t, 10 * max(0.0, t - 50) + (t >= 30), Counter()) for t in map(float, range(0, 81, 5))]
    assert watch.rates().tokens == pytest.approx(10)


def test_a_swarm_is_played_for_as_many_events_however_slowly_the_clock_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "PLAYED_S", 240.0)  # so that samples are near each other
    run, groups = config.load(None, LARGE), groups_of("2xT4 home:50/500")
    kinds = devices_of(run, groups)
    where = topology_of(groups, [kinds[0].memory_bytes / 1e9], [1.0])
    budget_s = RESERVE * (EVENT_S + RATE_S) * 2_000
    slow = itertools.count(0.0, 1e-6)
    fast = itertools.count(0.0, budget_s / 4)
    still, slowly, cut = (
        play(run, where, kinds * 2, None, 8.0, SearchBudget(budget_s, clock=clock))
        for clock in (lambda: 0.0, slow.__next__, fast.__next__)
    )
    np.testing.assert_array_equal(still.sent_NN, slowly.sent_NN)
    assert still.tokens == slowly.tokens > 0
    assert cut.tokens != still.tokens


def test_routes_are_played_without_gossip_to_their_lasting_rate_in_little_work() -> None:
    """With gossip, the same swarm needs ten minutes of virtual time until its routes are as fast (below a third)."""
    swarm = swarm_of(with_shape(config.load(None), "3B", frozenset()), groups_of("4x4090 homes:50/500"))
    assert swarm.topology is not None
    where = replace(swarm.topology, costs=tuple(one.costs for one in swarm.each))
    plan = throughput_plan(where, swarm.run, "genetic", 0, SearchBudget(0.6))
    budget_s = 0.4
    alone = play_routes(swarm.run, where, swarm.each, plan, SearchBudget(budget_s))
    beside = play(swarm.run, where, swarm.each, plan, 16.0, SearchBudget(budget_s))
    lasting = 540.0  # tokens/s, of a play of 1,600 s with gossip
    assert alone.tokens == pytest.approx(lasting, rel=0.15)
    assert beside.until_s < ROUTES_SETTLED_S
    assert beside.tokens != pytest.approx(lasting, rel=0.15)
