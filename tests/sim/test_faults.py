"""The language of faults: read, written, drawn by chance, and read from a trace."""

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core.errors import UserError
from decentral.sim import faults, sweep
from decentral.sim.faults import ALL, Fault
from decentral.sim.sweep import SPANS_EVERY

EXAMPLES = {
    "crash 2 at 20": Fault("crash", 20, (2,)),
    "restart 2 at 30.5": Fault("restart", 30.5, (2,)),
    "wipe 2 at 30": Fault("wipe", 30, (2,)),
    "crash all at 60": Fault("crash", 60, (ALL,)),
    "freeze 1 at 10 for 5": Fault("freeze", 10, (1,), lasts=5),
    "slow 0 x5 at 10 for 20": Fault("slow", 10, (0,), 5, 20),
    "leave 3 at 40": Fault("leave", 40, (3,)),
    "join 100 at 30": Fault("join", 30, value=100),
    "part 0,1 at 20 for 15": Fault("part", 20, (0, 1), lasts=15),
    "oneway 0>1 at 5 for 10": Fault("oneway", 5, (0, 1), lasts=10),
    "degrade 0-1 x0.1 at 5 for 10": Fault("degrade", 5, (0, 1), 0.1, 10),
    "skew 2 by -1.5 at 0": Fault("skew", 0, (2,), -1.5),
    "clock 2 by -3600 at 20": Fault("clock", 20, (2,), -3600),
    "full-disk 1 at 20 for 15": Fault("full-disk", 20, (1,), lasts=15),
    "nat 3 at 0": Fault("nat", 0, (3,)),
    "lie 2 nan at 10 for 20": Fault("lie", 10, (2,), lasts=20, how="nan"),
    "loss 0.05 at 5 for 20": Fault("loss", 5, value=0.05, lasts=20),
    "late 2 at 5 for 20": Fault("late", 5, value=2, lasts=20),
    "lie 1,2 withheld at 5 for 20": Fault("lie", 5, (1, 2), lasts=20, how="withheld"),
    "revoke 2 at 5": Fault("revoke", 5, (2,)),
    "propose 2 at 5": Fault("propose", 5, (2,)),
    "eclipse peers at 5 for 20": Fault("eclipse", 5, lasts=20, how="peers"),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_each_form_is_read_and_written_back(text: str) -> None:
    assert faults.parse(text) == [EXAMPLES[text]]
    assert str(EXAMPLES[text]) == text


@given(st.integers(0, 10**6), st.integers(2, 50), st.floats(10, 900), st.integers(1, 8))
def test_whatever_is_drawn_can_be_written_and_read_again(seed: int, peers: int, until: float, count: int) -> None:
    drawn = faults.draw(Random(seed), peers, until, count)
    assert faults.parse(faults.text_of(drawn)) == drawn


@given(st.integers(0, 10**6))
def test_drawn_faults_are_in_order_and_a_peer_that_goes_down_comes_up(seed: int) -> None:
    drawn = faults.draw(Random(seed), 5, 60.0, 5)
    assert [fault.at for fault in drawn] == sorted(fault.at for fault in drawn)
    for peer in range(5):
        down = [fault.at for fault in drawn if fault.kind == "crash" and fault.peers in ((peer,), (ALL,))]
        up = [fault.at for fault in drawn if fault.kind in ("restart", "wipe") and fault.peers in ((peer,), (ALL,))]
        assert len(up) == len(down)
        assert max(up, default=0) >= max(down, default=0)


def test_every_kind_is_drawn_sooner_or_later() -> None:
    kinds = {fault.kind for seed in range(200) for fault in faults.draw(Random(seed), 5, 60.0, 5)}
    assert kinds == {*faults.PEERS, *faults.PAIRS, *faults.SHARES, "join"}


@given(st.integers(0, 10**6))
def test_faults_of_machines_are_drawn_apart_with_a_restart_after_each_jump_of_a_clock(seed: int) -> None:
    drawn = faults.draw_of_hosts(Random(seed), 5, 60.0)
    assert faults.parse(faults.text_of(drawn)) == drawn
    assert {fault.kind for fault in drawn} <= {*faults.HOSTS, "crash", "restart"}
    for jump in (fault for fault in drawn if fault.kind == "clock"):
        later = [fault.kind for fault in drawn if fault.peers == jump.peers and fault.at >= jump.at]
        assert "restart" in later


@pytest.mark.parametrize("routes", [False, True])
def test_a_sweep_has_every_lie_of_those_who_know_and_along_routes_where_there_are_any(routes: bool) -> None:
    without_spans = (seed for seed in sweep.seeds_from(0, ["liars"]) if seed % SPANS_EVERY == 0)
    with_liars = list(islice(without_spans, 200))
    lies = {fault.how for seed in with_liars for fault in faults.draw_of_liars(Random(seed), 5, 60.0, routes)}
    assert lies == {*faults.KNOWING_LIES, *(faults.HOP_LIES if routes else ())}
    drawn = [sweep.scenario_of(seed + 3 * routes).faults for seed in with_liars[:5]]
    assert all(any(fault.how in lies for fault in scenario) for scenario in drawn)


def test_faults_are_separated_by_lines_or_semicolons_and_comments_are_skipped() -> None:
    text = "crash 0 at 1; restart 0 at 2\n# the night\nleave 1 at 3;\n"
    assert [fault.kind for fault in faults.parse(text)] == ["crash", "restart", "leave"]


def test_peers_are_numbers_ranges_and_lists() -> None:
    (fault,) = faults.parse("crash 0,3-5,9 at 1")
    assert fault.peers == (0, 3, 4, 5, 9)


BAD = {
    "crash": "expected a fault such as",
    "crash 2": "expected a fault such as",
    "crash 2 at noon": "expected a fault such as",
    "crash 2 at 1.2.3": "expected a fault such as",
    "explode 2 at 3": "unknown fault 'explode'",
    "freeze 1 at 3": "needs a duration",
    "part 0,1 at 20": "needs a duration",
    "slow 0 at 3 for 4": "a number is wrong or missing",
    "slow 0 xfast at 3 for 4": "a number is wrong or missing",
    "slow 0 x0 at 3 for 4": "a number is wrong or missing",
    "degrade 0-1 at 3 for 4": "a number is wrong or missing",
    "oneway 0 at 3 for 2": "a number is wrong or missing",
    "crash 3-1 at 2": "a number is wrong or missing",
    "crash two at 2": "a number is wrong or missing",
    "loss nan at 3 for 2": "a number is wrong or missing",
    "full-disk 1 at 3": "needs a duration",
    "clock 1 at 3": "a number is wrong or missing",
    "lie 1 sideways at 3 for 4": "a lie is one of nan, scaled",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_fault_is_told_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        faults.parse(f"crash 0 at 1; {text}")
    assert BAD[text] in str(caught.value)
    assert "\n" not in str(caught.value)


# Traces


def test_a_trace_is_churn(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("time,peer,up/down\n30,2,down\n45.5,2,up\n")
    assert faults.trace(path) == [Fault("crash", 30, (2,)), Fault("restart", 45.5, (2,))]


@pytest.mark.parametrize(
    "text",
    [
        "time,peer\n1,2\n",
        *("time,peer,up/down\n" + row for row in ("noon,2,up\n", "1,2,sideways\n", "nan,2,up\n", "inf,2,up\n")),
        *("time,peer,up/down\n" + row for row in ("-1,2,up\n", "1,-1,up\n", "1,nan,up\n", f"1,{'9' * 5000},up\n")),
        None,
    ],
)
def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "spot.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="expected a CSV with the columns time, peer, up/down"):
        faults.trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("crash 99 at 5", "crash 99 at 5 names peer 99; the run has the peers 0 to 3"),
        ("join 2 at 1; crash 6 at 5", "crash 6 at 5 names peer 6; the run has the peers 0 to 5"),
        ("crash 1 at 20", "crash 1 at 20 comes after the end of the run; give a longer --seconds than 20"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(text: str, said: str) -> None:
    """It was reported as `all well 0.0 s later`."""
    with pytest.raises(UserError, match=re.escape(said)):
        faults.require_possible(faults.parse(text), peers=4, seconds=20.0)


def test_faults_of_newcomers_and_of_all_peers_are_possible() -> None:
    faults.require_possible(faults.parse("join 2 at 1; crash 5 at 5; crash all at 10"), peers=4, seconds=20.0)
