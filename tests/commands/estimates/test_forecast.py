"""The range of a forecast's bytes: that of windows which are one step longer or shorter."""

import numpy as np
import pytest

from decentral.commands.estimates.estimating import estimated, held, note_on_table, swarm_of
from decentral.commands.estimates.forecast import BYTES_RANGE, Forecast, between_codes, between_windows, forecast
from decentral.commands.estimates.peer_devices import STEP_SEQUENCES, with_micro_batch
from decentral.commands.estimates.places import MBIT, groups_of, topology_of
from decentral.commands.estimates.playing import Rates
from decentral.commands.estimates.sizes import with_shape
from decentral.commands.estimates.traffic import PredictedGossip
from decentral.core import config
from decentral.core.strict_json import JsonObject

SENT_NN = np.array([[0.0, 100.0], [300.0, 0.0]])
NO_CYCLE = np.zeros(2)


def test_bytes_lie_between_those_of_longer_and_of_shorter_windows() -> None:
    rates = Rates(1.0, SENT_NN, ((16.0, "link"), (8.0, "link")))
    found = between_windows(rates, 0.5, NO_CYCLE)
    assert found.mid_NN[1, 0] == 300
    assert found.low_NN[1, 0] == pytest.approx(300 / 2 / BYTES_RANGE)
    assert found.high_NN[1, 0] == pytest.approx(300 * 2 * BYTES_RANGE)


def test_no_windows_are_shorter_than_the_shortest() -> None:
    found = between_windows(Rates(1.0, SENT_NN, ((8.0, ""), (8.0, ""))), 8.0, NO_CYCLE)
    assert found.high_NN[0, 1] == pytest.approx(100 * BYTES_RANGE)


def test_steps_that_are_longer_than_windows_set_the_pace_whatever_their_length() -> None:
    found = between_windows(Rates(1.0, SENT_NN, ((0.5, ""), (0.5, ""))), 0.25, np.full(2, 6.0))
    assert found.low_NN[0, 1] == pytest.approx(100 / BYTES_RANGE)
    assert found.high_NN[0, 1] == pytest.approx(100 * BYTES_RANGE)


def test_a_peer_that_may_use_a_shorter_code_or_not_may_send_what_either_takes() -> None:
    """Of four homes with 20 Mb/s up, one sent a third of what the others sent, and another one in the next run."""
    played = between_windows(Rates(1.0, SENT_NN, ((0.5, ""), (0.5, ""))), 0.5, NO_CYCLE)
    window_N = np.full(2, 0.5)
    cases = [
        PredictedGossip(window_N, NO_CYCLE, NO_CYCLE, ("", ""), codes, times * SENT_NN)
        for codes, times in [(("q4", "q4"), 1.0), (("q1", "q4"), 0.4), (("q4", "q4"), 2.0)]
    ]
    found = between_codes(played, cases)
    assert found.low_NN[0, 1] == pytest.approx(0.4 * 100 / BYTES_RANGE)
    assert found.high_NN[0, 1] == pytest.approx(2 * 100 * BYTES_RANGE)
    assert found.mid_NN is played.mid_NN
    assert [found.low_NN[1, 0], found.high_NN[1, 0]] == [played.low_NN[1, 0], played.high_NN[1, 0]]


def test_no_case_has_more_bytes_than_the_link_carries() -> None:
    groups = groups_of("4090 home1:8/80, 4090 home2:8/80")
    topology = topology_of(groups, [1.0, 1.0], [1.0, 1.0])
    found = between_windows(Rates(1.0, 2e4 * SENT_NN, ((8.0, "link"),) * 2), 0.5, NO_CYCLE).within(topology)
    uplink = 8 * MBIT
    assert [one[1, 0] for one in (found.low_NN, found.mid_NN, found.high_NN)] == pytest.approx([uplink] * 3)
    assert found.low_NN[0, 1] < found.mid_NN[0, 1] <= found.high_NN[0, 1] <= uplink * 1.001


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 4), (0, 4)], "whole model"),
        ([(0, 4), (0, 0)], "1 of 2 peers: whole model"),
        ([(0, 1), (1, 4), (0, 0)], "2 of 3 peers: 1 to 3 of 4 layers"),
        ([(0, 2), (2, 4)], "2 of 4 layers"),
        ([(0, 0)], "nothing"),
    ],
)
def test_it_is_said_which_part_of_the_model_peers_hold(spans: list[tuple[int, int]], said: str) -> None:
    assert held(config.load(None), spans) == said


@pytest.mark.parametrize(
    ("peers", "sequences"), [("8xH100 lab", 16), ("4x4090 lab", 4), ("4x4090 lab, 3060 lab", 4), ("4x3080 lab", 1)]
)
def test_steps_have_as_many_sequences_whatever_memory_devices_have(peers: str, sequences: int) -> None:
    """An optimizer step takes as long for few sequences as for many, so another card must not make the others slow."""
    found = with_micro_batch(with_shape(config.load(None), "1B", frozenset()), groups_of(peers)).train
    assert (found.micro_batch, found.accumulate) == (sequences, STEP_SEQUENCES // sequences)


def test_micro_batches_in_a_step_are_as_many_as_the_user_has_set() -> None:
    run = config.load(None, ["train.accumulate=2"])
    found = with_micro_batch(with_shape(run, "1B", frozenset()), groups_of("4x4090 lab")).train
    assert found.accumulate == 2


def predicted(size: str, peers: str, seconds: float) -> Forecast:
    swarm = swarm_of(with_shape(config.load(None), size, frozenset()), groups_of(peers))
    return forecast(swarm.run, swarm.topology, swarm.each, seconds)


def test_a_short_simulation_of_routes_gives_what_a_long_one_does_with_a_wider_range() -> None:
    """The first minutes of gossip, in which routes stall, are not the tokens/s that last: 538 (154 to 1,075)."""
    found = predicted("3B", "4x4090 homes:50/500", 2.0)
    assert found.until_s is not None
    assert found.tokens_per_s.mid == pytest.approx(538, rel=0.2)
    assert found.tokens_per_s.low < 154 / 1.5
    assert found.tokens_per_s.high > 538


def test_a_short_simulation_of_whole_models_gives_the_bytes_that_last() -> None:
    """A longer one has 12.6 GB an hour; in the first minute, windows are four times as long as later."""
    found = predicted("350M", "4x4090 homes:50/500", 0.5)
    sent = found.pairs.between([0], range(4)).times(3600)
    assert found.until_s is not None
    assert sent.mid == pytest.approx(12.6e9, rel=0.05)
    assert sent.low < 6.3e9
    assert sent.high > 25e9


def test_it_is_said_what_cut_a_simulation_short_and_what_the_figures_are_then() -> None:
    run, groups = with_shape(config.load(None), "350M", frozenset()), groups_of("2x4090 homes:50/500")
    note, *_ = estimated(run, groups, 0.1)["notes"]
    assert note == (
        "the simulation was cut short by --seconds 0.1, at 24 of the 400 virtual seconds in which gossip settles: "
        "its bytes are by formulas"
    )
    rows: list[JsonObject] = [{"model": "1B", "is_cut_short": True}, {"model": "125M"}]
    assert note_on_table(rows, 60.0) == [
        "the simulation was cut short by --seconds 20 for 1B: tokens/s without gossip, wider ranges"
    ]
