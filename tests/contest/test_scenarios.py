"""The contest's worlds and faults: links as stated, speeds, kills that leave the first half alone, who takes part."""

import numpy as np
import pytest

from benchmarks.contest import contestants, scenarios
from benchmarks.wan import schedule
from decentral.core.errors import UserError


def test_a_household_s_round_trips_are_20_to_80_ms_and_its_uplinks_10_to_50_mbits() -> None:
    links = scenarios.household()
    trips = [links.round_trip_s(a, b) for a in range(4) for b in range(4) if a != b]
    assert min(trips) == pytest.approx(0.02)
    assert max(trips) == pytest.approx(0.08)
    assert (links.up.min() * 8e-6, links.up.max() * 8e-6) == (10, 50)


def test_published_worlds_have_their_delays_and_the_stated_part_of_their_rates() -> None:
    links = scenarios.world("eight-cities").links
    oregon, virginia = links.regions.index("Oregon"), links.regions.index("Virginia")
    assert links.delay_s[oregon, virginia] == pytest.approx(0.067)
    assert links.path[oregon, virginia] * 8e-9 == pytest.approx(0.79 * scenarios.SCALE)
    assert f"{scenarios.SCALE:g}" in scenarios.world("eight-cities").note


@pytest.mark.parametrize("name", scenarios.FULL)
def test_every_scenario_s_schedule_is_one_that_the_lab_plays(name: str) -> None:
    found = scenarios.scenario(name)
    schedule.parse(scenarios.schedule_of(found), found.peers)


def test_unequal_devices_are_1_to_10_times_slower_and_the_first_is_fast() -> None:
    assert scenarios.scenario("household/unequal").throttles == [1, 2, 4, 10]
    assert scenarios.scenario("eight-cities/unequal").throttles == [1, 1, 2, 2, 4, 4, 10, 10]


def test_kills_come_every_20_s_in_the_second_half_of_the_places() -> None:
    kills = scenarios.scenario("household/churn").kills(75)
    assert np.diff([at for at, _ in kills]).tolist() == [20, 20]
    assert [place for _, place in kills] == [2, 3, 2]
    assert scenarios.scenario("household/equal").kills(75) == []


def test_a_newcomer_has_time_before_the_end() -> None:
    churn = scenarios.scenario("household/churn")
    assert [at for at, _ in churn.kills(40)] == [10, 30]
    assert [at for at, _ in churn.kills(30 + scenarios.JOIN_S)] == [10]


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(UserError, match="churn"):
        scenarios.scenario("household/nothing")
    with pytest.raises(UserError, match="eight-cities"):
        scenarios.scenario("nowhere/equal")
    with pytest.raises(UserError, match="gloo DiLoCo"):
        contestants.contestant("nobody")


def test_only_ours_trains_what_no_peer_can_hold_and_alone_runs_where_nothing_fails() -> None:
    spans, churn = scenarios.scenario("far-homes/spans"), scenarios.scenario("household/churn")
    assert {one.kind for one in contestants.ALL if one.takes_part(spans)} == {"ours"}
    assert not contestants.contestant("alone").takes_part(churn)


def test_diloco_by_time_takes_part_where_devices_differ() -> None:
    one = contestants.contestant("gloo DiLoCo, by time")
    assert one.takes_part(scenarios.scenario("household/unequal"))
    assert not one.takes_part(scenarios.scenario("household/churn"))


def test_names_of_contestants_are_different() -> None:
    names = [one.name for one in contestants.ALL]
    assert len(set(names)) == len(names)
    assert set(contestants.QUICK) <= set(names)


def test_settings_of_a_run_have_its_seed_and_what_tuning_tries() -> None:
    overrides, options = contestants.settings(contestants.contestant("gloo DiLoCo"), 7, {"rate": 0.5, "inner_steps": 3})
    assert "seed=7" in overrides
    assert "train.learning_rate=0.5" in overrides
    assert options["inner_steps"] == 3
    assert options["algorithm"] == "diloco"


def test_one_that_is_like_another_takes_its_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "tuned", lambda: {"gloo DiLoCo": {"rate": 0.5, "inner_steps": 20}})
    overrides, options = contestants.settings(contestants.contestant("gloo DiLoCo, by time"), 0)
    assert "train.learning_rate=0.5" in overrides
    assert options["inner_s"] == pytest.approx(20 * contestants.STEP_S)
    assert "inner_steps" not in options
